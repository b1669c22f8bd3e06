"""Makes and deletes the pods and other objects of one job, beside the plan, each with a back-off of its own.

A recovery waits for no creation. The plan leaves here what it wants, and only the newest wanted set counts: it is read
again before each call. A refusal (a quota, a webhook, a policy) raises nothing here. It becomes an event, and a time at
which the job is planned again.

Pods are made 1, 2, 4 .. at once, and a refusal ends the round. So a full quota answers one request, not thousands. Jobs
take turns: hundreds of jobs that are created at once get their pods one job after the other. Creations in one slot wait
for one another until one of its pods runs. So a pod that the kubelet refuses makes no loop of pods.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from regroup_operator.api import ConflictError, Job, RegroupError, SpecError, UnavailableError
from regroup_operator.api.names import role_place
from regroup_operator.background import Background
from regroup_operator.model.plan import JobPlan
from regroup_operator.model.ports import AlreadyExists, EventNote, JobStore, Recorder, Workers
from regroup_operator.model.records import Pod, PodPlace
from regroup_operator.retries import FIRST_S, Retries

logger = logging.getLogger(__name__)

POD_MAX_S = 30.0
PREPARE_MAX_S = 8.0
TOLD_AFTER = 4
"""Number of tries without a verdict (no answer, 5xx) after which an event tells the user. They take about eight seconds."""
TELL_AGAIN_S = 300.0
"""Time after which the same sentence is told again."""

MAX_BATCH = 32
"""Requests of one job at once, and about as many in one turn, so that a job of thousands does not keep others waiting."""
CONFIRMED_S = 60.0
"""Longest age of the API server's answer that the job exists, if the plan wrote nothing.

Without that answer a pod could be made for a job that is gone, or by an operator that was paused.
"""
UNSEEN_S = 5.0
"""Time after which the name of a pod that was created, but that the informer has not shown, counts as taken."""


@dataclass(frozen=True)
class CreatePod:
    """A pod that is missing, of a worker or of a role. `slot` is the worker's slot, or the index in the role."""

    slot: int
    attempt: int
    avoid_nodes: tuple[str, ...] = ()
    role: str = ""

    @property
    def place(self) -> PodPlace:
        return role_place(self.role, self.slot) if self.role else self.slot


PodChange = CreatePod | Pod
"""A pod to make, or one to delete."""
StepKey = tuple[str, int | str]
"""Key of a step's back-off: create or delete, and the place or the pod's UID."""


@dataclass(frozen=True)
class Wanted:
    """Steps that the newest plan wants and that are not done yet. `confirmed`: the job existed when the plan was made."""

    job: Job
    steps: dict[StepKey, PodChange]
    confirmed: bool


