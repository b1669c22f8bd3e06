"""The trainers' log as the tour reads it."""

import pytest

from harness.judge import Commit
from harness.steps import Step, Steps, parse


def log(*steps: tuple[float, int, int]) -> Steps:
    made = Steps()
    for at_s, number, generation in steps:
        made.add(Step(at_s, number, "0.5", generation, 2, "w0"))
    return made


def test_line_of_kubectl_logs_is_a_step() -> None:
    line = "2026-11-21T17:04:53.123456789Z step 35  loss 0.8628  generation 3  ranks 2\n"
    assert parse(line, "w0") == Step(1795280693.123456, 35, "0.8628", 3, 2, "w0")


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("2026-11-21T17:04:53.1Z held-out accuracy 0.9778  parameters sha256 7ff4", id="other words"),
        pytest.param("2026-11-21T17:04:53.1Z step 35  loss 0.86", id="torn"),
        pytest.param("", id="empty"),
    ],
)
def test_other_lines_are_not(line: str) -> None:
    assert parse(line, "w0") is None


def test_pause_is_the_time_without_a_step_less_a_usual_step() -> None:
    steps = log((10.0, 0, 1), (10.1, 1, 1), (10.2, 2, 1), (10.7, 3, 2), (10.8, 4, 2), (11.9, 5, 3))
    assert steps.pauses_s(after=1) == pytest.approx([0.4, 1.0])
    assert steps.pauses_s(after=2) == pytest.approx([1.0])
    assert steps.pauses_s(after=3) == []


def test_change_of_generation_begins_with_the_first_step_of_a_newer_one() -> None:
    steps = log((10.0, 7, 1), (10.4, 8, 3), (10.5, 9, 3), (10.2, 8, 1))
    first = steps.first_after(1)
    assert first is not None
    assert (first.number, first.generation) == (8, 3)
    assert steps.first_after(3) is None
    assert steps.newest is not None
    assert steps.newest.number == 9


def test_line_that_is_read_again_counts_once() -> None:
    steps = log((10.0, 7, 1), (10.1, 8, 1), (10.0, 7, 1))
    assert len(list(steps)) == 2


def test_interval_that_begins_before_or_ends_after_the_span_counts_whole() -> None:
    steps = log((8.0, 5, 1), (9.0, 6, 1), (10.0, 7, 1), (10.1, 8, 1), (12.0, 9, 1), (12.1, 10, 1))
    assert steps.intervals_s(since_s=9.5, until_s=11.0) == pytest.approx([1.0, 0.1, 1.9])


def test_step_of_the_group_is_the_first_line_that_any_rank_printed_of_it() -> None:
    steps = Steps()
    for at_s, number, pod in ((10.2, 7, "w1"), (10.1, 7, "w0"), (10.3, 8, "w1")):
        steps.add(Step(at_s, number, "0.5", 1, 2, pod))
    assert [(s.at_s, s.number) for s in steps] == [(10.1, 7), (10.3, 8)]
    assert set(steps.commits()) == {Commit("w1", 1, 7), Commit("w0", 1, 7), Commit("w1", 1, 8)}
    assert steps.pods(1) == {"w0", "w1"}
