"""Decide whether the newest generation has been adopted: status.membership.startStep and adopted, status.lineage. Pure.

The first `adopted` report sets startStep and lineage (rule MAD). It also says with which checkpoint of an earlier job this job has
begun (adr/0071). The last report ends the list of older generations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from regroup.protocol.state import Phase
from regroup_operator.api.status import MAX_LINEAGE, JobStatus, LineageEntry, ResumedFrom
from regroup_operator.model.ports import EventNote
from regroup_operator.model.records import AgentSession
from regroup_operator.model.worker import Current, Worker


@dataclass(frozen=True)
class Adoption:
    """`current`: the newest generation, with what is known now. `status`: the status with what the reports change."""

    current: Current | None
    status: JobStatus
    completed: bool = False
    """True if all members have adopted it now, and had not at the plan before."""
    notes: tuple[EventNote, ...] = ()


_SHA256 = re.compile(r"[0-9a-f]{64}")


def see_adoption(
    status: JobStatus,
    current: Current | None,
    members: Sequence[Worker],
    sessions: Iterable[AgentSession],
    resume_path: str | None = None,
) -> Adoption:
    """Return what the members' reports come to. `status`: without them; `sessions`: of all workers, for the newest step told;
    `resume_path`: of the checkpoint that the job is to begin with."""
    membership = status.membership
    if current is None or membership is None:
        return Adoption(current, status)
    reports = [
        w.session.adopted
        for w in members
        if w.session and w.session.adopted and w.session.adopted_generation == current.number
    ]
    notes: tuple[EventNote, ...] = ()
    if reports and membership.start_step is None:
        start, digest, resumed = reports[0].start_step, reports[0].imported, status.resumed_from
        if any(report.rolled_back for report in reports):
            notes = (_rolled_back(status, current.number, start, sessions),)
        if resume_path is not None and resumed is None and digest is not None and _SHA256.fullmatch(digest):
            resumed = ResumedFrom(path=resume_path, step=start, digest=digest)
        membership = membership.with_fields(start_step=start)
        lineage = [*status.lineage, LineageEntry(generation=current.number, start_step=start)]
        status = status.with_fields(membership=membership, lineage=lineage[-MAX_LINEAGE:], resumed_from=resumed)
    everyone = all(_has_adopted(w, current.number) for w in members)
    if current.adopted or membership.start_step is None or not everyone:
        return Adoption(current, status, notes=notes)
    status = status.with_fields(membership=membership.with_fields(adopted=True, older=[]))
    return Adoption(replace(current, adopted=True, older=(), attempts=0), status, completed=True, notes=notes)


def _rolled_back(status: JobStatus, number: int, start: int, sessions: Iterable[AgentSession]) -> EventNote:
    """Say where a generation continues that found nobody with the newest state, and what is known to be lost."""
    told = [s.progress.step for s in sessions if s.progress is not None]
    stored_step = (status.progress.step or 0) if status.progress is not None else 0
    newest = max([stored_step, *told])
    what = f"Generation {number} continues from step {start}: no worker holds a newer state any more."
    reason = "Resumed" if start >= newest > 0 else "RolledBack"
    return EventNote("Warning", reason, f"{what} The last step reported was {newest}.")


def _has_adopted(worker: Worker, generation: int) -> bool:
    """Return whether all processes of a member have adopted. The agent's file names what *one* of them has (rule MAD). As long as
    the worker forms, another process has not adopted, and may hang."""
    condition = worker.session.condition if worker.session else None
    if condition is None or condition.adopted < generation:
        return False
    forms = condition.phase in (Phase.FORMING, Phase.ARRIVED, Phase.ADOPTING)
    return not (forms and condition.generation == generation)
