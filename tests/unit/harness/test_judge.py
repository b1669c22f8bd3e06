"""The judge of what trainers committed: each thing that must never pass is found, and what may happen passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from harness.judge import Change, Commit, changed, issued, kept, whole

Rows = Sequence[tuple[str, int, int, int]]
"""(processes, generation, first step, last step): every process commits all of these steps."""


def commits(*rows: tuple[str, int, int, int]) -> list[Commit]:
    return [
        Commit(process, generation, step)
        for processes, generation, first, last in rows
        for process in processes
        for step in range(first, last + 1)
    ]


KILL = Change(before=4, after=6, survivors="ab", num_survivors=2, generations=(2, 2))
"""Process c is killed in generation 4; a and b train in 5; d, which takes c's place, joins in 6."""

SURVIVED: Rows = [("abc", 4, 0, 108), ("ab", 5, 109, 120), ("abd", 6, 121, 130)]


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(SURVIVED, id="the next step follows"),
        pytest.param(
            [("ab", 4, 0, 107), ("c", 4, 0, 108), ("ab", 5, 108, 120), ("abd", 6, 121, 130)],
            id="the step that only the killed process had committed is done again",
        ),
        pytest.param(
            [("abc", 3, 0, 9), ("abc", 4, 10, 108), ("ab", 5, 109, 120), ("abd", 6, 121, 130), ("ab", 7, 131, 140)],
            id="what came earlier and later is not judged",
        ),
    ],
)
def test_fault_that_costs_at_most_one_step_holds(rows: Rows) -> None:
    assert changed(commits(*rows), KILL) == []


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        pytest.param(
            [("abc", 4, 0, 108), ("ab", 5, 110, 120), ("abd", 6, 121, 130)], "Steps are missing", id="108, then 110"
        ),
        pytest.param(
            [("abc", 4, 0, 108), ("ab", 5, 109, 120), ("abd", 6, 123, 130)],
            "Steps are missing",
            id="a step is missing at the return",
        ),
        pytest.param(
            [("abc", 4, 0, 108), ("de", 5, 0, 120), ("ded", 6, 121, 130)],
            "Rolled back by 109",
            id="a restart from step 0",
        ),
        pytest.param(
            [("abc", 4, 0, 108), ("ab", 5, 0, 120), ("abd", 6, 121, 130)],
            "a committed step 108 in generation 4, then step 0",
            id="survivors that go back to step 0",
        ),
        pytest.param(
            [("abc", 4, 0, 108), ("ab", 5, 107, 120), ("abd", 6, 121, 130)], "Rolled back by 2", id="two steps again"
        ),
        pytest.param(
            [("abc", 4, 0, 108), ("ab", 5, 108, 120), ("abd", 6, 121, 130)],
            "b committed step 108",
            id="a step again that a survivor had committed",
        ),
        pytest.param(
            [("ab", 4, 0, 107), ("c", 4, 0, 108), ("ab", 5, 108, 119), ("c", 5, 108, 120), ("abd", 6, 120, 130)],
            "2 steps were done again",
            id="one step again at the fault, one at the return",
        ),
        pytest.param(
            [("abc", 4, 0, 108), ("ab", 6, 109, 120)],
            "went on in generation 6, not in 5",
            id="a generation that formed no group",
        ),
        pytest.param(
            [("abc", 4, 0, 108), ("ab", 5, 109, 120)],
            "Nothing was committed in generation 6",
            id="nobody trains in the end",
        ),
        pytest.param(
            [("ab", 5, 109, 120), ("abd", 6, 121, 130)],
            "Nothing was committed in generation 4",
            id="nobody trained before",
        ),
        pytest.param(
            [("abc", 4, 0, 108), ("a", 5, 109, 110), ("abd", 6, 111, 130)],
            "b did not train in generation 5, the first after the change, which committed the steps 109 to 110",
            id="a survivor sits out",
        ),
        pytest.param(
            [("abc", 4, 0, 108), ("ab", 5, 109, 120), ("ade", 6, 121, 130)],
            "b did not live on",
            id="a survivor lost its process",
        ),
        pytest.param(
            [("ac", 4, 0, 108), ("ab", 5, 109, 120), ("abd", 6, 121, 130)],
            "b did not train in generation 4",
            id="a survivor that is new",
        ),
        pytest.param(
            [("abc", 4, 0, 108), ("ab", 5, 109, 112), ("ab", 5, 114, 120), ("abd", 6, 121, 130)],
            "Generation 5 committed no step 113",
            id="a hole",
        ),
        pytest.param(
            [("abc", 4, 0, 108), ("a", 5, 109, 120), ("b", 5, 109, 112), ("b", 5, 114, 120), ("abd", 6, 121, 130)],
            "b left out step 113 of generation 5",
            id="one process leaves out a step",
        ),
        pytest.param(
            [("abc", 4, 0, 108), ("a", 5, 109, 120), ("b", 5, 110, 120), ("abd", 6, 121, 130)],
            "b left out step 109 of generation 5",
            id="one process begins later than the others",
        ),
        pytest.param([], "Nothing was committed in generation 4", id="no commits at all"),
    ],
)
def test_fault_that_loses_something_is_found(rows: Rows, problem: str) -> None:
    assert problem in " ".join(changed(commits(*rows), KILL))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        pytest.param({"survivors": ""}, "0 processes should live on, 2 expected", id="no survivors at all"),
        pytest.param({"survivors": "a"}, "1 processes should live on, 2 expected", id="too few survivors"),
        pytest.param({"generations": (1, 1)}, "It took 2 generations (4 to 6), not 1.", id="one generation too many"),
        pytest.param({"generations": (3, 4)}, "It took 2 generations (4 to 6), not 3 to 4.", id="too few generations"),
        pytest.param({"after": 4}, "Nothing was committed in generation 4, after", id="no new generation"),
    ],
)
def test_expectation_that_is_not_met_is_found(changes: dict[str, Any], problem: str) -> None:
    values = {"before": 4, "after": 6, "survivors": "ab", "num_survivors": 2, "generations": (2, 2), **changes}
    assert problem in " ".join(changed(commits(*SURVIVED), Change(**values)))


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        pytest.param(
            [("abc", 4, 0, 108), ("abd", 6, 109, 120)], "", id="the second one goes on where the group stopped"
        ),
        pytest.param([("abc", 4, 0, 108), ("ad", 6, 109, 120)], "b did not live on", id="a survivor is missing"),
        pytest.param([("abc", 4, 0, 108), ("abd", 6, 111, 120)], "Steps are missing", id="steps are missing"),
    ],
)
def test_first_generation_of_a_new_operator_may_form_no_group(rows: Rows, problem: str) -> None:
    takes_over = Change(
        before=4, after=6, survivors="ab", num_survivors=2, pausing="ab", generations=(1, 3), skips=True
    )
    problems = " ".join(changed(commits(*rows), takes_over))
    assert problem in problems
    assert bool(problems) == bool(problem)


