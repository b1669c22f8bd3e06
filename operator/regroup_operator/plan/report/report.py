"""The stage of the report: the whole status, and the events that go with it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from regroup.protocol.document import PLANNED
from regroup.protocol.wire import Prune
from regroup_operator.api.conditions import SUSPENDED
from regroup_operator.api.job import NOT_REPEATED, template_digest
from regroup_operator.api.status import MAX_INCIDENTS, Goodput, Incident, JobStatus, Progress, RefusedSize, Samples
from regroup_operator.model.plan import Tell, Urgency, earliest, seconds_of
from regroup_operator.model.ports import EventNote
from regroup_operator.model.worker import PLANNED_CAUSES, Announce
from regroup_operator.plan.facts.facts import Facts
from regroup_operator.plan.facts.set_up import set_up_due_s
from regroup_operator.plan.facts.size import with_refusal
from regroup_operator.plan.failures.failures import Failures
from regroup_operator.plan.failures.hangs import HUNG, stack_lines
from regroup_operator.plan.generation.generation import NextGeneration
from regroup_operator.plan.lifecycle.lifecycle import Active, Ended, Finishing, Lifecycle, Suspended, finished_of
from regroup_operator.plan.report.breakdown import breakdown, times_of
from regroup_operator.plan.report.conditions import LONG_HELLOS
from regroup_operator.plan.report.counters import restarts_status
from regroup_operator.plan.report.curve import extended
from regroup_operator.plan.report.goodput import goodput
from regroup_operator.plan.report.incidents import make_incident, with_exit, with_rule, with_times
from regroup_operator.plan.report.overview import Stages, overview
from regroup_operator.plan.report.progress import checkpoint_status, progress_status, script_progress_status
from regroup_operator.plan.report.seen import seen_at, seen_due_s
from regroup_operator.plan.report.snapshots import snapshot_status
from regroup_operator.plan.report.urgency import urgency


@dataclass(frozen=True)
class Report:
    """`status`: the whole of it. `due_s`: when it changes although nothing happens."""

    status: JobStatus
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
    status = generation.status.with_fields(
        released=pods.released,
        roles=pods.roles.status,
        restarts=restarts_status(
            facts.status.restarts,
            processes=failures.processes,
            pods=pods.replaced,
            generations=int(number > 1),
            recent=failures.recent,
            ignored=failures.num_ignored,
            judged=failures.judged,
            exits=failures.exits,
        ),
        incidents=_incidents(facts, failures, generation),
        agent_image=inputs.agent_image,
        last_good_size=failures.size.good or None,
        refused_size=failures.size.refused or facts.size.refused or _judged(facts),
        refused_sizes=with_refusal(generation.status, failures.size.refused),
    )
    had_ended = isinstance(lifecycle, Ended) and lifecycle.had_ended
    if status.start_time is not None and inputs.job.refusal is None and not had_ended:
        spec = inputs.job.raw["spec"]
        status = status.with_fields(
            accepted_spec={name: value for name, value in spec.items() if name not in NOT_REPEATED},
            template_digest=status.template_digest or template_digest(inputs.job.raw),
        )
    if isinstance(lifecycle, Ended):
        why = lifecycle.why
        status = status.with_fields(
            completion_time=lifecycle.completed,
            exit_code=None if why is None else why.exit_code,
            failed_pod=None if why is None else why.pod or None,
        )
    finished = finished_of(lifecycle)
    if finished is not None:
        status = status.with_fields(finished=finished.to_status(), end_taken_back=None)
    elif isinstance(lifecycle, Active | Suspended):
        # Another member has failed, or the job was suspended, and all run again.
        status = status.with_fields(finished=None, end_taken_back=facts.taken_back)
    if status.membership is not None and isinstance(lifecycle, Suspended | Finishing):
        # A member whose script has to run again after the suspension gets a pod that replaces none.
        rests = isinstance(lifecycle, Suspended) and (finished is None or bool(finished.open))
        rests |= bool(status.membership.suspended and pods.create)
        status = status.with_fields(membership=status.membership.with_fields(suspended=rests or None))
    status = _with_progress(facts, generation, status)
    status = status.with_fields(goodput=_goodput(facts, lifecycle, status))
    status, notes = overview(stages, status)
    every_s = inputs.settings.progress_write_s
    seen = seen_at(status, facts.status, inputs.clock, ended=has_ended, every_s=every_s)
    status = status.with_fields(observed_at=seen)
    seen_s = seen_due_s(status, inputs.clock, ended=has_ended, every_s=every_s)
    now_s, running = inputs.clock.now_s, [w.pod.running_since_s for w in generation.workers if w.pod and not w.session]
    hello_s = inputs.settings.hello_timeout_s
    dues_s = [at_s + times * hello_s for at_s in running if at_s is not None for times in (1, LONG_HELLOS)]
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


def _incidents(facts: Facts, failures: Failures, generation: NextGeneration) -> list[Incident]:
    """Return status.incidents: what the newest generation's members have measured since, and the one that is issued."""
    incidents, current, clock = list(facts.status.incidents), facts.current, facts.inputs.clock
    if current is not None and incidents and incidents[-1].generation == current.number:
        if facts.adoption.completed and facts.tier == "Script" and current.has_document:
            start_ms = round((clock.now_s - current.announced_at_s) * 1000, 1)
            incidents[-1] = incidents[-1].with_fields(start_ms=start_ms)
        planned = current.kind == PLANNED
        persist_ms = facts.memory.issued.persist_ms
        incidents[-1] = with_times(incidents[-1], current.number, facts.members, persist_ms, planned=planned)
        # A process is seen to have left before its agent has reaped it and can say how it ended.
        before = incidents[-2].generation if len(incidents) > 1 else 1
        broken = range(before, current.number)
        incidents[-1] = with_exit(incidents[-1], generation.workers, broken=broken)
        if incidents[-1].rule is None and incidents[-1].cause not in PLANNED_CAUSES:
            incidents[-1] = with_rule(incidents[-1], failures.judged, broken=broken)
    document, decision = generation.document, generation.decision
    if document is not None and document.number > 1 and isinstance(decision, Announce):
        incident = make_incident(document.number, decision, generation.workers, clock)
        if current is not None:
            incident = incident.with_fields(workers_before=len(current.members))
        if current is not None and decision.cause not in PLANNED_CAUSES:
            incident = with_rule(incident, failures.judged, broken=range(current.number, current.number + 1))
        if decision.cause == HUNG and current is not None:
            incident = incident.with_fields(stacks=stack_lines(current, generation.workers, facts.processes))
        incidents = [*incidents, incident][-MAX_INCIDENTS:]
    return incidents


