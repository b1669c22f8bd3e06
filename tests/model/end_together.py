"""END where one member cannot run its end alone: the members of a model group, and a script without the library.

A failure takes `status.finished` back. All members then run their end again in an ordinary generation, those that have returned 0
included. Two members. Each rule has a switch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

from tests.model.search import Move

TogetherRule = Literal["SAME", "BACK"]
"""SAME: a word of an end counts for the generation that it names, and no other. BACK: who announces the next generation has taken
`status.finished` back, with all that it says of who is done."""

TOGETHER_RULES: frozenset[TogetherRule] = frozenset(get_args(TogetherRule))

MAX_GENERATION = 4

Script = Literal["loop", "left", "returned", "waits", "gone"]
"""In its loop with the state of the last step; after its loop; returned 0; started again, with no state of its own; its pod is
gone, and none takes its place while the member is done."""


class Member(NamedTuple):
    script: Script = "loop"
    generation: int = 1  # that its processes have entered last


class TogetherState(NamedTuple):
    members: tuple[Member, Member]
    newest: int  # generation that was announced last
    finished: int  # status.finished.generation; 0: it is not there
    done: frozenset[int]  # status.finished.done
    returned: frozenset[tuple[int, int]]  # (generation, member) whose script has returned 0
    is_complete: bool
    faults: int  # that may still happen


class EndTogether:
    """`scripts`: without the library, so that nobody tells them to leave their loops and the first word of an end is all that there
    is of it; else of a model group. `faults`: how many may happen."""

    def __init__(
        self, rules: frozenset[TogetherRule] = TOGETHER_RULES, *, scripts: bool = False, faults: int = 2
    ) -> None:
        self.rules, self.scripts, self.faults = rules, scripts, faults

    def init(self) -> TogetherState:
        return TogetherState((Member(), Member()), 1, 0, frozenset(), frozenset(), False, self.faults)

    def is_goal(self, state: TogetherState) -> bool:
        return state.is_complete

    def is_cut(self, state: TogetherState) -> bool:
        return state.newest >= MAX_GENERATION

    def is_judged(self, state: TogetherState) -> bool:  # noqa: ARG002
        return True

    def moves(self, state: TogetherState) -> Iterator[Move]:
        if state.is_complete:
            return
        yield from self._operator(state)
        for index, member in enumerate(state.members):
            yield from self._member(state, index, member)

    def _operator(self, state: TogetherState) -> Iterator[Move]:
        if self.scripts:
            is_over = any(member.script == "returned" and self._counts(state, member) for member in state.members)
        else:
            is_over = all(member == Member("loop", state.newest) for member in state.members)
        if not state.finished and is_over:
            yield Move("operator writes finished", False, state._replace(finished=state.newest, done=frozenset()))
        lost = [i for i, member in enumerate(state.members) if member.script == "waits"]
        back = state._replace(
            finished=0,
            done=frozenset(),
            members=self._each(state, lambda m: m._replace(script="waits") if m.script == "gone" else m),
        )
        if state.finished and lost:
            yield Move("operator takes finished back", False, back)
        may_announce = "BACK" not in self.rules or not state.finished
        heard = all(member.generation == state.newest or member.script == "waits" for member in state.members)
        if lost and may_announce and heard and state.newest < MAX_GENERATION:
            number = state.newest + 1
            yield Move(f"operator announces g{number}", False, state._replace(newest=number))
        for index, member in enumerate(state.members):
            if member.script != "returned" or not state.finished or index in state.done:
                continue
            if self._counts(state, member):
                yield Move(f"operator writes w{index} done", False, state._replace(done=state.done | {index}))
        if state.finished and state.done == {0, 1}:
            true = all((state.newest, index) in state.returned for index in (0, 1))
            violation = None if true else f"Complete, and a script has not returned 0 in g{state.newest}"
            yield Move("operator writes Complete", False, state._replace(is_complete=True), violation)

    def _member(self, state: TogetherState, index: int, member: Member) -> Iterator[Move]:
        who = f"w{index}"
        if member.script == "loop" and (self.scripts or state.finished == member.generation):
            yield Move(f"{who} leaves its loop", False, self._with(state, index, script="left"))
        if member.script == "left":
            returned = state.returned | {(member.generation, index)}
            yield Move(
                f"the script of {who} returns 0",
                False,
                self._with(state, index, script="returned")._replace(returned=returned),
            )
        if member.generation < state.newest and member.script != "gone":
            entered = self._with(state, index, script="loop", generation=state.newest)
            yield Move(f"{who} enters g{state.newest} anew", False, entered)
        if not state.faults:
            return
        less = state._replace(faults=state.faults - 1)
        if member.script == "left":
            yield Move(f"FAULT the script of {who} fails", True, self._with(less, index, script="waits"))
        gone: Script = "gone" if index in state.done else "waits"
        yield Move(f"FAULT the pod of {who} is deleted", True, self._with(less, index, script=gone))

    def _counts(self, state: TogetherState, member: Member) -> bool:
        return member.generation == state.newest or "SAME" not in self.rules

    def _with(self, state: TogetherState, index: int, **changes: object) -> TogetherState:
        changed = state.members[index]._replace(**changes)  # type: ignore[arg-type]
        first, second = (changed if i == index else member for i, member in enumerate(state.members))
        return state._replace(members=(first, second))

    @staticmethod
    def _each(state: TogetherState, change: Callable[[Member], Member]) -> tuple[Member, Member]:
        first, second = map(change, state.members)
        return first, second
