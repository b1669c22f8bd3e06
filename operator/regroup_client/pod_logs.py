"""Read the logs of a job's pods through the API server: one stream for each container.

Every request is sent before the first answer is read, so that 50 logs take no longer than the slowest one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

from regroup_client import views
from regroup_client.api import JOBS, PODS, Api, Asked, Stream
from regroup_client.errors import ApiError
from regroup_client.jobs import Wanted, slot_of
from regroup_client.log_lines import Worker
from regroup_client.log_streams import Log, LogsError, Opened

_NAME = re.compile(r"-worker-(\d+)-(\d+)$")
_TRAINER = "regroup.dev/trainer-container"


def logs_of(job: views.Object, pods: Sequence[views.Object], wanted: Wanted) -> list[Log]:
    """Return the logs to read: of the newest pod of each slot, or of every pod. Raises LogsError for a rank that there is not.

    The key of a log names pod and container, so that `PodLogs` can open it."""
    ranks = views.ranks(job)
    of_all = {
        Worker(int(name[1]), int(name[2])): pod for pod in pods if (name := _NAME.search(pod["metadata"]["name"]))
    }
    slot = slot_of(job, wanted, (worker.slot for worker in of_all))
    found = {worker: pod for worker, pod in of_all.items() if slot in (None, worker.slot)}
    newest: dict[int, Worker] = {}
    for worker in sorted(found, key=lambda one: (one.slot, one.attempt)):
        newest[worker.slot] = worker
    chosen = sorted(found, key=lambda one: (one.slot, one.attempt)) if wanted.all_attempts else list(newest.values())
    out: list[Log] = []
    for worker in chosen:
        of_it = ranks.get(views.Member(worker.slot, worker.attempt), ())
        out += _of_pod(found[worker], worker, of_it[0] if len(of_it) == 1 else None, wanted)
    return out


def _of_pod(pod: views.Object, worker: Worker, rank: int | None, wanted: Wanted) -> Iterator[Log]:
    metadata, status = pod["metadata"], pod.get("status") or {}
    names = [one["name"] for one in (pod.get("spec") or {}).get("containers") or ()]
    trainer = (metadata.get("annotations") or {}).get(_TRAINER) or ("trainer" if "trainer" in names else "")
    container = trainer or (names[0] if names else "")
    of_trainer: views.Object = next(
        (one for one in status.get("containerStatuses") or () if one["name"] == container), {}
    )
    restarts = of_trainer.get("restartCount", 0)
    key = f"{metadata['name']}/{container}/{metadata.get('uid', '')}"
    if (wanted.previous or wanted.all_attempts) and (restarts or wanted.previous):
        yield Log(f"{key}/{restarts - 1}", worker, rank, previous=True, is_open=False)
    if not wanted.previous:
        ended = status.get("phase") in ("Succeeded", "Failed") or "terminated" in (of_trainer.get("state") or {})
        yield Log(f"{key}/{restarts}", worker, rank, is_open=not ended)


class PodLogs:
    """Implements Reader for a job of a cluster."""

    def __init__(self, api: Api, job: str, wanted: Wanted, since_s: int | None = None) -> None:
        """Take the name of the job. `since_s`: lines that are older than this many seconds are not read."""
        self._api, self._job, self._wanted, self._since_s = api, job, wanted, since_s

    def logs(self) -> tuple[list[Log], bool]:
        try:
            job = self._api.get(JOBS, self._job)
            pods = self._api.list(PODS, labelSelector=f"regroup.dev/job-name={self._job},regroup.dev/role=worker")
        except ApiError as error:
            raise LogsError(str(error), is_final=error.is_final) from None
        return logs_of(job, pods, self._wanted), views.state(job) in views.ENDED

    def open(self, log: Log, *, follow: bool, tail: int | None, after_ns: int = 0) -> Opened:
        pod, container, *_ = log.key.split("/")
        query = {"timestamps": "true", "container": container}
        query |= {"follow": "true"} if follow and not log.previous else {}
        query |= {"previous": "true"} if log.previous else {}
        if after_ns > 1:
            query["sinceTime"] = datetime.fromtimestamp(after_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        else:
            query |= {} if tail is None else {"tailLines": str(tail)}
            query |= {"sinceSeconds": str(self._since_s)} if self._since_s else {}
        return _PodLog(lambda: self._api.ask_log(pod, **{name: value for name, value in query.items() if value}))


class _PodLog:
    """Implements Opened for one container."""

    def __init__(self, ask: Callable[[], Asked]) -> None:
        self._ask = ask
        self._asked: Asked | None = None
        self._stream: Stream | None = None
        self._is_closed = False

    def start(self) -> None:
        """Send the request. If that fails, `chunks` tries again and says why."""
        if self._is_closed:
            return
        try:
            self._asked = self._ask()
        except ApiError:
            self._asked = None

    def chunks(self) -> Iterator[bytes]:
        try:
            if self._is_closed:
                return
            asked = self._asked or self._ask()
            self._asked = asked
            if self._is_closed:  # while it was asked: `close` had nothing to close yet
                return
            self._stream = asked.stream()
            if self._is_closed:
                return
            yield from self._stream.chunks()
        except ApiError as error:
            if not self._is_closed:
                raise LogsError(str(error)) from None
        finally:
            self.close()

    def close(self) -> None:
        self._is_closed = True
        for one in (self._stream, self._asked):
            if one is not None:
                one.close()
