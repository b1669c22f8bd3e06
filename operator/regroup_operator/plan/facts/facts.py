"""The facts that every stage of the plan reads: the newest generation, the standing of each worker, the progress. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median_low

from regroup.protocol import frameworks
from regroup_operator.api import Job, processes_per_worker, worker_digest
from regroup_operator.api.members import MemberId
from regroup_operator.api.status import EndTakenBack, JobStatus, Membership
from regroup_operator.model.plan import Clock, JobMemory, ProgressDue, Verdict, earliest
from regroup_operator.model.records import Observation, Pod, Settings
from regroup_operator.model.worker import Current, Standing, Worker
from regroup_operator.plan.facts.adoption import Adoption, see_adoption
from regroup_operator.plan.facts.current import SCRIPT_AFTER_S, corrected_slots, decide_tier, outdated, read_current
from regroup_operator.plan.facts.finished import Finished, read_finished, read_taken_back, says_done
from regroup_operator.plan.facts.losses import see_losses
from regroup_operator.plan.facts.observers import Silences, see_silences
from regroup_operator.plan.facts.peers import Peers, with_peers
from regroup_operator.plan.facts.roles import awaited, succeeded
from regroup_operator.plan.facts.script_words import ScriptWords, script_words
from regroup_operator.plan.facts.size import Size, decide_size, earlier_refusals, standing_refusal
from regroup_operator.plan.facts.stalls import FIRST_STALL_S, Reported, counted_generations, newest_progress
from regroup_operator.plan.facts.standing import GroupView, assess

UNADOPTED_S = 1.0
"""Agents are asked whether they are there once a generation is older than this and not adopted."""

SCRIPT_LOOK_S = 2.0
"""While a script's processes are not known to be one, they are looked at this often."""


@dataclass(frozen=True)
class Inputs:
    """The arguments of a plan."""

    job: Job
    obs: Observation
    memory: JobMemory
    clock: Clock
    settings: Settings
    fresh_uid: str
    """Names the next generation, if one is issued."""
    endpoint: str
    agent_image: str
    logs: str
    """The sentence that says how a worker's log is read."""
    refusal: Verdict | None = None
    """The obstacle that keeps the job from running as it is written: a verdict on its template, or something that cannot be made.
    """