class Maker:
    """Makes the objects of one job. The controller keeps it while the job exists, and calls `stop` after that."""

    def __init__(
        self,
        workers: Workers,
        store: JobStore,
        recorder: Recorder,
        background: Background,
        monotonic: Callable[[], float],
        look_again: Callable[[Job, float], None],
    ) -> None:
        """Make nothing yet. `look_again(job, seconds)` is called when the job has to be planned again after that time."""
        self._workers, self._store, self._recorder = workers, store, recorder
        self._background, self._monotonic, self._look_again = background, monotonic, look_again
        self._prepares, self._pods = Retries(PREPARE_MAX_S), Retries(POD_MAX_S)
        self._rounds = Retries(POD_MAX_S)
        """Rounds that were refused before anything was made."""
        self._confirms = Retries(POD_MAX_S)
        """Questions whether the job exists that were not answered with yes."""
        self._has_changed = False
        """True if the answer to the last such question was that the job has changed."""
        self._held_s = float("-inf")
        """Time before which nothing is made or deleted, because the API server did not answer."""
        self._wanted: Wanted | None = None
        self._is_making = False
        self._made: dict[PodPlace, tuple[int, float]] = {}
        """Place -> the attempt number that exists in the API server, and since when."""
        self._attempts: dict[PodPlace, int] = {}
        """Place -> the attempt number that was requested last."""
        self._obstacle: EventNote | None = None
        self._told_s: dict[str, float] = {}
        self._spec_generation = 0

    async def prepare(self, job: Job, *, goes_on: bool) -> tuple[EventNote | None, float | None]:
        """Have the job's Service and ConfigMap made. Return the obstacle to its start, and when to look again (monotonic).

        A job that `goes_on`, because it has workers, has no obstacle: an event tells the user. For another job an error
        without a verdict is raised a few times before it becomes an obstacle.
        """
        due_s = self._prepares.due_s("")
        if self._monotonic() >= due_s or (self._obstacle is None and not goes_on):
            count = self._prepares.tried("", self._monotonic())
            due_s = self._prepares.due_s("")
            try:
                await self._workers.prepare(job)
            except RegroupError as error:
                self._obstacle = verdict_of(error, count, "CreateFailed")
                if self._obstacle is None and not goes_on:
                    raise
                logger.warning("%s/%s: %s", *job.key, error)
                if self._obstacle is not None and goes_on:
                    self._tell(job, self._obstacle)
            else:
                self._obstacle = None
                self._prepares.forget(lambda _: True)
                return None, None
        return None if goes_on else self._obstacle, due_s

    def want(self, job: Job, plan: JobPlan, pods: Collection[Pod], *, confirmed: bool) -> float | None:
        """Make and delete the pods that the plan asks for. Requests of earlier plans are dropped.

        Returns when to look again (monotonic). None: only an event can change anything, or `look_again` will be called.
        `confirmed`: the plan's status was written just now, so the job exists. `pods` are the present ones. They may be
        more than the plan knew, since its status was written meanwhile. A step that is already done is left out.
        """
        self._look_at(job, pods)
        steps: dict[StepKey, PodChange] = {("delete", pod.uid): pod for pod in plan.delete}
        steps |= {("create", slot): CreatePod(slot, attempt, avoid) for slot, attempt, avoid in plan.create}
        for role, index, attempt in plan.create_roles:
            steps["create", role_place(role, index)] = CreatePod(index, attempt, role=role)
        made = {(p.place, p.attempt) for p in pods}
        going = {p.uid for p in pods if p.terminating}
        steps = {
            key: step
            for key, step in steps.items()
            if (step.uid not in going if isinstance(step, Pod) else (step.place, step.attempt) not in made)
        }
        self._wanted = Wanted(job, steps, confirmed)
        if confirmed:
            self._confirms.forget(lambda _: True)
            self._has_changed = False
        if not self._is_making and self._batch(1):
            self._is_making = True
            self._background.start(self._make(), f"pods of {job.namespace}/{job.name}")
        return None if self._is_making else self._due_s()

    def stop(self) -> None:
        """Make nothing more, since the job is gone. Requests that are under way end by themselves."""
        self._wanted = None

    async def _make(self) -> None:
        size, goes_on, job = 1, True, None
        try:
            while goes_on and self._wanted is not None and self._batch(1):
                job = self._wanted.job
                async with self._background.turn(job.namespace, starts=job.status.start_time is None):
                    size, goes_on = await self._make_some(size)
        finally:
            self._is_making = False
        due_s = self._due_s()
        if job is not None and due_s is not None:
            self._look_again(job, max(0.0, due_s - self._monotonic()))

    async def _make_some(self, size: int) -> tuple[int, bool]:
        """Do about MAX_BATCH steps, the first `size` at once. Return the size of the next batch, and whether to go on."""
        num_tried = 0
        while num_tried < MAX_BATCH and self._wanted is not None and (batch := self._batch(size)):
            if not self._wanted.confirmed and any(isinstance(step, CreatePod) for step in batch.values()):
                await self._confirm(self._wanted)
                continue
            results: list[bool] = []
            await self._background.together(self._try(key, step, results) for key, step in batch.items())
            creates = any(isinstance(step, CreatePod) for step in batch.values())
            if creates and any(results):
                self._rounds.forget(lambda _: True)
            if creates and not all(results):
                if self._held_s <= self._monotonic():
                    self._rounds.tried("", self._monotonic())
                return size, False
            num_tried += len(batch)
            size = min(2 * size, MAX_BATCH)
        return size, True

    async def _confirm(self, wanted: Wanted) -> None:
        """Ask whether the job exists. A job that has changed is planned again at once, but not twice in a row.

        An answer that stays the same must not be asked for without a pause: a role may be taken away, or a job not shown.
        """
        try:
            await self._store.confirm(wanted.job, CONFIRMED_S)
        except RegroupError as error:
            logger.info("%s/%s: %s Planned again.", *wanted.job.key, error)
            now_s = self._monotonic()
            had_changed, self._has_changed = self._has_changed, isinstance(error, ConflictError)
            wait_s = 0.0
            if had_changed or not self._has_changed:
                count = self._confirms.tried("", now_s)
                wait_s = self._confirms.due_s("") - now_s
                note = verdict_of(error, count, "CreateFailed")
                if note is not None:
                    self._tell(wanted.job, note)
            if isinstance(error, UnavailableError):
                self._held_s = now_s + max(FIRST_S, error.retry_after_s)
                wait_s = max(wait_s, error.retry_after_s)
            if self._wanted is wanted:
                self._wanted = None
                self._look_again(wanted.job, wait_s)
        else:
            self._confirms.forget(lambda _: True)
            self._has_changed = False
            if self._wanted is wanted:
                self._wanted = replace(wanted, confirmed=True)

    def _rounds_due_s(self) -> float:
        """Return the time from which on pods may be made."""
        asks = self._wanted is not None and not self._wanted.confirmed
        return max(self._rounds.due_s(""), self._confirms.due_s("") if asks else float("-inf"))

    def _batch(self, size: int) -> dict[StepKey, PodChange]:
        """Return up to `size` steps that are due: deletions first, creations when none is left.

        Without the old pods the new ones may fit into a quota. Steps that were not tried yet come first, so that they
        do not starve behind steps that always fail.
        """
        now_s = self._monotonic()
        steps = {} if self._wanted is None or self._held_s > now_s else self._wanted.steps
        for verb, round_s in (("delete", now_s), ("create", self._rounds_due_s())):
            due = [key for key in steps if key[0] == verb and max(self._pods.due_s(key), round_s) <= now_s]
            if due:
                return {key: steps[key] for key in sorted(due, key=self._pods.due_s)[:size]}
        return {}

    def _due_s(self) -> float | None:
        """Return when the next step is due."""
        dues_s = []
        for key in () if self._wanted is None else self._wanted.steps:
            round_s = self._rounds_due_s() if key[0] == "create" else self._held_s
            dues_s.append(max(self._pods.due_s(key), round_s, self._held_s))
        return min(dues_s, default=None)

    async def _try(self, key: StepKey, step: PodChange, results: list[bool]) -> None:
        """Do one step, unless it is not wanted any more or the API server does not answer. Append to `results` whether
        it was done."""
        wanted = self._wanted
        if wanted is None or wanted.steps.get(key) != step or self._held_s > self._monotonic():
            return
        count = self._pods.tried(key, self._monotonic())
        try:
            if isinstance(step, Pod):
                await self._workers.delete(step)
            else:
                await self._create(wanted.job, step)
        except RegroupError as error:
            results.append(False)
            logger.warning("%s/%s: %s", *wanted.job.key, error)
            if isinstance(error, UnavailableError):
                self._held_s = self._monotonic() + max(FIRST_S, error.retry_after_s)
            note = verdict_of(error, count, "DeleteFailed" if isinstance(step, Pod) else "CreateFailed")
            if note is not None:
                self._tell(wanted.job, note)
        else:
            results.append(True)
            # The back-off alone would not keep it from being done again: under load a round and the next plan take longer.
            if self._wanted is not None and self._wanted.steps.get(key) == step:
                del self._wanted.steps[key]

    async def _create(self, job: Job, step: CreatePod) -> None:
        """Create a pod. If its name is taken, is terminating, or does not show up, take the next free attempt number."""
        place, attempt = step.place, step.attempt
        while True:
            self._attempts[place] = attempt
            known = self._made.get(place)
            try:
                if step.role:
                    made = await self._workers.create_role(job, step.role, step.slot, attempt)
                else:
                    made = await self._workers.create(job, step.slot, attempt, step.avoid_nodes)
            except AlreadyExists:
                attempt += 1
                continue
            now_s = self._monotonic()
            if made or known is None or known[0] != attempt:
                self._made[place] = attempt, now_s
                return
            if now_s < known[1] + UNSEEN_S:
                return
            attempt += 1

    def _look_at(self, job: Job, pods: Collection[Pod]) -> None:
        """Forget back-offs that do not apply any more.

        They are those of a slot whose newest pod has run, and of deletions of pods that are gone. A change of the spec
        may be the remedy for all, so all of them are forgotten.
        """
        if job.spec_generation != self._spec_generation:
            self._spec_generation = job.spec_generation
            self._pods.forget(lambda _: True)
            self._rounds.forget(lambda _: True)
        seen = {(p.place, p.attempt) for p in pods}
        self._made = {place: made for place, made in self._made.items() if (place, made[0]) not in seen}
        ran = {("create", p.place) for p in pods if _has_run(p) and p.attempt >= self._attempts.get(p.place, 0)}
        there = {("delete", p.uid) for p in pods}
        self._pods.forget(
            lambda key: key in ran or (key not in there and isinstance(key, tuple) and key[0] == "delete")
        )

    def _tell(self, job: Job, note: EventNote) -> None:
        now_s = self._monotonic()
        self._told_s = {text: at_s for text, at_s in self._told_s.items() if now_s < at_s + TELL_AGAIN_S}
        text = _WORKER.sub("", note.note)  # one event is enough for many slots that do not fit into a quota
        if text not in self._told_s:
            self._told_s[text] = now_s
            self._recorder.record(job, note)


_WORKER = re.compile(r"worker-\d+-\d+")


def verdict_of(error: RegroupError, count: int, reason: str) -> EventNote | None:
    """Return the event that tells the user of an error at the `count`-th try, or None while it may pass by itself."""
    if isinstance(error, UnavailableError | ConflictError) and count < TOLD_AFTER:
        return None
    return EventNote("Warning", error.reason if isinstance(error, SpecError) else reason, str(error))


def _has_run(pod: Pod) -> bool:
    return pod.running_since_s is not None or pod.container_restarts > 0
