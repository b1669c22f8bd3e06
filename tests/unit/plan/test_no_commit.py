"""Generations in a row that commit nothing: how many there are, and when they fail the job."""

from __future__ import annotations

from typing import Any

import pytest

from regroup.protocol.state import Phase
from regroup_operator.model.worker import Standing, Worker
from regroup_operator.plan.no_commit import MAX_IN_A_ROW, count_without_commit, no_commit_failure
from tests.builders.plan import make_fault, make_session, make_worker


def status(start: int | None, lineage: list[tuple[int, int]], causes: list[str] | None = None) -> dict[str, Any]:
    """Return a status whose newest generation is the last of `lineage`, which has (generation, start step)."""
    membership: dict[str, Any] = {"generation": lineage[-1][0]}
    if start is not None:
        membership["startStep"] = start
    return {
        "membership": membership,
        "lineage": [{"generation": generation, "startStep": step} for generation, step in lineage],
        "incidents": [{"generation": lineage[-1][0], "cause": cause} for cause in causes or ()],
    }


def broken(message: str) -> Worker:
    session = make_session(0, Phase.BROKEN, 1, fault=make_fault(message=message), fault_generation=1)
    return make_worker(0, Standing.BROKEN, session=session, why="CollectiveFailed")


@pytest.mark.parametrize(
    ("known", "step", "want"),
    [
        pytest.param(status(7, [(1, 0), (2, 7)]), None, 1, id="the newest, which has told of no step"),
        pytest.param(status(7, [(1, 0), (2, 7), (4, 7)]), 7, 2, id="and the one before it"),
        pytest.param(status(7, [(1, 0), (2, 7), (4, 7)]), 8, 0, id="a step was committed in the newest"),
        pytest.param(status(9, [(1, 7), (2, 7), (3, 9)]), None, 1, id="one before it committed"),
        pytest.param(status(None, [(1, 0), (2, 0)]), None, 0, id="the newest is not adopted"),
        pytest.param({}, None, 0, id="no generation"),
    ],
)
def test_how_many_there_are(known: dict[str, Any], step: int | None, want: int) -> None:
    assert count_without_commit(known, step) == want


LAST = [(number, 7) for number in range(1, MAX_IN_A_ROW + 1)]
BROKE = ["CollectiveFailed"] * 10


@pytest.mark.parametrize(
    ("known", "members", "fails"),
    [
        pytest.param(status(7, LAST, BROKE), [broken("Reset.")], True, id="the twentieth broke"),
        pytest.param(status(7, LAST[1:], BROKE), [broken("Reset.")], False, id="the nineteenth did"),
        pytest.param(status(7, LAST, BROKE), [make_worker(0)], False, id="the twentieth still stands"),
        pytest.param(status(7, LAST, [*BROKE, "PodDeleted"]), [broken("Reset.")], False, id="one ended with its pod"),
    ],
)
def test_when_they_fail_the_job(known: dict[str, Any], members: list[Worker], fails: bool) -> None:
    got = no_commit_failure(known, None, members)
    want = "20 generations in a row committed no step, although no process ended: Reset. Look for" if fails else None
    assert (got and got[: len(want or "")]) == want
