"""Kubernetes events about jobs (events.k8s.io/v1), which `kubectl describe` shows. Implements model.ports.Recorder.

A note that repeats becomes a series of one event, not many events. A token bucket bounds the events of one job, and a
full queue drops new ones. Nothing here ever blocks or fails the caller, so an event may be lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from regroup.protocol.text import shorten
from regroup_operator.api import GROUP, KIND, VERSION, Job, NotFoundError
from regroup_operator.kube.client import EVENTS, ApiConflict, ApiError, Client
from regroup_operator.kube.microtime import micro_time
from regroup_operator.model.bucket import TokenBucket
from regroup_operator.model.ports import EventNote

log = logging.getLogger(__name__)

CONTROLLER = "regroup.dev/operator"
NOTE_BYTES = 1024
"""Longest note that the API server accepts. It counts the bytes of UTF-8, not characters."""
WORD_BYTES = 128
"""Longest reason, action and reporter that the API server accepts, in bytes."""


@dataclass(frozen=True)
class Regarding:
    """The fields of a job that an event names. It stands in for a job that cannot be read as a Job."""

    namespace: str
    name: str
    uid: str
    resource_version: str


@dataclass
class Series:
    """One event that may repeat."""

    namespace: str
    name: str  # of the Event object
    body: dict[str, Any]
    count: int = 1
    last_s: float = 0.0
    last_time: str = ""
    posted: bool = False
    queued: bool = False
    """The series waits to be sent. Repeats meanwhile only raise `count`."""


class EventBook:
    """Tells new notes from repeated ones, and bounds their number for each job. Pure: clocks are passed in."""

    def __init__(
        self, *, window_s: float = 360.0, per_s: float = 1 / 60, burst: int = 25, max_series: int = 4096
    ) -> None:
        """Begin empty.

        A note repeats if it comes again within `window_s`. `burst` and `per_s` bound new events and repeats of each
        job.
        """
        self._window_s = window_s
        self._per_s = per_s
        self._burst = burst
        self._max_series = max_series
        self._series: OrderedDict[tuple[str, ...], Series] = OrderedDict()
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def note(self, job: Job | Regarding, note: EventNote, now_s: float, wall_time: str) -> Series | None:
        """Return the series to send now. None: it waits to be sent already, or the job has no token left."""
        key = (job.uid, note.kind, note.reason, note.note)
        series = self._series.get(key)
        repeats = series is not None and now_s - series.last_s <= self._window_s
        if series is not None and repeats:
            series.count += 1
            series.last_s, series.last_time = now_s, wall_time
            self._series.move_to_end(key)
            if series.queued:
                return None
        bucket = self._buckets.setdefault(job.uid, TokenBucket(self._per_s, self._burst))
        self._buckets.move_to_end(job.uid)
        self._bound(self._buckets)
        if not bucket.take(now_s):
            return None
        if series is None or not repeats:
            name = f"{job.name}.{uuid.uuid4().hex[:16]}"
            series = Series(job.namespace, name, event_body(job, note, name, wall_time), 1, now_s, wall_time)
            self._series[key] = series
            self._bound(self._series)
        series.queued = True
        return series

    def _bound(self, book: OrderedDict[Any, Any]) -> None:
        while len(book) > self._max_series:
            book.popitem(last=False)


def event_body(job: Job | Regarding, note: EventNote, name: str, wall_time: str) -> dict[str, Any]:
    """Return the Event object for the first occurrence."""
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": job.namespace},
        "eventTime": wall_time,
        "reportingController": CONTROLLER,
        "action": cut(note.reason, WORD_BYTES),
        "reason": cut(note.reason, WORD_BYTES),
        "type": note.kind,
        "note": cut(note.note, NOTE_BYTES),
        "regarding": {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "namespace": job.namespace,
            "name": job.name,
            "uid": job.uid,
            "resourceVersion": job.resource_version,
        },
    }


def cut(text: str, num_bytes: int) -> str:
    """Return the part of `text` that fits into `num_bytes` bytes of UTF-8. A text that is cut ends at a word, with an ellipsis.

    Characters that UTF-8 cannot encode become "?".
    """
    whole = text.encode(errors="replace")
    fits = whole[:num_bytes].decode(errors="ignore")
    return fits if len(whole) <= num_bytes else shorten(f"{fits} ", len(fits))


class EventRecorder:
    """Publishes notes from a task of its own."""

    def __init__(
        self,
        client: Client,
        instance: str,
        *,
        book: EventBook | None = None,
        max_queued: int = 1000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Send nothing before `run`. `instance` names this process in the events (its pod)."""
        self._client = client
        self._instance = cut(instance, WORD_BYTES)
        self._book = book or EventBook()
        self._queue: asyncio.Queue[Series] = asyncio.Queue(max_queued)
        self._clock = clock

    def record(self, job: Job | Regarding, note: EventNote) -> None:
        """Publish `note` about `job` soon, or lose it. Never blocks, never raises."""
        series = self._book.note(job, note, self._clock(), micro_time())
        if series is None:
            return
        try:
            self._queue.put_nowait(series)
        except asyncio.QueueFull:
            series.queued = False

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await self._send(await self._queue.get())

    async def drain(self, timeout_s: float = 1.0) -> None:
        """Send the queued events, for at most `timeout_s` seconds. Called at the end of the process, after `run` was cancelled."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._queue.empty():
                    await self._send(self._queue.get_nowait())
        except TimeoutError:
            pass

    async def _send(self, series: Series) -> None:
        series.queued = False
        repeated = {"series": {"count": series.count, "lastObservedTime": series.last_time}}
        try:
            if series.posted:
                try:
                    await self._client.patch(EVENTS, series.namespace, series.name, repeated)
                    return
                except NotFoundError:
                    pass  # Events expire; begin anew under the same name.
            body = {**series.body, "reportingInstance": self._instance}
            if series.count > 1:
                body |= repeated
            try:
                await self._client.create(EVENTS, series.namespace, body)
                series.posted = True
            except ApiConflict:
                # An earlier attempt was stored although its answer was lost; no other process makes events of this name.
                series.posted = True
                await self._client.patch(EVENTS, series.namespace, series.name, repeated)
        except ApiError as error:
            log.debug("An event was lost: %s", error)
