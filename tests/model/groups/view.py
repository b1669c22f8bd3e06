"""Questions that the moves ask of a state, the decision at adoption, and what must never be.

Pure. `decide` sees only what a rank of a generation can see: the arrivals, the document, and who is proved lost.
The `..._violation` functions see all histories at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Literal, NamedTuple

from tests.model.groups.records import (
    APPLYING,
    COMPUTING,
    COPIES_FORGOTTEN,
    EXACT,
    GUEST,
    INNER,
    INNER_ONCE,
    POD,
    REDUCED_STEP,
    ROWS_UNTIL_ROW,
    Arrival,
    Generation,
    GroupScenario,
    History,
    Name,
    Pending,
    Place,
    Rank,
    State,
)

INDEXES = (0, 1)
"""The inner indexes: m = 2."""


def inner(slot: int) -> int:
    return slot % len(INDEXES)


HAS_ADOPTED = frozenset({COMPUTING, REDUCED_STEP, APPLYING})


class Verdict(NamedTuple):
    """What a generation that has met continues from. A function of the arrivals, so the same for all of its ranks."""

    source: Literal["wait", "live", "backup", "checkpoint"]
    name: Name = (0, 0)


WAIT = Verdict("wait")
ABOVE_ALL: Name = (1 << 30, 0)


def with_item(items: tuple[Any, ...], index: int, item: object) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


def with_rank(state: State, slot: int, rank: Rank) -> State:
    return state._replace(ranks=with_item(state.ranks, slot, rank))


def with_generation(state: State, number: int, generation: Generation) -> State:
    return state._replace(generations=with_item(state.generations, number - 1, generation))


def pay(state: State, kind: str) -> State | None:
    """Return the state after one fault of `kind` was paid for; None when there is no budget left for it."""
    left = getattr(state.budget, kind)
    if left <= 0 or state.budget.total <= 0:
        return None
    return state._replace(budget=state.budget._replace(**{kind: left - 1, "total": state.budget.total - 1}))


def name(history: History) -> Name:
    return (abs(history[-1]), len(history)) if history else (0, 0)


def is_among(wanted: Name, histories: Iterable[History]) -> bool:
    return any(name(history) == wanted for history in histories)


def is_prefix(shorter: History, longer: History) -> bool:
    return longer[: len(shorter)] == shorter


def is_gone(state: State, slot: int, uid: int) -> bool:
    """Whether that process has ended. The model's operator knows at once: to know later only delays a decision."""
    return state.ranks[slot].uid != uid or not state.ranks[slot].is_up


def members(generation: Generation) -> list[tuple[int, Place]]:
    """Slot and place of everybody that has a rank in it."""
    return [(slot, place) for slot, place in enumerate(generation.places) if place and place.group != GUEST]


def is_named(generation: Generation, slot: int, uid: int) -> bool:
    place = generation.places[slot]
    return place is not None and place.uid == uid


def is_guest(generation: Generation, slot: int) -> bool:
    place = generation.places[slot]
    return place is not None and place.group == GUEST


def is_inside(state: State, number: int, slot: int, uid: int) -> bool:
    return not is_gone(state, slot, uid) and state.ranks[slot].generation == number


def is_whole(state: State, number: int) -> bool:
    """Whether every member is there: else what it decides never leads to a commit."""
    return all(is_inside(state, number, slot, place.uid) for slot, place in members(state.generations[number - 1]))


