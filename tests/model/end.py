"""END: a job is complete once the script has returned 0 in every member, whatever fails between its last step and that.

Two members have committed the last step and wait in their loops. The operator writes `status.finished`, then tells each member to
leave its loop; the script then does what it does with the trained model, which may change that model. A script that fails, or
whose pod is lost, is run again in the same place, with the state of the last step from a checkpoint. Each rule has a switch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, get_args

from tests.model.search import Move

EndRule = Literal["ORDER", "STAYS", "PROOF", "EXACT", "PLACE", "WRITTEN"]
"""ORDER: `status.finished` is written before anybody is told to leave the loop, and no generation is announced after it. STAYS: a
worker whose processes have all returned 0 has that on its disk, repeats it, and stays until `status.finished.done` names it.
PROOF: only that word proves it, neither the end of a pod nor that the worker was told to stop. EXACT: a script is run again only
with the state of the last step. PLACE: it gets the place of its predecessor, once the pod of that one is gone. WRITTEN: a worker
that says that it has left its loop was told to, so `status.finished` was written. Where a backup has lost it, it is written
again."""

END_RULES: frozenset[EndRule] = frozenset(get_args(EndRule))

Script = Literal["loop", "left", "returned", "failed", "begun", "ended"]
"""Where the script of a worker is: in its loop with the state of the last step; after its loop; returned 0; failed, and its agent
starts it again; begun again, and not at its session yet, so that it may see that its work is done, and return 0 without the state;
ended by the agent's word, the agent has exited, and its pod has succeeded."""


class Pod(NamedTuple):
    script: Script
    exact: bool = True  # its processes began the code after the loop with the state of the last step
    told: bool = False  # it was told to leave the loop
    is_cut: bool = False  # it runs on a node that nobody can reach
    stopped: bool = False  # it was told to stop, because the job is suspended


class EndState(NamedTuple):
    places: tuple[tuple[Pod, ...], tuple[Pod, ...]]  # by place: the pods that have it
    finished: bool  # status.finished
    done: frozenset[int]  # status.finished.done: places
    outcome: Literal["", "Complete", "Failed"]
    suspended: bool
    is_next_announced: bool  # a generation after the one that has finished
    checkpoint: Literal["exact", "older"]  # the newest durable one
    num_returned: tuple[int, int]  # by place: how often a script has returned 0
    faults: int  # that may still happen


