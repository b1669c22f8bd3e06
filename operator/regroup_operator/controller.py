"""The controller: observe -> plan -> act for one job, through the ports of model/ports.py.

It decides nothing (plan/ does) and knows neither Kubernetes nor HTTP. What it owns is the ORDER of writes:

1. The status is written by compare-and-swap on the resourceVersion that the plan was made from (rule PERSIST). On a conflict
   nothing else happens: read again, plan again.
2. Only then is a generation announced, a worker told to stop (rule RELEASE: its UID stands in status.released by now).
3. Only then are pods deleted and created, beside the plan (maker.py).

A CR event, a pod event, an agent's report, a due deadline: all only lead here.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from regroup_operator.api import ConflictError, Job, JobStatus, SpecError, UnavailableError
from regroup_operator.background import Background
from regroup_operator.decision_log import DecisionLog, has_decided
from regroup_operator.endpoint.registry import Registry
from regroup_operator.maker import TOLD_AFTER, Maker
from regroup_operator.model.bucket import TokenBucket
from regroup_operator.model.pace import write_every_s
from regroup_operator.model.plan import Clock, JobMemory, JobPlan, ProgressDue, Urgency, Verdict
from regroup_operator.model.ports import EventNote, JobStore, Recorder, Workers
from regroup_operator.model.records import Key, Observation, Pod, Settings
from regroup_operator.plan.commands import stop_leaving
from regroup_operator.plan.facts.facts import Inputs
from regroup_operator.plan.facts.stalls import newest_progress
from regroup_operator.plan.failures.restarts import KUBECTL_LOGS
from regroup_operator.plan.job import plan_job
from regroup_operator.plan.report.urgency import differing, write_due_s

logger = logging.getLogger(__name__)

CONFLICTS = 5
"""Plans in a row that may lose the race for the status before the work queue's back-off takes over."""
UNANSWERED = 5
"""Plans of one job that are kept while the answer to their write is not known."""
LEADS_AGAIN_S = 1.0
"""A renewal may be answered after its deadline and before the process has ended: then it leads on, and its jobs are looked at."""
REST, LEAST_REST_S, MAX_REST_S = 2.0, 0.02, 0.5
"""A job whose plan takes long rests for REST times as long before the next plan.

A plan of 5,000 workers takes 0.1 s, and each pod that starts asks for one. Without a rest, requests and agents would get one turn
of the event loop between two plans. The shorter one of the last two plans counts, because this process may have stood still.
"""
STARTING_PODS, STARTING_REST_S = 4, 0.2
"""Least time between two plans of a job that has more pods than that and no generation. A small job starts at once.

Each pod changes five times and more until its worker is ready. A plan for each change was most of the operator's cost of a pod."""
BUDGET_RETRY_PART, BUDGET_RETRY_MIN_S = 0.1, 0.1
"""Progress that is due when all jobs together have written enough of it waits so much of the usual time longer."""


class Observer(Protocol):
    """The events that metrics count. Every method is cheap and never raises."""

    def generation_issued(self, kind: str) -> None:
        """Count a generation that was written to a status and announced."""
        ...

    def status_written(self, before: JobStatus, after: JobStatus) -> None:
        """Count what differs between two statuses of a job; `after` was just written."""
        ...


@dataclass
class _Kept:
    """The state of a job between two looks. It is lost with the operator, and safe to lose."""

    uid: str
    maker: Maker
    memory: JobMemory = field(default_factory=JobMemory)
    refusal: EventNote | None = None
    """Verdict on the template as it was at `judged_generation`."""
    judged_generation: int | None = None
    num_unjudged: int = 0
    """Number of tries of the template without an answer."""
    logged: object = None
    """The requests in the last line of the decision log. Each look repeats a request until it is met."""
    plan_s: float = 0.0
    """Duration of the last plan."""
    progress_due: ProgressDue | None = None
    pods: tuple[Pod, ...] = ()
    """The pods that the last plan saw."""
    unanswered: deque[tuple[JobStatus, JobPlan]] = field(default_factory=lambda: deque(maxlen=UNANSWERED))
    """Plans whose status was sent and perhaps stored, as no answer came; and the status that each was made from."""


