"""The part of the status that people see: conditions, phase, columns, and the events that go with them. Pure; conditions.py has the
sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from regroup.protocol.state import Group
from regroup_operator.api import set_condition
from regroup_operator.api.conditions import (
    ACCEPTED,
    CHECKPOINTS_SAVED,
    COMPLETE,
    DEGRADED,
    PODS_READY,
    SNAPSHOTS_TAKEN,
    SUSPENDED,
    TRAINING,
    Condition,
)
from regroup_operator.api.job import NOT_REPEATED
from regroup_operator.api.launcher import ignored_options
from regroup_operator.api.names import selector
from regroup_operator.api.status import JobStatus
from regroup_operator.model.plan import JobCondition
from regroup_operator.model.ports import EventNote
from regroup_operator.model.worker import RESUMED, Decision, Standing, Wait, Worker
from regroup_operator.plan.facts.facts import Facts
from regroup_operator.plan.facts.finished import Finished
from regroup_operator.plan.facts.groups import spare_words, waiting_words
from regroup_operator.plan.facts.roles import awaited_words
from regroup_operator.plan.facts.saved import save_words, waits_for_save
from regroup_operator.plan.facts.stalls import is_unresponsive
from regroup_operator.plan.failures.failures import Failures
from regroup_operator.plan.failures.hangs import HUNG
from regroup_operator.plan.failures.on_exit import UNSCHEDULABLE
from regroup_operator.plan.failures.refused_size import refused_words
from regroup_operator.plan.generation.generation import NextGeneration, bounds_of
from regroup_operator.plan.lifecycle.lifecycle import (
    Active,
    Completing,
    Ended,
    Finishing,
    Lifecycle,
    Refused,
    Suspended,
    Suspending,
    finished_of,
)
from regroup_operator.plan.pods.pods import PodChanges
from regroup_operator.plan.pods.wanted import SLOW_STOP_S
from regroup_operator.plan.report.conditions import (
    COMPLETING,
    FAILED,
    FINISHING,
    ORDINARY,
    PASSING,
    SUCCEEDED,
    SUSPENDING,
    WAITING_FOR_ROLES,
    Course,
    Workforce,
    phase_of,
    summary,
    training_conditions,
    worker_conditions,
)
from regroup_operator.plan.report.conditions import SUSPENDED as PHASE_SUSPENDED
from regroup_operator.plan.report.incidents import missing_for_memory
from regroup_operator.plan.report.leaving import leaving_words
from regroup_operator.plan.report.saving import NOT_SAVED, judge_saving, way_on, with_way_on
from regroup_operator.plan.report.script_group import script_group
from regroup_operator.plan.report.snapshots import NOT_TAKEN, judge_snapshots


@dataclass(frozen=True)
class Stages:
    """Results of the stages of a plan."""

    facts: Facts
    failures: Failures
    lifecycle: Lifecycle
    generation: NextGeneration
    pods: PodChanges


def overview(stages: Stages, status: JobStatus) -> tuple[JobStatus, list[EventNote]]:
    """Return the status with the part that people read, and the events of what has changed in it. `status`: as planned without
    that part."""
    facts, lifecycle, generation, pods = stages.facts, stages.lifecycle, stages.generation, stages.pods
    job, clock = facts.inputs.job, facts.inputs.clock
    before = {c.type: c for c in facts.status.conditions}
    group = None
    if facts.tier == "Script":
        ran = _is_true(before.get(TRAINING))
        group = script_group(facts.current, generation.workers, ran=ran)
        # It trains, with or without a process group of torch. A pattern that is given up takes its words back, and it trains on.
        if facts.script is not None and (facts.script.goes_on or ran):
            group = Group.FORMED
    rest = _at_rest(lifecycle)
    phase = phase_of(
        current=facts.current,
        decision=generation.decision,
        workers=generation.workers,
        trained=_has_trained(status) and not _is_resumed(status),
        ended=rest,
        stalled=facts.stalled,
        group=group,
        before=facts.status.phase,
    )
    now = {
        **_accepted(facts, lifecycle, before),
        **_of_workers(facts, lifecycle, rest, generation, pods),
        **_of_saving(facts, lifecycle, generation, status, before),
    }
    now |= _suspended(facts, lifecycle, status, before)
    now |= _of_training(stages, status, phase, group, now.get(CHECKPOINTS_SAVED))
    if FAILED in now and COMPLETE in before:  # it waited for its roles
        now |= _by_type([JobCondition(COMPLETE, "False", FAILED, "The job has failed; see condition Failed.")])
    # Where all scripts run again, none of them is at its end.
    all_train = not rest or (isinstance(lifecycle, Suspended) and lifecycle.finished is None)
    dropped = {COMPLETE} - now.keys() if all_train else frozenset[str]()
    conditions = [one for one in facts.status.conditions if one.type not in dropped]
    for one in now.values():
        conditions = set_condition(conditions, one.type, one.status, one.reason, one.message,  # type: ignore[arg-type]
                                   clock.timestamp(), job.spec_generation)  # fmt: skip
    ready = 0 if rest else _num_ready(facts, generation.workers)
    shown = status.with_fields(
        conditions=conditions,
        observed_generation=job.spec_generation,
        phase=phase,
        replicas=_num_workers(facts),
        ready_replicas=ready,
        selector=selector(job.name),
        summary=summary(
            phase=phase,
            refused=lifecycle.why.reason if isinstance(lifecycle, Refused) else None,
            ready=ready,
            replicas=facts.size.wanted,
            progress=status.progress,
            samples=status.samples,
        ),
    )
    return shown, [*_notes(now, before), *_hang_notes(stages.failures, now, before)]


def _is_resumed(status: JobStatus) -> bool:
    """Return whether the job starts again after it was suspended: nothing has failed."""
    membership, newest = status.membership, status.incidents[-1] if status.incidents else None
    if membership is None:
        return False
    resumes = newest is not None and newest.cause == RESUMED and newest.generation == membership.generation
    return bool(membership.suspended) or (resumes and not membership.adopted)


def _has_trained(status: JobStatus) -> bool:
    membership = status.membership
    if membership is None:
        return False
    return membership.adopted or any(e.generation < membership.generation for e in status.lineage)


def _is_true(condition: Condition | None) -> bool:
    return condition is not None and condition.status == "True"


def _again(condition: Condition) -> JobCondition:
    """Return a condition as it was."""
    return JobCondition(condition.type, condition.status, condition.reason, condition.message)


def _by_type(conditions: Iterable[JobCondition]) -> dict[str, JobCondition]:
    return {one.type: one for one in conditions}


def _accepted(facts: Facts, lifecycle: Lifecycle, before: Mapping[str, Condition]) -> dict[str, JobCondition]:
    """Return whether the spec is what the job runs by, or could: a job that is suspended is judged, too. Once it has ended it is
    judged no longer."""
    if isinstance(lifecycle, Ended) and ACCEPTED in before:
        said, late = _again(before[ACCEPTED]), _changed_fields(facts)
        if said.status == "True":
            words = _runs_as_written(facts)
            if late:
                words = f"The job has ended, so the change of {', '.join(late)} has no effect. "
                words += "Submit it again under another name."
            said = JobCondition(ACCEPTED, "True", said.reason, words)
        return _by_type([said])
    why = facts.inputs.refusal
    if why is None:
        words = _runs_as_written(facts)
        return _by_type([JobCondition(ACCEPTED, "True", "Valid", words)])
    return _by_type([JobCondition(ACCEPTED, "False", why.reason or "InvalidSpec", why.message)])


def _runs_as_written(facts: Facts) -> str:
    return " ".join(filter(None, ("The job can run as written.", ignored_options(facts.inputs.job.raw["spec"]))))


def _changed_fields(facts: Facts) -> list[str]:
    """Return the fields of the spec that are not those with which the job ran last."""
    ran, spec = facts.status.accepted_spec, facts.inputs.job.raw["spec"]
    if ran is None:
        return []
    now = {name: value for name, value in spec.items() if name not in NOT_REPEATED}
    return [f"spec.{name}" for name in sorted(ran.keys() | now.keys()) if ran.get(name) != now.get(name)]


def _at_rest(lifecycle: Lifecycle) -> str | None:
    """Return the phase of a job that does not want to train, None: it does."""
    if isinstance(lifecycle, Ended):
        return SUCCEEDED if lifecycle.succeeded else FAILED
    if isinstance(lifecycle, Finishing) or (isinstance(lifecycle, Active) and lifecycle.finished is not None):
        return FINISHING
    if isinstance(lifecycle, Completing):
        return COMPLETING
    if isinstance(lifecycle, Suspending | Suspended):
        return SUSPENDING if isinstance(lifecycle, Suspending) else PHASE_SUSPENDED
    return None


def _suspended(
    facts: Facts, lifecycle: Lifecycle, status: JobStatus, before: Mapping[str, Condition]
) -> dict[str, JobCondition]:
    """Return whether the job is suspended, and from where it will continue; nothing where it never was."""
    if isinstance(lifecycle, Suspending):
        said = JobCondition(SUSPENDED, "False", SUSPENDING, _left_of(facts))
    elif isinstance(lifecycle, Suspended):
        said = JobCondition(SUSPENDED, "True", PHASE_SUSPENDED, _continues(facts, lifecycle.finished, status))
    elif SUSPENDED not in before:
        return {}
    elif isinstance(lifecycle, Ended):
        said = _again(before[SUSPENDED])
    else:
        said = JobCondition(SUSPENDED, "False", "Resumed", "The job was resumed.")
    return _by_type([said])


def _left_of(facts: Facts) -> str:
    """Return the sentence on what a job that is being suspended waits for.

    A pod on a node that is off, or cut off, is gone only once the API has it no more. Until then a process of the job may be alive
    there.
    """
    pods = [*sorted(facts.inputs.obs.pods, key=lambda pod: pod.id), *facts.inputs.obs.roles]
    lost = [pod.name for pod in pods if not pod.node_ready]
    if lost:
        what = f"Waiting for pods whose node is not ready ({_some(lost)})."
        return f"{what} Bring the nodes back, or delete the pods by force if they are off."
    now_s, told = facts.inputs.clock.now_s, {uid: s.told_stop_at_s for uid, s in facts.inputs.obs.sessions.items()}
    late = [
        pod.name
        for pod in pods
        if pod.usable and (at_s := told.get(pod.uid)) is not None and now_s >= at_s + SLOW_STOP_S
    ]
    if late:
        return (
            f"Waiting for pods whose processes have not stopped yet ({_some(late)}). They are deleted if they do not."
        )
    return "The workers stop after a step, and their pods are deleted."


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _continues(facts: Facts, finished: Finished | None, status: JobStatus) -> str:
    """Return from where a suspended job will continue."""
    if finished is not None:
        what = "the rest of its scripts runs" if finished.open else "the job waits for its roles"
        return f"No pod is left. All steps are committed; resumed, {what}."
    if status.membership is None:
        return "No pod is left. The job has not begun."
    if facts.tier == "Script":
        return "No pod is left. Resumed, the script starts again, and continues from what it has saved itself."
    if facts.inputs.job.spec.checkpoint is None:
        return "No pod is left, and spec.checkpoint is not set: resumed, the job begins anew."
    return "No pod is left. Resumed, the job continues from its newest checkpoint."


def _of_workers(
    facts: Facts, lifecycle: Lifecycle, rest: str | None, generation: NextGeneration, pods: PodChanges
) -> dict[str, JobCondition]:
    inputs = facts.inputs
    finished = finished_of(lifecycle) if rest == FINISHING else None

    def judge(ended: str | None) -> list[JobCondition]:
        wants = None if finished is None else frozenset(finished.open)
        return worker_conditions(
            Workforce(
                workers=[w for w in generation.workers if wants is None or w.id in wants],
                replicas=facts.size.wanted if wants is None else len(wants),
                spares=inputs.job.spec.recovery.spares if wants is None else 0,
                held="; ".join(filter(None, [facts.size.words if wants is None else "", pods.words])),
                failing=pods.failing,
                ended=ended,
                now_s=inputs.clock.now_s,
                settings=inputs.settings,
                endpoint=inputs.endpoint,
                refusals=inputs.obs.refusals,
            )
        )

    found = _by_type(judge(rest))
    if finished is not None:  # a script that has to run again may wait for a node, which nothing else would say
        found |= {one.type: one for one in judge(None) if one.status == "False" and one.reason not in PASSING}
    return found


def _of_saving(
    facts: Facts,
    lifecycle: Lifecycle,
    generation: NextGeneration,
    status: JobStatus,
    before: Mapping[str, Condition],
) -> dict[str, JobCondition]:
    """Return whether checkpoints are saved and snapshots taken. A condition stays as it was where nothing new is known, and once
    the job has ended or its workers have finished."""
    spec, judged = facts.inputs.job.spec, dict[str, JobCondition | None]()
    if spec.checkpoint is not None:
        judged[CHECKPOINTS_SAVED] = judge_saving(
            current=facts.current,
            workers=generation.workers,
            checkpoint=status.checkpoint,
            succeeded=finished_of(lifecycle) is not None or (isinstance(lifecycle, Ended) and lifecycle.succeeded),
            now_s=facts.inputs.clock.now_s,
            settings=facts.inputs.settings,
        )
    if spec.memory_snapshot is not None:
        step = None if status.memory_snapshot is None else status.memory_snapshot.step
        judged[SNAPSHOTS_TAKEN] = judge_snapshots(current=facts.current, workers=generation.workers, step=step)
    is_settled = (isinstance(lifecycle, Ended) and lifecycle.had_ended) or facts.status.finished is not None
    new = [one for one in judged.values() if one is not None and not is_settled]
    kept = [_again(before[kind]) for kind in (CHECKPOINTS_SAVED, SNAPSHOTS_TAKEN) if kind in before]
    return _by_type([*kept, *new])


def _of_training(
    stages: Stages, status: JobStatus, phase: str, group: str | None, saving: JobCondition | None
) -> dict[str, JobCondition]:
    """Return whether the job trains, and what is wrong. `group` says whether a script has formed its group (script_group.py);
    `saving` is the condition CheckpointsSaved."""
    facts, failures, lifecycle, generation = stages.facts, stages.failures, stages.lifecycle, stages.generation
    job, current, workers = facts.inputs.job, facts.current, generation.workers
    ended = lifecycle if isinstance(lifecycle, Ended) else None
    failure = ended.why if ended is not None and not ended.succeeded else None
    if failure is not None and ended is not None and not ended.had_ended:  # else it is said already
        failure = with_way_on(failure, status.checkpoint)
    unsaved = saving.message if saving is not None and saving.reason == NOT_SAVED else ""
    if unsaved and status.checkpoint is not None:
        unsaved = f"{unsaved} {way_on(status.checkpoint)}"
    return _by_type(
        training_conditions(
            Course(
                phase=phase,
                decision=generation.decision,
                current=current,
                replicas=facts.size.replicas,
                workers=workers,
                failure=failure,
                complete=ended.why if ended is not None and ended.succeeded else None,
                finished=ended.finished if ended is not None else finished_of(lifecycle),
                roles=_of_roles(facts, stages.pods, waits=ended is None),
                crash=failures.crash,
                ignored=failures.ignored,
                note=_refusal_note(generation.decision, workers),
                group=group,
                hang=failures.hang.message,
                leaving=leaving_words(
                    current,
                    workers,
                    generation.decision,
                    saves=job.spec.checkpoint is not None,
                    per_group=facts.per_group,
                ),
                spares=spare_words(current, workers, facts.per_group)
                or waiting_words(current, workers, bounds_of(facts)),
                size=_size_words(facts),
                growth=_growth_words(facts, generation),
                refused_size=_refused_size_words(facts),
                memory=missing_for_memory(status.incidents, current),
                unsaved=unsaved,
            )
        )
    )


def _growth_words(facts: Facts, generation: NextGeneration) -> str:
    """Return the sentence on workers that join after the script's next checkpoint; empty: there are none."""
    spec, workers, members = facts.inputs.job.spec, generation.workers, generation.members
    if spec.checkpoint is None or len(members) >= facts.size.replicas:
        return ""
    since_s = 0.0 if facts.current is None else facts.current.announced_at_s
    if not waits_for_save(spec.elastic_policy, facts.tier, members, facts.inputs.clock.now_s, since_s=since_s):
        return ""
    ready = sum(not w.is_member and w.available and not w.draining for w in workers)
    # Workers that are ready may be too few for the next permitted size.
    grows = bounds_of(facts).fitting(len(members) + ready) > len(members)
    return save_words(members, ready, spec.checkpoint.directory) if grows else ""


