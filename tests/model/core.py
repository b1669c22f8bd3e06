"""The membership protocol as a model: operators, agents, trainers, generations, adopt, restart in place, completion.

Ties records, view and moves together into what search.py searches; see the package's docstring for what is modelled.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.moves_faults import link_faults, worker_faults
from tests.model.moves_operator import fresh_worker, operator_moves
from tests.model.moves_worker import worker_moves
from tests.model.records import (
    COMPUTING,
    EXITED,
    Announcement,
    Arrival,
    Group,
    Operator,
    Scenario,
    State,
    Worker,
)
from tests.model.search import Move
from tests.model.view import View


class Core:
    """A model (search.Model) of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.view = View(scenario)

    def init(self) -> State:
        """Generation 1 is formed by its members at step 0; the other workers are fresh joiners."""
        scenario = self.scenario
        slots = range(scenario.workers)
        members = tuple((slot, 0) for slot in (slots if scenario.members is None else scenario.members))
        snapshot = ((), 0) if scenario.snapshots else None
        training = Worker(0, 1, 1, 0, COMPUTING, 0, 0, (), 1, 0, snapshot, 0, 0, 0, 0, 0)
        arrivals = tuple(Arrival(0, 0, 1, (), 0, 0, 0) if (slot, 0) in members else None for slot in slots)
        return State(
            operators=(Operator(1, 0, 0),) * scenario.leaders,
            persisted=0,
            announcements=(Announcement(1, members, 0, ()),),
            workers=tuple(training if (slot, 0) in members else fresh_worker(0) for slot in slots),
            groups=(Group(arrivals, (None,) * scenario.workers, 0),),
            acknowledged=(),
            budget=scenario.faults,
            cut_links=0,
        )

    def moves(self, state: State) -> Iterator[Move]:
        for slot, worker in enumerate(state.workers):
            if worker.has_pod and worker.phase != EXITED:
                yield from worker_moves(self.view, state, slot)
            yield from worker_faults(self.view, state, slot)
        for number in range(len(state.operators)):
            yield from operator_moves(self.view, state, number)
        yield from link_faults(self.view, state)

    def is_goal(self, state: State) -> bool:
        """All members of the newest generation are finished, and an operator is there to see it."""
        return self.view.is_all_finished(state, self.view.newest(state)) and any(o.is_up for o in state.operators)

    def is_cut(self, state: State) -> bool:
        return self.scenario.liveness == "bounded" and self._is_at_bound(state)

    def is_judged(self, state: State) -> bool:
        return self.scenario.liveness != "left" or not self._is_at_bound(state)

    def _is_at_bound(self, state: State) -> bool:
        return len(state.announcements) >= self.scenario.max_announcements
