"""Count generations in a row that broke before a step was committed. They come less and less often, and have an end. Pure.

A group of which all processes live on may break again and again before its first commit. One cause is a network that lets
connections come up and then loses data. Without a pause such a job would announce several generations a second for ever. A
generation that ends with a process, a pod or a node begins the count anew: those have budgets of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from regroup.protocol.document import FORCED
from regroup_operator.api.status import JobStatus
from regroup_operator.model.worker import Announce, Current, Standing, Worker

COLLECTIVE_FAILED = "CollectiveFailed"
"""Worker.why of a member whose group broke while its processes lived on; then the cause of an incident, too."""
MAX_IN_A_ROW = 20
"""Number of generations in a row that fail the job. With the pauses of retry.py the last one comes more than a minute after the
first."""
NO_COMMIT = "NoStepCommitted"
"""Reason of condition Failed."""

_ENDED = (Standing.LOST, Standing.DIED, Standing.HUNG)


def first_without_commit(status: JobStatus, newest_step: int | None) -> int | None:
    """Return the first of the generations in a row that began at the newest one's start step.

    None: a step was committed in the newest one, or no member has adopted it. Generations before a suspension do not count: people
    suspend a job to repair what stops it. `newest_step` is the newest step that the newest generation has reported (None: nothing
    yet).
    """
    membership = status.membership
    if membership is None or membership.start_step is None:
        return None
    if newest_step is not None and newest_step > membership.start_step:
        return None
    first = membership.generation
    for entry in reversed(status.lineage):
        if entry.start_step != membership.start_step or entry.generation < (membership.resumed_in or 0):
            break
        first = entry.generation
    return first


def broke_without_commit(
    current: Current | None, members: Sequence[Worker], *, start_step: int | None, newest_step: int | None
) -> bool:
    """Return whether all members adopted the newest generation, and it broke before a step was committed although every process
    lives on. Members say what they hold with their faults; reports of progress may be late."""
    if current is None or not current.adopted or start_step is None:
        return False
    if any(w.standing in _ENDED for w in members) or not _faults(members):
        return False
    seals = [w.session.seal for w in members if w.session is not None and w.session.seal is not None]
    newest = [seal.state.step for seal in seals if seal.state is not None and seal.state.generation == current.number]
    return max([*newest, newest_step or 0]) <= start_step


def count_after(count: int, announced: Announce, *, broke: bool) -> int:
    """Return the count once a generation is announced: `count` before it, `broke` of `broke_without_commit`."""
    if broke:
        return count + 1
    # A planned generation changes who is in it, which says nothing of why the ones before it broke.
    return 0 if announced.kind == FORCED else count


def no_commit_failure(count: int, members: Sequence[Worker]) -> str | None:
    """Return why the job has to fail, None if it has not to. `count`: generations in a row, the newest included."""
    if count < MAX_IN_A_ROW:
        return None
    said = next(iter(_faults(members)), "")
    return (
        f"{count} generations in a row committed no step, although no process ended: {said.rstrip('. ')}. "
        "Find out why connections between the workers' nodes end, then submit the job again."
    )


def _faults(members: Iterable[Worker]) -> list[str]:
    faults = [w.session.fault for w in members if w.session is not None and w.why == COLLECTIVE_FAILED]
    return [fault.message for fault in faults if fault is not None]