@dataclass(frozen=True, kw_only=True)
class Ports:
    """The parts through which the controller reads and writes the world."""

    store: JobStore
    workers: Workers
    recorder: Recorder
    registry: Registry
    background: Background
    """Runs what is made beside the plan. Its owner ends it."""
    observer: Observer | None = None
    decisions: DecisionLog | None = None


@dataclass(frozen=True, kw_only=True)
class Options:
    """The settings of an operator."""

    settings: Settings
    endpoint: str
    """Host and port that agents connect to."""
    agent_image: str = ""
    logs: str = KUBECTL_LOGS
    """The sentence that says how a worker's log is read."""
    progress_writes_per_s: float = 20.0
    """Writes of progress for all jobs together."""


@dataclass(frozen=True)
class Turns:
    """The functions with which the controller asks for the next look at a job."""

    look_after: Callable[[Key, float], None]
    """Looks at the job after so many seconds, because something was made for it."""
    expect: Callable[[Key, float], None]
    """Looks at the job at that time on the monotonic clock, or at `progress_overdue_s` if that is later."""
    rest: Callable[[Key, float], None]
    """Keeps the job from being looked at before that time on the monotonic clock."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """The time in which this process leads."""

    leads: Callable[[], bool] = lambda: True
    """No look at a job begins while this is false. A process that was stopped for longer than its lease would count by its own
    memory what the next leader has counted from the API. Its first write would show it only a conflict."""
    admission_s: float = 0.0
    """Seconds that it takes to admit the agents that there are now."""
    waiting: Callable[[], frozenset[str]] = frozenset
    """Returns the UIDs of pods whose agents wait to be admitted."""


class Controller:
    """Reconciles one job at a time per key; the work queue sees to that."""

    def __init__(
        self,
        ports: Ports,
        options: Options,
        turns: Turns,
        *,
        term: Term = Term(),
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._workers, self._recorder = ports.store, ports.workers, ports.recorder
        self._registry, self._background = ports.registry, ports.background
        self._observer, self._decisions = ports.observer, ports.decisions
        self._options, self._turns = options, turns
        self._progress_writes = TokenBucket(options.progress_writes_per_s, max(1.0, options.progress_writes_per_s))
        self._monotonic, self._wall = monotonic, wall
        self._kept: dict[Key, _Kept] = {}
        self._term_started_s = monotonic()
        self._leads = term.leads
        self._admitted_by_s, self._waiting = self._term_started_s + term.admission_s, term.waiting

    async def reconcile(self, key: Key) -> float | None:
        """Bring one job forward. Returns the seconds after which it wants to be seen again, None: only an event helps.

        Raises UnavailableError where the job cannot be read, judged or written, and anything unexpected: the work queue
        tries again with back-off. What cannot be made or deleted is no error here (maker.py).
        """
        for _ in range(CONFLICTS):
            if not self._leads():
                return LEADS_AGAIN_S
            job = await self._read(key)
            if job is None:
                return None
            try:
                return await self._once(job)
            except ConflictError:
                continue
        raise ConflictError(f"The status of {key[0]}/{key[1]} changed {CONFLICTS} times while it was planned.")

    def progress_overdue_s(self, key: Key) -> float | None:
        """Return when a job's steps are overdue by what its members have reported until now (monotonic); None: nothing is known of
        that. To ask costs much less than a plan, and a job that trains need not be planned for it."""
        kept = self._kept.get(key)
        if kept is None or kept.progress_due is None:
            return None
        newest = newest_progress(self._registry.sessions(kept.pods).values(), kept.progress_due.generations)
        return None if newest is None else newest.stalls_at_s

    async def _read(self, key: Key) -> Job | None:
        try:
            job = await self._store.get(key)
        except SpecError as error:
            # A spec of other fields than the CRD's: it cannot be planned for; the store has said so.
            logger.warning("%s/%s: %s", *key, error)
            return None
        is_gone = job is None or job.deleting
        # Of an earlier job of this name, too: `kubectl delete` returns before its pods have ended.
        self._stop_leaving(key, None if job is None or is_gone else job.uid)
        if is_gone:
            self._forget(key)
            return None
        return job

    def _forget(self, key: Key) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            kept.maker.stop()

    def _stop_leaving(self, key: Key, job_uid: str | None) -> None:
        leaving = self._registry.leaving(key, job_uid)
        pods = {pod.uid: pod for pod, _ in leaving}
        for tell in stop_leaving(leaving):
            self._registry.tell(tell.pod_uid, pods[tell.pod_uid].job_uid, 0, tell.body)

    async def _once(self, job: Job) -> float | None:
        kept = self._recall(job)
        self._answer(job, kept)
        await self._judge(job, kept)
        pods = self._workers.list(job.key, job.uid)
        obstacle, prepare_s = None, None
        # A job that is refused or has ended needs nothing made: its pods and sessions are looked at.
        if kept.refusal is None and not _cannot_start(job) and not job.has_ended:
            goes_on = job.status.start_time is not None or bool(pods)
            obstacle, prepare_s = await kept.maker.prepare(job, goes_on=goes_on)
            pods = self._workers.list(job.key, job.uid)
        roles = self._workers.roles(job.key, job.uid)
        refusal = kept.refusal or obstacle
        observation = Observation(
            pods,
            self._registry.sessions(pods),
            term_started_s=self._term_started_s,
            admitted_by_s=self._admitted_by_s,
            waiting=self._waiting(),
            refusals=self._registry.refusals(pods),
            roles=roles,
            num_out_of_reach=self._registry.out_of_reach(),
        )
        options = self._options
        usual_s, writes_per_s = options.settings.progress_write_s, options.progress_writes_per_s
        every_s = write_every_s(usual_s, self._registry.num_jobs, writes_per_s)
        inputs = Inputs(
            job,
            observation,
            kept.memory,
            Clock(self._monotonic(), self._wall()),
            replace(options.settings, progress_write_s=every_s),
            fresh_uid=uuid.uuid4().hex[:8],
            endpoint=options.endpoint,
            agent_image=options.agent_image,
            logs=options.logs,
            refusal=_why(refusal, job),
        )
        plan = plan_job(inputs)
        kept.progress_due, kept.pods = plan.progress_due, pods
        self._let_rest(job, plan, kept, inputs.clock)
        written, write_s = await self._write(job, plan, inputs.clock, kept, every_s)
        self._log(inputs, plan, kept, written=written is not None)
        self._say(job, plan)
        if plan.expired:
            await self._store.remove(job)
            return None
        # The write has taken time, in which an earlier plan's pods may have been made.
        there = (*self._workers.list(job.key, job.uid), *self._workers.roles(job.key, job.uid))
        make_s = kept.maker.want(written or job, plan, there, confirmed=written is not None)
        if plan.progress_due is not None:
            self._turns.expect(job.key, plan.progress_due.due_s)
        due = [d for d in (plan.due_s, prepare_s, write_s, make_s) if d is not None]
        return max(0.0, min(due) - self._monotonic()) if due else None

    def _let_rest(self, job: Job, plan: JobPlan, kept: _Kept, began: Clock) -> None:
        now_s = self._monotonic()
        took_s, kept.plan_s = min(kept.plan_s, now_s - began.now_s), now_s - began.now_s
        is_starting = plan.status.membership is None and len(kept.pods) > STARTING_PODS
        rest_s = max(min(REST * took_s, MAX_REST_S), STARTING_REST_S if is_starting else 0.0)
        if rest_s >= LEAST_REST_S:
            self._turns.rest(job.key, now_s + rest_s)

    def _log(self, inputs: Inputs, plan: JobPlan, kept: _Kept, *, written: bool) -> None:
        """Write a line for a plan that has decided something new."""
        if self._decisions is None or not has_decided(plan, written=written):
            return
        asked = (plan.create, plan.create_roles, plan.delete, plan.tell)
        if written or asked != kept.logged:
            kept.logged = asked
            self._decisions.write(inputs, plan)

    def _recall(self, job: Job) -> _Kept:
        kept = self._kept.get(job.key)
        if kept is None or kept.uid != job.uid:
            self._forget(job.key)
            maker = Maker(
                self._workers,
                self._store,
                self._recorder,
                self._background,
                self._monotonic,
                lambda made_for, wait_s: self._turns.look_after(made_for.key, wait_s),
            )
            kept = self._kept[job.key] = _Kept(job.uid, maker)
        return kept

    async def _judge(self, job: Job, kept: _Kept) -> None:
        """Have the template tried once per spec generation (not once the job has workers: it is immutable then)."""
        if kept.judged_generation == job.spec_generation:
            return
        kept.refusal = None
        if job.status.start_time is None and job.refusal is None:
            try:
                await self._workers.validate(job)
            except SpecError as error:
                kept.refusal = EventNote("Warning", error.reason, str(error))
            except UnavailableError:
                kept.num_unjudged += 1
                if kept.num_unjudged < TOLD_AFTER:
                    raise
                # A webhook that fails, for example: making the pods will say so.
        kept.judged_generation = job.spec_generation

    async def _write(
        self, job: Job, plan: JobPlan, clock: Clock, kept: _Kept, every_s: float
    ) -> tuple[Job | None, float | None]:
        """Write the status if it changed, and if that may not wait; progress alone every `every_s` seconds. Returns the job as
        written, None: it was not, and when the write is due, on the monotonic clock."""
        written = None
        memory, changed = plan.memory, plan.status != job.status
        differs = differing(memory.differs_since_s, plan.urgency if changed else None, clock.now_s)
        memory = replace(memory, differs_since_s=differs)
        if changed:
            due = write_due_s(plan.urgency, memory, now_s=clock.now_s, progress_write_s=every_s)
            is_progress = plan.urgency == Urgency.LATER
            if is_progress and clock.now_s >= due and not self._progress_writes.take(clock.now_s):
                due = clock.now_s + max(BUDGET_RETRY_MIN_S, BUDGET_RETRY_PART * every_s)
            if clock.now_s < due:
                kept.memory = memory
                return None, due
            started = self._monotonic()
            try:
                written = await self._store.write_status(job, plan.written, progress_only=is_progress)
            except UnavailableError:
                kept.unanswered.append((job.status, plan))
                raise
            kept.unanswered.clear()
            ended = self._monotonic()
            # As of the plan, so that the plan which comes `every_s` later may write again, unless the write has taken long.
            memory = replace(memory, written_s=max(clock.now_s, ended - every_s / 2), differs_since_s={})
            if plan.announced:
                issued = replace(memory.issued, persist_ms=(ended - started) * 1000)
                memory = replace(memory, issued=issued)
            if self._observer:
                self._observer.status_written(job.status, plan.status)
        # Remembered only after the write: a plan that lost its race has announced nothing and counted nothing.
        kept.memory = memory
        return written, None

    def _answer(self, job: Job, kept: _Kept) -> None:
        """Take up a plan whose write took effect although its answer was lost, or what it counted would be counted again."""
        if not kept.unanswered:
            return
        sent = next((s for s in kept.unanswered if s[1].status == job.status), None)
        if sent is not None:
            before, plan = sent
            kept.unanswered.clear()
            if self._observer:
                self._observer.status_written(before, plan.status)
            kept.memory = replace(plan.memory, written_s=self._monotonic(), differs_since_s={})
            self._say(job, plan)

    def _say(self, job: Job, plan: JobPlan) -> None:
        membership = plan.status.membership
        number = 0 if membership is None else membership.generation
        for tell in plan.tell:
            self._registry.tell(tell.pod_uid, job.uid, number, tell.body)
        if plan.announced and membership is not None and self._observer:
            self._observer.generation_issued(membership.kind)
        for note in plan.notes:
            self._recorder.record(job, note)


def _cannot_start(job: Job) -> bool:
    """Return whether the spec breaks a rule that only Python checks, before the start: there is nothing to try or to prepare."""
    return job.refusal is not None and job.status.start_time is None


def _why(refusal: EventNote | None, job: Job) -> Verdict | None:
    """Return what keeps the job from running as it is written."""
    if refusal is not None:
        return Verdict(refusal.reason, refusal.note)
    return None if job.refusal is None else Verdict(job.refusal.reason, str(job.refusal))
