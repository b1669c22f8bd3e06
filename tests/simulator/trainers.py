"""Trainers without tensors: what `regroup.elastic` does with a generation, step by step, on the real adoption rule.

A `Trainer` follows `elastic/regrouper.py` (enter once, ask, form, adopt, leave for good), a `Group` is the store and the
collectives of one generation: it forms when all ranks are there and commits a step when all of them live.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regroup.elastic.adoption import Arrival, Copy, Fallback, Refuse, decide
from regroup.protocol.document import FORCED, Document
from regroup.protocol.local import (
    AdoptedLocally,
    Answer,
    Assignment,
    Attach,
    Committed,
    Entering,
    FinishedLocally,
    FormedLocally,
    Left,
    StopLocally,
)
from regroup.protocol.state import StatePair

if TYPE_CHECKING:
    from tests.simulator.world import Agent


class Group:
    """The meeting of one generation."""

    def __init__(self, number: int, world_size: int) -> None:
        self.number, self.world_size = number, world_size
        self.ranks: dict[int, Trainer] = {}
        self.document: Document | None = None
        self.adopted: set[int] = set()
        self.step = 0
        self.is_broken = False
        self.is_over = False

    @property
    def trains(self) -> bool:
        """Every rank has adopted, and nothing has happened since."""
        return (
            len(self.adopted) == self.world_size
            and not self.is_broken
            and not self.is_over
            and all(t.alive and not t.finished for t in self.ranks.values())
        )

    def commit_step(self) -> tuple[int, int] | None:
        """One step, or the cut if every rank knows of a newer generation. Returns (generation, step) of a commit."""
        if not self.trains:
            return None
        self.step += 1
        state = StatePair(self.number, self.step)
        trainers = [self.ranks[rank] for rank in sorted(self.ranks)]
        leave = all(t.newest is not None and t.newest.number > self.number for t in trainers)
        for trainer in trainers:
            trainer.committed(self, state)
        if leave and self.step < trainers[0].agent.world.total_steps:
            self.is_over = True
            for trainer in trainers:
                trainer.group = None
                trainer.agent.world.later(trainer.go_on)
        return (self.number, self.step)

    def join(self, trainer: Trainer, rank: int, document: Document | None) -> None:
        self.ranks[rank] = trainer
        self.document = document or self.document
        if len(self.ranks) < self.world_size or self.is_broken:
            if self.is_broken:
                self.break_up(None)
            return
        world = trainer.agent.world
        for pair in world.cut_links:
            ends = [(r, t) for r, t in self.ranks.items() if t.agent.uid in pair]
            if len({t.agent.uid for _, t in ends}) == 2:
                (rank_a, a), (rank_b, b) = ends[0], ends[-1]
                a.lost_rank, b.lost_rank = rank_b, rank_a
                self.break_up(None)
                return
        assert self.document is not None
        document = self.document
        ranks = sorted(self.ranks)
        for r in ranks:
            self.ranks[r].say(FormedLocally(self.number, 1.0))
        arrivals = [self.ranks[r].arrival() for r in ranks]
        decision = decide(document, arrivals)
        if isinstance(decision, Refuse):
            for r in ranks:
                self.ranks[r].leave("witness", decision.reason)
            return
        if isinstance(decision, Copy):
            state, source = decision.state, "copy"
        elif isinstance(decision, Fallback) and decision.best is not None:
            state, source = decision.best.state, "copy"
        else:
            state, source = StatePair(self.number, 0), "nothing"
        world.nobody_holds_more_than(state)
        self.step = state.step
        for r in ranks:
            self.ranks[r].adopt(self, state, source, decision.rolled_back)

    def break_up(self, culprit: Trainer | None) -> None:
        """A rank is gone: everybody else's collective fails."""
        self.is_broken = True
        rank = next((r for r, t in self.ranks.items() if t is culprit), None)
        for trainer in list(self.ranks.values()):
            if trainer is not culprit and trainer.group is self and trainer.alive:
                trainer.agent.world.later(lambda t=trainer: t.failed(self, rank))  # type: ignore[misc]


