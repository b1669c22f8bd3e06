"""The stage of pods: which are made, released and deleted, and what of it counts as a restart. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from regroup_operator.api.members import MemberId
from regroup_operator.api.spec import RunPolicy
from regroup_operator.model.plan import CreateWorker, Verdict, earliest, seconds_of
from regroup_operator.model.pod_row import PodRow
from regroup_operator.model.ports import EventNote
from regroup_operator.model.records import Pod
from regroup_operator.model.worker import Standing
from regroup_operator.plan.facts.current import named_members
from regroup_operator.plan.facts.facts import Facts
from regroup_operator.plan.failures.exits import avoided_nodes, count_created
from regroup_operator.plan.failures.failures import Failures
from regroup_operator.plan.generation.generation import NextGeneration, bounds_of
from regroup_operator.plan.lifecycle.lifecycle import Active, Completing, Ended, Finishing, Lifecycle, Suspending
from regroup_operator.plan.pods.capacity import Capacity, Demand, judge_capacity, put_off
from regroup_operator.plan.pods.early import disrupted_words, early_words, held_until, note_early, surplus
from regroup_operator.plan.pods.finishing import plan_finishing
from regroup_operator.plan.pods.notices import Notices, judge_notices, with_tainted
from regroup_operator.plan.pods.roles import NO_ROLES, RoleChanges, plan_roles
from regroup_operator.plan.pods.wanted import LOGS_S, Roster, WorkerChanges, plan_ended, plan_workers

TEMPLATE_WORDS = "none is made from a template that is not the one of the start (see condition Accepted)"


@dataclass(frozen=True)
class PodChanges:
    """`released`: status.released."""

    rows: PodRows
    noticed: frozenset[str]
    """Pod UIDs of workers that are asked to leave by a notice."""
    created: frozenset[MemberId]
    """Pods that are asked for and counted, and not seen yet."""
    create: tuple[CreateWorker, ...]
    delete: tuple[Pod, ...]
    released: list[str]
    replaced: Mapping[str, int]
    """Number of pods to make that replace a lost one and were not counted yet, by the cause of the loss."""
    due_s: float | None = None
    words: str = ""
    """The reason for which pods are made later; empty: none is."""
    failing: Verdict | None = None
    """The reason for which pods fail again and again before they run; None: they do not."""
    notes: tuple[EventNote, ...] = ()
    roles: RoleChanges = NO_ROLES
    """Its pods to delete are in `delete`, too."""


@dataclass(frozen=True)
class PodRows:
    """Pods in a row that failed before they ran, were evicted or preempted, or found no room, by slot. The next ones are made
    later."""

    early: Mapping[int, PodRow]
    disrupted: Mapping[int, PodRow]
    capacity: Capacity
    lost: Mapping[str, int]
    """Slots of workers that cannot be reached, by pod UID. Their pods have a node, and are no use to the job."""
    reached: Sequence[Pod]
    """The pods of the others."""

    @cached_property
    def held(self) -> dict[int, float]:
        """Time until which no pod is made, by slot."""
        times_s = held_until(self.early), held_until(self.disrupted), self.capacity.held or {}
        return {slot: max(some[slot] for some in times_s if slot in some) for slot in set().union(*times_s)}

    @property
    def counted(self) -> list[MemberId]:
        """The newest pod of each row."""
        rows = (self.early, self.disrupted, self.capacity.rows)
        return [MemberId(slot, row.attempt) for some in rows for slot, row in some.items()]


def plan_pods(facts: Facts, failures: Failures, lifecycle: Lifecycle, generation: NextGeneration) -> PodChanges:
    """Return the changes. Before the first generation a pod that is made anew counts as no restart."""
    inputs, memory, current, pods = facts.inputs, facts.memory, facts.current, facts.inputs.obs.pods
    rows = _note_rows(facts, failures, lifecycle, generation)
    early, disrupted, capacity = rows.early, rows.disrupted, rows.capacity
    notices = Notices(frozenset())
    later: frozenset[int] = frozenset()
    if isinstance(lifecycle, Active):
        notices = judge_notices(generation.workers, memory.of_workers(lambda w: w.is_noticed or None), facts.released)
        later = _put_off(facts, generation, rows)
    changes = _worker_changes(facts, failures, lifecycle, generation, rows, later)
    delete = (*changes.delete, *(pod for pod in changes.release if not pod.terminating))
    going, clears = {pod.uid for pod in delete}, _clears(lifecycle, inputs.job.spec.run_policy)
    if isinstance(lifecycle, Active | Finishing):
        delete += surplus(pods, going)
    elif clears:
        delete += tuple(p for p in pods if not p.alive and not p.terminating and p.uid not in going)
    roles = plan_roles(
        job=inputs.job,
        pods=inputs.obs.roles,
        rows=memory.roles,
        active=isinstance(lifecycle, Active | Finishing | Completing),
        cleans=clears,
        clock=inputs.clock,
    )
    create, words = changes.create, capacity.words
    if later:
        words = words or f"the others are made once {bounds_of(facts).minimum} workers in whole groups have a node"
    if inputs.job.template_changed:
        create, words, roles = (), TEMPLATE_WORDS, replace(roles, create=())
    replaced, created = count_created(
        [MemberId(c.slot, c.attempt) for c in create],
        pods,
        counted=memory.created,
        disrupted=failures.rows.disrupted,
        released=facts.released,
        members=current.members if current is not None and not current.suspended else (),
        leaving={w.uid for w in generation.workers if w.draining and w.connected},
    )
    return PodChanges(
        rows=rows,
        noticed=notices.noticed,
        created=created,
        create=create,
        delete=(*delete, *roles.delete),
        released=_released(facts, (pod.uid for pod in changes.release)),
        replaced=replaced if generation.status.membership else {},
        due_s=earliest(
            (changes.due_s, capacity.due_s, roles.due_s, failures.size.held_until_s), after_s=inputs.clock.now_s
        ),
        words=words,
        failing=early_words(early, pods, inputs.clock)
        or disrupted_words(disrupted, pods, inputs.clock, facts.known_slots),
        notes=(*notices.notes, *capacity.notes, *roles.notes),
        roles=roles,
    )


def _note_rows(facts: Facts, failures: Failures, lifecycle: Lifecycle, generation: NextGeneration) -> PodRows:
    """Note which pods failed or found no room. A suspended job begins anew, and so does a slot whose template was corrected before
    the start."""
    inputs, memory = facts.inputs, facts.memory
    early, disrupted = dict[int, PodRow](), dict[int, PodRow]()
    if isinstance(lifecycle, Active | Finishing):  # it may need pods
        failed_slots = _without(memory.of_slots(lambda s: s.failed), facts.corrected)
        early = note_early(failed_slots, facts.telling_pods, inputs.clock.now_s, slots=facts.known_slots)
        disrupted = _without(failures.rows.disrupted, facts.corrected)
    lost = {w.uid: w.id.slot for w in generation.workers if w.pod is not None and w.standing == Standing.LOST}
    unreached = lost.keys() | generation.abandoned
    reached = [pod for pod in inputs.obs.pods if pod.uid not in unreached]
    capacity = judge_capacity(
        policy=inputs.job.spec.elastic_policy if isinstance(lifecycle, Active) else None,
        pods=reached,
        released=facts.released,
        demand=Demand(facts.slots, bounds_of(facts).minimum, facts.per_group),
        unplaced=memory.of_workers(lambda w: w.unplaced_s),
        rows=memory.of_slots(lambda s: s.given_back),
        clock=inputs.clock,
    )
    return PodRows(early, disrupted, capacity, lost, reached)


def _put_off(facts: Facts, generation: NextGeneration, rows: PodRows) -> frozenset[int]:
    """Return the slots of which no pod is made before others have a node. Nor is one made where a pod that cannot be reached is
    still waited for."""
    held = [slot for slot, until_s in rows.held.items() if until_s > facts.inputs.clock.now_s]
    return put_off(
        rows.reached,
        facts.released,
        held + [slot for uid, slot in rows.lost.items() if uid not in generation.abandoned],
        slots=facts.slots,
        per_group=facts.per_group,
        minimum=bounds_of(facts).minimum,
    )


def _worker_changes(
    facts: Facts,
    failures: Failures,
    lifecycle: Lifecycle,
    generation: NextGeneration,
    rows: PodRows,
    later: frozenset[int],
) -> WorkerChanges:
    """Return the changes to the workers' pods, by what becomes of the job."""
    inputs, obs, current = facts.inputs, facts.inputs.obs, facts.current
    bad_nodes = avoided_nodes(failures.seen.nodes, inputs.clock.now_s, inputs.job.spec.recovery.window_seconds)
    named = named_members(generation.status)
    roster = Roster(
        workers=generation.workers,
        released=facts.released,
        named=[*named, *(lifecycle.finished.members if isinstance(lifecycle, Finishing) else ())],
        counted=rows.counted,
        bad_nodes=with_tainted(bad_nodes, obs.pods, facts.known_slots),
        held=rows.held,
        now_s=inputs.clock.now_s,
        hello_timeout_s=inputs.settings.hello_timeout_s,
        term_began_s=max(obs.term_started_s, obs.admitted_by_s),
        blip_s=inputs.settings.late_timeout_s,
    )
    if isinstance(lifecycle, Finishing):
        return plan_finishing(roster, lifecycle.finished, lifecycle.finished.done if facts.ends_alone else frozenset())
    if not isinstance(lifecycle, Active):
        return plan_ended(roster, _read_until_s(facts, lifecycle))
    return plan_workers(
        roster,
        slots=facts.slots,
        # Who waits outside may be the last to hold the job's state.
        settled=generation.document is None and (current is None or (current.adopted and generation.stands)),
        on_trial=_holds(facts, failures),
        abandoned=generation.abandoned,
        given_back=rows.capacity.given_back,
        unmade=later | _idle_slots(facts, lifecycle),
        unsure=frozenset().union(*generation.kept.links) | generation.kept.setbacks.keys(),
    )


