"""Decide whether the newest generation has been adopted: status.membership.startStep and adopted, status.lineage. Pure.

The first `adopted` report sets startStep and lineage (rule MAD). It also says with which checkpoint of an earlier job this job has
begun (adr/0071). The last report ends the list of older generations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from regroup.protocol.state import Phase
from regroup_operator.api.status import MAX_LINEAGE
from regroup_operator.model.ports import EventNote
from regroup_operator.model.records import Session
from regroup_operator.model.worker import Current, Worker


@dataclass(frozen=True)
class Adoption:
    """`current`: the newest generation, with what is known now. `status`: the fields that change."""

    current: Current | None
    status: Mapping[str, Any] = field(default_factory=dict)
    completed: bool = False
    """True if all members have adopted it now, and had not at the plan before."""
    notes: tuple[EventNote, ...] = ()


_SHA256 = re.compile(r"[0-9a-f]{64}")


def see_adoption(
    status: Mapping[str, Any],
    current: Current | None,
    members: Sequence[Worker],
    sessions: Iterable[Session],
    resume_path: str | None = None,
) -> Adoption:
    """Return what the members' reports come to. `status`: as it is stored; `sessions`: of all workers, for the newest step told;
    `resume_path`: of the checkpoint that the job is to begin with."""
    membership = status.get("membership")
    if current is None or membership is None:
        return Adoption(current)
    reports = [
        w.session.adopted
        for w in members
        if w.session and w.session.adopted and w.session.adopted_generation == current.number
    ]
    changed: dict[str, Any] = {}
    notes: tuple[EventNote, ...] = ()
    if reports and membership.get("startStep") is None:
        start = reports[0].start_step
        membership = changed["membership"] = {**membership, "startStep": start}
        lineage = [*status.get("lineage", ()), {"generation": current.number, "startStep": start}]
        changed["lineage"] = lineage[-MAX_LINEAGE:]
        digest = reports[0].imported
        if resume_path is not None and "resumedFrom" not in status and digest is not None and _SHA256.fullmatch(digest):
            changed["resumedFrom"] = {"path": resume_path, "step": start, "digest": digest}
        if any(report.rolled_back for report in reports):
            notes = (_rolled_back(status, current.number, start, sessions),)
    everyone = all(_has_adopted(w, current.number) for w in members)
    if current.adopted or membership.get("startStep") is None or not everyone:
        return Adoption(current, changed, notes=notes)
    changed["membership"] = {**membership, "adopted": True, "older": []}
    return Adoption(replace(current, adopted=True, older=(), attempts=0), changed, completed=True, notes=notes)


def _rolled_back(status: Mapping[str, Any], number: int, start: int, sessions: Iterable[Session]) -> EventNote:
    """Say where a generation continues that found nobody with the newest state, and what is known to be lost."""
    told = [s.progress.step for s in sessions if s.progress is not None]
    newest = max([(status.get("progress") or {}).get("step", 0), *told])
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
