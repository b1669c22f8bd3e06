"""Measure how much of a job's time went into steps that count: status.goodput. Pure.

Each committed step is credited once, with the duration that its rank measured. Steps that are redone after a loss, waits for a
group, starts, checkpoints and hangs are the rest.

That is the runtime goodput of the literature: productive time over the time since the start. The time before the first generation
is not in it, since queues and image pulls are no fault of the job. Nor is the time for which the job was suspended. Scripts without
the library report no steps, and have none.
"""

from __future__ import annotations

from regroup_operator.api.status import Goodput


def goodput(
    stored: Goodput | None,
    *,
    newest_step: int,
    first_step: int | None,
    step_s: float | None,
    running_s: float,
) -> Goodput | None:
    """Return status.goodput; None: it is not known yet.

    `stored` is the value of the plan before. `newest_step` is the newest committed step. `first_step` is the step with which the
    job began: 0, or that of a checkpoint (None: not known). `step_s` is the duration of a step now, in seconds (None: not known).
    `running_s` is the seconds since the job's start, without those for which it was suspended.
    """
    counted = first_step if stored is None else stored.step
    if counted is None or running_s <= 0.0:
        return None
    productive_s = 0.0 if stored is None else stored.productive_seconds
    if step_s is not None and newest_step > counted:
        productive_s += (newest_step - counted) * step_s
        counted = newest_step
    productive_s = min(productive_s, running_s)
    return Goodput(
        percent=int(100 * productive_s / running_s),
        productive_seconds=round(productive_s, 3),
        step=counted,
        suspended_seconds=0.0 if stored is None else stored.suspended_seconds,
    )
