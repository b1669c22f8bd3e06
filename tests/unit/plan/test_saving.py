"""What is said of checkpoints that are written, waited for, or cannot be written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from regroup.protocol.state import Busy, Phase
from regroup.protocol.wire import Progress
from regroup_operator.api.status import CheckpointStatus
from regroup_operator.model.plan import JobCondition, Verdict
from regroup_operator.model.records import Settings
from regroup_operator.model.worker import Worker
from regroup_operator.plan.report.saving import WAITS_S, judge_saving, with_way_on
from tests.builders.plan import make_current, make_session, make_worker

NOW_S = 5000.0
HANGS = "Writing checkpoint step-30.g1-a has taken more than 300 s: the volume of /data does not answer."
SAVED = CheckpointStatus(generation=1, step=20, directory="step-20.g1-a")


LATE = "Checkpoints begin every 40 s, and spec.checkpoint.everySeconds is 10: writing one has taken 38 s."


def member(
    slot: int, problem: str | None, *, generation: int = 1, waits_s: float | None = None, late: str | None = ""
) -> Worker:
    """Return a member that said this of its checkpoints, and has waited for one for so long."""
    session = make_session(
        slot,
        Phase.TRAINING,
        1,
        progress=Progress(30, checkpoint_problem=problem, checkpoints_late=late),
        progress_generation=generation,
    )
    if waits_s is not None:
        busy = (Busy(Busy.CHECKPOINT, max_s=600.0),)
        session = replace(session, condition=replace(session.condition, busy=busy), busy_since_s=(NOW_S - waits_s,))
    return make_worker(slot, session=session)


def judge(
    *workers: Worker, checkpoint: CheckpointStatus | None = SAVED, succeeded: bool = False
) -> JobCondition | None:
    return judge_saving(
        current=make_current(range(len(workers))),
        workers=workers,
        checkpoint=checkpoint,
        succeeded=succeeded,
        now_s=NOW_S,
        settings=Settings(),
    )


@pytest.mark.parametrize(
    ("workers", "checkpoint", "want"),
    [
        pytest.param([member(0, "")], SAVED, ("True", "Saved"), id="nothing is wrong"),
        pytest.param([member(0, "")], None, ("Unknown", "NoneYet"), id="none was due yet"),
        pytest.param([member(0, "", late=LATE)], SAVED, ("True", "IntervalTooShort"), id="less often than asked for"),
        pytest.param([member(0, HANGS, late=LATE)], SAVED, ("False", "NotSaved"), id="not at all comes before seldom"),
        pytest.param([member(0, None, late=LATE)], SAVED, None, id="who writes nothing has no say in that"),
        pytest.param([member(0, HANGS)], SAVED, ("False", "NotSaved"), id="the volume does not answer"),
        pytest.param([member(0, ""), member(1, HANGS)], SAVED, ("True", "Saved"), id="who wrote before has no say"),
        pytest.param([member(0, HANGS, generation=0)], SAVED, None, id="of an older generation: nothing is known"),
        pytest.param([member(0, None)], SAVED, None, id="the writer has said nothing: nothing is known"),
        pytest.param([member(0, "", waits_s=WAITS_S)], SAVED, ("False", "Waiting"), id="the script waits for its last"),
        pytest.param([member(0, "", waits_s=WAITS_S - 1)], SAVED, ("True", "Saved"), id="not for long yet"),
        pytest.param([member(0, HANGS, waits_s=WAITS_S)], SAVED, ("False", "NotSaved"), id="a reason before a wait"),
    ],
)
def test_what_is_said(workers: list[Worker], checkpoint: CheckpointStatus | None, want: tuple[str, str] | None) -> None:
    saving = judge(*workers, checkpoint=checkpoint)
    assert (saving and (saving.status, saving.reason)) == want


def test_sentences_name_worker_volume_time_and_what_is_saved() -> None:
    saving = judge(member(0, HANGS))
    assert saving is not None
    assert saving.message == f"Worker 0: {HANGS} The newest checkpoint is of step 20."
    saving = judge(member(0, "", waits_s=60), checkpoint=None)
    assert saving is not None
    assert saving.message == (
        "The job waits until worker 0 has written a checkpoint, for 600 s at most. There is no checkpoint."
    )


def test_end_without_the_last_checkpoint_says_that_it_is_not_saved() -> None:
    saving = judge(member(0, HANGS), succeeded=True)
    assert saving is not None
    assert saving.message.startswith("The last step is committed, but not saved. Worker 0: ")


@pytest.mark.parametrize(
    ("message", "checkpoint", "want"),
    [
        ("Too long.", None, "Too long."),
        (
            "Too long.",
            SAVED,
            "Too long. A new job continues after step 20 with spec.checkpoint.resumeFrom: step-20.g1-a; ",
        ),
        ("Crash:\n  a.py", SAVED, "Crash:\n  a.py\nA new job continues after step 20"),
    ],
    ids=["no checkpoint", "a checkpoint", "a traceback"],
)
def test_failed_job_says_how_another_one_continues(
    message: str, checkpoint: CheckpointStatus | None, want: str
) -> None:
    said = with_way_on(Verdict("Any", message), checkpoint)
    assert said.reason == "Any"
    assert said.message.startswith(want)
