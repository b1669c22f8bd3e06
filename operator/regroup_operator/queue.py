"""The work queue: it chooses the job that is reconciled next, never one twice at the same time, and the time of the next look.

It owns order and time only; the caller reconciles. Its invariants:

- A key that is being processed is not taken again before `done`, but an add meanwhile is not lost.
- The earliest of several delayed adds counts.
- Namespaces take turns, so that one with a thousand jobs does not starve one with a single job.

`Schedule` is pure (the clock is passed in). `WorkQueue` runs it in an event loop and belongs to that loop's thread.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable

from regroup_operator.api import ConflictError, RegroupError, UnavailableError
from regroup_operator.model.records import Key

log = logging.getLogger(__name__)

BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 5.0
"""Longest back-off. It is as short as the silence of a lost worker: when the API server is back, a job may have lost one."""


class Schedule:
    """Dirty, processing and delayed keys. Times are seconds on the caller's monotonic clock."""

    def __init__(self, put_off: Callable[[Key], float | None] = lambda _: None) -> None:
        """Begin empty. `put_off(key)` returns the time to which an expected look may be put off now, or None."""
        self._put_off = put_off
        self._expected_s: dict[Key, float] = {}
        self._rests_s: dict[Key, float] = {}
        self._lanes: OrderedDict[str, deque[Key]] = OrderedDict()
        self._dirty: set[Key] = set()
        self._processing: set[Key] = set()
        self._due_s: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._failures: dict[Key, int] = {}

    def __len__(self) -> int:
        """Return the number of keys that could be taken now, or wait for their own processing to end. Delayed ones do not count."""
        return len(self._dirty)

    def add(self, key: Key) -> None:
        """Have `key` taken as soon as possible. Several adds before that are one."""
        if key in self._dirty:
            return
        self._dirty.add(key)
        if key not in self._processing:
            self._lanes.setdefault(key[0], deque()).append(key)

    def add_at(self, key: Key, due_s: float) -> None:
        """Have `key` added at `due_s`. An earlier time that is already set stays."""
        if key in self._due_s and self._due_s[key] <= due_s:
            return
        self._due_s[key] = due_s
        heapq.heappush(self._heap, (due_s, key))

    def expect(self, key: Key, due_s: float) -> None:
        """Have `key` added at `due_s`, unless `put_off` puts that off then. It replaces the last expected time."""
        self._expected_s[key] = due_s
        heapq.heappush(self._heap, (due_s, key))

    def rest(self, key: Key, until_s: float) -> None:
        """Keep `key` from being taken before `until_s`, also if it is added."""
        self._rests_s[key] = until_s

    def take(self, now_s: float) -> Key | None:
        """Return the next key and mark it as processing, or return None. Delayed adds of the key are dropped."""
        while self._heap and self._heap[0][0] <= now_s:
            due_s, key = heapq.heappop(self._heap)
            if self._due_s.get(key) == due_s:
                del self._due_s[key]
                self.add(key)
            elif self._expected_s.get(key) == due_s:
                later_s = self._put_off(key)
                if later_s is not None and later_s > now_s:
                    self.expect(key, later_s)
                else:
                    del self._expected_s[key]
                    self.add(key)
        while self._lanes:
            key = self._next()
            rests_until_s = self._rests_s.pop(key, now_s)
            if rests_until_s > now_s:
                self._rests_s[key] = rests_until_s
                self.add_at(key, rests_until_s)
                continue
            self._due_s.pop(key, None)
            self._expected_s.pop(key, None)
            self._processing.add(key)
            return key
        return None

    def _next(self) -> Key:
        namespace, lane = next(iter(self._lanes.items()))
        key = lane.popleft()
        if lane:
            self._lanes.move_to_end(namespace)
        else:
            del self._lanes[namespace]
        self._dirty.discard(key)
        return key

    def done(self, key: Key) -> None:
        """End the processing of `key`. If it was added meanwhile, it can be taken again."""
        self._processing.discard(key)
        if key in self._dirty:
            self._lanes.setdefault(key[0], deque()).append(key)

    def fail(self, key: Key, now_s: float, jitter: float = 1.0, *, least_s: float = 0.0) -> float:
        """Add `key` again after its back-off, and return the seconds. They double with each failure in a row, up to
        BACKOFF_MAX_S, and are at least `least_s`.

        The key is not taken earlier, also if it is added: a job whose status is refused has events several times a
        second.
        """
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        wait_s = max(min(BACKOFF_MIN_S * 2.0 ** min(failures, 30), BACKOFF_MAX_S) * jitter, least_s)
        self.rest(key, now_s + wait_s)
        self.add_at(key, now_s + wait_s)
        return wait_s

    def succeed(self, key: Key) -> None:
        """Forget the failures of `key`."""
        self._failures.pop(key, None)

    def next_due_s(self) -> float | None:
        """Return when the next delayed add is due, or None."""
        while self._heap and self._heap[0][0] not in (
            self._due_s.get(self._heap[0][1]),
            self._expected_s.get(self._heap[0][1]),
        ):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


