"""The trainers' own trace: what the judge is told of it."""

from __future__ import annotations

from harness import judge
from harness.trace import Commit, Trace


def trace(*commits: tuple[str, int, int]) -> Trace:
    """(pod, generation, step): each by the pod's process 7."""
    return Trace(
        tuple(Commit(float(n), pod, 7, 0, generation, step) for n, (pod, generation, step) in enumerate(commits)),
        (),
        (),
    )


REBOOTED = trace(("a", 4, 8), ("b", 4, 8), ("b", 4, 9), ("a", 5, 9), ("a", 6, 10), ("b", 6, 10))
"""b's node restarts after generation 4; in 6 its container is back, whose first process has the id of the former one."""
CHANGE = judge.Change(4, 6, {("a", 7)}, 1, generations=(1, 2))


def test_restarted_container_has_processes_of_its_own_although_the_ids_come_again() -> None:
    told = REBOOTED.judged(restarted={"b"}, after=4)
    assert [c.process for c in told if c.generation == 6] == [("a", 7), ("b", 7, "restarted")]
    assert judge.changed(told, CHANGE) == []


def test_step_that_only_a_restarted_process_had_committed_is_done_again() -> None:
    fixed = trace(("a", 4, 8), ("b", 4, 8), ("b", 4, 9), ("a", 5, 9), ("b", 5, 9))
    change = judge.Change(4, 5, {("a", 7)}, 1)
    assert judge.changed(fixed.judged(restarted={"b"}, after=4), change) == []
    assert "('b', 7) committed step 9" in judge.changed(fixed.judged(), change)[0]


def test_restarted_processes_hide_no_roll_back_of_the_others() -> None:
    back = trace(("a", 4, 8), ("b", 4, 8), ("a", 5, 0), ("b", 5, 0))
    problems = judge.changed(back.judged(restarted={"b"}, after=4), judge.Change(4, 5, {("a", 7)}, 1))
    assert any("Rolled back by 9" in problem for problem in problems)
