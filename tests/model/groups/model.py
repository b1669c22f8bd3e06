"""The model of model groups: ties records, view and moves together into what search.py searches."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.groups.moves import fault_moves, fresh_rank, operator_moves, rank_moves
from tests.model.groups.records import (
    ARRIVED,
    COMPUTING,
    COPYING,
    OUTSIDE,
    REDUCED,
    SERVING,
    Generation,
    GroupScenario,
    Place,
    Rank,
    State,
)
from tests.model.groups.view import View, is_inside, members
from tests.model.search import Move

FIRST_SLOTS = 4


class Groups:
    """A model (search.Model) of one scenario."""

    def __init__(self, scenario: GroupScenario) -> None:
        self.scenario = scenario
        self.view = View(scenario)

    def init(self) -> State:
        """Generation 1 trains: two model groups of two ranks have adopted it at step 0. The spares hold nothing."""
        scenario = self.scenario
        slots = range(FIRST_SLOTS + scenario.spares)
        held = Rank(0, 1, 1, 0, OUTSIDE, (), (), 0, ((),) if scenario.snapshots else (), 0)
        training = held._replace(generation=1, phase=COMPUTING, adopted=1)
        ranks = tuple(
            training if slot in scenario.first else held if slot < FIRST_SLOTS else fresh_rank(0) for slot in slots
        )
        contributed = tuple(int(slot in scenario.first) for slot in slots)
        first = Generation(
            places=tuple(Place(0, slot // 2) if slot in scenario.first else None for slot in slots),
            holders=(-1,) * len(slots),
            arrivals=(None,) * len(slots),
            contributed=contributed,
            rows=(0,) * len(slots) if REDUCED in scenario.rules else contributed,
        )
        return State(ranks=ranks, generations=(first,), acknowledged=(), trained=1, budget=scenario.faults)

    def moves(self, state: State) -> Iterator[Move]:
        for move in self._moves(state):
            yield move._replace(state=self._settled(move.state))

    def _moves(self, state: State) -> Iterator[Move]:
        for slot in range(len(state.ranks)):
            yield from rank_moves(self.view, state, slot)
        yield from operator_moves(self.view, state)
        yield from fault_moves(self.view, state)

    def _settled(self, state: State) -> State:
        """Forget the stores of generations that nobody uses any more, so that what is the same looks the same."""
        generations = tuple(
            self._store(state, number, generation) for number, generation in enumerate(state.generations, 1)
        )
        return state if generations == state.generations else state._replace(generations=generations)

    def _store(self, state: State, number: int, generation: Generation) -> Generation:
        uses = False
        for place, rank in zip(generation.places, state.ranks, strict=True):
            if place is None or not rank.is_up or rank.uid != place.uid:
                continue
            if rank.generation < number or (rank.generation == number and rank.phase in (ARRIVED, COPYING)):
                return generation
            uses = uses or (rank.generation == number and rank.phase != SERVING)
        nothing = (None,) * len(state.ranks)
        if uses:
            return generation._replace(arrivals=nothing)
        zeros, nobody = (0,) * len(state.ranks), (-1,) * len(state.ranks)
        return Generation(generation.places, nobody, nothing, zeros, zeros)

    def is_goal(self, state: State) -> bool:
        """Every member of the newest generation has committed the last step."""
        number = len(state.generations)
        return all(
            is_inside(state, number, slot, place.uid)
            and state.ranks[slot].phase == COMPUTING
            and len(state.ranks[slot].history or ()) == self.scenario.steps
            for slot, place in members(state.generations[-1])
        )

    def is_cut(self, _state: State) -> bool:
        return False

    def is_judged(self, state: State) -> bool:
        """Where no announcement is left, nobody can tell whether the job would go on."""
        return len(state.generations) < self.scenario.max_generations
