"""What an operator can do next: die and restart, catch up with status, replace a pod, announce a generation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from tests.model.records import (
    CLIQUE,
    DEAD,
    EXITED,
    FORMING,
    IDLE,
    INC,
    PERSIST,
    RESAY,
    SEAL,
    Announcement,
    Group,
    Operator,
    Seal,
    State,
    Worker,
)
from tests.model.search import Move
from tests.model.view import STEPPING, View, pay, with_item, with_worker


def operator_moves(view: View, state: State, number: int) -> Iterator[Move]:
    """Moves of one operator process; with two leaders, each believes that it leads."""
    operator = state.operators[number]
    if not operator.is_up:
        for at in range(0 if view.scenario.stale_reads else state.persisted, state.persisted + 1):
            label = f"operator {number} restarts, reads {view.name(state, at)} from status"
            yield Move(label, False, _with_operator(state, number, Operator(1, at, 0)))
        return
    if after := pay(state, "operator"):
        yield Move(f"FAULT operator {number} killed", True, _with_operator(after, number, Operator(0, -1, 0)))
    yield from _catch_up(view, state, number, operator)
    if view.scenario.replaces:
        for slot, worker in enumerate(state.workers):
            if not worker.has_pod and worker.phase != EXITED:
                yield Move(
                    f"operator {number} replaces pod of w{slot}",
                    False,
                    with_worker(state, slot, fresh_worker(worker.uid + 1)),
                )
    if len(state.announcements) >= view.scenario.max_announcements:
        return
    if PERSIST in view.rules and state.persisted != operator.newest:
        return  # the compare-and-swap would be refused
    if view.is_all_finished(state, view.newest(state)):
        return
    if view.scenario.announces == "seen" and not _has_cause(view, state, operator):
        return
    yield from _announce(view, state, number, operator)


def fresh_worker(uid: int) -> Worker:
    """A new pod: attached, without state, in no generation."""
    return Worker(uid, 1, 1, -1, IDLE, 0, -1, None, 1, -1, None, -1, 0, 0, -1, 0)


def _with_operator(state: State, number: int, operator: Operator) -> State:
    return state._replace(operators=with_item(state.operators, number, operator))


def _catch_up(view: View, state: State, number: int, operator: Operator) -> Iterator[Move]:
    if PERSIST in view.rules:
        if state.persisted != operator.newest:
            read = operator._replace(newest=state.persisted)
            yield Move(f"operator {number} re-reads status", False, _with_operator(state, number, read))
        return
    if state.persisted != operator.newest:
        yield Move(
            f"operator {number} writes {view.name(state, operator.newest)} to status",
            False,
            state._replace(persisted=operator.newest),
        )
    for slot, worker in enumerate(state.workers):
        if (
            worker.has_pod
            and worker.is_connected
            and worker.heard >= 0
            and view.is_newer(state, worker.heard, operator.newest)
        ):
            learned = operator._replace(newest=worker.heard)
            yield Move(
                f"operator {number} learns {view.name(state, worker.heard)} from w{slot}'s hello",
                False,
                _with_operator(state, number, learned),
            )


def _has_cause(view: View, state: State, operator: Operator) -> bool:
    """Whether an operator that acts only on what it sees would plan a new generation."""
    at = operator.newest
    for slot, uid in state.announcements[at].members:
        worker = state.workers[slot]
        if not worker.has_pod or worker.uid != uid or not worker.is_connected:
            return True
        if RESAY in view.rules:
            if worker.phase in (DEAD, IDLE) and worker.last_formed >= at:
                return True
            if worker.is_stopped:
                return True
            all_know = all(peer.heard == at or not peer.is_connected for peer in state.workers if peer.has_pod)
            if worker.phase == FORMING and view.is_broken(state, at) and all_know:
                return True
        elif operator.faults >> slot & 1:  # with RESAY a report carries its generation, and old ones are dropped
            return True
    has_joiner = any(
        worker.has_pod and worker.is_connected and worker.phase == IDLE and not view.is_member(state, at, slot)
        for slot, worker in enumerate(state.workers)
    )
    return has_joiner and view.scenario.replaces


def _announce(view: View, state: State, number: int, operator: Operator) -> Iterator[Move]:
    """Announce one of the member sets that may follow the generation this operator believes newest."""
    scenario, newest = view.scenario, operator.newest
    candidates = [slot for slot in range(scenario.workers) if _is_candidate(view, state, newest, slot)]
    seals = _seals(view, state)
    for size in range(scenario.min_members, len(candidates) + 1):
        for chosen in combinations(candidates, size):
            if CLIQUE in view.rules and view.has_cut_link(state, chosen):
                continue
            if scenario.announces == "seen" and not _may_leave_out(view, state, candidates, chosen):
                continue
            is_healthy = all(
                view.is_there(state, newest, slot) and state.workers[slot].phase in STEPPING
                for slot in view.slots(state, newest)
            )
            if not is_healthy and not all(state.workers[slot].is_connected for slot in chosen):
                continue
            members = tuple((slot, state.workers[slot].uid) for slot in chosen)
            announcement = Announcement(
                state.announcements[newest].generation + 1, members, int(scenario.has_planned and is_healthy), seals
            )
            yield _announced(view, state, number, announcement)


def _announced(view: View, state: State, number: int, announcement: Announcement) -> Move:
    at = len(state.announcements)
    empty = (None,) * view.scenario.workers
    following = _with_operator(state, number, Operator(1, at, 0))._replace(
        announcements=(*state.announcements, announcement),
        groups=(*state.groups, Group(empty, empty, 0)),
    )
    how = ""
    if PERSIST in view.rules:
        following = following._replace(persisted=at)
        how = "persists and "
    kind = "planned " if announcement.is_planned else ""
    members = [slot for slot, _ in announcement.members]
    return Move(
        f"operator {number} {how}announces {kind}g{announcement.generation}#{at} members {members}", False, following
    )


def _is_candidate(view: View, state: State, newest: int, slot: int) -> bool:
    """A living process that is connected, or, for a planned generation, one that may be training on unheard."""
    worker = state.workers[slot]
    is_training_on = view.scenario.has_planned and view.is_member(state, newest, slot) and worker.entered == newest
    return bool(worker.has_pod and worker.phase not in (DEAD, EXITED) and (worker.is_connected or is_training_on))


def _may_leave_out(view: View, state: State, candidates: list[int], chosen: tuple[int, ...]) -> bool:
    """An operator that acts on what it sees leaves a candidate out only for a cut link or a stopped process."""
    return (
        len(chosen) == len(candidates)
        or (CLIQUE in view.rules and view.has_cut_link(state, candidates))
        or any(state.workers[slot].is_stopped for slot in candidates if slot not in chosen)
    )


def _seals(view: View, state: State) -> tuple[Seal, ...]:
    """The promises of processes that are in no group; INC is what makes them hold."""
    if SEAL not in view.rules or INC not in view.rules:
        return ()
    return tuple(
        Seal((slot, worker.uid), left_up_to, view.arrival(worker))
        for slot, worker in enumerate(state.workers)
        if worker.has_pod and worker.is_connected and worker.phase == IDLE and worker.is_valid
        if (left_up_to := _left_up_to(view, state, slot, worker)) > 0
    )


def _left_up_to(view: View, state: State, slot: int, worker: Worker) -> int:
    """Return the newest generation that it was a member of and will not enter; 0 if there is none. Rule HEARD: that is
    whatever it entered or left, all below the newest that its agent heard, and that one too for a non-member."""
    closed = [state.announcements[at].generation for at in (worker.last_formed, worker.entered) if at >= 0]
    if worker.heard >= 0:
        heard = state.announcements[worker.heard].generation
        closed.append(heard - 1 if view.is_member(state, worker.heard, slot) else heard)
    left_up_to = max(closed, default=0)
    memberships = (a.generation for a in state.announcements if (slot, worker.uid) in a.members)
    return max((generation for generation in memberships if generation <= left_up_to), default=0)