def test_planned_change_does_no_step_again() -> None:
    rows: Rows = [("a", 1, 0, 9), ("b", 1, 0, 10), ("ac", 2, 10, 20)]
    resize = Change(before=1, after=2, survivors="a", num_survivors=1, redone=0)
    assert changed(commits(*rows), resize) == ["1 steps were done again, at most 0 may be."]


def test_sibling_of_a_killed_process_may_miss_the_first_generation_and_must_come_back() -> None:
    sibling = Change(before=4, after=6, survivors="abs", num_survivors=3, pausing="s", generations=(2, 2))
    there: Rows = [("abcs", 4, 0, 108), ("ab", 5, 109, 120), ("absd", 6, 121, 130)]
    assert changed(commits(*there), sibling) == []
    gone: Rows = [("abcs", 4, 0, 108), ("ab", 5, 109, 120), ("abd", 6, 121, 130)]
    assert changed(commits(*gone), sibling) == ["s did not live on: it commits nothing in generation 6."]


def test_whole_run_has_every_step_once() -> None:
    assert whole(commits(*SURVIVED), last=130) == []
    again: Rows = [("ab", 4, 0, 107), ("c", 4, 0, 108), ("ab", 5, 108, 120)]
    assert whole(commits(*again), redone=1) == []


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        pytest.param([], "Nothing was committed.", id="nothing at all"),
        pytest.param([("a", 1, 1, 9)], "The first step is 1, not 0.", id="a run that begins late"),
        pytest.param([("a", 1, 0, 8)], "The last step is 8, not 9.", id="a run that ends early"),
        pytest.param([("a", 1, 0, 5), ("b", 2, 0, 9)], "Rolled back by 6 steps", id="another process from step 0"),
        pytest.param([("a", 1, 0, 5), ("b", 2, 5, 9)], "1 steps were done again in the whole run", id="a step again"),
        pytest.param([("a", 1, 0, 5), ("b", 2, 7, 9)], "Steps are missing", id="a step between two generations"),
        pytest.param(
            [("a", 3, 0, 5), ("b", 4, 3, 4), ("c", 5, 5, 9)],
            "Rolled back by 3 steps",
            id="a fork whose steps fill up what the union of steps has anyway",
        ),
    ],
)
def test_whole_run_that_is_not_whole_is_found(rows: Rows, problem: str) -> None:
    assert problem in " ".join(whole(commits(*rows), last=9))


BEFORE = {"w0": [10], "w1": [11], "w2": [12]}


@pytest.mark.parametrize(
    ("before", "now", "number", "problem"),
    [
        pytest.param(BEFORE, {"w0": [10], "w2": [12], "w3": [20]}, 2, "", id="both others keep their processes"),
        pytest.param(
            BEFORE, {"w0": [10], "w2": [13]}, 2, "w2 had the processes [12], now [13]", id="one has a new one"
        ),
        pytest.param(BEFORE, {"w0": [10]}, 2, "w2 had the processes [12], now []", id="one has none"),
        pytest.param(BEFORE, {"w0": [10], "w2": [12]}, 3, "2 workers were left by the fault, 3 expected", id="too few"),
        pytest.param({}, {}, 2, "0 workers were left by the fault, 2 expected: none", id="nobody was there before"),
        pytest.param({"w0": [], "w1": [1]}, {}, 1, "w0 had no process before", id="a worker without a process before"),
    ],
)
def test_survivors_keep_their_processes(
    before: dict[str, list[int]], now: dict[str, list[int]], number: int, problem: str
) -> None:
    problems = kept(before, now, lost={"w1"}, number=number)
    assert problem in " ".join(problems)
    assert bool(problems) == bool(problem)


@pytest.mark.parametrize(
    ("after", "allowed", "problem"),
    [
        pytest.param(6, (2, 2), None, id="one without the worker, one with it again"),
        pytest.param(5, (1, 2), None, id="the least"),
        pytest.param(7, (2, 2), "It took 3 generations (4 to 7), not 2.", id="one that formed no group"),
        pytest.param(4, (1, 2), "It took 0 generations (4 to 4), not 1 to 2.", id="none although one was lost"),
    ],
)
def test_generations_of_a_fault_are_counted_by_their_numbers(
    after: int, allowed: tuple[int, int], problem: str | None
) -> None:
    assert issued(4, after, allowed) == ([problem] if problem else [])
