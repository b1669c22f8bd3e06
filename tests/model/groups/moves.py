"""What can happen next: a rank enters, adopts, reduces and applies; the operator announces; what can go wrong.

The order of the moves is part of the model: it decides which of several shortest traces is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from tests.model.groups.records import (
    APPLYING,
    ARRIVED,
    COMPUTING,
    COPYING,
    GUEST,
    GUESTS,
    KEEP,
    KEEP_UNTIL_BACKWARD,
    LOCAL,
    ONE_SNAPSHOT,
    OUTSIDE,
    POD,
    REDUCED,
    REDUCED_STEP,
    ROWS,
    ROWS_UNTIL_ROW,
    SERVE,
    SERVING,
    Arrival,
    Generation,
    History,
    Pending,
    Place,
    Rank,
    State,
)
from tests.model.groups.view import (
    HAS_ADOPTED,
    INDEXES,
    Verdict,
    View,
    inner,
    is_among,
    is_guest,
    is_inside,
    is_named,
    members,
    name,
    pay,
    with_generation,
    with_item,
    with_rank,
)
from tests.model.search import Move


def fresh_rank(uid: int) -> Rank:
    """A process without state, connected."""
    return Rank(uid, 1, 1, 0, OUTSIDE, None, (), 0, (), 0)


# ---- a rank


def rank_moves(view: View, state: State, slot: int) -> Iterator[Move]:
    rank = state.ranks[slot]
    if not rank.is_up:
        if view.scenario.restarts:
            started = fresh_rank(rank.uid)._replace(backups=rank.backups)
            yield Move(f"r{slot} starts again", False, with_rank(state, slot, started))
        return
    yield from _enter(view, state, slot, rank)
    if not rank.generation:
        return
    if rank.phase == ARRIVED and view.has_met(state, rank.generation):
        yield from _adopt(view, state, slot, rank)
    if rank.phase == COPYING:
        yield from _copy(view, state, slot, rank)
    if rank.phase == COMPUTING:
        yield from _reduce(view, state, slot, rank)
    if rank.phase == REDUCED_STEP:
        yield from _apply(view, state, slot, rank)
    if rank.phase == APPLYING:
        yield from _end_of_apply(view, state, slot, rank)


def _enter(view: View, state: State, slot: int, rank: Rank) -> Iterator[Move]:
    """It hears of a newer generation, leaves its group at once, wherever it is, and arrives, as member or as guest."""
    if not rank.is_connected:
        return
    for number in range(rank.generation + 1, len(state.generations) + 1):
        generation = state.generations[number - 1]
        if not is_named(generation, slot, rank.uid):
            continue
        left = interrupted(view, rank)._replace(generation=number, phase=ARRIVED)
        arrival = Arrival(left.uid, left.history, left.pending, left.adopted, left.backups, left.has_rows)
        arrived = generation._replace(arrivals=with_item(generation.arrivals, slot, arrival))
        how = " as guest" if is_guest(generation, slot) else ""
        kept = "".join(f", reduced in g{p.generation} on {p.base}" for p in left.pending)
        yield Move(
            f"r{slot} enters g{number}{how} with {left.history}{kept}",
            False,
            with_generation(with_rank(state, slot, left), number, arrived),
        )


def interrupted(view: View, rank: Rank) -> Rank:
    """What a rank is left with when it leaves its group."""
    if rank.phase == APPLYING:
        return rank._replace(history=None, pending=())  # half applied: neither this state nor the one before (TORN)
    return rank if KEEP in view.rules else rank._replace(pending=())


def _adopt(view: View, state: State, slot: int, rank: Rank) -> Iterator[Move]:
    """Everybody is here: go on from the state that all can have, or wait for whoever may hold a newer one."""
    number = rank.generation
    verdict = view.decide(state, number)
    if verdict.source == "wait":
        return
    own = _own(view, rank, verdict)
    if is_guest(state.generations[number - 1], slot):
        serving = rank._replace(phase=SERVING)
        if own and verdict.source == "live":
            serving = serving._replace(history=own[1], pending=own[2], has_rows=int(bool(own[1])))
        label = f"r{slot}, a guest of g{number}, serves {serving.history}"
        yield Move(label, False, with_rank(state, slot, serving))
    elif own is None:
        copying = rank._replace(phase=COPYING)
        yield Move(f"r{slot} starts to copy {verdict.name} in g{number}", False, with_rank(state, slot, copying))
    else:
        what, history, pending = own
        violation = view.loss_violation(state, number, verdict) or view.rollback_violation(state, number, verdict.name)
        yield _adopted(view, state, slot, f"{what} {history}", history, pending, violation)


def _own(view: View, rank: Rank, verdict: Verdict) -> tuple[str, History, tuple[Pending, ...]] | None:
    """What a rank makes of its own into the decided state; None: it needs a copy."""
    if verdict.source == "checkpoint":
        return "reads the checkpoint", (), ()
    wanted = verdict.name
    if rank.history is not None:
        if name(rank.history) == wanted:
            return "keeps", rank.history, rank.pending
        for kept in rank.pending:
            if view.rolls(kept, rank.history, wanted):
                reduced_in = kept.generation if ROWS in view.rules else -kept.generation
                return "rolls forward to", (*rank.history, reduced_in), ()
    if verdict.source == "backup" and is_among(wanted, rank.backups):
        return "goes back to its snapshot", next(b for b in rank.backups if name(b) == wanted), ()
    return None


def _adopted(
    view: View,
    state: State,
    slot: int,
    what: str,
    history: History,
    pending: tuple[Pending, ...],
    violation: str | None,
) -> Move:
    rank = state.ranks[slot]
    if KEEP_UNTIL_BACKWARD in view.scenario.weaker:
        pending = ()
    following = rank._replace(
        phase=COMPUTING, history=history, pending=pending, adopted=rank.generation, has_rows=int(bool(history))
    )
    after = _contributed(view, with_rank(state, slot, following), slot)
    violation = violation or view.training_violation(after, rank.generation, slot)
    return Move(f"r{slot} {what} in g{rank.generation}", False, after, violation)


def _contributed(view: View, state: State, slot: int) -> State:
    """A rank contributes to its next step as soon as it can: to do so later adds no outcome."""
    rank = state.ranks[slot]
    assert rank.history is not None
    generation = state.generations[rank.generation - 1]
    step = len(rank.history) + 1
    generation = generation._replace(contributed=with_item(generation.contributed, slot, step))
    if REDUCED not in view.rules:
        generation = generation._replace(rows=with_item(generation.rows, slot, step))
    return with_generation(state, rank.generation, generation)


def _copy(view: View, state: State, slot: int, rank: Rank) -> Iterator[Move]:
    """Receive the shard of its inner index from a member or guest of the same one."""
    number = rank.generation
    verdict = view.decide(state, number)
    for source, peer in enumerate(state.ranks):
        if source == slot or inner(source) != inner(slot) or not peer.is_up or peer.generation != number:
            continue
        offered = _served(view, peer, verdict)
        if offered is not None:
            kept = rank.pending if KEEP in view.rules else ()
            yield _adopted(view, state, slot, f"has copied {offered} from r{source}", offered, kept, None)


def _served(view: View, peer: Rank, verdict: Verdict) -> History | None:
    """What a rank that has arrived gives to whoever asks for a copy."""
    if SERVE not in view.rules:
        return None if peer.phase == COPYING else peer.history
    if peer.phase not in (*HAS_ADOPTED, SERVING):
        return None
    copies = peer.backups if verdict.source == "backup" else ()
    return next((held for held in (peer.history, *copies) if held is not None and name(held) == verdict.name), None)


def _reduce(view: View, state: State, slot: int, rank: Rank) -> Iterator[Move]:
    """Its part of the step is reduced once its model group and all of its inner index have contributed: not all members."""
    number, history = rank.generation, rank.history
    assert history is not None
    if len(history) >= view.scenario.steps:
        return
    step = len(history) + 1
    generation = state.generations[number - 1]
    own = generation.places[slot]
    assert own is not None
    if any(
        generation.contributed[other] < step
        for other, place in members(generation)
        if place.group == own.group or inner(other) == inner(slot)
    ):
        return
    reduced = rank._replace(phase=REDUCED_STEP, pending=(*rank.pending, Pending(number, history)))
    if view.scenario.snapshots:  # the copy of the state before is complete before the row of a step is sent
        kept = (history, *(backup for backup in rank.backups if backup != history))
        reduced = reduced._replace(backups=kept[: 1 if ONE_SNAPSHOT in view.scenario.weaker else 2])
    if ROWS_UNTIL_ROW in view.scenario.weaker:
        reduced = reduced._replace(has_rows=0)
    sent = generation._replace(rows=with_item(generation.rows, slot, step))
    yield Move(
        f"r{slot} has reduced step {step} in g{number}",
        False,
        with_generation(with_rank(state, slot, reduced), number, sent),
        view.rollback_violation(state, number, name(history)),
    )


def _apply(view: View, state: State, slot: int, rank: Rank) -> Iterator[Move]:
    """It has all rows: apply. Nothing can come in between, except in the middle of an apply that communicates."""
    number, history = rank.generation, rank.history
    assert history is not None
    step = len(history) + 1
    generation = state.generations[number - 1]
    if any(generation.rows[other] < step for other, _ in members(generation)):
        return
    if LOCAL in view.rules:
        yield _applied(view, state, slot, rank)
    else:
        begun = rank._replace(phase=APPLYING)
        yield Move(f"r{slot} begins to apply step {step} in g{number}", False, with_rank(state, slot, begun))


def _end_of_apply(view: View, state: State, slot: int, rank: Rank) -> Iterator[Move]:
    """Apply that communicates: it ends once the other ranks of the model group are in it, or through it."""
    number, history = rank.generation, rank.history
    assert history is not None
    generation = state.generations[number - 1]
    own = generation.places[slot]
    assert own is not None
    for mate, place in members(generation):
        peer = state.ranks[mate]
        if place.group == own.group and not (
            is_inside(state, number, mate, place.uid)
            and peer.history is not None
            and (peer.phase == APPLYING or len(peer.history) > len(history))
        ):
            return
    yield _applied(view, state, slot, rank)


def _applied(view: View, state: State, slot: int, rank: Rank) -> Move:
    number = rank.generation
    assert rank.history is not None
    history = (*rank.history, number)
    following = rank._replace(phase=COMPUTING, history=history, pending=(), has_rows=1)
    after = _contributed(view, with_rank(state, slot, following), slot)
    after = after._replace(trained=max(state.trained, number))
    contributed = after.generations[number - 1].contributed
    if name(history) > name(state.acknowledged) and all(
        contributed[member] > len(history) for member, _ in members(after.generations[number - 1])
    ):
        after = after._replace(acknowledged=history)
    return Move(
        f"r{slot} applies step {len(history)} in g{number}", False, after, view.training_violation(after, number, slot)
    )


# ---- the operator


def operator_moves(view: View, state: State) -> Iterator[Move]:
    """It may announce any whole model groups of connected processes at any time: no timeout is assumed."""
    number = len(state.generations) + 1
    if number > view.scenario.max_generations:
        return
    ready = [slot for slot, rank in enumerate(state.ranks) if rank.is_up and rank.is_connected]
    columns = [[slot for slot in ready if inner(slot) == index] for index in INDEXES]
    sets = view.scenario.sets
    for size in range(min(len(column) for column in columns), 0, -1):
        for first in combinations(columns[0], size):
            for second in combinations(columns[1], size):
                chosen = tuple(sorted((*first, *second)))
                if sets and chosen not in sets[number - 2]:
                    continue
                groups = {slot: group for side in (first, second) for group, slot in enumerate(side)}
                yield Move(
                    f"operator announces g{number} members {list(chosen)}",
                    False,
                    state._replace(generations=(*state.generations, _announced(view, state, groups))),
                )


def _announced(view: View, state: State, groups: dict[int, int]) -> Generation:
    """A generation whose members are `groups`, slot to model group."""
    holders = tuple(
        rank.uid if rank.is_up and rank.is_connected and (rank.history is not None or rank.backups) else -1
        for rank in state.ranks
    )
    places: list[Place | None] = [None] * len(holders)
    for slot, uid in enumerate(holders):
        if slot in groups:
            places[slot] = Place(state.ranks[slot].uid, groups[slot])
        elif uid >= 0 and GUESTS in view.rules:
            places[slot] = Place(uid, GUEST)
    nothing = (0,) * len(holders)
    return Generation(tuple(places), holders, (None,) * len(holders), nothing, nothing)


# ---- what can go wrong


def fault_moves(_view: View, state: State) -> Iterator[Move]:
    for slot, rank in enumerate(state.ranks):
        if not rank.is_up:
            continue
        killed = fresh_rank(rank.uid + 1)._replace(is_up=0, backups=rank.backups)
        if after := pay(state, "crash"):
            yield Move(f"FAULT r{slot} dies", True, with_rank(after, slot, killed))
        if after := pay(state, "pod"):
            replaced = killed._replace(uid=(rank.uid // POD + 1) * POD, backups=())
            yield Move(f"FAULT r{slot}'s pod is lost", True, with_rank(after, slot, replaced))
        if rank.is_connected and (after := pay(state, "cut_off")):
            cut = rank._replace(is_connected=0)
            yield Move(f"FAULT r{slot} cut off from the operator", True, with_rank(after, slot, cut))
        if not rank.is_connected:
            yield Move(f"r{slot} reconnects", False, with_rank(state, slot, rank._replace(is_connected=1)))