class View:
    """A scenario's eyes."""

    def __init__(self, scenario: GroupScenario) -> None:
        self.scenario = scenario
        self.rules = scenario.rules

    def has_met(self, state: State, number: int) -> bool:
        """Whether all members have arrived, and every guest that is not lost."""
        generation = state.generations[number - 1]
        return not any(
            place and not arrival and not (place.group == GUEST and is_gone(state, slot, place.uid))
            for slot, (place, arrival) in enumerate(zip(generation.places, generation.arrivals, strict=True))
        )

    # ---- what a rank holds, by name

    def rolls(self, pending: Pending, history: History, wanted: Name) -> bool:
        """Whether this rank, at `history`, makes `wanted` of it by applying what it has kept."""
        if EXACT in self.rules:
            return name(pending.base) == name(history) and (pending.generation, len(history) + 1) == wanted
        return len(pending.base) + 1 == len(history) + 1 == wanted[1]

    def has(self, held: Arrival | Rank, wanted: Name) -> bool:
        """Whether it holds the wanted state, or the one before and the gradients that lead to it."""
        history = held.history
        if history is None:
            return False
        return name(history) == wanted or any(self.rolls(pending, history, wanted) for pending in held.pending)

    def decide(self, state: State, number: int) -> Verdict:
        """Whose state a generation that has met continues from.

        The newest state that somebody here has applied and of which every inner index has a holder here; kept gradients count as
        held, but decide nothing. A snapshot that is newer, of a generation that these have left behind, comes before it; then the
        durable checkpoint. Each state that is newer must be certainly gone.
        """
        arrivals = state.generations[number - 1].arrivals
        here = [(inner(slot), a) for slot, a in enumerate(arrivals) if a is not None]
        applied = {name(a.history) for _, a in here if a.history is not None}
        if INNER not in self.rules and not self._has_witness(state, number, None, ABOVE_ALL):
            return WAIT
        below = ABOVE_ALL
        for wanted in (*sorted(applied, reverse=True), None):
            if INNER in self.rules and not all(self._has_witness(state, number, index, below) for index in INDEXES):
                return WAIT
            if wanted is None:
                break
            if {index for index, a in here if self.has(a, wanted)} == set(INDEXES) and (
                ROWS_UNTIL_ROW not in self.scenario.weaker or self._needs_no_rows(here, wanted)
            ):
                newer = self._newest_snapshot(here)
                return Verdict("live", wanted) if newer is None or newer <= wanted else Verdict("backup", newer)
            if INNER_ONCE not in self.scenario.weaker:
                below = wanted
        newest = self._newest_snapshot(here)
        return Verdict("checkpoint") if newest is None else Verdict("backup", newest)

    def _newest_snapshot(self, here: list[tuple[int, Arrival]]) -> Name | None:
        """The newest state of which every inner index has a snapshot here, or holds it."""
        copies = {name(backup) for _, a in here for backup in a.backups}
        for wanted in sorted(copies, reverse=True):
            if {index for index, a in here if self.has(a, wanted) or is_among(wanted, a.backups)} == set(INDEXES):
                return wanted
        return None

    def _needs_no_rows(self, arrivals: list[tuple[int, Arrival]], wanted: Name) -> bool:
        holders = [(index, a) for index, a in arrivals if a.history is not None and name(a.history) == wanted]
        return any(a.has_rows for _, a in holders) or {index for index, _ in holders} == set(INDEXES)

    def _has_witness(self, state: State, number: int, index: int | None, below: Name) -> bool:
        """Rule WITNESS for one inner index, or (INNER off) for all of them together: nobody who is not here can hold a newer state
        than those here do. `below` a state that is certainly gone, who holds that one is no witness: it knows of no older one.

        A generation that never stepped is passed over, but who adopted it may have copied the state of an older one, and be the
        last that holds it: it counts among those who must be lost.
        """
        arrivals = state.generations[number - 1].arrivals
        copied: list[tuple[int, int]] = []
        for older in range(number - 1, 0, -1):
            everybody = members(state.generations[older - 1])
            present = {
                slot: arrival
                for slot, place in everybody
                if (arrival := arrivals[slot]) is not None and arrival.uid == place.uid
            }
            asked = [(slot, place.uid) for slot, place in everybody if index is None or inner(slot) == index]
            if any(
                (arrival := present.get(slot)) is not None
                and arrival.history is not None
                and name(arrival.history) < below
                and arrival.adopted >= older
                for slot, _ in asked
            ):
                return True
            if any(arrival.adopted < older for arrival in present.values()):
                if COPIES_FORGOTTEN not in self.scenario.weaker:
                    copied += asked
                continue  # one member never adopted it, so it never committed a step
            if any(
                not is_gone(state, slot, uid) and ((arrival := arrivals[slot]) is None or arrival.uid != uid)
                for slot, uid in (*asked, *copied)
            ):
                return False
        return True

    # ---- what must never be

    def holds(self, rank: Rank, history: History) -> bool:
        """Whether the rank has this very state, or the one before and exactly the gradients that lead to it."""
        return rank.history == history or (
            rank.history is not None
            and rank.history == history[:-1]
            and any((*p.base, p.generation) == history and p.base == rank.history for p in rank.pending)
        )

    def can_be_had(self, state: State, slots: Collection[int], history: History) -> bool:
        """Whether these slots, together, hold a whole copy of this state, and one of them has applied it."""
        return any(state.ranks[slot].history == history for slot in slots) and {
            inner(slot) for slot in slots if self.holds(state.ranks[slot], history)
        } == set(INDEXES)

    def training_violation(self, state: State, number: int, slot: int) -> str | None:
        """What is wrong with a rank that trains on in this generation."""
        rank = state.ranks[slot]
        history = rank.history
        assert history is not None
        if any(step < 0 for step in history):
            step = next(at for at, committed in enumerate(history, 1) if committed < 0)
            return f"batch rows left out: r{slot} has applied step {step} with its own row only"
        for other, place in members(state.generations[number - 1]):
            peer = state.ranks[other]
            if (
                other == slot
                or not is_inside(state, number, other, place.uid)
                or peer.phase not in HAS_ADOPTED
                or peer.history is None
            ):
                continue
            shorter, longer = sorted((history, peer.history), key=len)
            if longer not in (shorter, (*shorter, number)):
                return f"mixed: in g{number} r{slot} trains on {history}, r{other} on {peer.history}"
        return None

    def rollback_violation(self, state: State, number: int, base: Name) -> str | None:
        """A generation that can commit must not go on from less than what is acknowledged and can be had from the living, nor
        from less than what anybody has applied and can be had from those that were connected."""
        if not is_whole(state, number):
            return None
        living = [slot for slot, rank in enumerate(state.ranks) if rank.is_up]
        acknowledged = state.acknowledged
        for newer in self._applied(state, living):
            shorter, longer = sorted((newer, acknowledged), key=len)
            if (
                base < name(shorter)
                and name(newer)[0] != number
                and is_prefix(shorter, longer)
                and self.can_be_had(state, living, newer)
            ):
                return f"silent rollback: g{number} goes on from {base}; acknowledged {shorter} can be had"
        reachable = self._reachable(state, number)
        for newer in self._applied(state, reachable):
            if base < name(newer) and name(newer)[0] != number and self.can_be_had(state, reachable, newer):
                return f"silent rollback: g{number} goes on from {base}; {newer} was applied and can be had"
        return None

    def _reachable(self, state: State, number: int) -> list[int]:
        """Slots of living members, and of living holders that were connected when the generation was announced."""
        generation = state.generations[number - 1]
        return [
            slot
            for slot, (place, holder) in enumerate(zip(generation.places, generation.holders, strict=True))
            if (place and not is_gone(state, slot, place.uid)) or (holder >= 0 and not is_gone(state, slot, holder))
        ]

    def _applied(self, state: State, slots: Iterable[int]) -> list[History]:
        return sorted({history for slot in slots if (history := state.ranks[slot].history) is not None})

    def loss_violation(self, state: State, number: int, verdict: Verdict) -> str | None:
        """A snapshot is read only when some inner index has lost every process that trained last, the checkpoint only when it has
        lost their snapshots, too."""
        if verdict.source == "live" or not is_whole(state, number):
            return None
        trained = members(state.generations[state.trained - 1])
        if {inner(slot) for slot, place in trained if not is_gone(state, slot, place.uid)} == set(INDEXES):
            return (
                f"nothing left: g{number} goes back to a copy; each inner index of g{state.trained} has a living member"
            )
        arrivals = state.generations[number - 1].arrivals
        if verdict.source == "checkpoint" and {
            inner(slot)
            for slot, place in trained
            if (arrival := arrivals[slot]) is not None and arrival.backups and arrival.uid // POD == place.uid // POD
        } == set(INDEXES):
            return f"nothing left: g{number} reads the checkpoint; each inner index of g{state.trained} has a snapshot"
        return None
