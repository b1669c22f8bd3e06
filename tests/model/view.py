"""Questions that the moves ask of a state, the witness walk (rule 8), and what must never be.

Pure. The three `..._violation` functions see what no single part of the real system can: all histories at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.model.records import (
    BACKUP,
    COMPUTING,
    COPIES,
    COPYING,
    EXITED,
    FINISHED,
    FORMING,
    LOST,
    MAD,
    REDUCING,
    SEAL,
    STATE,
    TORN,
    TORN_MARK,
    WITNESS,
    Arrival,
    Budget,
    History,
    Member,
    Scenario,
    State,
    Worker,
)

TAKES_PART = frozenset({FORMING, COPYING, COMPUTING, REDUCING, FINISHED})
HAS_ADOPTED = frozenset({COMPUTING, REDUCING, FINISHED})
STEPPING = frozenset({COMPUTING, REDUCING})
NOTHING = (-2, -2)
"""The order key of a member without a usable state."""


def is_prefix(shorter: History, longer: History | None) -> bool:
    return longer is not None and longer[: len(shorter)] == shorter


def committed_in(history: History, step: int) -> int:
    """Return the announcement in which `step`, counted from 1, was committed."""
    at = history[step - 1]
    assert isinstance(at, int), f"torn: {history}"
    return at


def with_item(items: tuple[Any, ...], index: int, item: object) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


def with_worker(state: State, slot: int, worker: Worker) -> State:
    return state._replace(workers=with_item(state.workers, slot, worker))


def pay(state: State, kind: str) -> State | None:
    """Return the state after one fault of `kind` was paid for; None when there is no budget left for it."""
    left = getattr(state.budget, kind)
    if left <= 0 or state.budget.total <= 0:
        return None
    budget: Budget = state.budget._replace(**{kind: left - 1, "total": state.budget.total - 1})
    return state._replace(budget=budget)


class View:
    """A scenario's eyes: every question takes the state to look at. `at` is always the index of an announcement."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rules = scenario.rules

    # ---- who is where

    def slots(self, state: State, at: int) -> list[int]:
        return [slot for slot, _ in state.announcements[at].members]

    def is_member(self, state: State, at: int, slot: int) -> bool:
        return (slot, state.workers[slot].uid) in state.announcements[at].members

    def newest(self, state: State) -> int:
        return max(range(len(state.announcements)), key=lambda at: (state.announcements[at].generation, at))

    def is_newer(self, state: State, at: int, than: int) -> bool:
        """Whether `at` carries a higher number than `than`; everything is newer than none."""
        return than < 0 or state.announcements[at].generation > state.announcements[than].generation

    def has_cut_link(self, state: State, slots: Iterable[int]) -> bool:
        slots = list(slots)
        return bool(state.cut_links) and any(
            state.cut_links >> (a * self.scenario.workers + b) & 1 for a in slots for b in slots if a < b
        )

    def is_there(self, state: State, at: int, slot: int) -> bool:
        """Whether the slot's current process still takes part in `at`."""
        worker = state.workers[slot]
        return bool(
            self.is_member(state, at, slot)
            and worker.has_pod
            and worker.entered == at
            and worker.phase in TAKES_PART
            and not worker.is_reentered
        )

    def is_broken(self, state: State, at: int) -> bool:
        """Whether a collective of `at` must fail."""
        slots = self.slots(state, at)
        return self.has_cut_link(state, slots) or any(not self.is_there(state, at, slot) for slot in slots)

    def is_all_adopted(self, state: State, at: int) -> bool:
        return all(
            self.is_member(state, at, slot)
            and state.workers[slot].entered == at
            and state.workers[slot].phase in HAS_ADOPTED
            for slot in self.slots(state, at)
        )

    def is_all_finished(self, state: State, at: int) -> bool:
        return all(
            self.is_member(state, at, slot) and state.workers[slot].phase in (FINISHED, EXITED)
            for slot in self.slots(state, at)
        )

    # ---- states and their order

    def arrival(self, worker: Worker) -> Arrival:
        history = worker.history
        if history is None:
            return Arrival(-1, -1, 1, None, -1, worker.agent_adopted, 0)
        lineage = committed_in(history, len(history)) if history and history[-1] != TORN_MARK else 0
        return Arrival(
            len(history),
            lineage,
            worker.is_valid,
            history,
            worker.adopted,
            worker.agent_adopted,
            worker.is_backup,
        )

    def order(self, state: State, arrival: Arrival) -> tuple[int, ...]:
        """The order that members can see: the highest is the source of the state."""
        if arrival.history is None or (TORN in self.rules and not arrival.is_valid):
            return NOTHING
        if STATE in self.rules:
            return (state.announcements[arrival.lineage].generation, arrival.step)
        return (arrival.step,)

    def best(self, state: State, at: int) -> tuple[int, ...]:
        arrivals = state.groups[at].arrivals
        return max(self.order(state, a) for slot in self.slots(state, at) if (a := arrivals[slot]) is not None)

    def source(self, state: State, at: int, best: tuple[int, ...]) -> int:
        arrivals = state.groups[at].arrivals
        return min(
            slot
            for slot in self.slots(state, at)
            if (arrival := arrivals[slot]) is not None and self.order(state, arrival) == best
        )

    def holders(self, state: State) -> list[int]:
        """Slots that still hold all that was acknowledged, in memory or in a snapshot."""
        return [
            slot
            for slot, worker in enumerate(state.workers)
            if worker.has_pod
            and worker.phase != EXITED
            and (
                (worker.history is not None and worker.is_valid and is_prefix(state.acknowledged, worker.history))
                or (worker.snapshot is not None and is_prefix(state.acknowledged, worker.snapshot[0]))
            )
        ]

    # ---- rule 8

    def has_witness(self, state: State, at: int) -> bool:
        """Whether the members that arrived for `at` may train: no older generation can know of a newer state.

        Walks the older generations newest first, as rule 8 does. Each must be covered by an arrived member or a seal,
        be proven never to have stepped, or be lost as a whole.
        """
        if WITNESS not in self.rules:
            return True
        arrivals, current = state.groups[at].arrivals, state.announcements[at]
        seals = current.seals if SEAL in self.rules else ()
        best = max(self.order(state, arrival) for arrival in arrivals if arrival is not None)
        older = [j for j, a in enumerate(state.announcements) if a.generation < current.generation]
        may_copy: set[Member] = set()
        for j in sorted(older, key=lambda j: -state.announcements[j].generation):
            members = state.announcements[j].members
            present = {
                slot: arrival
                for slot, uid in members
                if (arrival := arrivals[slot]) is not None and (slot, uid) in current.members
            }
            if any(
                self._is_witness(arrival, j) and (arrival.is_valid or TORN not in self.rules)
                for arrival in present.values()
            ):
                return True
            number = state.announcements[j].generation
            sealed = {s.member: s.arrival for s in seals if s.member in members and s.left_up_to >= number}
            if any(a.adopted >= j and self.order(state, a) > best for a in sealed.values()):
                return False
            if any(self._is_witness(a, j) for a in sealed.values()):
                return True
            told_of_loss = {*present, *(slot for slot, _ in sealed)} if LOST in self.rules else set()
            missing = {member for member in members if not self._is_lost(state, member, told_of_loss)}
            if any(
                (arrival.agent_adopted if MAD in self.rules else arrival.adopted) < j
                for arrival in [*present.values(), *sealed.values()]
            ):
                # Left without ever adopting: j never stepped. But others may have copied what an older one left.
                may_copy |= missing if COPIES in self.rules else set()
                continue
            if missing or may_copy:
                return False
            # Every copy of j's state is gone, proven: roll back, and say so.
        return True

    def _is_witness(self, arrival: Arrival, j: int) -> bool:
        """Whether it holds what it has committed since it adopted `j`, or a later one: a snapshot may be older."""
        return arrival.adopted >= j and arrival.history is not None and not (arrival.is_backup and BACKUP in self.rules)

    def _is_lost(self, state: State, member: Member, told_of_loss: set[int]) -> bool:
        slot, uid = member
        worker = state.workers[slot]
        return worker.uid != uid or not worker.has_pod or slot in told_of_loss

    # ---- what must never be

    def divergence_violation(self, state: State, slot: int) -> str | None:
        """All that are past adopt in one generation must agree up to the step in flight."""
        worker = state.workers[slot]
        assert worker.history is not None
        if TORN_MARK in worker.history:
            return f"w{slot} trains on a torn state"
        for other, peer in enumerate(state.workers):
            if (
                other == slot
                or not peer.has_pod
                or peer.entered != worker.entered
                or peer.phase not in HAS_ADOPTED
                or peer.history is None
            ):
                continue
            shorter, longer = sorted((worker.history, peer.history), key=len)
            if not is_prefix(shorter, longer):
                return (
                    f"w{slot} and w{other} are in one generation with different histories "
                    f"{worker.history} {peer.history}"
                )
            if len(longer) - len(shorter) > 1:
                return f"w{slot} and w{other} are {len(longer) - len(shorter)} steps apart in one generation"
        return None

    def split_violation(self, state: State, at: int, step: int) -> str | None:
        """A group must not complete a step after one with the same or a higher number has trained."""
        number = state.announcements[at].generation
        for other, announcement in enumerate(state.announcements):
            if (
                other != at
                and announcement.generation >= number
                and state.groups[other].has_committed
                and all(self.is_there(state, at, slot) for slot in self.slots(state, at))
            ):
                return (
                    f"split brain: g{number}#{at} completes step {step} "
                    f"after g{announcement.generation}#{other} has already trained"
                )
        return None

    def rollback_violation(self, state: State, history: History, at: int) -> str | None:
        """A group that really can train must not start below what was acknowledged and is still held."""
        if any(not self.is_there(state, at, slot) for slot in self.slots(state, at)):
            return None
        acknowledged = state.acknowledged
        if not acknowledged or is_prefix(acknowledged, history) or len(history) >= len(acknowledged):
            return None
        holders = self.holders(state)
        if not holders:
            return None
        return (
            f"silent rollback: group starts at step {len(history)}, "
            f"step {len(acknowledged)} was acknowledged and still held by w{holders[0]}"
        )

    # ---- names for labels

    def name(self, state: State, at: int) -> str:
        """`g2#1`: number and index of an announcement; without PERSIST the number alone can be ambiguous."""
        return f"g{state.announcements[at].generation}#{at}"
