"""Decide how soon a changed status is written. Pure.

Each write is a request to the API server, and each pod of a job that starts changes a number in the status. So only what a decision
depends on is written at once. The rest is collected for as long as a reader may be shown an old value
(docs/design/adr/0060-few-writes-to-running.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regroup_operator.api.conditions import AGENTS_CONNECTED, PODS_READY
from regroup_operator.api.status import JobStatus
from regroup_operator.model.plan import JobMemory, Urgency
from regroup_operator.plan.report.conditions import PENDING, STARTING

SOON_S = 1.0
"""Greatest age of a number or the words of a condition in the status of a job that trains, or has trained."""
STARTING_S = 5.0
"""Greatest age of a number or the words of a condition in the status of a job that starts."""

_AGES_S = {Urgency.STARTING: STARTING_S, Urgency.SOON: SOON_S}

_PROGRESS = ("progress", "samples", "memory_snapshot", "observed_at", "replicas", "goodput")
"""`replicas` is what an autoscaler reads, every 15 s."""
_COUNTS = ("ready_replicas", "longest_start_seconds", "summary", "roles")
_OF_PODS = frozenset({PODS_READY, AGENTS_CONNECTED})
"""Conditions that only count what there is."""


def urgency(status: JobStatus, stored: JobStatus) -> Urgency:
    """Return how soon the status is written, by what differs from the stored one."""
    starts = all(s.phase in (PENDING, STARTING) for s in (status, stored))
    first = starts and not stored.lineage
    if _decisive(status, starts=starts, first=first) != _decisive(stored, starts=starts, first=first):
        return Urgency.NOW
    if status.lineage != stored.lineage:
        return Urgency.SOON
    if _shown(status) == _shown(stored):
        return Urgency.LATER
    return Urgency.STARTING if starts else Urgency.SOON


def differing(before: Mapping[Urgency, float], urgency: Urgency | None, now_s: float) -> dict[Urgency, float]:
    """Return JobMemory.differs_since_s of a status that is not written yet, and differs from the stored one by `urgency` (None: not
    at all). `before`: the same, as of the last plan."""
    return {level: before.get(level, now_s) for level in _AGES_S if urgency is not None and urgency >= level}


def write_due_s(urgency: Urgency, memory: JobMemory, *, now_s: float, progress_write_s: float) -> float:
    """Return when a status that differs from the stored one is written (monotonic); not after `now_s`: at once.

    `progress_write_s`: the time between two writes of progress alone.
    """
    if urgency == Urgency.NOW:
        return now_s
    if urgency == Urgency.LATER:
        return now_s if memory.written_s is None else memory.written_s + progress_write_s
    return min(since_s + _AGES_S[level] for level, since_s in memory.differs_since_s.items())


def _decisive(status: JobStatus, *, starts: bool, first: bool) -> tuple[object, ...]:
    """Return what a decision or an announcement depends on. `starts`: it is the status of a job that starts; `first`: and that
    has no lineage yet."""
    other: dict[str, Any] = dict.fromkeys((*_PROGRESS, *_COUNTS, "conditions", "incidents"))
    if status.finished is not None:  # who of thousands has returned is collected, and so told to stop
        other["finished"] = status.finished.with_fields(done="")
    if status.restarts is not None:  # an exit that counts changes its counts, too
        other["restarts"] = status.restarts.with_fields(exits=None)
    if starts:
        # Any operator reads Session from the agents' reports. Script is decided once, and cannot be seen later.
        other |= {"phase": None, "tier": None if status.tier == "Session" else status.tier}
    if first:
        other["lineage"] = None
        if status.membership is not None:
            other["membership"] = status.membership.with_fields(start_step=None)
    counted = _OF_PODS if starts else frozenset()
    conditions = [(c.type, c.status) for c in status.conditions if c.type not in counted]
    incidents = [(i.generation, i.cause, i.decision) for i in status.incidents]
    return status.with_fields(**other), conditions, incidents


def _shown(status: JobStatus) -> JobStatus:
    summary = None if status.summary is None else status.summary.with_fields(step="", progress="", loss="", eta="")
    return status.with_fields(**dict.fromkeys(_PROGRESS), summary=summary)