def _with_progress(facts: Facts, generation: NextGeneration, status: JobStatus) -> JobStatus:
    """Return the status with progress, samples, memorySnapshot and checkpoint, as far as something is known of them."""
    newest, current, spec = facts.newest, facts.current, facts.inputs.job.spec
    if facts.script is not None:
        said = script_progress_status(facts.script, status.progress, facts.inputs.clock)
        return status.with_fields(progress=_with_curve(said, status.start_time))
    if newest is None or current is None:
        return status
    clock = facts.inputs.clock
    step_time = breakdown(times_of(generation.members, newest.generation))
    status = status.with_fields(
        progress=_with_curve(progress_status(newest, status.progress, clock, step_time), status.start_time),
        samples=Samples(committed=newest.report.samples, digest=newest.report.digest),
    )
    if spec.memory_snapshot is not None and newest.generation == current.number:
        status = status.with_fields(memory_snapshot=snapshot_status(newest))
    if spec.checkpoint is not None:
        checkpoint = checkpoint_status(
            newest,
            status.checkpoint,
            current,
            has_started=status.membership is not None and status.membership.start_step is not None,
            finished=None if status.finished is None else status.finished.generation,
            keep=spec.checkpoint.keep,
            clock=clock,
        )
        if checkpoint is not None:
            status = status.with_fields(checkpoint=checkpoint)
    return status


def _with_curve(progress: Progress, start_time: str | None) -> Progress:
    """Return the progress with its curve. The time of a point is that of the report, so the same report makes the same curve."""
    step = progress.optimizer_steps if progress.step is None else progress.step
    if step is None or start_time is None or progress.at is None:
        return progress
    seconds = seconds_of(progress.at) - seconds_of(start_time)
    return progress.with_fields(curve=extended(progress.curve or (), step=step, seconds=seconds, loss=progress.loss))


def _goodput(facts: Facts, lifecycle: Lifecycle, status: JobStatus) -> Goodput | None:
    """Return status.goodput. It changes with the progress only: a status is not written because time passes."""
    stored, wall = status.goodput, facts.inputs.clock.wall
    if isinstance(lifecycle, Suspended):
        return stored
    said = facts.status.condition(SUSPENDED)
    if stored is not None and said is not None and said.status == "True":
        rested_s = max(0.0, wall - seconds_of(said.last_transition_time))
        stored = stored.with_fields(suspended_seconds=round(stored.suspended_seconds + rested_s, 3))
    if facts.newest is None or status.start_time is None or status.progress == facts.status.progress:
        return stored
    resting_s = 0.0 if stored is None else stored.suspended_seconds
    return goodput(
        stored,
        newest_step=facts.newest.step,
        first_step=facts.start_step,
        step_s=facts.newest.report.step_s if facts.newest.report.step_s is not None else facts.newest.step_s,
        running_s=wall - seconds_of(status.start_time) - resting_s,
    )


def _prune(facts: Facts, generation: NextGeneration, status: JobStatus) -> tuple[Tell, ...]:
    """Have one member delete the checkpoints that are kept no longer, once there is a newer one."""
    checkpoint = status.checkpoint
    if checkpoint is None or checkpoint == facts.status.checkpoint:
        return ()
    pruner = next((w.pod for w in generation.members if w.connected and w.pod), None)
    return () if pruner is None else (Tell(pruner.uid, Prune(tuple(checkpoint.kept))),)


def _judged(facts: Facts) -> RefusedSize | None:
    """Return the refusal of the newest generation's size after an edit has ended it. Without it the same failures, which the agents
    repeat, would be judged again."""
    refused, current = facts.inputs.job.status.refused_size, facts.current
    if refused is None or current is None or current.suspended or refused.generation != current.number:
        return None
    return refused
