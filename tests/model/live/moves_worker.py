"""What a worker can do next: its agent hears and reports, its process attaches, enters, adopts, commits, leaves."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.live.records import (
    ABSENT,
    COLLECTIVE,
    FORMING,
    JOIN,
    NO_FAULT,
    PLANNED,
    READY,
    STARTING,
    TRAINING,
    Arrival,
    Group,
    State,
    Worker,
)
from tests.model.live.view import View, group_of, is_alive, is_there, is_whole, with_group, with_item, with_worker
from tests.model.search import Move


def worker_moves(view: View, state: State, place: int) -> Iterator[Move]:
    """Moves of a worker that has a pod."""
    worker = state.workers[place]
    yield from _agent_moves(view, state, place, worker)
    if worker.phase == STARTING:
        attached = worker._replace(phase=READY)
        yield Move(f"w{place}'s process attaches", False, with_worker(state, place, attached))
        return
    if worker.hangs:
        return
    yield from _enter_or_leave(state, place, worker)
    group = group_of(state, worker.inside) if worker.inside else None
    if group is None:
        return
    yield from _lose_group(state, place, worker, group)
    if worker.phase == FORMING:
        yield from _adopt(view, state, place, worker, group)
    if worker.phase == TRAINING:
        yield from _commit(view, state, place, worker, group)


def _agent_moves(view: View, state: State, place: int, worker: Worker) -> Iterator[Move]:
    if not worker.is_connected:
        opened = worker._replace(is_connected=1, stream_from=state.number)
        following = with_worker(state, place, opened)
        said = view.word(opened)
        if state.told[place] is None:
            said = said._replace(fault=NO_FAULT)  # a fault is not said again to another operator
        following = following._replace(told=with_item(state.told, place, said))
        yield Move(f"w{place} connects", False, following)
        return
    if view.scenario.has_late_reports and state.told[place] is not None and state.told[place] != view.word(worker):
        told = state._replace(told=with_item(state.told, place, view.word(worker)))
        yield Move(f"w{place}'s report reaches the operator", False, told)
    if state.told[place] is None:
        return
    oldest = state.number - 1 if view.scenario.has_late_generations else state.number
    for group in state.groups:
        number = group.number
        if number <= worker.heard or number < max(oldest, worker.stream_from):
            continue
        if number == state.number and not state.is_known:
            continue
        if _is_withheld(view, state, place, group):
            continue
        is_member = (place, worker.uid) in group.members
        heard = worker._replace(heard=number, is_member=int(is_member))
        if not is_member and not worker.inside and worker.left and worker.phase == READY:
            heard = heard._replace(left=number)  # the process that was in a group is told, and answers "left"
        yield Move(f"w{place} hears g{number}", False, with_worker(state, place, heard))


def _is_withheld(view: View, state: State, place: int, group: Group) -> bool:
    """Rule JOIN: plan/commands.py `_waits_for_joiners`."""
    word = state.told[place]
    if JOIN not in view.rules or group.kind != PLANNED or word is None or word.phase != TRAINING:
        return False
    reports = (state.told[member[0]] for member in group.members) if group.number == state.number else ()
    unreported = any(w is None or (w.phase != TRAINING and w.inside != group.number) for w in reports)
    return unreported or group.awaits_joiners()


def _enter_or_leave(state: State, place: int, worker: Worker) -> Iterator[Move]:
    if worker.inside >= worker.heard:
        return
    if worker.inside and _waits_for_cut(state, worker):
        return
    if not worker.is_member:
        if worker.inside:
            left = worker._replace(phase=READY, inside=0, left=worker.heard)
            label = f"w{place} leaves g{worker.inside} for good: no member of g{worker.heard}"
            yield Move(label, False, with_worker(state, place, left))
        return
    group = group_of(state, worker.heard)
    if group is None or worker.heard <= max(worker.entered, worker.left):
        return
    entered = worker._replace(
        phase=FORMING, inside=worker.heard, entered=worker.heard, left=worker.inside or worker.left
    )
    arrival = Arrival(worker.state, worker.state_adopted, worker.adopted)
    group = group._replace(arrivals=with_item(group.arrivals, place, arrival))
    label = f"w{place} enters g{group.number} with state {worker.state}, adopted {worker.adopted}"
    violation = None
    if group.kind == PLANNED and group.awaits_joiners() and _trains_in_whole_group(state, worker):
        violation = f"w{place} leaves a group that trains for a joiner that has not arrived"
    yield Move(label, False, with_group(with_worker(state, place, entered), group), violation)


def _trains_in_whole_group(state: State, worker: Worker) -> bool:
    current = group_of(state, worker.inside) if worker.inside else None
    return (
        current is not None
        and worker.phase == TRAINING
        and all(is_there(state, current, member) for member in current.members)
    )


def _waits_for_cut(state: State, worker: Worker) -> bool:
    """Rule CUTALL: a whole group is left for a planned generation after a step in which all know of it."""
    newer, current = group_of(state, worker.heard), group_of(state, worker.inside)
    if newer is None or newer.kind != PLANNED or current is None or worker.phase != TRAINING:
        return False
    mates = [state.workers[member[0]] for member in current.members if is_alive(state, member)]
    if len(mates) < len(current.members) or any(
        m.heard <= current.number and m.inside != current.number for m in mates
    ):
        return False  # somebody is gone: the next collective fails
    return worker.state != current.number or any(m.heard <= current.number for m in mates)


def _lose_group(state: State, place: int, worker: Worker, group: Group) -> Iterator[Move]:
    """A collective fails: a peer that had arrived is not there any more."""
    if any(group.arrivals[member[0]] and not is_there(state, group, member) for member in group.members):
        broken = worker._replace(phase=READY, inside=0, left=group.number)
        if worker.heard <= group.number:
            broken = broken._replace(fault=(COLLECTIVE, group.number))
        yield Move(f"w{place} loses its group g{group.number}", False, with_worker(state, place, broken))


def _adopt(view: View, state: State, place: int, worker: Worker, group: Group) -> Iterator[Move]:
    if not is_whole(state, group) or any(state.workers[member[0]].hangs for member in group.members):
        return
    verdict = view.decide(state, group)
    if verdict.refusal:
        refused = worker._replace(phase=READY, inside=0, left=group.number)
        if worker.heard <= group.number:
            refused = refused._replace(fault=(verdict.refusal, group.number))
        label = f"w{place} refuses g{group.number} ({verdict.refusal})"
        yield Move(label, False, with_worker(state, place, refused))
        return
    adopted = worker._replace(phase=TRAINING, adopted=group.number, state=verdict.state, state_adopted=group.number)
    group = group._replace(contributed=group.contributed | 1 << place)
    label = f"w{place} adopts g{group.number} from {verdict.state}"
    yield Move(label, False, with_group(with_worker(state, place, adopted), group))


def _commit(view: View, state: State, place: int, worker: Worker, group: Group) -> Iterator[Move]:
    everybody = sum(1 << member[0] for member in group.members)
    if worker.state == group.number or group.contributed != everybody:
        return
    if any(state.workers[m[0]].hangs for m in group.members if is_there(state, group, m)) and not group.committed:
        return
    violation = view.rollback_violation(state, group, place) or view.split_violation(state, group)
    group = group._replace(committed=group.committed | 1 << place)
    following = with_group(with_worker(state, place, worker._replace(state=group.number)), group)
    following = following._replace(trained=max(state.trained, group.number))
    if group.committed == everybody:
        following = following._replace(acknowledged=(*state.acknowledged, group.number))
    yield Move(f"w{place} commits in g{group.number}", False, following, violation, True)


def absent(worker: Worker) -> Worker:
    return Worker(worker.uid, ABSENT, 0)
