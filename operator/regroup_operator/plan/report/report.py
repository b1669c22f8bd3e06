"""The stage of the report: the whole status, and the events that go with it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regroup.protocol.document import PLANNED
from regroup.protocol.wire import Prune
from regroup_operator.api.conditions import SUSPENDED
from regroup_operator.api.job import NOT_REPEATED, template_digest
from regroup_operator.api.status import MAX_INCIDENTS
from regroup_operator.model.plan import Tell, Urgency, earliest, seconds_of
from regroup_operator.model.ports import EventNote
from regroup_operator.model.worker import PLANNED_CAUSES, Announce
from regroup_operator.plan.facts.facts import Facts
from regroup_operator.plan.facts.set_up import set_up_due_s
from regroup_operator.plan.failures.failures import Failures
from regroup_operator.plan.failures.hangs import HUNG, stack_lines
from regroup_operator.plan.generation.generation import NextGeneration
from regroup_operator.plan.lifecycle.lifecycle import Active, Ended, Finishing, Lifecycle, Suspended, finished_of
from regroup_operator.plan.report.breakdown import breakdown, times_of
from regroup_operator.plan.report.counters import restarts_status
from regroup_operator.plan.report.goodput import goodput
from regroup_operator.plan.report.incidents import make_incident, with_rule, with_times
from regroup_operator.plan.report.overview import Stages, overview
from regroup_operator.plan.report.progress import checkpoint_status, progress_status
from regroup_operator.plan.report.seen import FIELD as OBSERVED_AT
from regroup_operator.plan.report.seen import seen_at, seen_due_s
from regroup_operator.plan.report.snapshots import snapshot_status
from regroup_operator.plan.report.urgency import urgency


@dataclass(frozen=True)
class Report:
    """`status`: the whole of it. `due_s`: when it changes although nothing happens."""

    status: dict[str, Any]
    urgency: Urgency
    notes: tuple[EventNote, ...]
    tell: tuple[Tell, ...]
    due_s: float | None


def make_report(stages: Stages) -> Report:
    """Return the status and the events of a plan."""
    facts, failures, lifecycle = stages.facts, stages.failures, stages.lifecycle
    generation, pods = stages.generation, stages.pods
    inputs, has_ended = facts.inputs, isinstance(lifecycle, Ended | Suspended)
    number = 0 if generation.document is None else generation.document.number
    status: dict[str, Any] = {**facts.updated, **generation.changed}
    status["released"] = pods.released
    status["roles"] = pods.roles.status
    status["restarts"] = restarts_status(
        facts.status.get("restarts"),
        processes=failures.processes,
        pods=pods.replaced,
        generations=int(number > 1),
        recent=failures.recent,
        ignored=failures.num_ignored,
        judged=failures.judged,
        exits=failures.exits,
    )
    status["incidents"] = _incidents(facts, failures, generation)
    if "startTime" in status and inputs.job.refusal is None:
        spec = inputs.job.raw["spec"]
        status["acceptedSpec"] = {name: value for name, value in spec.items() if name not in NOT_REPEATED}
        status["templateDigest"] = inputs.job.status.template_digest or template_digest(inputs.job.raw)
    if isinstance(lifecycle, Ended):
        status["completionTime"] = lifecycle.completed
        status["exitCode"] = None if lifecycle.why is None else lifecycle.why.exit_code
        status["failedPod"] = (lifecycle.why.pod or None) if lifecycle.why is not None else None
    finished = finished_of(lifecycle)
    if finished is not None:
        status["finished"], status["endTakenBack"] = finished.to_status(), None
    elif isinstance(lifecycle, Active | Suspended):
        # Another member has failed, or the job was suspended, and all run again.
        status["finished"] = None
        status["endTakenBack"] = None if facts.taken_back is None else facts.taken_back.to_status()
    if status.get("membership") and isinstance(lifecycle, Suspended | Finishing):
        # A member whose script has to run again after the suspension gets a pod that replaces none.
        rests = isinstance(lifecycle, Suspended) and (finished is None or bool(finished.open))
        rests |= bool(status["membership"].get("suspended") and pods.create)
        others = {key: value for key, value in status["membership"].items() if key != "suspended"}
        status["membership"] = others | ({"suspended": True} if rests else {})
    status.update(_progress(facts, generation, status))
    status["goodput"] = _goodput(facts, lifecycle, status)
    status = {key: value for key, value in status.items() if value is not None}
    part, notes = overview(stages, status)
    status.update(part, agentImage=inputs.agent_image)
    every_s = inputs.settings.progress_write_s
    status[OBSERVED_AT] = seen_at(status, facts.status, inputs.clock, ended=has_ended, every_s=every_s)
    seen_s = seen_due_s(status, inputs.clock, ended=has_ended, every_s=every_s)
    now_s, running = inputs.clock.now_s, [w.pod.running_since_s for w in generation.workers if w.pod and not w.session]
    dues_s = [at_s + inputs.settings.hello_timeout_s for at_s in running if at_s is not None]
    pods_of_job = (*(w.pod for w in generation.workers if w.pod), *inputs.obs.roles)
    dues_s += [due_s for pod in pods_of_job if (due_s := set_up_due_s(pod)) is not None]
    if seen_s is not None:
        # The time is of whole seconds: a plan up to one earlier would only find that no write is due.
        dues_s.append(max(seen_s, now_s) + 1.0)
    return Report(
        status=status,
        urgency=urgency(status, facts.status),
        notes=tuple(notes),
        tell=_prune(facts, generation, status),
        due_s=earliest(dues_s, after_s=now_s),
    )


def _incidents(facts: Facts, failures: Failures, generation: NextGeneration) -> list[dict[str, Any]] | None:
    """Return status.incidents: what the newest generation's members have measured since, and the one that is issued."""
    incidents, current, clock = list(facts.status.get("incidents", ())), facts.current, facts.inputs.clock
    if current is not None and incidents and incidents[-1]["generation"] == current.number:
        if facts.adoption.completed and facts.tier == "Script" and current.has_document:
            start_ms = round((clock.now_s - current.announced_at_s) * 1000, 1)
            incidents[-1] = {**incidents[-1], "startMs": start_ms}
        planned = current.kind == PLANNED
        persist_ms = facts.memory.issued.persist_ms
        incidents[-1] = with_times(incidents[-1], current.number, facts.members, persist_ms, planned=planned)
        if "rule" not in incidents[-1] and incidents[-1].get("cause") not in PLANNED_CAUSES:
            # A process is seen to have left before its agent has reaped it and can say how it ended.
            before = incidents[-2]["generation"] if len(incidents) > 1 else 1
            incidents[-1] = with_rule(incidents[-1], failures.judged, broken=range(before, current.number))
    document, decision = generation.document, generation.decision
    if document is not None and document.number > 1 and isinstance(decision, Announce):
        incident = make_incident(document.number, decision, generation.workers, clock)
        if current is not None and decision.cause not in PLANNED_CAUSES:
            incident = with_rule(incident, failures.judged, broken=range(current.number, current.number + 1))
        if decision.cause == HUNG and current is not None:
            incident["stacks"] = stack_lines(current, generation.workers, facts.processes)
        incidents = [*incidents, incident][-MAX_INCIDENTS:]
    return incidents or facts.status.get("incidents")


