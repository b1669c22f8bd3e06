"""Decide how soon a changed status is written. Pure.

Each write is a request to the API server, and each pod of a job that starts changes a number in the status. So only what a decision
depends on is written at once. The rest is collected for as long as a reader may be shown an old value
(docs/design/adr/0060-few-writes-to-running.md).
"""

from __future__ import annotations

from collections.abc import Mapping

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


def differing(known: Mapping[Urgency, float], urgency: Urgency | None, now_s: float) -> dict[Urgency, float]:
    """Return JobMemory.differs_since_s of a status that is not written yet, and differs from the stored one by `urgency` (None: not
    at all). `known`: the same, as of the last plan."""
    return {level: known.get(level, now_s) for level in _AGES_S if urgency is not None and urgency >= level}


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
    kept = _without(status, *_PROGRESS, *_COUNTS)
    counted = _OF_PODS if starts else frozenset()
    conditions = [(c.type, c.status) for c in kept.conditions if c.type not in counted]
    incidents = [(i.generation, i.cause, i.decision) for i in kept.incidents]
    if kept.finished is not None:  # who of thousands has returned is collected, and so told to stop
        kept = kept.with_fields(finished=kept.finished.with_fields(done=""))
    if kept.restarts is not None:  # an exit that counts changes its counts, too
        kept = kept.with_fields(restarts=kept.restarts.with_fields(exits=None))
    if starts:
        # Any operator reads Session from the agents' reports. Script is decided once, and cannot be seen later.
        kept = kept.with_fields(phase=None, tier=None if kept.tier == "Session" else kept.tier)
    if first:
        kept = _without(kept, "lineage")
        if kept.membership is not None:
            kept = kept.with_fields(membership=kept.membership.with_fields(start_step=None))
    return _without(kept, "conditions", "incidents"), conditions, incidents


def _shown(status: JobStatus) -> JobStatus:
    summary = status.summary
    if summary is not None:
        summary = summary.with_fields(progress="", loss="", eta="")
    return _without(status, *_PROGRESS).with_fields(summary=summary)


def _without(status: JobStatus, *fields: str) -> JobStatus:
    """Return the status without some fields, to compare the rest."""
    return status.with_fields(**dict.fromkeys(fields))