class Trainer:
    """One trainer process."""

    def __init__(self, agent: Agent, local_rank: int, incarnation: int) -> None:
        self.agent, self.local_rank, self.incarnation = agent, local_rank, incarnation
        self.alive = True
        self.attached = False
        self.frozen = False
        self.newest: Assignment | None = None
        self.state: StatePair | None = None
        self.state_adopted = 0
        self.group: Group | None = None
        self.finished = False
        self.lost_rank: int | None = None
        self._floor = 0
        self._forced = 0
        self._answer: Answer | None = None

    def attach(self) -> None:
        if self.alive and not self.attached:
            self.attached = True
            self.say(Attach(1, self.local_rank, self.incarnation))

    def say(self, message: Any) -> None:
        self.agent.trainer_says(self, message)

    def receive(self, message: Any) -> None:
        if not self.alive:
            return
        if isinstance(message, StopLocally):
            self.agent.world.later(lambda: self.agent.exited(self, 0))
        elif isinstance(message, Answer):
            self._answered(message)
        elif isinstance(message, Assignment) and (self.newest is None or message.number > self.newest.number):
            self.newest = message
            if message.kind == FORCED:
                self._forced = message.number
            self.go_on()

    def go_on(self) -> None:
        """Leave what has to be left; enter what may be entered (`Regrouper.ensure`)."""
        if not self.alive or self.frozen:
            return
        if self.group is not None:
            formed = len(self.group.adopted) == self.group.world_size
            newer = self.newest is not None and self.newest.number > self.group.number
            if not (self._forced > self.group.number or (newer and not formed)):
                return
            self.drop()
        newest = self.newest
        if newest is None or newest.number <= self._floor:
            return
        self._floor = newest.number
        self.finished = False
        if newest.member:
            self.say(Entering(newest.number))
        else:
            self._send_left()

    def _answered(self, answer: Answer) -> None:
        if answer.to != "entering" or not answer.ok or self.newest is None or answer.generation != self.newest.number:
            return
        newest = self.newest
        key = (newest.number, newest.uid)
        self.group = self.agent.world.groups.setdefault(key, Group(newest.number, newest.world_size))
        assert (newest.document is not None) == newest.hosts_store
        self.group.join(self, newest.rank, newest.document)

    def arrival(self) -> Arrival:
        return Arrival(self.state, self.state_adopted, self.agent.saved.adopted)

    def adopt(self, group: Group, state: StatePair, source: str, rolled_back: bool) -> None:
        source = "self" if self.state == state else source
        self.state, self.state_adopted = state, group.number
        self.say(AdoptedLocally(group.number, state.step, source, state, 1.0, rolled_back))
        group.adopted.add(self.newest.rank if self.newest else 0)
        if state.step >= self.agent.world.total_steps:
            self._finish(group)

    def committed(self, group: Group, state: StatePair) -> None:
        self.state = state
        self.say(
            Committed(group.number, state.step, state.step, loss=1.0, samples=8 * state.step, digest=f"d{state.step}")
        )
        if state.step >= self.agent.world.total_steps:
            self._finish(group)

    def failed(self, group: Group, peer_rank: int | None) -> None:
        """A collective raised."""
        if self.group is not group or not self.alive or self.frozen or self.finished:
            return
        knows_newer = self.newest is not None and self.newest.number > group.number
        if knows_newer:
            self.drop()
            self.go_on()
        else:
            lost, self.lost_rank = self.lost_rank, None
            self.leave("collective", "Connection closed by peer.", peer_rank if peer_rank is not None else lost)

    def leave(self, cause: str, message: str, peer_rank: int | None = None) -> None:
        self.group = None
        self._send_left(cause, message, peer_rank)

    def drop(self) -> None:
        """Out of the group, without a word."""
        group, self.group = self.group, None
        if group is not None and not group.is_over:
            group.break_up(self)

    def _finish(self, group: Group) -> None:
        self.finished = True
        self.say(FinishedLocally(group.number, group.step))

    def _send_left(self, cause: str | None = None, message: str = "", peer_rank: int | None = None) -> None:
        step = self.state.step if self.state else 0
        self.say(Left(self._floor, self.state, self.state_adopted, step, cause, message, peer_rank))
