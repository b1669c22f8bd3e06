"""The liveness model: ties records, view and moves together into what search.py searches."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.live.moves_faults import fault_moves
from tests.model.live.moves_operator import all_adopted, is_training, operator_moves, time_moves
from tests.model.live.moves_worker import absent, worker_moves
from tests.model.live.records import ABSENT, FORCED, TRAINING, Arrival, Group, LiveScenario, State, Word, Worker
from tests.model.live.renumber import simplest
from tests.model.live.view import View
from tests.model.search import Move


class Live:
    """A model (search.Model) of one scenario."""

    def __init__(self, scenario: LiveScenario) -> None:
        self.scenario = scenario
        self.view = View(scenario)

    def init(self) -> State:
        """Generation 1 trains: every member has committed in it."""
        slots = self.scenario.slots
        first = [slots.index(slot) for slot in range(self.scenario.replicas)]
        training = Worker(
            0, TRAINING, heard=1, is_member=1, inside=1, entered=1, adopted=1, state=1, state_adopted=1, stream_from=1
        )
        workers = tuple(training if place in first else absent(training) for place in range(len(slots)))
        members = tuple((place, 0) for place in first)
        everybody = sum(1 << place for place in first)
        arrivals = tuple(Arrival(-1, 0, 0) if place in first else None for place in range(len(slots)))
        group = Group(1, members, FORCED, (), (), (), (), 0, arrivals, everybody, everybody)
        state = State(
            workers=workers,
            told=(None,) * len(slots),
            groups=(group,),
            number=1,
            members=members,
            kind=FORCED,
            is_adopted=1,
            is_known=1,
            older=(),
            tried=(),
            could_not_read=0,
            replicas=self.scenario.replicas,
            minimum=self.scenario.minimum,
            unreadable=0,
            acknowledged=(1,),
            trained=1,
            budget=self.scenario.faults,
        )
        told = tuple(self.view.word(worker) if worker.phase != ABSENT else None for worker in workers)
        return self._settled(state._replace(told=told))

    def moves(self, state: State) -> Iterator[Move]:
        is_idle = True
        for move in self._fault_free(state):
            is_idle = False
            yield move._replace(state=self._settled(move.state))
        if is_idle:
            for move in time_moves(self.view, state):
                yield move._replace(state=self._settled(move.state))
        for move in fault_moves(self.view, state):
            yield move._replace(state=self._settled(move.state))

    def _fault_free(self, state: State) -> Iterator[Move]:
        for place, worker in enumerate(state.workers):
            if worker.phase != ABSENT:
                yield from worker_moves(self.view, state, place)
        yield from operator_moves(self.view, state)
        if state.unreadable and all(
            state.unreadable >> place & 1 or worker.phase == ABSENT for place, worker in enumerate(state.workers)
        ):
            yield Move("the checkpoint can be read again", False, state._replace(unreadable=0))

    def _settled(self, state: State) -> State:
        """The state after the operator has taken in what reaches it at once, in its simplest form."""
        told = tuple(self._told(state, place) for place in range(len(state.workers)))
        if told != state.told:
            state = state._replace(told=told)
        if not state.is_adopted and all_adopted(state):
            state = state._replace(is_adopted=1, older=())
        return simplest(state, keeps_previous=self.scenario.has_late_generations)

    def _told(self, state: State, place: int) -> Word | None:
        worker, word = state.workers[place], state.told[place]
        if worker.phase == ABSENT:
            return None
        if not worker.is_connected:
            return word
        if word is not None and self.scenario.has_late_reports:
            return word
        return self.view.word(worker)

    def is_goal(self, state: State) -> bool:
        return is_training(state)

    def is_cut(self, _state: State) -> bool:
        return False

    def is_judged(self, _state: State) -> bool:
        return True
