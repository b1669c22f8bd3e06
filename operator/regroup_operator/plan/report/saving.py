"""Judge whether the job's checkpoints reach their volume: condition CheckpointsSaved, and the sentence at the end. Pure.

The process that writes (rank 0's) never waits without a bound. Training and the end of the job go on without a checkpoint that
cannot be written. The job still succeeds then, for the reasons in docs/design/adr/0015-a-volume-that-does-not-answer.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from regroup.protocol.state import Busy
from regroup_operator.api.conditions import CHECKPOINTS_SAVED, INTERVAL_TOO_SHORT
from regroup_operator.api.status import CheckpointStatus
from regroup_operator.model.plan import JobCondition, Verdict
from regroup_operator.model.records import AgentSession, Settings
from regroup_operator.model.worker import Current, Worker

NOT_SAVED = "NotSaved"
WAITS_S = 10.0
"""A wait for a checkpoint is worth a condition after this long."""


def judge_saving(
    *,
    current: Current | None,
    workers: Sequence[Worker],
    checkpoint: CheckpointStatus | None,
    succeeded: bool,
    now_s: float,
    settings: Settings,
) -> JobCondition | None:
    """Return the condition, or None to leave what it was: the writer has not spoken in this generation.

    `checkpoint` is status.checkpoint: the newest that was saved. `succeeded`: the job ends now.
    """
    writer = min((w for w in workers if w.is_member), key=lambda w: w.id, default=None)
    session = writer.session if writer is not None else None
    if current is None or writer is None or session is None:
        return None
    said = session.progress.checkpoint_problem if session.progress is not None else None
    problem = said if session.progress_generation == current.number else None
    newest = "There is no checkpoint." if checkpoint is None else f"The newest checkpoint is of step {checkpoint.step}."
    if problem:
        text = f"Worker {writer.id}: {problem} {newest}"
        return JobCondition(
            CHECKPOINTS_SAVED,
            "False",
            NOT_SAVED,
            f"The last step is committed, but not saved. {text}" if succeeded else text,
        )
    most_s = _waits_s(session, now_s, settings)
    if most_s is not None and not succeeded:
        text = f"The job waits until worker {writer.id} has written a checkpoint, for {most_s:.0f} s at most. {newest}"
        return JobCondition(CHECKPOINTS_SAVED, "False", "Waiting", text)
    if problem is None:
        return None
    if checkpoint is None:
        return JobCondition(CHECKPOINTS_SAVED, "Unknown", "NoneYet", "No checkpoint has been written yet.")
    text = "Checkpoints are written; status.checkpoint names the newest."
    late = session.progress.checkpoints_late if session.progress is not None else None
    if late:
        return JobCondition(CHECKPOINTS_SAVED, "True", INTERVAL_TOO_SHORT, f"{text} {late}")
    return JobCondition(CHECKPOINTS_SAVED, "True", "Saved", text)


def with_way_on(verdict: Verdict, checkpoint: CheckpointStatus | None) -> Verdict:
    """Return why a job has failed, and how another one continues from its newest checkpoint. `checkpoint`: status.checkpoint."""
    if checkpoint is None:
        return verdict
    space = "\n" if "\n" in verdict.message else " "  # a traceback stands for itself
    return replace(verdict, message=f"{verdict.message}{space}{way_on(checkpoint)}")


def way_on(checkpoint: CheckpointStatus) -> str:
    """Return the sentence how a new job continues from a checkpoint."""
    return (
        f"A new job continues after step {checkpoint.step} with spec.checkpoint.resumeFrom: {checkpoint.directory}; "
        "without it, it begins at step 0."
    )


def _waits_s(session: AgentSession, now_s: float, settings: Settings) -> float | None:
    """Return how long the script may wait for a checkpoint in all, if it has done so for WAITS_S; else None."""
    for busy, since_s in zip(session.condition.busy, session.busy_since_s):
        if busy.kind == Busy.CHECKPOINT and now_s >= since_s + WAITS_S:
            return settings.checkpoint_s if busy.max_s is None else busy.max_s
    return None
