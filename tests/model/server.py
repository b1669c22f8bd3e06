"""The model of a parameter server: is a version that anybody has seen ever lost, and is each share counted once?

The rules are those of docs/design/adr/0031-parameter-server.md. All members of a generation adopt the newest state. Then all
but its first two, the *server* and the *standby*, drop it: they compute with parameters that they pull. A version applies one
share's gradient. "Parameters" are the list of (generation, share, version that the gradient was computed on) in the order in
which they were applied.

**Modelled.** Generations of any connected processes, announced at any time, heard late; a server that hears of none of them and
goes on; processes that die; pushes that come late or never; versions that are made, copied, acknowledged, committed; shares
that are dealt, given up, refused, owed. **Not modelled**, since core.py has it: how a witness is found (here: whoever holds a
state that was adopted in the generation that adopted last, by rule WITNESS), operators that fail, copies that are cut off. A
process that dies does not come back; another one takes its place. Versions of more than one share add no order of events.

**What must never be.** A worker pulls, or a generation goes on from, parameters that are no continuation of what was seen before;
a share is applied twice; a share that was dealt is neither applied, dealt nor owed; a gradient is older than the bound.
**Liveness:** from every state in which no fault calls for another generation, all shares can be applied without another fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

from tests.model.search import Move

COPY = "COPY"
"""A version is seen by nobody before the standby of its generation holds it."""
LEDGER = "LEDGER"
"""Parameters and ledger change in one mark, in the copy, too."""
LEAVE = "LEAVE"
"""Who has heard of a newer generation acknowledges nothing of an older one."""
DEALT = "DEALT"
"""The server counts a share only where its ledger has it dealt to the worker that pushes it."""
OWED = "OWED"
"""A share that was dealt and is not counted is owed when its generation ends, and when its gradient is refused."""
AGE = "AGE"
"""The age of a gradient is looked at when it is applied, not when it comes."""
MEET = "MEET"
"""The server makes no version before all members but server and standby have dropped the state that they adopted."""
ALL_RULES = frozenset({COPY, LEDGER, LEAVE, DEALT, OWED, AGE, MEET})

NUM_PROCESSES = 4


class Budget(NamedTuple):
    """How many faults of each kind may happen."""

    crash: int = 0
    deaf: int = 0
    """A process hears of no newer generation any more; its connections to the others stand."""
    late: int = 0
    """The server gives a share up that its worker has not pushed."""


class ServerScenario(NamedTuple):
    """The bounds of a search."""

    rules: frozenset[str] = ALL_RULES
    staleness: int | None = None
    """None: no bound."""
    shares: int = 2
    max_generations: int = 2
    faults: Budget = Budget()


_TWO = ServerScenario(faults=Budget(crash=1))
WIDE = {
    "two shares and a crash": _TWO,
    "two shares, and one that hears nothing": _TWO._replace(faults=Budget(deaf=1)),
    "two shares and both": _TWO._replace(faults=Budget(crash=1, deaf=1)),
}
"""For `python -m tests.model SERVER`."""
WILD = ServerScenario(staleness=1, shares=4, max_generations=4, faults=Budget(crash=1, deaf=1, late=1))
"""For walks."""


class Applied(NamedTuple):
    """What one version applied."""

    generation: int
    share: int
    base: int


class Dealt(NamedTuple):
    """A share that a worker computes, or has pushed."""

    share: int
    worker: int
    base: int


class Held(NamedTuple):
    """The state: parameters and ledger."""

    parameters: tuple[Applied, ...] = ()
    following: int = 0
    """First share that was never dealt."""
    dealt: frozenset[Dealt] = frozenset()
    owed: frozenset[int] = frozenset()


class Process(NamedTuple):
    """One process."""

    is_alive: bool = True
    is_deaf: bool = False
    entered: int = 0
    held: Held | None = None
    adopted: int = 0
    """Generation in which it was adopted."""
    queue: frozenset[Dealt] = frozenset()
    """Of the server: pushed, not applied."""
    staged: Dealt | None = None
    """Of the server: applied in the version that is not committed."""


class Generation(NamedTuple):
    members: tuple[int, ...]
    server: int = -1
    """-1: it has not adopted a state."""
    standby: int = -1
    dropped: frozenset[int] = frozenset()
    """Workers that have said in this generation that they hold the state no more."""


class State(NamedTuple):
    processes: tuple[Process, ...]
    generations: tuple[Generation, ...]
    seen: tuple[Applied, ...]
    """The longest parameters that a worker has pulled."""
    copies: frozenset[tuple[int, Held]]
    """On the way to the standby of a generation."""
    acknowledged: frozenset[tuple[int, int]]
    """(generation, version), on the way to its server."""
    budget: Budget


class Server:
    """A model (search.Model) of one scenario."""

    def __init__(self, scenario: ServerScenario) -> None:
        self.scenario = scenario

    def has(self, rule: str) -> bool:
        return rule in self.scenario.rules

    def init(self) -> State:
        """Generation 1 has adopted: p0 is its server, p1 the standby, p2 a worker; p3 is not there yet."""
        first = Process(entered=1, held=Held(), adopted=1)
        processes = (first, first, first, Process())
        return State(
            processes,
            (Generation((0, 1, 2), 0, 1),),
            (),
            frozenset(),
            frozenset(),
            self.scenario.faults,
        )

    def is_goal(self, state: State, /) -> bool:
        return len(state.seen) == self.scenario.shares

    def is_cut(self, state: State, /) -> bool:
        """Another generation would be announced, and none may be: nobody can tell what it would do."""
        newest = state.generations[-1]
        is_whole = newest.server >= 0 and all(state.processes[at].is_alive for at in newest.members)
        return len(state.generations) >= self.scenario.max_generations and not is_whole

    def is_judged(self, _state: State, /) -> bool:
        return True

    def moves(self, state: State, /) -> Iterator[Move]:
        for number, generation in enumerate(state.generations, 1):
            server = generation.server
            if server >= 0 and self._is_in(state, server, number):
                yield from self._server_moves(state, number, generation)
            if server >= 0:
                yield from self._drops(state, number, generation)
            if generation.standby >= 0:
                yield from self._standby_moves(state, number, generation)
        yield from self._membership_moves(state)
        yield from self._faults(state)

    # --- a server and its standby ------------------------------------------------------------------------------------

    def _is_in(self, state: State, at: int, number: int) -> bool:
        process = state.processes[at]
        return process.is_alive and process.entered == number

    def _drops(self, state: State, number: int, generation: Generation) -> Iterator[Move]:
        """A worker drops the state: from now on it computes with parameters that it pulls."""
        for at in generation.members:
            process = state.processes[at]
            is_worker = at not in (generation.server, generation.standby)
            if is_worker and self._is_in(state, at, number) and process.held is not None:
                said = generation._replace(dropped=generation.dropped | {at})
                following = _with(state, at, process._replace(held=None, adopted=0))
                following = following._replace(
                    generations=(*state.generations[: number - 1], said, *state.generations[number:])
                )
                yield Move(f"p{at} drops the state that it adopted in g{number}", False, following)

    @staticmethod
    def _has_met(generation: Generation) -> bool:
        """The server has heard of all workers that they have dropped the state."""
        return set(generation.members) == generation.dropped | {generation.server, generation.standby}

    def _server_moves(self, state: State, number: int, generation: Generation) -> Iterator[Move]:
        at = generation.server
        process = state.processes[at]
        held = process.held
        assert held is not None
        yield from self._pulls(state, number, generation, held)
        for one in sorted(held.dealt):
            if one in process.queue or one == process.staged:
                continue
            # A worker pushes: it must be in this generation still.
            if self._is_in(state, one.worker, number):
                queued = process._replace(queue=process.queue | {one})
                yield Move(f"p{one.worker} pushes share {one.share} to p{at}", False, _with(state, at, queued))
            if state.budget.late:
                given_up = held._replace(dealt=held.dealt - {one}, owed=held.owed | {one.share})
                budget = state.budget._replace(late=state.budget.late - 1)
                following = _with(state, at, process._replace(held=given_up))._replace(budget=budget)
                yield Move(f"FAULT p{at} gives up share {one.share} of p{one.worker}", True, following)
        # What comes late, and is not dealt to its worker any more.
        if not self.has(DEALT):
            for share in sorted(held.owed | {one.share for one in held.dealt} | {a.share for a in held.parameters}):
                for worker in generation.members:
                    late = Dealt(share, worker, 0)
                    is_known = any((one.share, one.worker) == (share, worker) for one in held.dealt)
                    if state.budget.late < self.scenario.faults.late and not is_known and late not in process.queue:
                        queued = process._replace(queue=process.queue | {late})
                        yield Move(f"p{worker} pushes share {share} to p{at}, late", False, _with(state, at, queued))
        if process.staged is None:
            if self._has_met(generation) or not self.has(MEET):
                for one in sorted(process.queue):
                    yield self._stage(state, at, number, one)
        elif (number, len(held.parameters) + 1) in state.acknowledged or not self.has(COPY):
            yield Move(f"p{at} commits share {process.staged.share}", False, self._commit(state, at, number))

    def _pulls(self, state: State, number: int, generation: Generation, held: Held) -> Iterator[Move]:
        """A worker gets the newest committed parameters, and a share."""
        for worker in generation.members:
            is_busy = any(one.worker == worker for one in held.dealt)
            if is_busy or not self._is_in(state, worker, number):
                continue
            share = min(held.owed, default=held.following)
            is_new = share == held.following
            taken = held
            if share < self.scenario.shares:
                taken = held._replace(
                    dealt=held.dealt | {Dealt(share, worker, len(held.parameters))},
                    owed=held.owed - {share},
                    following=held.following + is_new,
                )
            following, violation = _saw(state, held.parameters)
            process = state.processes[generation.server]._replace(held=taken)
            yield Move(
                f"p{worker} pulls version {len(held.parameters)} of g{number}, share {share}",
                False,
                _with(following, generation.server, process),
                violation,
            )

    def _stage(self, state: State, at: int, number: int, one: Dealt) -> Move:
        process = state.processes[at]
        held = process.held
        assert held is not None
        queue = process.queue - {one}
        staleness = self.scenario.staleness
        age = len(held.parameters) - one.base
        is_old = staleness is not None and age > staleness
        if (is_old and self.has(AGE)) or (one not in held.dealt and self.has(DEALT)):
            owed = held.owed | {one.share} if self.has(OWED) and one in held.dealt else held.owed
            kept = held._replace(dealt=held.dealt - {one}, owed=owed)
            following = _with(state, at, process._replace(queue=queue, held=kept))
            return Move(f"p{at} refuses share {one.share} of p{one.worker}", False, following, _lost(kept))
        applied = (*held.parameters, Applied(number, one.share, one.base))
        new = held._replace(parameters=applied, dealt=held.dealt - {one})
        copied = new if self.has(LEDGER) else new._replace(dealt=held.dealt)
        following = _with(state, at, process._replace(queue=queue, staged=one))
        following = following._replace(copies=following.copies | {(number, copied)})
        violation = "a gradient is older than the bound" if is_old else None
        if any(earlier.share == one.share for earlier in held.parameters):
            violation = "a share is applied twice"
        return Move(f"p{at} applies share {one.share} and sends it to its standby", False, following, violation)

    def _commit(self, state: State, at: int, number: int) -> State:
        process = state.processes[at]
        return _with(state, at, process._replace(held=_with_staged(process, number), staged=None))

    def _standby_moves(self, state: State, number: int, generation: Generation) -> Iterator[Move]:
        at = generation.standby
        process = state.processes[at]
        if not process.is_alive:
            return
        for copy in sorted(state.copies):
            if copy[0] != number:
                continue
            version = len(copy[1].parameters)
            following = state._replace(
                copies=state.copies - {copy}, acknowledged=state.acknowledged | {(number, version)}
            )
            if process.entered == number:
                following = _with(following, at, process._replace(held=copy[1]))
                yield Move(f"p{at} holds version {version} of g{number}, and says so", False, following)
            elif not self.has(LEAVE):
                yield Move(f"p{at}, of g{process.entered}, says that it holds version {version}", False, following)

    # --- membership --------------------------------------------------------------------------------------------------

    def _membership_moves(self, state: State) -> Iterator[Move]:
        number = len(state.generations)
        if number < self.scenario.max_generations:
            there = [at for at, process in enumerate(state.processes) if process.is_alive and not process.is_deaf]
            for size in (2, 3):
                for members in combinations(there, size):
                    following = state._replace(generations=(*state.generations, Generation(members)))
                    yield Move(f"operator announces g{number + 1} members {list(members)}", False, following)
        newest = state.generations[-1]
        for at in newest.members:
            process = state.processes[at]
            if process.is_alive and not process.is_deaf and process.entered < number:
                # A version that is staged stays in its state: nobody has seen it.
                held = process.held if process.staged is None else _with_staged(process, process.entered)
                left = process._replace(entered=number, held=held, queue=frozenset(), staged=None)
                yield Move(f"p{at} enters g{number}", False, _with(state, at, left))
        if newest.server < 0 and all(self._is_in(state, at, number) for at in newest.members):
            yield from self._adopts(state, number, newest)

    def _adopts(self, state: State, number: int, newest: Generation) -> Iterator[Move]:
        """All are there. Rule WITNESS: one of them holds a state that it adopted in the generation that adopted last."""
        last = max(at for at, one in enumerate(state.generations, 1) if one.server >= 0)
        holders = [at for at in newest.members if state.processes[at].adopted == last]
        if not holders:
            return  # it waits
        held, source = max((_held(state, at), -at) for at in holders)
        source = -source
        owed = held.owed | {one.share for one in held.dealt} if self.has(OWED) else held.owed
        taken = held._replace(dealt=frozenset(), owed=owed)
        server, standby = newest.members[:2]
        following = state._replace(
            generations=(*state.generations[:-1], newest._replace(server=server, standby=standby)),
            processes=tuple(
                process._replace(held=taken, adopted=number) if at in newest.members else process
                for at, process in enumerate(state.processes)
            ),
        )
        violation = _lost(taken)
        if state.seen != held.parameters[: len(state.seen)]:
            violation = "a generation goes on without a version that was seen"
        yield Move(f"g{number} goes on from version {len(held.parameters)} of p{source}", False, following, violation)

    def _faults(self, state: State) -> Iterator[Move]:
        budget = state.budget
        for at, process in enumerate(state.processes[: NUM_PROCESSES - 1]):
            if budget.crash and process.is_alive:
                dead = process._replace(is_alive=False, held=None, adopted=0, queue=frozenset(), staged=None)
                following = _with(state, at, dead)._replace(budget=budget._replace(crash=budget.crash - 1))
                yield Move(f"FAULT p{at} dies", True, following)
            if budget.deaf and process.is_alive and not process.is_deaf:
                following = _with(state, at, process._replace(is_deaf=True))
                following = following._replace(budget=budget._replace(deaf=budget.deaf - 1))
                yield Move(f"FAULT p{at} hears nothing of the operator", True, following)


def _with(state: State, at: int, process: Process) -> State:
    return state._replace(processes=(*state.processes[:at], process, *state.processes[at + 1 :]))


def _with_staged(process: Process, number: int) -> Held:
    """Return what a server holds with the version that it has applied in generation `number`."""
    held, one = process.held, process.staged
    assert held is not None
    assert one is not None
    applied = (*held.parameters, Applied(number, one.share, one.base))
    return held._replace(parameters=applied, dealt=held.dealt - {one})


def _held(state: State, at: int) -> Held:
    held = state.processes[at].held
    assert held is not None
    return held


def _saw(state: State, parameters: tuple[Applied, ...]) -> tuple[State, str | None]:
    """Somebody sees these parameters."""
    both = min(len(parameters), len(state.seen))
    if parameters[:both] != state.seen[:both]:
        return state, "two servers go on from one version"
    return state._replace(seen=max(parameters, state.seen, key=len)), None


def _lost(held: Held) -> str | None:
    known = {one.share for one in held.parameters} | {one.share for one in held.dealt} | held.owed
    return None if known == set(range(held.following)) else "a share is lost"