def _holds(facts: Facts, failures: Failures) -> bool:
    """Return whether workers that are not needed keep their pods, because the script may refuse the smaller size."""
    until_s = failures.size.held_until_s
    return until_s is not None and facts.inputs.clock.now_s < until_s


def _read_until_s(facts: Facts, lifecycle: Lifecycle) -> dict[str, float]:
    """Return by UID until when the pod whose log a failure's message points to is kept, monotonic."""
    if not isinstance(lifecycle, Ended) or lifecycle.succeeded or lifecycle.why is None:
        return {}
    if facts.inputs.job.spec.run_policy.clean_pod_policy != "None":
        return {}
    until_s = facts.inputs.clock.at_s(seconds_of(lifecycle.completed)) + LOGS_S
    return {pod.uid: until_s for pod in facts.inputs.obs.pods if pod.name == lifecycle.why.pod}


def _idle_slots(facts: Facts, lifecycle: Active) -> frozenset[int]:
    """Return the slots for which no script runs any more while others still do (Script tier). They need no pod unless another
    one fails."""
    if lifecycle.finished is None:
        return frozenset()
    return frozenset(range(facts.known_slots)) - {member.slot for member in lifecycle.finished.open}


def _without(rows: Mapping[int, PodRow], slots: Collection[int]) -> dict[int, PodRow]:
    return {slot: row for slot, row in rows.items() if slot not in slots}


def _clears(lifecycle: Lifecycle, policy: RunPolicy) -> bool:
    """Return whether pods that have ended are deleted, too."""
    return isinstance(lifecycle, Suspending) or (isinstance(lifecycle, Ended) and policy.clean_pod_policy == "All")


def _released(facts: Facts, uids: Iterable[str]) -> list[str]:
    """Return who is released, without those whose pods are gone: a UID never comes back."""
    released = [*facts.status.released, *facts.outdated, *uids]
    there = {pod.uid for pod in facts.inputs.obs.pods}
    return [uid for uid in released if uid in there]
