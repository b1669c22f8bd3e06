"""The lease's thread: what it forwards to the main loop, that it does without its turns, and what ends it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import pytest

from harness.polling import until_async
from regroup_operator.api import NotFoundError, RegroupError
from regroup_operator.kube.client import Client
from regroup_operator.kube.lease import LeaseTimes
from regroup_operator.kube.lease_thread import LeaseThread

DEADLINE_S = 20.0
TIMES = LeaseTimes(60, 30.0, 0.001)


class Leases:
    """The API server's one lease, in place of a client. `fails`: what the next write raises."""

    def __init__(self, holder: str | None = None) -> None:
        self.lease: dict[str, Any] | None = None
        self.threads: set[str] = set()
        self.renewed, self.closed = threading.Semaphore(0), threading.Event()
        self.fails: Exception | None = None
        if holder is not None:
            self._store({"spec": {"holderIdentity": holder, "leaseDurationSeconds": 60}})

    def _store(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self.threads.add(threading.current_thread().name)
        version = int(self.lease["metadata"]["resourceVersion"]) + 1 if self.lease else 1
        self.lease = {"metadata": {"resourceVersion": str(version)}, "spec": dict(body["spec"])}
        return self.lease

    async def get(self, *_: object, **__: object) -> dict[str, Any]:
        if self.lease is None:
            raise NotFoundError("There is none.")
        return self.lease

    async def create(self, _: object, __: str, body: Mapping[str, Any], **___: object) -> dict[str, Any]:
        return self._store(body)

    async def replace(self, _: object, __: str, ___: str, body: Mapping[str, Any], **____: object) -> dict[str, Any]:
        if self.fails is not None:
            raise self.fails
        self.renewed.release()
        return self._store(body)

    async def close(self) -> None:
        self.closed.set()

    async def connect(self) -> Client:
        return cast(Client, self)

    @property
    def holder(self) -> str:
        assert self.lease is not None
        return str(self.lease["spec"]["holderIdentity"])


def with_lease(
    leases: Leases,
    test: Callable[[LeaseThread], Awaitable[None]],
    die: Callable[[str], None] = pytest.fail,
    **kwargs: Any,
) -> None:
    """Run `test`, then release: no thread of the lease is left."""

    async def run() -> None:
        elector = LeaseThread(leases.connect, "ns", "regroup", "me", TIMES, die=die, **kwargs)
        assert (elector.leading, elector.holder) == (False, "")
        try:
            await test(elector)
        finally:
            await elector.release()
        assert not elector.leading

    asyncio.run(run())
    for thread in threading.enumerate():
        if thread.name.startswith("lease"):
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), thread.name
    assert leases.closed.is_set()


def test_lease_is_renewed_while_the_main_loop_is_blocked_and_released_at_the_end() -> None:
    leases = Leases()

    async def test(elector: LeaseThread) -> None:
        await elector.acquire()
        assert (elector.leading, elector.holder) == (True, "me")
        for _ in range(5):
            assert leases.renewed.acquire(timeout=DEADLINE_S), "not renewed"

    with_lease(leases, test)
    assert leases.threads == {"lease"}
    assert leases.holder == ""


def test_what_a_renewal_raises_ends_hold() -> None:
    leases = Leases()

    async def test(elector: LeaseThread) -> None:
        await elector.acquire()
        leases.fails = ZeroDivisionError()
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(elector.hold(), DEADLINE_S)
        leases.fails = None

    with_lease(leases, test)


def test_cancelled_hold_stops_the_renewals_and_leaves_the_lease() -> None:
    leases = Leases()

    async def test(elector: LeaseThread) -> None:
        await elector.acquire()
        hold = asyncio.create_task(elector.hold())
        await asyncio.sleep(0)
        hold.cancel()
        assert isinstance((await asyncio.gather(hold, return_exceptions=True))[0], asyncio.CancelledError)
        await until_async(lambda: elector._leading is not None and elector._leading.done(), "no more renewals")
        assert (elector.leading, leases.holder) == (True, "me")

    with_lease(leases, test)
    assert leases.holder == ""


def test_candidate_that_waits_ends_without_touching_the_lease() -> None:
    leases = Leases("other")

    async def test(elector: LeaseThread) -> None:
        acquire = asyncio.create_task(elector.acquire())
        await until_async(lambda: elector.holder == "other", "the other one is seen", timeout_s=DEADLINE_S)
        acquire.cancel()
        assert isinstance((await asyncio.gather(acquire, return_exceptions=True))[0], asyncio.CancelledError)

    with_lease(leases, test)
    assert leases.holder == "other"


def test_client_that_cannot_be_made_ends_acquire() -> None:
    async def refuse() -> Client:
        raise RegroupError("The kubeconfig cannot be used.")

    async def run() -> None:
        elector = LeaseThread(refuse, "ns", "regroup", "me", TIMES)
        with pytest.raises(RegroupError, match="cannot be used"):
            await elector.acquire()
        await elector.release()

    asyncio.run(run())


def test_main_loop_that_hangs_ends_the_process_and_one_that_runs_does_not() -> None:
    leases = Leases()
    died: list[str] = []
    dead = threading.Event()

    def die(why: str) -> None:
        died.append(why)
        dead.set()

    async def test(elector: LeaseThread) -> None:
        await elector.acquire()
        hold = asyncio.create_task(elector.hold())
        # 1 ms apart at least, so that the loop runs for longer than it may be silent.
        await asyncio.to_thread(lambda: [leases.renewed.acquire(timeout=DEADLINE_S) for _ in range(1200)])
        assert died == []
        assert dead.wait(DEADLINE_S), "it leads for ever"
        hold.cancel()

    with_lease(leases, test, die, silence_s=1.0)
    assert died[0].startswith("The event loop has not begun a turn for 1 s (at ")
    assert died[0].endswith("The lease runs out.")