def _progress(facts: Facts, generation: NextGeneration, status: Mapping[str, Any]) -> dict[str, Any]:
    """Return progress, samples, memorySnapshot and checkpoint, as far as something is known of them. None: it is removed."""
    newest, current, spec = facts.newest, facts.current, facts.inputs.job.spec
    if newest is None or current is None:
        return {}
    clock = facts.inputs.clock
    step_time = breakdown(times_of(generation.members, newest.generation))
    changed: dict[str, Any] = {
        "progress": progress_status(newest, status.get("progress") or {}, clock, step_time),
        "samples": {"committed": newest.report.samples, "digest": newest.report.digest},
    }
    if spec.memory_snapshot is not None and newest.generation == current.number:
        changed["memorySnapshot"] = snapshot_status(newest)
    if spec.checkpoint is not None:
        checkpoint = checkpoint_status(
            newest,
            status.get("checkpoint"),
            current,
            has_started=status["membership"].get("startStep") is not None,
            finished=(status.get("finished") or {}).get("generation"),
            keep=spec.checkpoint.keep,
            clock=clock,
        )
        if checkpoint is not None:
            changed["checkpoint"] = checkpoint
    return changed


def _goodput(facts: Facts, lifecycle: Lifecycle, status: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return status.goodput. It changes with the progress only: a status is not written because time passes."""
    known, wall = status.get("goodput"), facts.inputs.clock.wall
    if isinstance(lifecycle, Suspended):
        return known
    said = next(
        (c for c in facts.status.get("conditions", ()) if c["type"] == SUSPENDED and c["status"] == "True"), None
    )
    if known is not None and said is not None:
        rested_s = max(0.0, wall - seconds_of(said["lastTransitionTime"]))
        known = {**known, "suspendedSeconds": round(known.get("suspendedSeconds", 0.0) + rested_s, 3)}
    same = status.get("progress") == facts.status.get("progress")
    if facts.newest is None or status.get("startTime") is None or same:
        return known
    resting_s = (known or {}).get("suspendedSeconds", 0.0)
    return goodput(
        known,
        newest_step=facts.newest.step,
        first_step=facts.start_step,
        step_s=facts.newest.report.step_s if facts.newest.report.step_s is not None else facts.newest.step_s,
        running_s=wall - seconds_of(status["startTime"]) - resting_s,
    )


def _prune(facts: Facts, generation: NextGeneration, status: Mapping[str, Any]) -> tuple[Tell, ...]:
    """Have one member delete the checkpoints that are kept no longer, once there is a newer one."""
    checkpoint = status.get("checkpoint")
    if checkpoint is None or checkpoint == facts.status.get("checkpoint"):
        return ()
    pruner = next((w.pod for w in generation.members if w.connected and w.pod), None)
    return () if pruner is None else (Tell(pruner.uid, Prune(tuple(checkpoint["kept"]))),)
