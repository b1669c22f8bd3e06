"""Search a small model of the protocol for a state that must not be, or one from which nobody gets on.

Owns the search only: breadth first, so that a trace is a shortest one, and seeded random walks beyond its reach.
It knows nothing of training. Everything is counted in states and walks, never in seconds: the same model and bounds
give the same outcome, the same trace and the same number of states on every machine.
"""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

State = Any
"""Whatever a model uses; hashable."""


class Move(NamedTuple):
    """One atomic thing that can happen next."""

    label: str
    """A sentence for the trace; unique among the moves of one state."""
    is_fault: bool
    """Faults are never counted on when a way to the goal is looked for."""
    state: State
    violation: str | None = None
    """What must never happen, in words, if this move makes it happen."""
    is_progress: bool = False
    """The job gets on by this move, so a circle that contains it is no way to get stuck (`forever`)."""


class Model(Protocol):
    """What the search needs to know of a model."""

    def init(self) -> State: ...

    def moves(self, state: State, /) -> Iterator[Move]: ...

    def is_goal(self, state: State, /) -> bool:
        """Whether the job is done; liveness asks whether such a state can be reached without another fault."""

    def is_cut(self, state: State, /) -> bool:
        """Whether the model's bound was reached here: the state counts as live, since nobody can tell."""

    def is_judged(self, state: State, /) -> bool:
        """Whether a state from which no goal can be reached is reported."""


