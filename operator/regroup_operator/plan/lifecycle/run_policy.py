"""How long a job may run, wait for its start, and stay after its end: spec.runPolicy. Pure.

Times are wall clock, since they come from the API server (creation) and from the status (start, end, resumption), which outlive the
operator. A clock that is set wrong by a minute moves a deadline by a minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regroup_operator.api.conditions import SUSPENDED
from regroup_operator.api.spec import RunPolicy
from regroup_operator.model.plan import Verdict, seconds_of

DEADLINE_EXCEEDED = "DeadlineExceeded"
START_DEADLINE_EXCEEDED = "StartDeadlineExceeded"


def resumed_at(status: Mapping[str, Any]) -> float | None:
    """Return when the job was resumed last, in seconds since the epoch; None: it never was suspended, or is."""
    said = next((c for c in status.get("conditions", ()) if c["type"] == SUSPENDED), None)
    return seconds_of(said["lastTransitionTime"]) if said is not None and said["reason"] == "Resumed" else None


def overdue(
    policy: RunPolicy,
    status: Mapping[str, Any],
    *,
    created: str | None,
    waits: bool,
    ready: int,
    needed: int,
    now: float,
) -> tuple[Verdict | None, float | None]:
    """Return why the job has to end now, and in how many seconds it would have to if nothing changes.

    `created`: the object's creationTimestamp; `waits`: it has not begun to train since it was created or resumed; `ready` of the
    `needed` workers could. `now` is seconds since the epoch.
    """
    resumed = resumed_at(status)
    bounds: list[tuple[float, Verdict]] = []
    start = status.get("startTime")
    if policy.active_deadline_seconds is not None and start is not None:
        began = resumed if resumed is not None else seconds_of(start)
        bound_s = policy.active_deadline_seconds
        text = f"The job ran longer than spec.runPolicy.activeDeadlineSeconds ({bound_s}). Raise it and submit the job again."
        bounds.append((began + bound_s, Verdict(DEADLINE_EXCEEDED, text)))
    if policy.start_deadline_seconds is not None and waits and created is not None:
        began = resumed if resumed is not None else seconds_of(created)
        bound_s = policy.start_deadline_seconds
        text = (
            f"{ready} of the {needed} workers that the job needs were ready within spec.runPolicy.startDeadlineSeconds "
            f"({bound_s}). Its pods are given back. Look for capacity or quota, then submit the job again."
        )
        bounds.append((began + bound_s, Verdict(START_DEADLINE_EXCEEDED, text)))
    due = next((verdict for at, verdict in bounds if at <= now), None)
    return due, min((at - now for at, _ in bounds), default=None)


def expires_in_s(policy: RunPolicy, completed: str | None, now: float) -> float | None:
    """Return in how many seconds a job that has ended is deleted, 0 or less: now; None: it stays."""
    if policy.ttl_seconds_after_finished is None or completed is None:
        return None
    return seconds_of(completed) + policy.ttl_seconds_after_finished - now
