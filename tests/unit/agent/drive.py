"""Drives the agent's core without any I/O: events in, effects kept by kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from _regroup_agent import events as ev
from _regroup_agent.core import Core
from _regroup_agent.ending import Terms
from _regroup_agent.statefile import Saved
from _regroup_agent.worker import Identity
from _regroup_agent.writers import Look
from regroup.protocol import frameworks, local, wire
from regroup.protocol.document import Document, Member, Store
from regroup.protocol.snapshot import SnapshotState
from regroup.protocol.state import StatePair

JOB, POD, PORT = "job", "pod", 4000
TERMS = Terms()
NEW_POD = Saved()


class Drive:
    """A core with p processes and a clock. `effects` are those of the last event; `on_disk` is the last Persist.

    `look` is what each look at the processes' files shows. It may be a function of the time.
    """

    def __init__(
        self,
        processes: int = 1,
        saved: Saved = NEW_POD,
        grace_s: float = 25.0,
        saves: bool = False,
        session: bool = False,
        preloading: bool = False,
        cannot_run: str = "",
        snapshot: SnapshotState | None = None,
        terms: Terms = TERMS,
        framework: str = frameworks.PYTORCH,
    ) -> None:
        identity = Identity(JOB, POD, "boot", processes, grace_s, saves, terms=terms, framework=framework)
        self.look: Look | Callable[[float], Look] = Look()
        self.core = Core(
            identity,
            saved,
            session=session,
            preloading=preloading,
            cannot_run=cannot_run,
            snapshots={} if snapshot is None else {0: snapshot},
        )
        self.processes, self.now_s = processes, 100.0
        self.effects: list[ev.Effect] = []
        self.all: list[ev.Effect] = []
        self.on_disk = saved
        self.incarnations = [0] * processes
        self.newest = 0
        self.feed(ev.StoreOpened(PORT))

    def feed(self, event: ev.Event) -> Drive:
        self.effects = self.core.handle(event, self.now_s)
        self.all += self.effects
        for effect in self.effects:
            if isinstance(effect, ev.Persist):
                self.on_disk = effect.saved
            elif isinstance(effect, ev.Start):
                assert self.on_disk.incarnation >= effect.incarnation, "INC: started before its incarnation was on disk"
                self.incarnations[effect.local_rank] = effect.incarnation
        if self.of(ev.LookAtFiles):
            effects = self.effects
            self.feed(ev.Looked(self.look(self.now_s) if callable(self.look) else self.look))
            self.effects = effects + self.effects
        return self

    def wait(self, seconds: float) -> Drive:
        """Let time pass, with every tick that is due."""
        end_s = self.now_s + seconds
        effects: list[ev.Effect] = []
        num_ticks = 0
        while (due_s := self.core.due_s) is not None and due_s <= end_s:
            num_ticks += 1
            assert num_ticks < 10_000, "the agent spins"
            self.now_s = max(self.now_s, due_s)
            effects += self.feed(ev.Tick()).effects
        self.now_s, self.effects = end_s, effects
        return self

    def command(self, body: Any, **changed: Any) -> Drive:
        if isinstance(body, wire.Generation):
            self.newest = max(self.newest, body.number)
        return self.feed(ev.Commanded(replace(wire.Command(JOB, POD, 1, self.newest, body), **changed)))

    def says(self, message: Any, rank: int = 0) -> Drive:
        return self.feed(ev.FromTrainer(rank, self.incarnations[rank], message))

    def attach(self, *ranks: int) -> Drive:
        for rank in ranks or range(self.processes):
            self.says(local.Attach(1, rank, self.incarnations[rank]), rank)
        return self

    def exits(self, code: int, rank: int = 0, last_line: str = "") -> Drive:
        return self.feed(ev.Exited(rank, self.incarnations[rank], code, last_line))

    def session(self) -> Drive:
        """Welcome to tier Session, all attached."""
        self.feed(ev.Connected())
        return self.command(wire.Welcome("Session")).attach()

    def generation(self, number: int, **changed: Any) -> Drive:
        return self.command(generation(number, self.processes, **changed))

    def trains(self, number: int, step: int = 0) -> Drive:
        """Take every process through generation `number` up to a committed step."""
        self.generation(number)
        for rank in range(self.processes):
            self.says(local.Entering(number), rank)
        for rank in range(self.processes):
            self.says(local.FormedLocally(number, 1.0), rank)
            self.says(local.AdoptedLocally(number, step, "self", StatePair(number, step), 1.0), rank)
        if step:
            for rank in range(self.processes):
                self.says(committed(number, step), rank)
        return self

    def finish(self, number: int, step: int, offset: int = 0, **changed: Any) -> Drive:
        """All have committed the last step, `step`, in generation `number`, and the operator ends the loops."""
        world_size = offset + self.processes
        return self.command(replace(wire.Finish(number, step, offset, world_size), **changed))

    def of(self, kind: type[Any], effects: list[ev.Effect] | None = None) -> list[Any]:
        return [e for e in (self.effects if effects is None else effects) if isinstance(e, kind)]

    def bodies(self, kind: type[Any] = object, *, ever: bool = False) -> list[Any]:
        """Return the bodies of the reports sent, of the last event or ever."""
        sent = [e.report.body for e in self.of(ev.Send, self.all if ever else None)]
        return [body for body in sent if isinstance(body, kind)]

    def told(self, kind: type[Any] = object) -> list[tuple[int, Any]]:
        return [(e.local_rank, e.message) for e in self.of(ev.Tell) if isinstance(e.message, kind)]

    @property
    def report(self) -> wire.Report:
        return self.core.report(wire.Changed(), self.now_s)

    @property
    def phase(self) -> str:
        return self.report.condition.phase


def committed(number: int, step: int, **changed: Any) -> local.Committed:
    return replace(local.Committed(number, step, step, 0.5, step, f"d{step}"), **changed)


def left(number: int, at: int | None = None, **changed: Any) -> local.Left:
    state = StatePair(number, at) if at is not None else None
    return replace(local.Left(number, state, number if state else 0), **changed)


def document(number: int, processes: int = 1) -> Document:
    return Document(
        number,
        f"u{number}",
        JOB,
        "forced",
        (Member(0, "p", POD, 1, "10.0.0.1", processes),),
        Store("10.0.0.1", PORT, POD),
    )


def generation(number: int, processes: int = 1, **changed: Any) -> wire.Generation:
    doc = document(number, processes)
    command = wire.Generation(
        number, doc.uid, doc.kind, True, 0, processes, 0, 0, "10.0.0.1", PORT, doc.store_prefix(), False, doc.digest()
    )
    return replace(command, **changed)
