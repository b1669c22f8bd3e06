"""The controller: observe -> plan -> act for one job, through the ports of model/ports.py.

It decides nothing (plan/ does) and knows neither Kubernetes nor HTTP. What it owns is the ORDER of writes:

1. The status is written by compare-and-swap on the resourceVersion that the plan was made from (rule PERSIST). On a conflict
   nothing else happens: read again, plan again.
2. Only then is a generation announced, a worker told to stop (rule RELEASE: its UID stands in status.released by now).
3. Only then are pods deleted and created.

A CR event, a pod event, an agent's report, a due deadline: all only lead here.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from regroup_operator.api import ConflictError, Job, RegroupError, SpecError, UnavailableError
from regroup_operator.membership.registry import Registry
from regroup_operator.model.bucket import TokenBucket
from regroup_operator.model.plan import Clock, JobPlan, Memory
from regroup_operator.model.ports import AlreadyExists, EventNote, JobStore, Recorder, Workers
from regroup_operator.model.records import Key, Observation, Settings
from regroup_operator.plan.job import plan_job

logger = logging.getLogger(__name__)

CONFLICTS = 5
"""Plans in a row that may lose the race for the status before the work queue's back-off takes over."""
BUDGET_RETRY_S = 1.0
"""When progress is due but all jobs together have written enough of it."""


class Observer(Protocol):
    """What the metrics want to hear. Every method is cheap and never raises."""

    def generation_issued(self, kind: str) -> None:
        """A generation was written to a status and announced."""
        ...

    def status_written(self) -> None:
        """A job's status was written."""
        ...


