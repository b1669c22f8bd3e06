"""What a worker can do next: its agent hears and reports, its trainer enters, forms, copies, steps and ends.

The order of the moves is part of the model: it decides which of several shortest traces is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.model.records import (
    COMPUTING,
    COPYING,
    CUTALL,
    DEAD,
    EXITED,
    FINISH,
    FINISHED,
    FORMING,
    IDLE,
    INC,
    LINGER,
    REDUCING,
    TORN,
    TORN_MARK,
    Contribution,
    State,
    Worker,
)
from tests.model.search import Move
from tests.model.view import HAS_ADOPTED, STEPPING, View, committed_in, with_item, with_worker


def worker_moves(view: View, state: State, slot: int) -> Iterator[Move]:
    """Moves of a worker that has a pod and has not exited."""
    worker = state.workers[slot]
    yield from _agent_moves(view, state, slot, worker)
    if worker.phase == DEAD:
        history, adopted = worker.snapshot or (None, -1)
        restarted = worker._replace(
            phase=IDLE,
            is_stopped=0,
            entered=-1,
            history=history,
            is_valid=1,
            adopted=adopted,
            is_backup=int(history is not None),
        )
        yield Move(f"w{slot} restarted in place, state {history}", False, with_worker(state, slot, restarted))
        return
    if worker.is_stopped:
        return
    yield from _enter_or_leave(view, state, slot, worker)
    if worker.entered < 0 or not view.is_member(state, worker.entered, slot):
        return
    if worker.phase == FORMING:
        yield from _form(view, state, slot, worker)
    if worker.phase == COPYING:
        yield from _copy(view, state, slot, worker)
    if worker.phase in (COPYING, COMPUTING, REDUCING) and view.is_broken(state, worker.entered):
        interrupted = worker._replace(phase=IDLE, has_fault_to_report=1, **_state_on_leaving(view, worker))
        yield Move(f"w{slot} collective fails (peer gone), interrupted", False, with_worker(state, slot, interrupted))
    if worker.phase == COMPUTING:
        yield from _compute(view, state, slot, worker)
    if worker.phase == REDUCING:
        yield from _commit(view, state, slot, worker)
    if worker.phase == FINISHED and view.scenario.exits:
        yield from _exit_finished(view, state, slot, worker)


def _agent_moves(view: View, state: State, slot: int, worker: Worker) -> Iterator[Move]:
    """The agent hears any announced generation newer than what it heard (FENCE), and reports a fault once."""
    if not worker.is_connected:
        return
    for at, announcement in enumerate(state.announcements):
        if not view.is_newer(state, at, worker.heard):
            continue
        if worker.heard < 0 and not view.is_member(state, at, slot):
            continue
        label = f"w{slot} hears {view.name(state, at)} members {[member for member, _ in announcement.members]}"
        yield Move(label, False, with_worker(state, slot, worker._replace(heard=at)))
    if worker.has_fault_to_report:
        for number, operator in enumerate(state.operators):
            if operator.is_up:
                told = operator._replace(faults=operator.faults | 1 << slot)
                yield Move(
                    f"w{slot} reports its fault to operator {number}",
                    False,
                    with_worker(state, slot, worker._replace(has_fault_to_report=0))._replace(
                        operators=with_item(state.operators, number, told)
                    ),
                )


def _state_on_leaving(view: View, worker: Worker) -> dict[str, Any]:
    """What a process is left with when it leaves its group: only in mid-copy is that not what it had."""
    if worker.phase != COPYING:
        return {}
    if TORN not in view.rules:
        return {"history": (*(worker.history or ()), TORN_MARK)}  # half old, half new, and nobody knows
    history, adopted = worker.snapshot or (None, -1)
    return {"history": history, "adopted": adopted, "is_backup": int(history is not None)}


def _enter_or_leave(view: View, state: State, slot: int, worker: Worker) -> Iterator[Move]:
    at = worker.heard
    if worker.phase == IDLE and TORN in view.rules and not worker.is_valid:
        history, adopted = worker.snapshot or (None, -1)
        restored = worker._replace(history=history, is_valid=1, adopted=adopted, is_backup=int(history is not None))
        yield Move(f"w{slot} torn state replaced by its snapshot {history}", False, with_worker(state, slot, restored))
    if at >= 0 and at != worker.entered and view.is_newer(state, at, worker.entered):
        waits_for_cut = bool(state.announcements[at].is_planned) and worker.phase in HAS_ADOPTED
        if view.is_member(state, at, slot):
            if not waits_for_cut:
                yield from _enter(view, state, slot, worker)
        elif not waits_for_cut and (worker.phase != IDLE or worker.entered != at):
            left = worker._replace(phase=IDLE, entered=at, **_state_on_leaving(view, worker))
            yield Move(
                f"w{slot} leaves its group: not in {view.name(state, at)}", False, with_worker(state, slot, left)
            )
    if (
        worker.phase == IDLE
        and view.scenario.exits
        and at >= 0
        and worker.entered == at
        and not view.is_member(state, at, slot)
    ):
        newest = view.newest(state)
        if LINGER not in view.rules or (view.is_all_adopted(state, newest) and worker.heard == newest):
            violation = None
            if state.acknowledged and view.holders(state) == [slot]:
                violation = (
                    f"w{slot} drained away although it is the last holder of "
                    f"acknowledged step {len(state.acknowledged)}"
                )
            yield Move(f"w{slot} exits (scaled away)", False, with_worker(state, slot, _exited(worker)), violation)


def _enter(view: View, state: State, slot: int, worker: Worker) -> Iterator[Move]:
    """A process enters the generation it heard of and puts its arrival into the store."""
    at = worker.heard
    is_again = at <= worker.last_formed
    if is_again and INC in view.rules:
        return
    if TORN in view.rules and not worker.is_valid and worker.phase == IDLE:
        return
    leaving = worker._replace(**_state_on_leaving(view, worker))
    arrival = view.arrival(leaving)
    entered = leaving._replace(phase=FORMING, entered=at, last_formed=at, is_reentered=int(is_again))
    following = with_worker(state, slot, entered)
    name = view.name(state, at)
    if is_again:
        yield Move(f"w{slot} (new process) enters {name} a second time", False, following)
        return
    group = state.groups[at]
    arrived = group._replace(arrivals=with_item(group.arrivals, slot, arrival))
    yield Move(
        f"w{slot} enters {name} with {arrival.history}{'' if arrival.is_valid else ' TORN'}",
        False,
        following._replace(groups=with_item(state.groups, at, arrived)),
    )


def _form(view: View, state: State, slot: int, worker: Worker) -> Iterator[Move]:
    """All arrived: find the source of the state, or refuse for want of a witness."""
    at = worker.entered
    arrivals = state.groups[at].arrivals
    name = view.name(state, at)
    if worker.is_reentered:
        if view.scenario.stale_store and all(arrivals[member] is not None for member in view.slots(state, at)):
            formed = worker._replace(phase=COMPUTING, history=worker.history or (), adopted=at, agent_adopted=at)
            yield Move(f"w{slot} finds the old keys and 'forms' {name} alone", False, with_worker(state, slot, formed))
        return
    slots = view.slots(state, at)
    if any(arrivals[member] is None for member in slots) or view.has_cut_link(state, slots):
        return
    own = arrivals[slot]
    assert own is not None
    if not view.has_witness(state, at):
        refused = worker._replace(phase=IDLE, has_fault_to_report=1)
        yield Move(
            f"w{slot} refuses {name}: no witness of an older generation", False, with_worker(state, slot, refused)
        )
        return
    adopted = worker._replace(phase=COMPUTING, adopted=at, agent_adopted=at, is_backup=0)
    best = view.best(state, at)
    if best < (0,):
        yield Move(
            f"w{slot} starts from nothing (nobody has state)",
            False,
            with_worker(state, slot, adopted._replace(history=(), is_valid=1)),
            view.rollback_violation(state, (), at),
        )
        return
    source = view.source(state, at, best)
    offered = arrivals[source]
    assert offered is not None
    assert offered.history is not None
    violation = view.rollback_violation(state, offered.history, at)
    if view.order(state, own) == best and own.history is not None:
        label, following = f"w{slot} formed {name}, keeps its state {worker.history}", adopted
    else:
        label = f"w{slot} formed {name}, starts copying from w{source} {offered.history}"
        following = worker._replace(phase=COPYING)
    yield Move(label, False, with_worker(state, slot, following), violation)


def _copy(view: View, state: State, slot: int, worker: Worker) -> Iterator[Move]:
    at = worker.entered
    source = view.source(state, at, view.best(state, at))
    peer = state.workers[source]
    serving = HAS_ADOPTED if FINISH in view.rules else STEPPING
    if (
        view.is_there(state, at, source)
        and peer.phase in serving
        and not peer.is_stopped
        and not view.has_cut_link(state, (slot, source))
    ):
        offered = state.groups[at].arrivals[source]
        assert offered is not None
        copied = worker._replace(
            phase=COMPUTING, history=peer.history, is_valid=1, adopted=at, agent_adopted=at, is_backup=0
        )
        violation = None if peer.history == offered.history else "source changed while it was being copied"
        yield Move(f"w{slot} copy complete", False, with_worker(state, slot, copied), violation)


def _compute(view: View, state: State, slot: int, worker: Worker) -> Iterator[Move]:
    """Contribute to the next step's all-reduce, or end; snapshots happen in between."""
    at, history = worker.entered, worker.history
    assert history is not None
    violation = view.divergence_violation(state, slot)
    if len(history) >= view.scenario.steps:
        yield Move(f"w{slot} finished", False, with_worker(state, slot, worker._replace(phase=FINISHED)), violation)
    else:
        step = len(history) + 1
        knows_newer = int(worker.heard >= 0 and view.is_newer(state, worker.heard, at))
        group = state.groups[at]
        contributions = with_item(group.contributions, slot, Contribution(step, knows_newer))
        is_complete = all(
            contributions[member] is not None and contributions[member].step == step for member in view.slots(state, at)
        )
        if is_complete and not violation:
            violation = view.split_violation(state, at, step)
        contributed = group._replace(contributions=contributions)
        yield Move(
            f"w{slot} contributes to step {step} in {view.name(state, at)}",
            False,
            with_worker(state, slot, worker._replace(phase=REDUCING))._replace(
                groups=with_item(state.groups, at, contributed)
            ),
            violation,
        )
    if view.scenario.snapshots and (not worker.snapshot or worker.snapshot[0] != history):
        kept = worker._replace(snapshot=(history, worker.adopted))
        yield Move(f"w{slot} snapshots step {len(history)}", False, with_worker(state, slot, kept))