@dataclass(frozen=True)
class Facts:
    """The job as it stands now, before anything is decided."""

    inputs: Inputs
    peers: Peers
    losses: Mapping[str, float]
    """Maps each lost member of the newest generation to the time since which it is lost (monotonic)."""
    tier: str | None
    processes: int
    """Number of processes of each worker."""
    released: frozenset[str]
    """Pod UIDs, with those of `outdated`."""
    outdated: tuple[str, ...]
    """Pod UIDs of workers that were made from an earlier spec, before the first generation."""
    adoption: Adoption
    workers: tuple[Worker, ...]
    newest: Reported | None
    silences: Silences
    """Members of which their observers hear nothing."""
    size: Size
    """Number of workers that the job has now: spec.replicas, or fewer while a growth waits."""
    finished: Finished | None
    """The end of the steps, as the status has it; None: there are steps to train."""
    script: ScriptWords | None = None
    """The words of an unmodified script on its progress; None: there are none, or the job has a session."""

    @property
    def memory(self) -> JobMemory:
        """The memory that the plan before has left."""
        return self.inputs.memory

    @property
    def status(self) -> JobStatus:
        """The status as it is stored."""
        return self.inputs.job.status

    @property
    def updated(self) -> JobStatus:
        """The status with what these facts change."""
        return self.adoption.status

    @property
    def awaited(self) -> dict[str, int]:
        """Maps each role that is required for completion to the number of its pods that have not succeeded."""
        job, roles = self.inputs.job, self.inputs.obs.roles
        return awaited(job, succeeded(job, roles))

    @property
    def lists_members(self) -> bool:
        """True if the framework of the job lists all members in each process."""
        return self.inputs.job.spec.framework in frameworks.LISTS_MEMBERS

    @property
    def slots(self) -> int:
        """Number of slots that have pods, those of spares included."""
        return self.size.replicas + self.inputs.job.spec.recovery.spares

    @property
    def taken_back(self) -> EndTakenBack | None:
        """The end that is taken back if no member is at its end now, or was taken back before; None: there is none."""
        return read_taken_back(self.status, self.current, self.start_step)

    @property
    def known_slots(self) -> int:
        """Number of slots that may have pods. While scripts come to their end, all members have one, whatever spec.replicas says
        now."""
        members = self.finished.members if self.finished is not None else ()
        return max(self.slots, *(member.slot + 1 for member in members), 0)

    @cached_property
    def corrected(self) -> frozenset[int]:
        """Slots whose newest pod was made from an earlier template. They are told apart before the first generation only: a row of
        failures begins anew there."""
        if self.current is not None:
            return frozenset()
        return corrected_slots(self.inputs.obs.pods, worker_digest(self.inputs.job))

    @cached_property
    def telling_pods(self) -> tuple[Pod, ...]:
        """The workers' pods whose failures count.

        A pod that was made from an earlier template, before the first generation, stays for its log. It says nothing of the
        template that there is now.
        """
        pods = self.inputs.obs.pods
        if self.current is not None:
            return pods
        digest = worker_digest(self.inputs.job)
        return tuple(p for p in pods if p.slot not in self.corrected and p.spec_digest in ("", digest))

    @property
    def ends_alone(self) -> bool:
        """True if one member can run its end again without the others. Its rank and the state of the last step are then all it
        needs."""
        return self.tier != "Script" and self.per_group == 1

    @property
    def current(self) -> Current | None:
        """The newest generation."""
        return self.adoption.current

    @property
    def per_group(self) -> int:
        """Workers of a group."""
        return self.inputs.job.spec.workers_per_group

    @property
    def members(self) -> tuple[Worker, ...]:
        """The newest generation's, as they stand before hangs are looked for."""
        return members_of(self.workers)

    @property
    def membership(self) -> Membership | None:
        """status.membership as of now."""
        return self.updated.membership

    @property
    def returned(self) -> frozenset[MemberId]:
        """Members of the newest generation whose script has returned 0, by the status or by what their agents say."""
        current = self.current
        if current is None:
            return frozenset()
        return _done(self.finished, current) | {w.id for w in self.members if says_done(w, current.number)}

    @property
    def start_step(self) -> int | None:
        """The step that the newest generation continued from, once that is known."""
        return None if self.membership is None else self.membership.start_step

    @property
    def newest_step(self) -> int | None:
        """The newest step that the newest generation has reported."""
        newest, current = self.newest, self.current
        return newest.step if newest and current and newest.generation == current.number else None

    @property
    def step_s(self) -> float:
        """Duration of a step by the newest reports; 0 before the first one.

        All ranks step together, so half of the reports may be wrong. The time between two reports may hold minutes in which an
        agent was stopped. Before the second report in an operator's term the processes' own measurement counts, because that report
        may take as long as a step does.
        """
        sessions = self.inputs.obs.sessions.values()
        durations = [s.step_s for s in sessions if s.step_s is not None]
        if not durations:
            measured = [p.step_s or p.longest_s for s in sessions if (p := s.progress) is not None]
            durations = [step_s for step_s in measured if step_s is not None]
        return median_low(durations) if durations else 0.0

    @property
    def stalled(self) -> bool:
        """True if steps are overdue in a generation that trains."""
        current = self.current
        if current is None or not current.adopted or self.tier != "Session":
            return False
        stalls_at_s = self.newest.stalls_at_s if self.newest is not None else current.announced_at_s + FIRST_STALL_S
        return self.inputs.clock.now_s >= stalls_at_s

    @property
    def asks(self) -> bool:
        """True if agents are asked whether they are there, because steps or an adoption are overdue."""
        current = self.current
        if self.stalled or current is None or current.adopted:
            return self.stalled
        return self.inputs.clock.now_s >= current.announced_at_s + UNADOPTED_S

    @property
    def due_s(self) -> float | None:
        """When these facts change whatever is reported: a script's processes have run long enough to be called one, agents are
        asked."""
        current, now_s = self.current, self.inputs.clock.now_s
        starting = [w.since_s for w in self.workers if w.standing == Standing.STARTING and self.tier is None]
        dues_s: list[float | None] = [max(since_s + SCRIPT_AFTER_S, now_s + SCRIPT_LOOK_S) for since_s in starting]
        if current is not None and not current.adopted:
            dues_s.append(current.announced_at_s + UNADOPTED_S)
        dues_s += [self.size.due_s, *self.silences.due_s(self.inputs.obs.sessions)]
        return earliest(dues_s, after_s=now_s)

    @property
    def progress_due(self) -> ProgressDue | None:
        """The time at which steps are overdue if no more progress is reported."""
        if self.newest is None or self.current is None or self.newest.stalls_at_s <= self.inputs.clock.now_s:
            return None
        return ProgressDue(self.newest.stalls_at_s, counted_generations(self.current))