class End:
    """`checkpoint`: what can be read; `faults`: how many may happen."""

    def __init__(
        self,
        rules: frozenset[EndRule] = END_RULES,
        *,
        checkpoint: Literal["exact", "older"] = "exact",
        faults: int = 2,
        suspends: bool = False,
        restores: bool = False,
    ) -> None:
        """`restores`: one of the faults may be that the status is restored from a backup of before the last step."""
        self.rules, self.checkpoint, self.faults, self.suspends = rules, checkpoint, faults, suspends
        self.restores = restores

    def init(self) -> EndState:
        pods = ((Pod("loop"),), (Pod("loop"),))
        checkpoint: Literal["exact", "older"] = self.checkpoint
        return EndState(pods, False, frozenset(), "", False, False, checkpoint, (0, 0), self.faults)

    def is_goal(self, state: EndState) -> bool:
        return state.outcome != ""

    def is_cut(self, state: EndState) -> bool:  # noqa: ARG002
        return False

    def is_judged(self, state: EndState) -> bool:
        """A job that stays suspended, and one whose lost node nobody takes out of the API, wait for a person."""
        return not state.suspended and not any(pod.is_cut for pods in state.places for pod in pods)

    def moves(self, state: EndState) -> Iterator[Move]:
        if state.outcome:
            return
        yield from self._operator(state)
        for place in (0, 1):
            for index, pod in enumerate(state.places[place]):
                yield from self._worker(state, place, index, pod)

    # --- the operator: what it knows is the status and the words of the agents that can be reached ------------------------

    def _operator(self, state: EndState) -> Iterator[Move]:
        pods = [pod for some in state.places for pod in some]
        if not state.finished and all(some and some[0].script == "loop" for some in state.places):
            yield Move("operator writes finished", False, state._replace(finished=True))
        if self.restores:
            if state.finished and state.faults:
                lost = state._replace(finished=False, done=frozenset(), faults=state.faults - 1)
                yield Move("FAULT the status is restored from a backup", True, lost)
            if not state.finished and self._says_left(pods):
                yield Move("operator writes finished again", False, state._replace(finished=True))
        # Whoever cannot be reached may hold the state (rule WITNESS); in a restored status nobody knows better.
        waits = self.restores and (self._says_left(pods) or any(pod.is_cut for pod in pods))
        is_whole = all(any(pod.script != "ended" for pod in some) for some in state.places)
        if not state.finished and not state.is_next_announced and not is_whole and not waits:
            left = any(pod.script not in ("loop", "ended") for pod in pods)
            violation = "g2 copies the state of a worker whose script has left its loop" if left else None
            yield Move("operator announces g2", False, state._replace(is_next_announced=True), violation)
        if state.is_next_announced:
            if not state.finished:  # g2 trains nothing more, and finishes as g1 did
                whole = ((Pod("loop"),), (Pod("loop"),))
                yield Move("g2 finishes", False, state._replace(is_next_announced=False, places=whole))
            return
        if self.suspends and state.finished and not state.suspended and not any(pod.stopped for pod in pods):
            stopped = self._each(state, lambda pod: pod._replace(stopped=pod.script not in ("returned", "ended")))
            yield Move("operator tells all to stop: the job is suspended", False, stopped._replace(suspended=True))
        if state.suspended and not any(state.places):
            yield Move("the job is resumed", False, state._replace(suspended=False))
        for place in (0, 1):
            yield from self._of_place(state, place)
        if state.finished and state.done == {0, 1}:
            violation = None if all(state.num_returned) else "Complete, and a script has not returned 0"
            yield Move("operator writes Complete", False, state._replace(outcome="Complete"), violation)

    def _says_left(self, pods: Sequence[Pod]) -> bool:
        """Return whether an agent that can be reached says that its script was told to leave its loop."""
        return "WRITTEN" in self.rules and any(p.told and not p.is_cut and p.script != "ended" for p in pods)

    def _of_place(self, state: EndState, place: int) -> Iterator[Move]:
        for index, pod in enumerate(state.places[place]):
            may_tell = state.finished or "ORDER" not in self.rules
            if may_tell and not pod.told and not pod.is_cut and not pod.stopped and pod.script == "loop":
                left = self._with(state, place, index, pod._replace(told=True, script="left"))
                yield Move(f"w{place} is told to leave its loop", False, left)
            says = pod.script == "returned" and not pod.is_cut
            seems = "PROOF" not in self.rules and pod.script == "ended"
            if state.finished and (says or seems) and place not in state.done:
                yield Move(f"operator writes w{place} done", False, state._replace(done=state.done | {place}))
            if pod.script == "ended" and state.finished and (place not in state.done or state.suspended):
                yield Move(f"operator deletes the ended pod of w{place}", False, self._without(state, place, index))
        # A pod that cannot be reached has the place until the API has it no more.
        is_free = not state.places[place] or (
            "PLACE" not in self.rules
            and all(pod.is_cut for pod in state.places[place])
            and len(state.places[place]) < 2
        )
        if state.finished and place not in state.done and is_free and not state.suspended:
            yield from self._run_again(state, place, (*state.places[place], Pod("begun", told=True)))

    def _run_again(self, state: EndState, place: int, pods: tuple[Pod, ...]) -> Iterator[Move]:
        if "EXACT" in self.rules and state.checkpoint != "exact":
            label = f"no checkpoint has the last state for w{place}: the job fails"
            yield Move(label, False, state._replace(outcome="Failed"))
            return
        runs = sum(pod.script in ("begun", "left") for pod in pods)
        violation = f"two pods run the end of w{place} at once" if runs > 1 else None
        if state.checkpoint != "exact":
            violation = violation or f"w{place} runs the end of its script with an older state"
        again = state._replace(places=self._replaced(state.places, place, pods))
        yield Move(f"the script of w{place} is run again", False, again, violation)

    # --- a worker ---------------------------------------------------------------------------------------------------------

    def _worker(self, state: EndState, place: int, index: int, pod: Pod) -> Iterator[Move]:
        def to(changed: Pod) -> EndState:
            return self._with(state, place, index, changed)

        if pod.script == "begun" and not pod.stopped:
            yield Move(f"the script of w{place} takes the state", False, to(pod._replace(script="left")))
        if pod.script in ("begun", "left") and not pod.stopped:  # an exit with 0 after a signal proves nothing
            count = tuple(n + (p == place) for p, n in enumerate(state.num_returned))
            violation = None
            if state.num_returned[place] and self.faults == state.faults:
                violation = f"the script of w{place} is run again, and nothing has failed"
            returned = to(pod._replace(script="returned"))._replace(num_returned=(min(1, count[0]), min(1, count[1])))
            yield Move(f"the script of w{place} returns 0", False, returned, violation)
        if pod.script == "returned" and ("STAYS" not in self.rules or place in state.done):
            yield Move(f"the agent of w{place} exits", False, to(pod._replace(script="ended")))
        if pod.script == "failed":
            pods = tuple(
                Pod("begun", told=True) if i == index else other for i, other in enumerate(state.places[place])
            )
            yield from self._run_again(state, place, pods)
        if pod.stopped and pod.script in ("loop", "left", "failed", "begun"):
            yield Move(f"w{place} stops", False, self._without(state, place, index))
            if "PROOF" not in self.rules:
                yield Move(
                    f"w{place} stops, and its pod succeeds", False, to(pod._replace(script="ended", stopped=False))
                )
        if not state.faults:
            return
        less = state.faults - 1
        if pod.script in ("begun", "left"):
            failed = to(pod._replace(script="failed"))._replace(faults=less)
            yield Move(f"FAULT the script of w{place} fails", True, failed)
        gone = self._without(state, place, index)._replace(faults=less)
        yield Move(f"FAULT the pod of w{place} is deleted", True, gone)
        if not pod.is_cut:
            cut = to(pod._replace(is_cut=True))._replace(faults=less)
            yield Move(f"FAULT the node of w{place} is cut off", True, cut)
        else:
            yield Move(f"the node of w{place} is back", False, to(pod._replace(is_cut=False)))

    # --- records ----------------------------------------------------------------------------------------------------------

    def _each(self, state: EndState, change: Callable[[Pod], Pod]) -> EndState:
        first, second = (tuple(change(pod) for pod in pods) for pods in state.places)
        return state._replace(places=(first, second))

    def _with(self, state: EndState, place: int, index: int, pod: Pod) -> EndState:
        pods = state.places[place]
        return state._replace(places=self._replaced(state.places, place, (*pods[:index], pod, *pods[index + 1 :])))

    def _without(self, state: EndState, place: int, index: int) -> EndState:
        pods = state.places[place]
        return state._replace(places=self._replaced(state.places, place, (*pods[:index], *pods[index + 1 :])))

    @staticmethod
    def _replaced(
        places: tuple[tuple[Pod, ...], tuple[Pod, ...]], place: int, pods: tuple[Pod, ...]
    ) -> tuple[tuple[Pod, ...], tuple[Pod, ...]]:
        return (pods, places[1]) if place == 0 else (places[0], pods)
