"""What is said of memory snapshots: status.memorySnapshot and condition SnapshotsTaken."""

from __future__ import annotations

import pytest

from regroup.protocol.state import Phase
from regroup.protocol.wire import Progress
from regroup_operator.model.worker import Worker
from regroup_operator.plan.facts.stalls import Reported
from regroup_operator.plan.report.snapshots import judge_snapshots, snapshot_status
from tests.builders.plan import make_current, make_session, make_worker

SMALL = "The memory snapshot needs 64 MiB. Raise it to at least 64Mi."


LATE = "Memory snapshots begin every 30 s, and spec.memorySnapshot.everySeconds is 2."


def member(slot: int, problem: str | None, *, generation: int = 1, late: str | None = "") -> Worker:
    progress = Progress(30, snapshot_problem=problem, snapshots_late=late)
    return make_worker(
        slot, session=make_session(slot, Phase.TRAINING, 1, progress=progress, progress_generation=generation)
    )


@pytest.mark.parametrize(
    ("workers", "step", "want"),
    [
        pytest.param([member(0, ""), member(1, "")], 20, ("True", "Taken"), id="every worker has one"),
        pytest.param([member(0, ""), member(1, "")], None, ("Unknown", "NoneYet"), id="one has none yet"),
        pytest.param([member(0, ""), member(1, SMALL)], 20, ("False", "NotTaken"), id="one cannot take any"),
        pytest.param([member(0, ""), member(1, "", late=LATE)], 20, ("True", "IntervalTooShort"), id="less often"),
        pytest.param(
            [member(0, "", late=LATE), member(1, SMALL)], 20, ("False", "NotTaken"), id="none at all comes first"
        ),
        pytest.param([member(0, None)], None, None, id="none has spoken of them"),
        pytest.param([member(0, SMALL, generation=0)], 20, None, id="said in an older generation"),
    ],
)
def test_what_is_said(workers: list[Worker], step: int | None, want: tuple[str, str] | None) -> None:
    got = judge_snapshots(current=make_current(range(len(workers))), workers=workers, step=step)
    assert (got and (got.status, got.reason)) == want


def test_sentence_names_a_worker_and_counts_the_others() -> None:
    workers = [member(0, SMALL), member(1, SMALL), member(2, SMALL)]
    got = judge_snapshots(current=make_current(range(3)), workers=workers, step=None)
    assert got is not None
    assert got.message == f"Worker 0: {SMALL} (2 more workers have none either.)"


def test_sentence_has_the_real_interval() -> None:
    got = judge_snapshots(current=make_current(range(1)), workers=[member(0, "", late=LATE)], step=20)
    assert got is not None
    assert got.message.endswith(f"status.memorySnapshot has its step. {LATE}")


@pytest.mark.parametrize("step", [20, None], ids=["every worker has it", "some worker has none"])
def test_status_is_what_every_worker_has(step: int | None) -> None:
    got = snapshot_status(Reported(1, 30, 100.0, Progress(30, snapshot_step=step), 100.0, None))
    assert (got and got.step) == step
