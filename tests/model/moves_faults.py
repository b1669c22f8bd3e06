"""What can go wrong, each at most as often as the scenario's budget says, and the two things that mend by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from tests.model.records import DEAD, EXITED, State
from tests.model.search import Move
from tests.model.view import View, pay, with_worker


def worker_faults(view: View, state: State, slot: int) -> Iterator[Move]:
    """Process killed, stopped or continued; pod lost; cut off from the operator or back."""
    worker = state.workers[slot]
    if worker.has_pod and worker.phase not in (DEAD, EXITED):
        if after := pay(state, "crash"):
            killed = worker._replace(phase=DEAD, history=None, is_valid=1, has_fault_to_report=1, is_stopped=0)
            yield Move(f"FAULT w{slot} process killed", True, with_worker(after, slot, killed))
        if not worker.is_stopped and (after := pay(state, "stop")):
            yield Move(f"FAULT w{slot} SIGSTOP", True, with_worker(after, slot, worker._replace(is_stopped=1)))
    if worker.is_stopped:
        yield Move(f"w{slot} SIGCONT", False, with_worker(state, slot, worker._replace(is_stopped=0)))
    if worker.has_pod and worker.phase != EXITED and (after := pay(state, "pod")):
        gone = worker._replace(
            has_pod=0, phase=DEAD, history=None, snapshot=None, entered=-1, is_stopped=0, has_fault_to_report=0
        )
        yield Move(f"FAULT w{slot} pod lost", True, with_worker(after, slot, gone))
    if worker.has_pod and worker.is_connected and (after := pay(state, "cut_off")):
        cut_off = worker._replace(is_connected=0)
        yield Move(f"FAULT w{slot} cut off from the operator", True, with_worker(after, slot, cut_off))
    if worker.has_pod and not worker.is_connected and view.scenario.heals:
        yield Move(f"w{slot} reconnects", False, with_worker(state, slot, worker._replace(is_connected=1)))


def link_faults(view: View, state: State) -> Iterator[Move]:
    """A pair of workers stops reaching each other, for good; both still reach the operator."""
    if after := pay(state, "link"):
        for a, b in combinations(range(view.scenario.workers), 2):
            cut = after._replace(cut_links=state.cut_links | 1 << (a * view.scenario.workers + b))
            yield Move(f"FAULT link {a}-{b} cut (both still see the operator)", True, cut)