def _refused_size_words(facts: Facts) -> str:
    """Return the sentences on a size that the script refused; empty: the job trains with what it wants, or nothing was refused."""
    refused, current = facts.size.refused, facts.current
    if refused is None or (
        refused.size == refused.wanted and current is not None and len(current.members) >= refused.size
    ):
        return ""
    return refused_words(refused)


def _size_words(facts: Facts) -> str:
    """Return the sentence on a job that trains with fewer workers than spec.replicas by its sizes; empty: it does not."""
    job, wanted = facts.inputs.job, facts.size.wanted
    policy = job.spec.elastic_policy
    if policy is None or policy.permitted is None or wanted != job.wanted or wanted == job.spec.replicas:
        return ""
    field = "sizes" if policy.sizes is not None else "sizeMultipleOf"
    return f"{wanted} is the largest size of spec.elasticPolicy.{field} up to spec.replicas ({job.spec.replicas})."


def _of_roles(facts: Facts, pods: PodChanges, *, waits: bool) -> str:
    """Return which roles are required for completion; where the job `waits` for them, how far they are, and why a pod cannot
    start."""
    waited = facts.awaited
    if not waits:
        return ", ".join(f"role {name}" for name in waited)
    stuck = [one.message for one in pods.roles.status or () if one.awaited and one.message]
    return "; ".join([awaited_words(facts.inputs.job, waited), *stuck])


