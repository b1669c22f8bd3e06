"""Questions that the moves ask of a state: who is there, what an agent says, rule WITNESS as `adoption.decide` has it."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.model.live.records import (
    ABSENT,
    BEST,
    CHECKPOINT,
    COLLECTIVE,
    HEARD,
    NO_STATE,
    STARTING,
    WITNESS,
    Budget,
    Group,
    LiveScenario,
    Member,
    Seal,
    State,
    Word,
    Worker,
)


class Verdict(NamedTuple):
    refusal: str
    """The cause of a refusal; empty: train."""
    state: int


def with_item(items: tuple[Any, ...], index: int, item: object) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


def with_worker(state: State, place: int, worker: Worker) -> State:
    return state._replace(workers=with_item(state.workers, place, worker))


def with_group(state: State, group: Group) -> State:
    return state._replace(groups=tuple(group if g.number == group.number else g for g in state.groups))


def pay(state: State, kind: str) -> State | None:
    """Return the state after one fault of `kind` was paid for; None when there is no budget left for it."""
    left = getattr(state.budget, kind)
    if left <= 0 or state.budget.total <= 0:
        return None
    budget: Budget = state.budget._replace(**{kind: left - 1, "total": state.budget.total - 1})
    return state._replace(budget=budget)


def is_alive(state: State, member: Member) -> bool:
    """Whether the member's pod is there."""
    worker = state.workers[member[0]]
    return worker.uid == member[1] and worker.phase != ABSENT


def is_there(state: State, group: Group, member: Member) -> bool:
    """Whether the member takes part in the group."""
    return is_alive(state, member) and state.workers[member[0]].inside == group.number


def is_whole(state: State, group: Group) -> bool:
    return all(is_there(state, group, member) for member in group.members)


def group_of(state: State, number: int) -> Group | None:
    return next((g for g in state.groups if g.number == number), None)


class View:
    """A scenario's eyes."""

    def __init__(self, scenario: LiveScenario) -> None:
        self.scenario = scenario
        self.rules = scenario.rules

    # ---- what an agent says

    def seal(self, worker: Worker) -> Seal | None:
        """What `aggregate.seal` returns: nothing while the process is in a group."""
        if worker.phase == ABSENT or worker.inside:
            return None
        left, below = max(worker.entered, worker.left), 0
        if HEARD in self.rules:
            below = worker.heard
            if worker.heard and not worker.is_member:
                left = max(left, worker.heard)
        return Seal(left, below, worker.state, worker.state_adopted, worker.adopted)

    def word(self, worker: Worker) -> Word:
        return Word(
            worker.phase, worker.inside, worker.entered, worker.adopted, worker.heard, self.seal(worker), worker.fault
        )

    # ---- rule WITNESS

    def decide(self, state: State, group: Group) -> Verdict:
        """Whose state a group that has met continues from."""
        arrivals = {member: a for member in group.members if (a := group.arrivals[member[0]]) is not None}
        best = max(a.state for a in arrivals.values())
        may_copy: set[Member] = set()
        for number, members in group.older:
            present = [arrivals[m] for m in members if m in arrivals]
            if any(a.state != NO_STATE and a.state_adopted >= number for a in present):
                return Verdict("", best)
            seals = [(m, s) for m, s in group.seals if m in members and m not in arrivals and s.closes(number)]
            holding = [s.state for _, s in seals if s.state != NO_STATE and s.state_adopted >= number]
            if holding:
                return Verdict("", best) if best >= max(holding) else Verdict(WITNESS, 0)
            gone = {*group.lost, *arrivals, *(m for m, _ in seals)}
            missing = {member for member in members if member not in gone}
            if any(a.adopted < number for a in present) or any(s.adopted < number for _, s in seals):
                may_copy |= missing  # one member never adopted it, so it never committed a step (rule COPIES)
                continue
            if missing or may_copy:
                return Verdict(WITNESS, 0)
        if BEST in self.rules:
            outside = [s.state for m, s in group.seals if m not in arrivals]
            if group.unspoken or max(outside, default=NO_STATE) > best:
                return Verdict(WITNESS, 0)
        if best == NO_STATE and self.scenario.has_checkpoint and state.unreadable >> group.reader & 1:
            return Verdict(CHECKPOINT, 0)
        return Verdict("", max(best, 0))

    # ---- what the operator makes of it

    def has_refused(self, state: State, *causes: str) -> bool:
        """Whether a member of the newest generation refused it for one of these causes."""
        return any(
            is_alive(state, member)
            and (word := state.told[member[0]]) is not None
            and word.fault[0] in causes
            and word.fault[1] == state.number
            for member in state.members
        )

    def is_gone(self, state: State, member: Member) -> bool:
        """Whether the operator takes a member of the newest generation as lost, died or broken (plan/facts/standing.py)."""
        if not is_alive(state, member):
            return True
        word = state.told[member[0]]
        if word is None:
            return False
        if not state.workers[member[0]].is_connected:
            return self._has_broken(state)
        if word.phase == STARTING:  # after an operator's restart nobody knows whether it died or never ran
            return bool(state.is_known) or word.entered >= state.number
        return word.entered >= state.number and not word.inside

    def is_lost_or_died(self, state: State, member: Member) -> bool:
        """Whether a member that is gone did not just leave: its process or pod ended, or its stream."""
        word = state.told[member[0]]
        return self.is_gone(state, member) and (
            not is_alive(state, member)
            or not state.workers[member[0]].is_connected
            or (word is not None and word.phase == STARTING)
        )

    def _has_broken(self, state: State) -> bool:
        return any(
            is_alive(state, member)
            and state.workers[member[0]].is_connected
            and (word := state.told[member[0]]) is not None
            and word.fault == (COLLECTIVE, state.number)
            for member in state.members
        )

    def is_deaf(self, state: State, member: Member) -> bool:
        """Whether a member has not heard a generation that this operator cannot say again."""
        word = state.told[member[0]]
        return (
            not state.is_known
            and is_alive(state, member)
            and bool(state.workers[member[0]].is_connected)
            and word is not None
            and word.heard < state.number
        )

    def is_able(self, state: State, place: int) -> bool:
        word = state.told[place]
        worker = state.workers[place]
        return (
            worker.phase != ABSENT
            and bool(worker.is_connected)
            and word is not None
            and word.phase not in (ABSENT, STARTING)
        )

    # ---- what must never be

    def rollback_violation(self, state: State, group: Group, place: int) -> str | None:
        """A group must not commit onto a state below an acknowledged one that can still be had."""
        base = state.workers[place].state
        for other, holder in enumerate(state.workers):
            if (
                holder.phase not in (ABSENT, STARTING)
                and holder.is_connected
                and not holder.hangs
                and base < holder.state < group.number
                and holder.state in state.acknowledged
            ):
                return f"silent rollback: g{group.number} trains on from {base} while w{other} holds {holder.state}"
        return None

    def split_violation(self, state: State, group: Group) -> str | None:
        if state.trained > group.number and is_whole(state, group):
            return f"split brain: g{group.number} commits after g{state.trained} has"
        return None