class Controller:
    """Reconciles one job at a time per key; the work queue sees to that."""

    def __init__(
        self,
        *,
        store: JobStore,
        workers: Workers,
        recorder: Recorder,
        registry: Registry,
        settings: Settings,
        endpoint: str,
        agent_image: str = "",
        observer: Observer | None = None,
        progress_writes_per_s: float = 20.0,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._workers, self._recorder, self._registry = store, workers, recorder, registry
        self._settings, self._endpoint, self._agent_image = settings, endpoint, agent_image
        self._observer = observer
        self._progress_writes = TokenBucket(progress_writes_per_s, max(1.0, progress_writes_per_s))
        self._monotonic, self._wall = monotonic, wall
        self._memory: dict[Key, tuple[str, Memory]] = {}
        self._term_started_s = monotonic()

    async def reconcile(self, key: Key) -> float | None:
        """Bring one job forward. Returns the seconds after which it wants to be seen again, None: only an event helps.

        Raises UnavailableError and anything unexpected: the work queue tries again with back-off.
        """
        for _ in range(CONFLICTS):
            job = await self._read(key)
            if job is None:
                return None
            try:
                return await self._once(job)
            except ConflictError:
                continue
        raise ConflictError(f"The status of {key[0]}/{key[1]} changed {CONFLICTS} times while it was planned.")

    async def _read(self, key: Key) -> Job | None:
        try:
            job = await self._store.get(key)
        except SpecError as error:
            # A rule that only Python can check, or newer than the job: it cannot be planned for; the store has said so.
            logger.warning("%s/%s: %s", *key, error)
            return None
        if job is None or job.deleting:
            self._memory.pop(key, None)
            return None
        return job

    async def _once(self, job: Job) -> float | None:
        memory = await self._judged(job, self._recall(job))
        # A job that has ended needs no workers: its pods and sessions are looked at, nothing is made.
        if memory.refusal is None:
            memory = await self._prepared(job, memory)
        pods = self._workers.list(job.key, job.uid)
        observation = Observation(
            pods, self._registry.sessions(pods), self._term_started_s, self._registry.refusals(pods)
        )
        clock = Clock(self._monotonic(), self._wall())
        plan = plan_job(
            job,
            observation,
            memory,
            clock,
            fresh_uid=uuid.uuid4().hex[:8],
            settings=self._settings,
            endpoint=self._endpoint,
            agent_image=self._agent_image,
        )
        later = await self._write(job, plan, clock)
        await self._act(job, plan)
        due = [d for d in (plan.look_again_s, later) if d is not None]
        return max(0.0, min(due) - self._monotonic()) if due else None

    def _recall(self, job: Job) -> Memory:
        uid, memory = self._memory.get(job.key, ("", Memory()))
        return memory if uid == job.uid else Memory()

    async def _judged(self, job: Job, memory: Memory) -> Memory:
        """Have the template tried once per spec generation (not once the job has workers: it is immutable then)."""
        if memory.judged_generation == job.spec_generation:
            return memory
        refusal, reason = None, ""
        if job.status.start_time is None:
            try:
                await self._workers.validate(job)
            except SpecError as error:
                refusal, reason = str(error), error.reason
        memory = replace(memory, refusal=refusal, refusal_reason=reason, judged_generation=job.spec_generation)
        self._memory[job.key] = (job.uid, memory)
        return memory

    async def _prepared(self, job: Job, memory: Memory) -> Memory:
        """Have what the job has once made; a name that somebody else has is a verdict on a job that has not started."""
        try:
            await self._workers.prepare(job)
        except SpecError as error:
            if job.status.start_time is not None:
                raise
            # Judged anew at the next look: the name may have become free.
            memory = replace(memory, refusal=str(error), refusal_reason=error.reason, judged_generation=None)
        return memory

    async def _write(self, job: Job, plan: JobPlan, clock: Clock) -> float | None:
        """Write the status if it changed; progress alone waits its turn. Returns when it is due, on the monotonic clock."""
        memory = plan.memory
        if plan.status != job.status.to_dict():
            since = memory.progress_written_s
            due = since + self._settings.progress_write_s if since is not None else clock.now_s
            if not plan.urgent:
                if clock.now_s >= due and not self._progress_writes.take(clock.now_s):
                    due = clock.now_s + BUDGET_RETRY_S
                if clock.now_s < due:
                    self._memory[job.key] = (job.uid, memory)
                    return due
            started = self._monotonic()
            await self._store.write_status(job, plan.status)
            ended = self._monotonic()
            memory = replace(memory, progress_written_s=ended)
            if plan.announced:
                memory = replace(memory, persist_ms=(ended - started) * 1000)
            if self._observer:
                self._observer.status_written()
        # Remembered only after the write: a plan that lost its race has announced nothing and counted nothing.
        self._memory[job.key] = (job.uid, memory)
        return None

    async def _act(self, job: Job, plan: JobPlan) -> None:
        membership = plan.status.get("membership") or {}
        number = membership.get("generation", 0)
        for tell in plan.tell:
            self._registry.tell(tell.pod_uid, job.uid, number, tell.body)
        if plan.announced and self._observer:
            self._observer.generation_issued(membership["kind"])
        for note in plan.notes:
            self._recorder.record(job, note)
        # Deleted first: what does not fit into a quota beside the old pods may fit without them.
        for pod in plan.delete:
            await self._workers.delete(pod)
        failed: RegroupError | None = None
        for slot, attempt, avoid_nodes in plan.create:
            try:
                await self._create(job, slot, attempt, avoid_nodes)
            except RegroupError as error:
                failed = failed or error
        if failed is not None:
            if not isinstance(failed, UnavailableError | ConflictError):
                reason = failed.reason if isinstance(failed, SpecError) else "CreateFailed"
                self._recorder.record(job, EventNote("Warning", reason, str(failed)))
            raise failed

    async def _create(self, job: Job, slot: int, attempt: int, avoid_nodes: tuple[str, ...]) -> None:
        """Create a worker; where a pod of that name is not ours or is going, under the next free number."""
        while True:
            try:
                await self._workers.create(job, slot, attempt, avoid_nodes)
            except AlreadyExists:
                attempt += 1
            else:
                return