class WorkQueue:
    """Runs `reconcile(key)` for every key that is added.

    `reconcile` returns the seconds until it wants to run again, or None. An exception becomes a log line and a
    back-off.
    """

    def __init__(
        self,
        reconcile: Callable[[Key], Awaitable[float | None]],
        *,
        num_workers: int = 16,
        put_off: Callable[[Key], float | None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        observe: Callable[[float, bool], None] | None = None,
        observe_wait: Callable[[float], None] | None = None,
    ) -> None:
        """Begin empty.

        `put_off` is that of Schedule. For metrics, `observe(seconds, succeeded)` is called after each run.
        `observe_wait(seconds)` is called before a run with the time since `add`. It is not called for a run whose time
        has come by itself.
        """
        self._observe_wait = observe_wait
        self._asked_s: dict[Key, float] = {}
        self._reconcile = reconcile
        self._clock = clock
        self._observe = observe
        self._put_off = put_off
        self._schedule = Schedule(self._until)
        self._wake = asyncio.Event()
        self._free = asyncio.Semaphore(num_workers)
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Return the number of keys that wait to be reconciled now."""
        return len(self._schedule)

    def add(self, key: Key) -> None:
        """Have `key` reconciled soon. Never blocks."""
        self._schedule.add(key)
        self._asked_s.setdefault(key, self._clock())
        self._wake.set()

    def add_after(self, key: Key, delay_s: float) -> None:
        """Have `key` reconciled in `delay_s` seconds, or earlier if that is already set."""
        self._schedule.add_at(key, self._clock() + delay_s)
        self._wake.set()

    def expect(self, key: Key, due_s: float) -> None:
        """Have `key` reconciled at `due_s` on the clock, unless `put_off` puts that off then."""
        self._schedule.expect(key, due_s)
        self._wake.set()

    def rest(self, key: Key, until_s: float) -> None:
        """Keep `key` from being reconciled before `until_s` on the clock."""
        self._schedule.rest(key, until_s)

    async def run(self) -> None:
        """Work until cancelled. Runs in progress are then cancelled, too, and waited for."""
        try:
            while True:
                await self._free.acquire()
                key = await self._next()
                task = asyncio.create_task(self._one(key), name=f"reconcile {key[0]}/{key[1]}")
                self._running.add(task)
                task.add_done_callback(self._ended)
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._free.release()
        self._wake.set()

    def _until(self, key: Key) -> float | None:
        try:
            return self._put_off(key)
        except Exception:
            log.exception("%s/%s: a bug of ours; it is reconciled now.", *key)
            return None

    async def _next(self) -> Key:
        while True:
            self._wake.clear()
            key = self._schedule.take(self._clock())
            if key is not None:
                return key
            due_s = self._schedule.next_due_s()
            timeout_s = None if due_s is None else max(0.0, due_s - self._clock())
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _one(self, key: Key) -> None:
        started_s = self._clock()
        asked_s = self._asked_s.pop(key, None)
        if asked_s is not None and self._observe_wait is not None:
            self._observe_wait(started_s - asked_s)
        succeeded = False
        try:
            again_s = await self._reconcile(key)
            succeeded = True
            self._schedule.succeed(key)
            if again_s is not None:
                self.add_after(key, max(0.0, again_s))
        except Exception as error:
            least_s = error.retry_after_s if isinstance(error, UnavailableError) else 0.0
            wait_s = self._schedule.fail(key, self._clock(), random.uniform(0.8, 1.2), least_s=least_s)
            if isinstance(error, ConflictError):
                log.debug("%s/%s: %s Again in %.2f s.", *key, error, wait_s)
            elif isinstance(error, RegroupError):
                log.warning("%s/%s: %s Again in %.2f s.", *key, error, wait_s)
            else:
                log.exception("%s/%s: a bug of ours; again in %.2f s.", *key, wait_s)
        finally:
            self._schedule.done(key)
            if self._observe is not None:
                self._observe(self._clock() - started_s, succeeded)