def _notes(now: Mapping[str, JobCondition], before: Mapping[str, Condition]) -> list[EventNote]:
    """Return an event for the end, for a refusal, for what is not saved, and for a pod that cannot start: each once."""
    notes = []
    for kind, event in ((COMPLETE, SUCCEEDED), (FAILED, FAILED)):
        if kind in now and now[kind].status == "True" and not _is_true(before.get(kind)):
            notes.append(EventNote("Normal" if kind == COMPLETE else "Warning", event, now[kind].message))
    for kind, lacks, event in (
        (ACCEPTED, "", ""),
        (CHECKPOINTS_SAVED, NOT_SAVED, "CheckpointNotSaved"),
        (SNAPSHOTS_TAKEN, NOT_TAKEN, "SnapshotNotTaken"),
    ):
        one = now.get(kind)
        wrong = one is not None and one.status == "False" and lacks in ("", one.reason)
        if one is not None and wrong and (kind not in before or before[kind].message != one.message):
            notes.append(EventNote("Warning", event or one.reason, one.message))
    was_complete = before[COMPLETE].reason if COMPLETE in before else ""
    if COMPLETE in now and now[COMPLETE].reason == WAITING_FOR_ROLES != was_complete:
        notes.append(EventNote("Normal", COMPLETING, now[COMPLETE].message))
    pods, was = now[PODS_READY], before.get(PODS_READY)
    # A kubelet's reasons follow each other again and again. That a pod has no node is another trouble than any of them.
    is_new = (
        was is None
        or was.status != "False"
        or was.reason in ORDINARY
        or (was.reason == UNSCHEDULABLE) != (pods.reason == UNSCHEDULABLE)
    )
    if pods.status == "False" and pods.reason not in ORDINARY and is_new:
        notes.append(EventNote("Warning", pods.reason, pods.message))
    return notes


