"""One simulated operator process: the real controller and registry on the world's clock, its watch, and signals that stop it."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from regroup_operator.api import RegroupError
from regroup_operator.controller import Controller, Options, Ports, Term, Turns
from regroup_operator.endpoint.registry import Registry, Stream
from regroup_operator.kube.job_cache import JobCache
from regroup_operator.kube.jobs import CachedJobStore
from regroup_operator.model.records import Settings
from regroup_operator.queue import BACKOFF_MAX_S, BACKOFF_MIN_S
from tests.simulator.cluster import KEY, Api

if TYPE_CHECKING:
    from tests.simulator.world import World

WALL = 1_800_000_000.0
"""The operators' wall clock is so far ahead of the world's."""


class AtOnce:
    """The simulator's Background: what is made beside the plan is made at once."""

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:  # noqa: ARG002
        """See Background."""
        with suppress(StopIteration):
            work.send(None)
            raise AssertionError("what is made does not wait")

    def turn(self, namespace: str, *, starts: bool) -> AbstractAsyncContextManager[None]:  # noqa: ARG002
        """See Background."""
        return nullcontext()

    async def together(self, works: Iterable[Coroutine[Any, Any, None]]) -> None:
        """See Background."""
        for work in works:
            await work


class Operator:
    """One operator process: a controller and a registry. Killed, it is forgotten (`dead`). `paused`: it does nothing, its
    streams stay open, and its kernel takes what is written to it."""

    def __init__(self, world: World, settings: Settings) -> None:
        self.world = world
        self.paused = self.dead = self.is_dirty = False
        self.look_s: float | None = None
        self.expected_s: float | None = None
        self.rests_until_s = 0.0
        self.num_reconciles = 0
        factor = world.progress_factors[world.num_operators % len(world.progress_factors)]
        world.num_operators += 1
        self.registry = Registry(
            lambda: world.now_s,
            lambda _: self.dirty(),
            lambda _, wait_s: self.look_in(wait_s),
            lambda _: factor,
        )
        self.jobs = JobCache()
        self.jobs.see(world.store.view)
        store = CachedJobStore(Api(world.store), self.jobs, look=lambda _: self.dirty(), clock=lambda: world.now_s)
        self.controller = Controller(
            Ports(
                store=store,
                workers=world.pods,
                recorder=world,
                registry=self.registry,
                background=AtOnce(),
                decisions=world.decisions,
            ),
            Options(
                settings=settings,
                endpoint="regroup.ns.svc:8443",
                progress_writes_per_s=world.progress_writes_per_s,
            ),
            Turns(
                look_after=lambda _, wait_s: self.look_in(wait_s),
                expect=lambda _, due_s: self.expect(due_s),
                rest=lambda _, until_s: self.rest(until_s),
            ),
            term=Term(leads=lambda: self.leads),
            monotonic=lambda: world.now_s,
            wall=lambda: WALL + world.now_s + world.wall_skew_s,
        )
        self._failures = 0
        self._suspended: Coroutine[Any, Any, float | None] | None = None
        self._ended: list[tuple[str, Stream]] = []
        self._unseen: list[tuple[dict[str, Any], bool]] = []

    @property
    def leads(self) -> bool:
        """Whether its lease has not run out: nobody else has taken it."""
        return self.world.operator in (self, None)

    def dirty(self) -> None:
        self.is_dirty = True

    def see(self, raw: dict[str, Any], gone: bool) -> None:
        """Its watch shows the job's object."""
        if self.paused:
            self._unseen.append((raw, gone))
            return
        if gone:
            self.jobs.drop(KEY, raw["metadata"]["uid"])
        elif not self.jobs.see(raw):
            return
        self.dirty()

    def look_in(self, wait_s: float) -> None:
        """Have it reconcile in `wait_s`, or earlier if that was asked for already."""
        due_s = self.world.now_s + wait_s
        self.look_s = due_s if self.look_s is None else min(self.look_s, due_s)

    def expect(self, due_s: float) -> None:
        """Have it reconcile at `due_s`, unless progress puts that off."""
        self.expected_s = due_s

    def rest(self, until_s: float) -> None:
        """Do not reconcile before."""
        self.rests_until_s = until_s

    @property
    def is_due(self) -> bool:
        now_s = self.world.now_s
        if self.paused or self._suspended is not None or now_s < self.rests_until_s:
            return False
        if self.expected_s is not None and self.expected_s <= now_s:
            later_s = self.controller.progress_overdue_s(KEY)
            if later_s is None or later_s <= now_s:
                return True
            self.expected_s = later_s
        return self.is_dirty or (self.look_s is not None and self.look_s <= now_s)

    def reconcile(self) -> None:
        """Reconcile once; with an error, where the world says so, again after the work queue's back-off."""
        self.expected_s = None
        self.num_reconciles += 1
        self._run(self.controller.reconcile(KEY))
        if self.world.pace.rest_s:
            self.rest(self.world.now_s + self.world.pace.rest_s)

    def pause(self) -> None:
        """SIGSTOP."""
        self.paused = True

    def go_on(self) -> None:
        """SIGCONT: a request that it was in the middle of goes on first, then what came meanwhile."""
        self.paused = False
        work, self._suspended = self._suspended, None
        if work is not None:
            self._run(work)
        for uid, stream in self._ended:
            self.end_stream(uid, stream)
        self._ended.clear()
        unseen, self._unseen = self._unseen, []
        for raw, gone in unseen:
            self.see(raw, gone)

    def end_stream(self, uid: str, stream: Stream) -> None:
        """The connection of a stream is gone."""
        if self.paused:
            self._ended.append((uid, stream))
        elif uid in self.world.pods.by_uid:
            self.registry.close(self.world.pods.by_uid[uid], stream)

    def _run(self, work: Coroutine[Any, Any, float | None]) -> None:
        now_s = self.world.now_s
        try:
            work.send(None)
        except StopIteration as end:
            wait_s: float | None = end.value
            self.look_s = None if wait_s is None else now_s + wait_s
            self._failures = 0
        except RegroupError:
            if not self.world.backs_off:
                raise
            self.look_s = now_s + min(BACKOFF_MIN_S * 2.0**self._failures, BACKOFF_MAX_S)
            self._failures += 1
        else:
            self._suspended, self.paused = work, True