def _commit(view: View, state: State, slot: int, worker: Worker) -> Iterator[Move]:
    """The all-reduce came back: commit, leave at a cut, and report what everyone has committed."""
    at = worker.entered
    assert worker.history is not None
    step = len(worker.history) + 1
    group = state.groups[at]
    contributions = [c for member in view.slots(state, at) if (c := group.contributions[member]) is not None]
    if len(contributions) < len(state.announcements[at].members) or any(c.step < step for c in contributions):
        return
    history = (*worker.history, at)
    flags = [c.knows_newer for c in contributions]
    if any(c.step > step for c in contributions) and not any(flags):
        flags = [0]
    leaves = all(flags) if CUTALL in view.rules else any(flags)
    committed = worker._replace(history=history, phase=IDLE if leaves else COMPUTING, has_fault_to_report=0)
    following = with_worker(state, slot, committed)._replace(
        groups=with_item(state.groups, at, group._replace(has_committed=1))
    )
    safe_step = step - 1
    known = state.acknowledged
    is_redone = safe_step == len(known) > 0 and history[:safe_step] != known
    if is_redone:
        redone_in, known_in = (state.announcements[committed_in(h, safe_step)] for h in (history, known))
        is_redone = redone_in.generation > known_in.generation
    if safe_step > len(known) or is_redone:
        following = following._replace(acknowledged=history[:safe_step])
    yield Move(
        f"w{slot} all-reduce done, commits step {step}{' and leaves at the cut' if leaves else ''}", False, following
    )


def _exit_finished(view: View, state: State, slot: int, worker: Worker) -> Iterator[Move]:
    is_complete = view.is_all_finished(state, view.newest(state))
    if FINISH in view.rules and not is_complete:
        return
    violation = None
    if not is_complete and view.holders(state) == [slot]:
        violation = (
            f"w{slot} exits 'done' as the last holder of step {len(state.acknowledged)}; the job is not complete"
        )
    yield Move(f"w{slot} exits 0 (done)", False, with_worker(state, slot, _exited(worker)), violation)


def _exited(worker: Worker) -> Worker:
    return worker._replace(phase=EXITED, has_pod=0, history=None, snapshot=None)