def _hang_notes(
    failures: Failures, now: Mapping[str, JobCondition], before: Mapping[str, Condition]
) -> list[EventNote]:
    """Return an event for a script that stands still and that nobody restarts, once."""
    said, was = now.get(DEGRADED), before.get(DEGRADED)
    is_new = said is not None and (was is None or was.message != said.message)
    if not failures.hang.is_only_said or not is_new:
        return []
    return [EventNote("Warning", HUNG, failures.hang.message)]


def _num_workers(facts: Facts) -> int:
    """Return how many workers there are without the spares: an autoscaler takes them for the size of the job."""
    count = sum(p.usable for p in facts.inputs.obs.pods)
    return count - max(0, min(facts.inputs.job.spec.recovery.spares, count - facts.size.replicas))


def _num_ready(facts: Facts, workers: Sequence[Worker]) -> int:
    adopted, now_s = facts.current is not None and facts.current.adopted, facts.inputs.clock.now_s

    def is_ready(worker: Worker) -> bool:
        if worker.standing in (Standing.TRAINING, Standing.FINISHED) or (adopted and worker.has_yet_to_call):
            return True
        if not worker.available or worker.standing == Standing.SILENT:
            return False
        if facts.tier == "Script" or worker.is_member or worker.session is None:
            return True
        # Its observers may have found it lost before its stream ends.
        return not is_unresponsive(worker.session, now_s)

    return min(sum(is_ready(w) for w in workers if w.pod), facts.size.wanted)


def _refusal_note(decision: Decision | None, workers: Sequence[Worker]) -> str:
    if not isinstance(decision, Wait) or decision.reason not in ("NoWitness", "CheckpointUnreadable"):
        return ""
    faults = [w.session.fault for w in workers if w.is_member and w.session and w.session.fault]
    return next((f.message for f in faults if f.cause in ("witness", "checkpoint")), "")
