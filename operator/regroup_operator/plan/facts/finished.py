"""Read and write the end of a job's steps in the status: status.finished (rule END). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from regroup.protocol.state import Phase
from regroup_operator.api import status as written
from regroup_operator.api.members import MemberId, format_members, parse_members
from regroup_operator.model.worker import Current, Worker


@dataclass(frozen=True)
class Finished:
    """`members`: who has the places of the generation, in the order of their ranks. `done`: those of them whose script has
    returned 0 in every process."""

    generation: int
    members: tuple[MemberId, ...]
    step: int = 0
    """Number of the steps that were committed; 0 for a script."""
    done: frozenset[MemberId] = frozenset()
    at: str = ""
    """RFC 3339 time at which it was first seen."""

    @property
    def open(self) -> tuple[MemberId, ...]:
        """The members whose script has not returned 0 yet."""
        return tuple(member for member in self.members if member not in self.done)

    def to_status(self) -> written.Finished:
        """Return status.finished."""
        return written.Finished(
            generation=self.generation,
            workers=len(self.members),
            step=self.step,
            members=format_members(self.members, in_order=True),
            done=format_members(self.done),
            at=self.at,
        )


def read_finished(status: written.JobStatus) -> Finished | None:
    """Return what the status says, None: nothing."""
    stored = status.finished
    if stored is None:
        return None
    done = frozenset(parse_members(stored.done))
    return Finished(stored.generation, parse_members(stored.members), stored.step, done, stored.at)


def read_taken_back(
    status: written.JobStatus, current: Current | None, start_step: int | None
) -> written.EndTakenBack | None:
    """Return the end that counts for the deadline if no member is at its end now; None: there is none.

    It is the end that the status has, which is then taken back, or one that was taken back before. `start_step` is the step from
    which the newest generation, `current`, continued (None: not known yet).

    A script without the library tells of no steps. Each newer generation runs it from its beginning.
    """
    stored, before = status.finished, status.end_taken_back
    if stored is not None:
        return written.EndTakenBack(generation=stored.generation, step=stored.step, at=stored.at)
    if before is None or current is None:
        return None
    trains = current.number > before.generation and (
        before.step == 0 or (start_step is not None and start_step < before.step)
    )
    return None if trains else before


def says_done(worker: Worker, generation: int) -> bool:
    """Return whether a worker's agent says that its script has returned 0 after the last step of this generation."""
    condition = worker.session.condition if worker.session is not None else None
    return condition is not None and (condition.phase, condition.generation) == (Phase.DONE, generation)
