"""The judge of the end-to-end test of kubectl's columns: what it must call false, and what it must let pass."""

import pytest

from tests.e2e.trace import Commit, Trace
from tests.e2e.truth import Asked, Row, judge

ASKED = [Asked(100.0, 2)]


def trained(*, kill_at: float | None = None, until: float = 130.0) -> Trace:
    """Two pods step every 0.1 s from 105 on; at `kill_at` pod b dies, and a alone goes on 0.3 s later in generation 2."""
    commits = []
    for n in range(round((until - 105) / 0.1)):
        t = 105 + n / 10
        if kill_at is not None and kill_at <= t < kill_at + 0.3:
            continue
        late = kill_at is not None and t >= kill_at
        for rank, pod in enumerate("a" if late else "ab"):
            commits.append(Commit(t, pod, 7, rank, 2 if late else 1, n))
    built = tuple({"event": "built", "t": 104.0, "pod": pod, "pid": 7} for pod in "ab")
    return Trace(tuple(commits), built, ({"event": "done", "t": until},))


def row(at: float, state: str = "Running", ready: str = "2/2", step: int | None = None, generation: int = 1) -> Row:
    shown = round((at - 105) / 0.1) if step is None else step
    return Row(at, at + 0.1, {"STATE": state, "READY": ready, "STEP": str(shown), "GENERATION": str(generation)})


@pytest.mark.parametrize(
    "true",
    [
        row(115),
        row(115, step=10),  # 9 s old
        row(105.5, "Starting", "0/2", generation=1),
        row(121, "Recovering", "1/2"),
        row(121, "Running", "2/2"),  # the kill was a second ago
        row(124, "Running", "1/2", generation=2),
        row(133, "Succeeded", "0/2", generation=2, step=250),
    ],
    ids=lambda r: f"{r.before} {r.cells['STATE']} {r.cells['READY']}",
)
def test_true_lines_pass(true: Row) -> None:
    assert judge(true, trained(kill_at=120.0), ASKED) == []


@pytest.mark.parametrize(
    ("false", "says"),
    [
        (row(115, "Starting"), "committed all the time"),
        (row(115, "Recovering"), "committed all the time"),
        (row(115, "Succeeded"), "nobody had finished"),
        (row(115, "Waiting"), "never too few"),
        (row(133, "Running", step=250, generation=2), "nobody committed"),
        (row(133, "Recovering", step=250, generation=2), "had ended"),
        (row(115, ready="1/2"), "the trace says 2 to 2"),
        (row(115, ready="2/3"), "the user asked for [2]"),
        (row(124, ready="2/2", generation=2), "the trace says 1 to 1"),
        (row(119, step=10), "lags behind"),
        (row(115, step=120), "not yet committed"),
        (row(124, ready="1/2", generation=1), "lags behind 2"),
        (row(115, generation=3), "nobody trains in it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_false_lines_are_caught(false: Row, says: str) -> None:
    assert any(says in problem for problem in judge(false, trained(kill_at=120.0), ASKED))


def test_a_job_without_a_state_is_late_after_two_seconds() -> None:
    blank = {"STATE": "", "READY": "", "STEP": "", "GENERATION": ""}
    assert judge(Row(101.0, 101.1, blank), trained(), ASKED) == []
    assert judge(Row(102.5, 102.6, blank), trained(), ASKED) == ["no state 2.5 s after the job was made"]
