"""Leader election by a coordination.k8s.io Lease, which at most one operator holds at any moment.

Safety rests on two clocks that are never compared. A follower takes the lease only after it has seen the same record,
unchanged, for the whole lease duration on its own clock. The leader has a shorter renew deadline, counted from *before*
the request that last succeeded, and ends its process when it passes. A thread watches the deadline, so that a process
that was stopped and continued ends before it does anything else. Any failure to renew counts as "not renewed".

`decide` is pure. `Elector` does the I/O, in an event loop that nothing else keeps busy (lease_thread.py). A write that
is late nevertheless is harmless, because every status is written by compare-and-swap (jobs.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from regroup_operator.api import NotFoundError
from regroup_operator.kube.client import LEASES, ApiConflict, ApiError, Client
from regroup_operator.kube.microtime import micro_time

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaseTimes:
    """Seconds. `renew_deadline_s` must be below `duration_s`, `retry_s` well below both."""

    duration_s: int = 15
    """A follower waits this long without a change before it takes the lease."""
    renew_deadline_s: float = 10.0
    """A leader that has not renewed for this long ends its process."""
    retry_s: float = 2.0
    """Time between two attempts to renew, or to look."""


@dataclass(frozen=True)
class ObservedLease:
    """A lease as a candidate sees it."""

    holder: str
    """Identity of the holder; empty if the lease was released."""
    resource_version: str
    duration_s: float
    """Time without a renewal after which others may take the lease, as the holder has written it."""
    unchanged_since_s: float
    """Time at which this resourceVersion was first seen, on the observer's own clock."""


Step = Literal["create", "renew", "take", "wait"]


def decide(sight: ObservedLease | None, identity: str, now_s: float) -> Step:
    """Return the next step of a candidate. `sight` None means that there is no lease. `now_s` is on the clock of
    unchanged_since_s."""
    if sight is None:
        return "create"
    if sight.holder == identity:
        return "renew"
    if not sight.holder or now_s - sight.unchanged_since_s > sight.duration_s:
        return "take"
    return "wait"


def look(
    lease: Mapping[str, Any], before: ObservedLease | None, now_s: float, default_duration_s: float
) -> ObservedLease:
    """Return the observation of `lease`. An unchanged resourceVersion keeps the time of `before`."""
    spec = lease.get("spec") or {}
    version = lease["metadata"]["resourceVersion"]
    unchanged = before is not None and before.resource_version == version
    return ObservedLease(
        holder=spec.get("holderIdentity") or "",
        resource_version=version,
        duration_s=float(spec.get("leaseDurationSeconds") or default_duration_s),
        unchanged_since_s=before.unchanged_since_s if unchanged and before is not None else now_s,
    )


