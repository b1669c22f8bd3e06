"""Say when the operator last looked: `status.observedAt`, kubectl's column Seen. Pure.

A status that nobody writes looks the same whether nothing happens or no operator is there. The operator's node may be cut off, or
the API server down. So each write carries its time, and tells a reader how old it is. A job with a generation is written again when
that time is `every_s` old, at the same low priority as progress.
"""

from __future__ import annotations

from regroup_operator.api.status import JobStatus
from regroup_operator.model.plan import Clock, seconds_of


def seen_at(status: JobStatus, stored: JobStatus, clock: Clock, *, ended: bool, every_s: float) -> str:
    """Return status.observedAt: the present time if anything else has changed or the stored time is due, else the stored time."""
    before = stored.observed_at
    if before is None or status.with_fields(observed_at=before) != stored:
        return clock.timestamp()
    due_s = seen_due_s(stored, clock, ended=ended, every_s=every_s)
    return clock.timestamp() if due_s is not None and due_s <= clock.now_s else before


def seen_due_s(status: JobStatus, clock: Clock, *, ended: bool, every_s: float) -> float | None:
    """Return when the time is written again although nothing has changed (monotonic); None: only after a change."""
    before = status.observed_at
    if before is None or ended or status.membership is None:
        return None
    due_s = clock.at_s(seconds_of(before)) + every_s
    return min(clock.now_s + every_s, due_s)  # a clock that was set back does not stop it
