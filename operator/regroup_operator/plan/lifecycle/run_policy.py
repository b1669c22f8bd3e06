"""Deadlines for a job's run, its start and its end, and its expiry: spec.runPolicy. Pure.

Times are wall clock. They come from the API server (creation) and from the status (start, end, resumption), which outlive the
operator. A clock that is set wrong by a minute moves a deadline by a minute.
"""

from __future__ import annotations

from dataclasses import dataclass

from regroup_operator.api.conditions import SUSPENDED
from regroup_operator.api.spec import RunPolicy
from regroup_operator.api.status import JobStatus
from regroup_operator.model.plan import Clock, Verdict, seconds_of

DEADLINE_EXCEEDED = "DeadlineExceeded"
START_DEADLINE_EXCEEDED = "StartDeadlineExceeded"
FINISH_DEADLINE_EXCEEDED = "FinishDeadlineExceeded"


def resumed_at(status: JobStatus, now: float) -> float | None:
    """Return when a job that is not to be suspended was resumed last, in seconds since the epoch; None: it never was suspended.

    It is resumed `now` where the status still says that it is suspended: the plan that is being made will say that it was resumed.
    """
    said = status.condition(SUSPENDED)
    if said is None:
        return None
    return now if said.status == "True" else seconds_of(said.last_transition_time)


def has_begun(status: JobStatus) -> bool:
    """Return whether the job has trained since it was created, or resumed last: a generation was adopted."""
    membership = status.membership
    if membership is None or membership.suspended:
        return False
    return membership.adopted or any(e.generation >= (membership.resumed_in or 0) for e in status.lineage)


@dataclass(frozen=True)
class Start:
    """A job that has not begun to train."""

    created: str
    """Creation time of the object, RFC 3339."""
    ready: int
    """Workers that could train."""
    needed: int
    refusal: str = ""
    """The reason for which the job may not begin; empty: it may."""


def overdue(
    policy: RunPolicy,
    status: JobStatus,
    clock: Clock,
    *,
    start: Start | None = None,
    ended_at: str | None = None,
) -> tuple[Verdict | None, float | None]:
    """Return why the job has to end now, and when it would have to if nothing changes (monotonic).

    `start` is None once the job has begun to train. `ended_at` is the time of the last commit,
    RFC 3339. It is None if the job has steps to train, and once its scripts have returned.
    """
    resumed = resumed_at(status, clock.wall)
    bounds: list[tuple[float, Verdict]] = []
    started = status.start_time
    if policy.active_deadline_seconds is not None and started is not None:
        began = seconds_of(started) if resumed is None else max(resumed, seconds_of(started))
        bound_s = policy.active_deadline_seconds
        text = f"The job ran longer than spec.runPolicy.activeDeadlineSeconds ({bound_s}). Raise it and submit the job again."
        bounds.append((began + bound_s, Verdict(DEADLINE_EXCEEDED, text)))
    if policy.start_deadline_seconds is not None and start is not None:
        began = resumed if resumed is not None else seconds_of(start.created)
        bound_s = policy.start_deadline_seconds
        why = _why_not_begun(f"spec.runPolicy.startDeadlineSeconds ({bound_s})", start)
        bounds.append((began + bound_s, Verdict(START_DEADLINE_EXCEEDED, why)))
    if policy.finish_seconds is not None and ended_at is not None:
        began = seconds_of(ended_at) if resumed is None else max(resumed, seconds_of(ended_at))
        bound_s = policy.finish_seconds
        begun = "All steps are committed, and the script has not returned"
        if status.tier == "Script":  # it tells of no steps
            begun = "The script has returned in some workers, and not"
        text = (
            f"{begun} in every worker within spec.runPolicy.finishSeconds "
            f"({bound_s}). Raise it, or let the script do less after its loop."
        )
        bounds.append((began + bound_s, Verdict(FINISH_DEADLINE_EXCEEDED, text)))
    due = next((verdict for at, verdict in bounds if at <= clock.wall), None)
    return due, min((clock.at_s(at) for at, _ in bounds), default=None)


def _why_not_begun(bound: str, start: Start) -> str:
    if start.refusal:
        return f"The job could not begin within {bound}: {start.refusal}"
    if start.ready < start.needed:
        return (
            f"{start.ready} of the {start.needed} workers that the job needs were ready within {bound}. "
            "Its pods are given back. Look for capacity or quota, then submit the job again."
        )
    who = "1 worker was" if start.ready == 1 else f"{start.ready} workers were"
    return (
        f"{who} ready, and the job has not begun to train within {bound}. Its pods are given back. "
        "Read the trainers' logs, or raise the deadline, then submit the job again."
    )


def expiry_s(policy: RunPolicy, completed: str | None, clock: Clock) -> float | None:
    """Return when a job that has ended is deleted (monotonic); None: it stays."""
    if policy.ttl_seconds_after_finished is None or completed is None:
        return None
    return clock.at_s(seconds_of(completed) + policy.ttl_seconds_after_finished)