def gather_facts(inputs: Inputs) -> Facts:
    """Return the facts. Before the first generation the pods of an earlier spec are released, and what kind of script they had is
    forgotten."""
    job, clock, status = inputs.job, inputs.clock, inputs.job.status
    memory, per_group = inputs.memory, job.spec.workers_per_group
    sessions, peers = with_peers(inputs.obs.sessions, memory.issued.document, memory.of_workers(lambda w: w.peer))
    inputs = replace(inputs, obs=replace(inputs.obs, sessions=sessions))
    obs = inputs.obs
    current = read_current(status, obs.pods, memory.issued, obs.term_started_s, per_group)
    released, earlier = frozenset(status.released), tuple[str, ...]()
    if current is None:
        earlier = tuple(uid for uid in outdated(obs.pods, worker_digest(job)) if uid not in released)
        if earlier:
            released |= set(earlier)
            status = status.with_fields(tier=None)
    on_torch = job.spec.framework in frameworks.ON_TORCH
    tier = decide_tier(
        status, [s for uid, s in sessions.items() if uid not in released], clock.now_s, on_torch=on_torch
    )
    processes = processes_per_worker(job)
    finished = read_finished(status)
    ids = frozenset(current.members) if current else frozenset()
    silences = see_silences(obs.pods, sessions, (pod for pod in obs.pods if pod.id in ids))
    view = GroupView(
        current=current,
        tier=tier,
        obs=obs,
        released=released,
        processes=processes,
        now_s=clock.now_s,
        disconnect_s=job.spec.recovery.disconnect_seconds,
        settings=inputs.settings,
        setbacks=memory.of_workers(lambda w: w.setback),
        unheard=silences.proven,
        done=_done(finished, current),
    )
    workers = assess(view)
    newest = newest_progress(sessions.values(), counted_generations(current)) if current else None
    losses = see_losses(memory.losses, members_of(workers), current, newest, status.progress, obs.term_started_s, clock)
    is_suspended = current is not None and current.suspended
    refused = standing_refusal(job, suspended=is_suspended)
    runs = current is not None and not is_suspended
    size = decide_size(job, status.growth, clock, runs=runs, refused=refused)
    status = status.with_fields(
        tier=tier,
        growth=size.growth,
        refused_size=refused,
        refused_sizes=earlier_refusals(job, suspended=is_suspended) or None,
    )
    checkpoint = job.spec.checkpoint
    resume_path = None if checkpoint is None else checkpoint.resume_path
    adoption = see_adoption(status, current, members_of(workers), sessions.values(), resume_path)
    return Facts(
        inputs=inputs,
        peers=peers,
        losses=losses,
        tier=tier,
        processes=processes,
        released=released,
        outdated=earlier,
        adoption=adoption,
        workers=workers,
        newest=newest,
        silences=silences,
        size=size,
        finished=finished,
        script=script_words(current, members_of(workers)) if tier != "Session" else None,
    )


def _done(finished: Finished | None, current: Current | None) -> frozenset[MemberId]:
    """Return the members of the newest generation whose script has returned 0, by the status."""
    if finished is None or current is None or finished.generation != current.number:
        return frozenset()
    return finished.done


def members_of(workers: Sequence[Worker]) -> tuple[Worker, ...]:
    """Return the members of the newest generation."""
    return tuple(w for w in workers if w.is_member)
