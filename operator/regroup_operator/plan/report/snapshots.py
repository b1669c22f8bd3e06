"""Say whether every worker keeps a snapshot of the state in memory: status.memorySnapshot and condition SnapshotsTaken. Pure.

What a snapshot is and when one is taken: docs/design/adr/0021-memory-snapshots.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from regroup_operator.api.conditions import INTERVAL_TOO_SHORT, SNAPSHOTS_TAKEN
from regroup_operator.api.status import MemorySnapshotStatus
from regroup_operator.model.plan import JobCondition
from regroup_operator.model.worker import Current, Worker
from regroup_operator.plan.facts.stalls import Reported

NOT_TAKEN = "NotTaken"


def snapshot_status(newest: Reported) -> MemorySnapshotStatus | None:
    """Return status.memorySnapshot, from a report of the newest generation; None: some worker has no snapshot."""
    step = newest.report.snapshot_step
    return None if step is None else MemorySnapshotStatus(step=step)


def judge_snapshots(*, current: Current | None, workers: Sequence[Worker], step: int | None) -> JobCondition | None:
    """Return the condition, or None to leave what it was: no member has spoken of snapshots in this generation.

    `step` is that of status.memorySnapshot.
    """
    if current is None:
        return None
    told = [
        (w, w.session.progress)
        for w in workers
        if w.is_member
        if w.session is not None and w.session.progress is not None and w.session.progress_generation == current.number
    ]
    said = [(w, progress.snapshot_problem) for w, progress in told]
    late_said = [progress.snapshots_late for _, progress in told]
    wrong = [f"Worker {w.id}: {problem}" for w, problem in said if problem]
    if wrong:
        more = f" ({len(wrong) - 1} more workers have none either.)" if len(wrong) > 1 else ""
        return JobCondition(SNAPSHOTS_TAKEN, "False", NOT_TAKEN, f"{wrong[0]}{more}")
    if all(problem is None for _, problem in said):
        return None
    if step is None:
        return JobCondition(
            SNAPSHOTS_TAKEN, "Unknown", "NoneYet", "Some worker has no snapshot of the state in memory yet."
        )
    text = "Every worker has a snapshot of the state in memory; status.memorySnapshot has its step."
    late = next((one for one in late_said if one), None)  # all copy after the same steps: the first one speaks for all
    if late:
        return JobCondition(SNAPSHOTS_TAKEN, "True", INTERVAL_TOO_SHORT, f"{text} {late}")
    return JobCondition(SNAPSHOTS_TAKEN, "True", "Taken", text)
