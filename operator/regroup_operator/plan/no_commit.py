"""Count generations in a row in which no step was committed: they come less and less often, and have an end. Pure.

A group of which all processes live on may break again and again before its first commit, for example where a network lets
connections come up and then loses data. Without a pause such a job would announce a generation several times a second for
ever. Generations that ended with a process, a pod or a node do not count for the end: those have budgets of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from regroup_operator.model.worker import Worker

COLLECTIVE_FAILED = "CollectiveFailed"
"""Worker.why of a member whose group broke while its processes lived on; then the cause of an incident, too."""
MAX_IN_A_ROW = 20
"""With the pauses of membership.py this is more than a minute after the first."""
NO_COMMIT = "NoStepCommitted"
"""Reason of condition Failed."""


def first_without_commit(status: Mapping[str, Any], newest_step: int | None) -> int | None:
    """Return the first of the generations in a row, up to the newest, that all members adopted and in which no step was
    committed; None: the newest has committed, or was not adopted.

    `newest_step` is the newest that the newest generation has reported; None: nothing yet.
    """
    start = (status.get("membership") or {}).get("startStep")
    if start is None or (newest_step is not None and newest_step > start):
        return None
    first: int = status["membership"]["generation"]
    for entry in reversed(status.get("lineage", ())):
        if entry["startStep"] != start:
            break
        first = entry["generation"]
    return first


def count_without_commit(status: Mapping[str, Any], newest_step: int | None) -> int:
    """Return how many such generations there are, the newest included."""
    first = first_without_commit(status, newest_step)
    return 0 if first is None else sum(entry["generation"] >= first for entry in status.get("lineage", ()))


def no_commit_failure(status: Mapping[str, Any], newest_step: int | None, members: Iterable[Worker]) -> str | None:
    """Return why the job has to fail, None if it has not to."""
    first, count = first_without_commit(status, newest_step), count_without_commit(status, newest_step)
    incidents = status.get("incidents", ())
    if first is None or count < MAX_IN_A_ROW or not all(i.get("cause") == COLLECTIVE_FAILED for i in incidents):
        return None
    faults = [w.session.fault for w in members if w.session is not None and w.why == COLLECTIVE_FAILED]
    said = next((fault.message for fault in faults if fault is not None), None)
    if said is None:  # the newest still stands
        return None
    return (
        f"{count} generations in a row committed no step, although no process ended: {said.rstrip('. ')}. "
        "Look for what ends connections between the workers' nodes, then submit the job again. "
        "A job of another UID does not read this one's checkpoints."
    )