@dataclass(frozen=True)
class Outcome:
    """What a search found."""

    verdict: Literal["holds", "violation", "stuck"]
    detail: str
    """The violation, or how it is stuck, in words; empty otherwise."""
    trace: tuple[str, ...]
    """Labels from the first state to the violation, or to the state where nobody gets on; a shortest one."""
    num_states: int
    """States seen until the verdict; changes if and only if the model's behaviour does."""
    is_exhaustive: bool
    """False when `max_states` ended the search: then "holds" means "not within these states"."""

    def __str__(self) -> str:
        how = "" if self.is_exhaustive or self.verdict != "holds" else " as far as searched"
        lines = [f"{self.verdict}{how} ({self.num_states} states) {self.detail}".rstrip()]
        return "\n".join(lines + [f"  {i:2}. {label}" for i, label in enumerate(self.trace, 1)])


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """States are tuples without cycles: scanning a million of them again and again only costs a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def search(
    model: Model, *, max_states: int, live: bool = False, forever: bool = False, start: State | None = None
) -> Outcome:
    """Return the first violation, breadth first; with `live`, also the first state that can no longer reach a goal.

    With `forever` (and `live`) also the first state from which the job may go on for ever without progress and without
    a fault, whatever the order in which things happen: it waits where nothing can happen, or goes round in a circle.
    That is stronger than liveness under fair scheduling. It is for models that announce without bound.
    `start` replaces the model's first state. Liveness needs every state, so only an exhaustive search judges it; but a
    state where nothing can happen is reported as soon as it is met.
    """
    with _no_garbage_collection():
        return _search(model, max_states, live, forever, model.init() if start is None else start)


def _search(model: Model, max_states: int, live: bool, forever: bool, first: State) -> Outcome:
    index = {first: 0}
    states, parents, labels = [first], [-1], [""]
    predecessors: list[list[int]] = [[]]
    circling: list[tuple[int, int]] = []
    queue = deque([0])

    def trace_to(at: int) -> tuple[str, ...]:
        out = []
        while parents[at] >= 0:
            out.append(labels[at])
            at = parents[at]
        return tuple(reversed(out))

    while queue:
        at = queue.popleft()
        waits = True
        for label, is_fault, following, violation, is_progress in model.moves(states[at]):
            if violation:
                return Outcome("violation", violation, (*trace_to(at), label), len(states), False)
            known = index.get(following)
            if known is None:
                known = len(states)
                index[following] = known
                states.append(following)
                parents.append(at)
                labels.append(label)
                queue.append(known)
                if live:
                    predecessors.append([])
            if live and not is_fault:
                waits = False
                predecessors[known].append(at)
                if forever and not is_progress:
                    circling.append((at, known))
        if forever and waits and not model.is_goal(states[at]):
            return Outcome("stuck", "nothing can happen", trace_to(at), len(states), False)
        if len(states) > max_states:
            return Outcome("holds", "", (), len(states), False)
    if live:
        stuck = _first_stuck(model, states, predecessors)
        if stuck is not None:
            return Outcome("stuck", "", trace_to(stuck), len(states), True)
    if forever:
        endless = _first_endless(model, states, circling)
        if endless is not None:
            return Outcome("stuck", "it may go on for ever without progress", trace_to(endless), len(states), True)
    return Outcome("holds", "", (), len(states), True)


def _first_stuck(model: Model, states: Sequence[State], predecessors: Sequence[Sequence[int]]) -> int | None:
    """Walk back from every goal along moves that are no faults; return the first judged state not met, if any."""
    todo = [at for at, state in enumerate(states) if model.is_goal(state) or model.is_cut(state)]
    gets_on = bytearray(len(states))
    for at in todo:
        gets_on[at] = 1
    while todo:
        for before in predecessors[todo.pop()]:
            if not gets_on[before]:
                gets_on[before] = 1
                todo.append(before)
    return next((at for at, state in enumerate(states) if not gets_on[at] and model.is_judged(state)), None)


def _first_endless(model: Model, states: Sequence[State], edges: Sequence[tuple[int, int]]) -> int | None:
    """Take away, again and again, the states from which every move leads to progress, to a goal, or to one taken away.
    What is left can be walked for ever."""
    is_goal = bytearray(1 if model.is_goal(state) else 0 for state in states)
    ways_on = [0] * len(states)
    before: list[list[int]] = [[] for _ in states]
    for at, following in edges:
        if not is_goal[at] and not is_goal[following]:
            ways_on[at] += 1
            before[following].append(at)
    todo = [at for at in range(len(states)) if not ways_on[at]]
    while todo:
        for at in before[todo.pop()]:
            ways_on[at] -= 1
            if not ways_on[at]:
                todo.append(at)
    return next((at for at, ways in enumerate(ways_on) if ways), None)


def follow(model: Model, trace: Sequence[str]) -> State:
    """Return the state after the moves named in `trace`; ValueError names the first one that is not possible."""
    state = model.init()
    for number, wanted in enumerate(trace, 1):
        found = {move.label: move.state for move in model.moves(state)}
        if wanted not in found:
            raise ValueError(f"move {number} is not possible: {wanted!r}; possible: {sorted(found)}")
        state = found[wanted]
    return state


@dataclass(frozen=True)
class WalkOutcome:
    """What a number of random walks met."""

    violation: str | None
    """A violation, or (`settle`) how the job is stuck."""
    trace: tuple[str, ...]
    num_walks: int
    num_moves: int
    num_finished: int
    """Walks that ended with the job done: if none does, the walks prove little."""


def walk(model: Model, *, num_walks: int, depth: int, seed: int, settle: int = 0) -> WalkOutcome:
    """Walk at random, far beyond the reach of `search`; stop at the first violation.

    Every second walk mostly avoids faults and the operator, so that training gets somewhere between them. With `settle`
    each walk then goes on without faults, for at most so many moves, until it meets a goal: one that does not is a
    violation, too. Chance is a fair scheduler.
    """
    rng = random.Random(seed)
    num_moves = num_finished = 0
    for number in range(num_walks):
        state, trace = model.init(), []
        for at in range(depth + settle):
            if at >= depth and model.is_goal(state):
                break
            moves = [move for move in model.moves(state) if at < depth or not move.is_fault]
            if not moves:
                break
            if number % 2:
                calm = [move for move in moves if not move.is_fault and not move.label.startswith("operator")]
                if calm and rng.random() < 0.85:
                    moves = calm
            move = rng.choice(moves)
            num_moves += 1
            trace.append(move.label)
            if move.violation:
                return WalkOutcome(move.violation, tuple(trace), number + 1, num_moves, num_finished)
            state = move.state
        is_finished = model.is_goal(state)
        num_finished += is_finished
        if settle and not is_finished:
            return WalkOutcome("stuck", tuple(trace), number + 1, num_moves, num_finished)
    return WalkOutcome(None, (), num_walks, num_moves, num_finished)