def boot_clock() -> float:
    """Return seconds that go on while the machine sleeps, if the system has such a clock."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


def die(why: str) -> None:
    """End the process at once. None of its other code runs, since it may not act any more."""
    if select.select((), (2,), (), 0)[1]:  # else the log has no reader, and a write would block for ever
        os.write(2, f"{why} Ending this process.\n".encode())
    os._exit(1)


class Elector:
    """Elects a leader: `await acquire()` until this process leads, run `hold()` from then on, `release()` at the end.

    All of them run in one event loop; `leading` and `holder` may be read in any thread.
    """

    def __init__(
        self,
        client: Client,
        namespace: str,
        name: str,
        identity: str,
        times: LeaseTimes | None = None,
        *,
        clock: Callable[[], float] = boot_clock,
        die: Callable[[str], None] = die,
    ) -> None:
        """Prepare to elect. `identity` must differ between any two processes that ever run: the pod's name and a random part."""
        self.identity = identity
        self._client = client
        self._namespace = namespace
        self._name = name
        self._times = times or LeaseTimes()
        self._clock = clock
        self._die = die
        self._sight: ObservedLease | None = None
        self._spec: dict[str, Any] = {}
        self._renewed_s: float | None = None
        self._over = threading.Event()

    @property
    def leading(self) -> bool:
        """True while this process holds the lease and its renew deadline has not passed."""
        renewed_s = self._renewed_s  # once: another thread may set it
        return renewed_s is not None and self._clock() < renewed_s + self._times.renew_deadline_s

    @property
    def holder(self) -> str:
        """Identity of the leader as last seen; empty if unknown or none."""
        sight = self._sight
        return self.identity if self.leading else (sight.holder if sight else "")

    async def acquire(self) -> None:
        """Return once this process leads. Failures of the API server only delay that."""
        while True:
            try:
                if await self._attempt(self._times.renew_deadline_s):
                    threading.Thread(target=self._watch_deadline, name="lease deadline", daemon=True).start()
                    log.info("%s leads.", self.identity)
                    return
            except ApiError as error:
                log.warning("Lease %s/%s: %s", self._namespace, self._name, error)
            await asyncio.sleep(self._times.retry_s)

    async def hold(self) -> None:
        """Renew until cancelled. The process ends when the renew deadline passes or another one holds the lease."""
        while True:
            await asyncio.sleep(self._times.retry_s)
            assert self._renewed_s is not None
            left_s = self._renewed_s + self._times.renew_deadline_s - self._clock()
            if left_s <= 0:
                self._die(f"The lease {self._name} was not renewed for {self._times.renew_deadline_s:g} s.")
                return
            try:
                if not await self._attempt(left_s):
                    self._die(f"{self._sight.holder if self._sight else 'Nobody'} holds the lease {self._name}.")
                    return
            except ApiError as error:
                log.warning("The lease was not renewed: %s", error)

    async def release(self, timeout_s: float = 3.0) -> None:
        """Give the lease away at once, if this process holds it. Called after everything that needs leadership has ended.

        `hold` may have been cancelled in the middle of a renewal that took effect. Then the known resourceVersion is
        too old to write on, so the lease is read and written once more. All of it takes at most `timeout_s` seconds.
        """
        self._over.set()
        if not self.leading:
            return
        self._renewed_s = None
        try:
            async with asyncio.timeout(timeout_s):
                await self._give_away(timeout_s)
        except (ApiError, TimeoutError) as error:
            why = str(error) or f"no answer in {timeout_s:g} s."
            log.warning("The lease was not released and runs out by itself: %s", why)

    async def _give_away(self, timeout_s: float) -> None:
        for is_last in (False, True):
            if self._sight is None or self._sight.holder != self.identity:
                return
            try:
                await self._write({"holderIdentity": "", "leaseDurationSeconds": 1}, self._sight, timeout_s)
            except ApiConflict:
                if is_last:
                    raise
                await self._read(timeout_s)
            else:
                log.info("%s released the lease.", self.identity)
                return

    async def _attempt(self, left_s: float) -> bool:
        """Read and write once within `left_s` seconds. Return whether this process holds the lease now. After ApiError
        it is unknown."""
        started_s = self._clock()
        if self._sight is None or self._sight.holder != self.identity:
            await self._read(left_s)
        step = decide(self._sight, self.identity, self._clock())
        if step == "wait":
            return False
        sent_s = self._clock()
        left_s = max(0.1, left_s - (sent_s - started_s))
        try:
            if step == "create":
                await self._create(left_s)
            else:
                assert self._sight is not None
                now = micro_time()
                mine = {
                    "holderIdentity": self.identity,
                    "leaseDurationSeconds": self._times.duration_s,
                    "renewTime": now,
                }
                if step == "take":
                    mine["acquireTime"] = now
                    mine["leaseTransitions"] = int(self._spec.get("leaseTransitions") or 0) + 1
                await self._write(mine, self._sight, left_s)
        except (ApiConflict, NotFoundError):
            # Either an earlier request of ours took effect although its answer was lost, or somebody else was faster.
            await self._read(max(0.1, left_s - (self._clock() - sent_s)))
            if self._sight is None or self._sight.holder != self.identity:
                return False
            raise
        self._renewed_s = sent_s
        return True

    async def _read(self, timeout_s: float) -> None:
        try:
            lease = await self._client.get(LEASES, self._namespace, self._name, timeout_s=timeout_s)
        except NotFoundError:
            self._sight = None
            return
        self._saw(lease)

    async def _create(self, timeout_s: float) -> None:
        now = micro_time()
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": self._times.duration_s,
                "acquireTime": now,
                "renewTime": now,
                "leaseTransitions": 0,
            },
        }
        self._saw(await self._client.create(LEASES, self._namespace, body, timeout_s=timeout_s))

    async def _write(self, changes: Mapping[str, Any], sight: ObservedLease, timeout_s: float) -> None:
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": self._name,
                "namespace": self._namespace,
                "resourceVersion": sight.resource_version,
            },
            "spec": {**self._spec, **changes},
        }
        self._saw(await self._client.replace(LEASES, self._namespace, self._name, body, timeout_s=timeout_s))

    def _saw(self, lease: Mapping[str, Any]) -> None:
        self._sight = look(lease, self._sight, self._clock(), self._times.duration_s)
        self._spec = dict(lease.get("spec") or {})

    def _watch_deadline(self) -> None:
        while not self._over.is_set():
            renewed_s = self._renewed_s
            if renewed_s is None:
                return
            left_s = renewed_s + self._times.renew_deadline_s - self._clock()
            if left_s <= 0:
                self._die(f"The lease {self._name} was not renewed for {self._times.renew_deadline_s:g} s.")
                return
            self._over.wait(min(left_s, 0.5))
