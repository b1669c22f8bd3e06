"""What can go wrong, and what a person can change, each at most as often as the scenario's budget says."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.live.moves_operator import ended, lost_moves, slow_moves
from tests.model.live.moves_worker import absent
from tests.model.live.records import ABSENT, EXIT, HEARD, NO_FAULT, STARTING, State, Worker
from tests.model.live.view import View, pay, with_worker
from tests.model.search import Move


def fault_moves(view: View, state: State) -> Iterator[Move]:
    """Every fault that is left in the budget."""
    if state.budget.total <= 0:
        return
    for place, worker in enumerate(state.workers):
        if worker.phase != ABSENT:
            yield from _of_worker(view, state, place, worker)
    yield from _of_all(view, state)


def _of_worker(view: View, state: State, place: int, worker: Worker) -> Iterator[Move]:
    if worker.phase != STARTING:
        if after := pay(state, "crash"):
            yield Move(f"FAULT w{place}'s process is killed", True, with_worker(after, place, _killed(worker)))
        if not worker.hangs and (after := pay(state, "hang")):
            yield Move(f"FAULT w{place} hangs", True, with_worker(after, place, worker._replace(hangs=1)))
    if after := pay(state, "container"):
        restarted = _killed(worker)._replace(is_connected=0, fault=NO_FAULT)
        if HEARD not in view.rules:  # what it had heard is not in its file
            restarted = restarted._replace(heard=worker.entered, is_member=0)
        yield Move(f"FAULT w{place}'s container restarts", True, with_worker(after, place, restarted))
    if after := pay(state, "pod"):
        yield Move(f"FAULT pod of w{place} is lost", True, with_worker(after, place, absent(worker)))
    if worker.is_connected and (after := pay(state, "stream")):
        cut_off = with_worker(after, place, worker._replace(is_connected=0))
        yield Move(f"FAULT w{place}'s stream ends", True, cut_off)
    if after := pay(state, "lost"):
        for move in lost_moves(view, after, place):
            yield move._replace(label=f"FAULT {move.label}", is_fault=True)
    has_place = view.scenario.slots.count(view.scenario.slots[place]) > 1  # for the successor
    if has_place and not worker.drains and (after := pay(state, "drain")):
        yield Move(f"FAULT w{place} is drained", True, with_worker(after, place, worker._replace(drains=1)))


def _of_all(view: View, state: State) -> Iterator[Move]:
    if after := pay(state, "all_crash"):
        killed = tuple(w if w.phase in (ABSENT, STARTING) else _killed(w) for w in state.workers)
        yield Move("FAULT every process is killed", True, after._replace(workers=killed))
    if after := pay(state, "operator"):
        alone = tuple(w if w.phase == ABSENT else w._replace(is_connected=0) for w in state.workers)
        restarted = after._replace(workers=alone, told=(None,) * len(alone), is_known=0, tried=(), could_not_read=0)
        yield Move("FAULT the operator restarts", True, restarted)
    if after := pay(state, "scale"):
        for replicas in range(1, max(view.scenario.slots) + 2):
            for minimum in view.scenario.minimums:
                if minimum <= replicas and (replicas, minimum) != (state.replicas, state.minimum):
                    scaled = after._replace(replicas=replicas, minimum=minimum)
                    yield Move(f"FAULT replicas {replicas}, minReplicas {minimum}", True, scaled)
    if state.budget.slow > 0:
        for label, _, following, _, _ in slow_moves(view, state):
            after = pay(following, "slow")
            assert after is not None
            yield Move(f"FAULT {label}", True, after)
    if not state.unreadable and view.scenario.has_checkpoint and (after := pay(state, "disk")):
        everywhere = after._replace(unreadable=(1 << len(state.workers)) - 1)
        yield Move("FAULT no worker can read the checkpoint", True, everywhere)
        for place in range(len(state.workers)):
            yield Move(f"FAULT w{place} cannot read the checkpoint", True, after._replace(unreadable=1 << place))


def _killed(worker: Worker) -> Worker:
    return ended(worker)._replace(fault=(EXIT, max(worker.inside, worker.entered)))
