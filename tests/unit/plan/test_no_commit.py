"""Generations in a row that break before a step is committed: which count, and when they fail the job."""

from __future__ import annotations

from typing import Any

import pytest

from regroup.protocol.document import FORCED, PLANNED
from regroup.protocol.state import Phase
from regroup_operator.api import JobStatus
from regroup_operator.model.worker import Announce, Current, Standing, Worker
from regroup_operator.plan.failures.no_commit import (
    MAX_IN_A_ROW,
    broke_without_commit,
    count_after,
    first_without_commit,
    no_commit_failure,
)
from tests.builders.plan import make_current, make_fault, make_seal, make_session, make_status, make_worker


def status(start: int | None, lineage: list[tuple[int, int]], **given: Any) -> JobStatus:
    """Return a status whose newest generation is the last of `lineage`, which has (generation, start step). `given`: more of it."""
    membership: dict[str, Any] = {"generation": lineage[-1][0], **given}
    if start is not None:
        membership["startStep"] = start
    begun = [{"generation": generation, "startStep": step} for generation, step in lineage]
    return make_status({"membership": membership, "lineage": begun})


@pytest.mark.parametrize(
    ("known", "step", "want"),
    [
        pytest.param(status(7, [(1, 0), (2, 7)]), None, 2, id="the newest, which has told of no step"),
        pytest.param(status(7, [(1, 0), (2, 7), (4, 7)]), 7, 2, id="and the one before it"),
        pytest.param(status(7, [(1, 0), (2, 7), (4, 7)]), 8, None, id="a step was committed in the newest"),
        pytest.param(status(9, [(1, 7), (2, 7), (3, 9)]), None, 3, id="one before it committed"),
        pytest.param(
            status(7, [(1, 0), (2, 7), (4, 7), (5, 7)], resumedIn=4), 7, 4, id="the job was suspended before the fourth"
        ),
        pytest.param(status(None, [(1, 0), (2, 0)]), None, None, id="nobody has adopted the newest"),
        pytest.param(JobStatus(), None, None, id="no generation"),
    ],
)
def test_first_of_the_row(known: JobStatus, step: int | None, want: int | None) -> None:
    assert first_without_commit(known, step) == want


def broken(state: tuple[int, int] | None = (1, 7), message: str = "Reset.") -> Worker:
    """A member of generation 2, which began at step 7; it names the state that it holds."""
    seal = make_seal(2, state, adopted=2, state_adopted=2)
    session = make_session(0, Phase.BROKEN, 2, seal=seal, fault=make_fault(message=message), fault_generation=2)
    return make_worker(0, Standing.BROKEN, session=session, why="CollectiveFailed")


ADOPTED = make_current((0, 1), number=2)


@pytest.mark.parametrize(
    ("current", "members", "step", "want"),
    [
        pytest.param(ADOPTED, [broken()], None, True, id="its members hold the state that it began with"),
        pytest.param(ADOPTED, [broken((2, 8))], None, False, id="a step was committed, and not reported yet"),
        pytest.param(ADOPTED, [broken(None)], 8, False, id="a step was reported"),
        pytest.param(ADOPTED, [make_worker(0)], None, False, id="it still stands"),
        pytest.param(ADOPTED, [broken(), make_worker(1, Standing.DIED)], None, False, id="a process ended"),
        pytest.param(ADOPTED, [broken(), make_worker(1, Standing.LOST)], None, False, id="a worker is lost"),
        pytest.param(make_current((0, 1), number=2, adopted=False), [broken()], None, False, id="not all adopted it"),
        pytest.param(None, [], None, False, id="no generation"),
    ],
)
def test_which_count(current: Current | None, members: list[Worker], step: int | None, want: bool) -> None:
    assert broke_without_commit(current, members, start_step=7, newest_step=step) is want


@pytest.mark.parametrize(
    ("kind", "broke", "want"),
    [
        pytest.param(FORCED, True, 4, id="one more"),
        pytest.param(FORCED, False, 0, id="this one ended in another way, or has trained"),
        pytest.param(PLANNED, False, 3, id="a resize changes nothing"),
    ],
)
def test_count(kind: str, broke: bool, want: int) -> None:
    assert count_after(3, Announce(kind, (), "", ""), broke=broke) == want


def test_the_twentieth_fails_the_job() -> None:
    assert no_commit_failure(MAX_IN_A_ROW - 1, [broken()]) is None
    failure = no_commit_failure(MAX_IN_A_ROW, [broken()])
    assert failure is not None
    assert failure.startswith(
        "20 generations in a row committed no step, although no process ended: Reset. Find out why"
    )
