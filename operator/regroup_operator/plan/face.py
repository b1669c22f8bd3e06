"""What people see of a job: conditions, phase, columns, and the events that go with them. Pure; the words are status.py's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regroup_operator.api import Job, set_condition
from regroup_operator.api.names import selector
from regroup_operator.model.plan import Clock, Memory, Said, Verdict
from regroup_operator.model.ports import EventNote
from regroup_operator.model.records import Observation, Settings
from regroup_operator.model.worker import Current, Decision, Standing, Wait, Worker
from regroup_operator.plan.incidents import missing_for_memory
from regroup_operator.plan.saving import CHECKPOINTS_SAVED, NOT_SAVED
from regroup_operator.plan.script_group import script_group
from regroup_operator.plan.snapshots import NOT_TAKEN, SNAPSHOTS_TAKEN
from regroup_operator.plan.status import (
    FAILED,
    ORDINARY,
    RUNNING,
    SUCCEEDED,
    phase_of,
    summary,
    training_conditions,
    worker_conditions,
)


@dataclass(frozen=True)
class View:
    """What the face is made from: one plan's findings."""

    job: Job
    obs: Observation
    memory: Memory
    clock: Clock
    settings: Settings
    endpoint: str
    workers: Sequence[Worker]
    current: Current | None
    decision: Decision | None
    ended: str | None
    """Succeeded, Failed, or None."""
    failure: Verdict | None
    """What fails the job now."""
    crash: str
    """What is said of a crash that repeats; empty: none does."""
    stalled: bool
    """Steps are overdue."""
    hang: str = ""
    """What is known of a hang."""
    leaving: str = ""
    """Who is asked to leave and still needed."""
    spares: str = ""
    """Who is ready and has no whole group."""
    finished: tuple[int, int] | None = None
    """Number and members of the generation whose end has just ended the job."""
    saving: Said | None = None
    """Whether checkpoints are saved; None: as it was."""
    taking: Said | None = None
    """Whether memory snapshots are taken; None: as it was."""


def face(view: View, status: Mapping[str, Any]) -> tuple[dict[str, Any], list[EventNote]]:
    """Return the part of the status that people read, and the events of what has changed in it. `status`: the rest, as planned."""
    replicas, before = view.job.spec.replicas, list(status.get("conditions", ()))
    ran = view.job.status.phase == RUNNING
    group = script_group(view.current, view.workers, ran=ran) if status.get("tier") == "Script" else None
    phase = phase_of(
        current=view.current,
        decision=view.decision,
        workers=view.workers,
        trained=_has_trained(status),
        ended=view.ended,
        stalled=view.stalled,
        group=group,
    )
    said = _said(view, phase, before, group, status.get("incidents", ()))
    conditions: list[dict[str, Any]] = before
    for one in said:
        conditions = set_condition(conditions, one.type, one.status, one.reason, one.message,  # type: ignore[arg-type]
                                   view.clock.timestamp(), view.job.spec_generation)  # fmt: skip
    ready = 0 if view.ended else _ready(view)
    part = {
        "conditions": conditions,
        "observedGeneration": view.job.spec_generation,
        "phase": phase,
        "replicas": sum(p.usable for p in view.obs.pods),
        "readyReplicas": ready,
        "selector": selector(view.job.name),
        "summary": summary(
            phase=phase,
            refused=said[0].reason if view.memory.refusal else None,
            ready=ready,
            replicas=replicas,
            progress=status.get("progress") or {},
            samples=status.get("samples") or {},
        ),
    }
    return part, _notes(view, said, before)


def is_urgent(status: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    """Return whether anything but progress differs from what is stored."""

    def skeleton(status: Mapping[str, Any]) -> dict[str, Any]:
        kept = {k: v for k, v in status.items() if k not in ("progress", "samples", "memorySnapshot", "observedAt")}
        kept["summary"] = {k: v for k, v in (status.get("summary") or {}).items() if k in ("state", "ready")}
        return kept

    return skeleton(status) != skeleton(stored)


def _has_trained(status: Mapping[str, Any]) -> bool:
    membership = status.get("membership") or {}
    earlier = any(e["generation"] < membership.get("generation", 0) for e in status.get("lineage", ()))
    return earlier or bool(membership.get("adopted"))


def _said(
    view: View,
    phase: str,
    before: Sequence[Mapping[str, Any]],
    group: str | None,
    incidents: Sequence[Mapping[str, Any]],
) -> list[Said]:
    """Return all conditions, Accepted first. `before`: as they were."""
    memory = view.memory
    saving = _kept(CHECKPOINTS_SAVED, view.saving, view, before)
    taking = _kept(SNAPSHOTS_TAKEN, view.taking, view, before)
    accepted = Said("Accepted", "True", "Valid", "The job can run as written.")
    if memory.refusal is not None:
        accepted = Said("Accepted", "False", memory.refusal_reason or "InvalidSpec", memory.refusal)
    return [
        accepted,
        *worker_conditions(
            workers=view.workers,
            replicas=view.job.spec.replicas,
            ended=view.ended is not None,
            now_s=view.clock.now_s,
            settings=view.settings,
            endpoint=view.endpoint,
            refusals=view.obs.refusals,
        ),
        *(one for one in (saving, taking) if one is not None),
        *training_conditions(
            phase=phase,
            decision=view.decision,
            current=view.current,
            replicas=view.job.spec.replicas,
            workers=view.workers,
            # What failed it stays: others of its processes may end a moment later.
            failure=_said_before("Failed", before) or view.failure,
            complete=_said_before("Complete", before),
            finished=view.finished,
            crash=view.crash,
            note=_refusal_note(view),
            group=group,
            hang=view.hang,
            leaving=view.leaving,
            spares=view.spares,
            memory=missing_for_memory(incidents, view.current),
            unsaved=saving.message if saving is not None and saving.reason == NOT_SAVED else "",
        ),
    ]


def _said_before(kind: str, before: Sequence[Mapping[str, Any]]) -> Verdict | None:
    """Return reason and message of a condition that is True already."""
    known = next((c for c in before if c["type"] == kind and c["status"] == "True"), None)
    return None if known is None else Verdict(known["reason"], known["message"])


def _kept(kind: str, judged: Said | None, view: View, before: Sequence[Mapping[str, Any]]) -> Said | None:
    """Return a condition that stays as it was where nothing new is known, and once the job has ended."""
    if judged is not None and view.job.status.phase not in (SUCCEEDED, FAILED):
        return judged
    known = next((c for c in before if c["type"] == kind), None)
    return None if known is None else Said(kind, known["status"], known["reason"], known["message"])


def _notes(view: View, said: Sequence[Said], before: Sequence[Mapping[str, Any]]) -> list[EventNote]:
    """Return an event for the end, for a refusal, and for a pod that cannot start: each once."""
    known = {c["type"]: c for c in before}
    notes = []
    if view.ended and view.job.status.phase != view.ended:
        notes.append(EventNote("Normal" if view.ended == SUCCEEDED else "Warning", view.ended, said[-1].message))
    accepted, pods = said[0], said[1]
    if accepted.status == "False" and known.get("Accepted", {}).get("message") != accepted.message:
        notes.append(EventNote("Warning", accepted.reason, accepted.message))
    for reason, event in ((NOT_SAVED, "CheckpointNotSaved"), (NOT_TAKEN, "SnapshotNotTaken")):
        lacking = next((s for s in said if s.reason == reason), None)
        if lacking is not None and known.get(lacking.type, {}).get("message") != lacking.message:
            notes.append(EventNote("Warning", event, lacking.message))
    was = known.get(pods.type, {"status": "Unknown", "reason": ""})
    was_stuck = was["status"] == "False" and was["reason"] not in ORDINARY
    if pods.status == "False" and pods.reason not in ORDINARY and not was_stuck:
        notes.append(EventNote("Warning", pods.reason, pods.message))
    return notes


def _ready(view: View) -> int:
    adopted = view.current is not None and view.current.adopted
    ready = sum(
        (w.available and w.standing != Standing.SILENT)
        or w.standing in (Standing.TRAINING, Standing.FINISHED)
        or (adopted and w.expected)
        for w in view.workers
        if w.pod
    )
    return min(ready, view.job.spec.replicas)


def _refusal_note(view: View) -> str:
    if not isinstance(view.decision, Wait) or view.decision.reason not in ("NoWitness", "CheckpointUnreadable"):
        return ""
    faults = [w.session.fault for w in view.workers if w.is_member and w.session and w.session.fault]
    return next((f.message for f in faults if f.cause in ("witness", "checkpoint")), "")
