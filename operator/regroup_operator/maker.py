"""Make and remove what one job has in the cluster, each thing with a back-off of its own.

What cannot be made (a quota, a webhook, a policy) never holds up the plan: a job with too few pods still has members to
watch. So a refusal raises nothing here; it becomes an event, and a time at which it is tried again. Nor does a pod that
fails before it ever ran (the kubelet's admission) make a loop of pods: creations in one slot wait for one another until
one of its pods runs.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from functools import partial

from regroup_operator.api import ConflictError, Job, RegroupError, SpecError, UnavailableError
from regroup_operator.model.plan import JobPlan
from regroup_operator.model.ports import AlreadyExists, EventNote, Recorder, Workers
from regroup_operator.model.records import Pod
from regroup_operator.retries import FIRST_S, Retries

logger = logging.getLogger(__name__)

POD_MAX_S = 30.0
PREPARE_MAX_S = 8.0
TOLD_AFTER = 4
"""Tries without a verdict (no answer, 5xx) after which people are told: about eight seconds."""
TELL_AGAIN_S = 300.0
"""How long a sentence that was told is not told again."""

Step = tuple[tuple[str, int | str], str, Callable[[], Awaitable[None]]]
"""Key of its back-off, reason of its event, what is done."""


class Maker:
    """Of one job; the controller keeps it as long as the job is there."""

    def __init__(self, workers: Workers, recorder: Recorder, monotonic: Callable[[], float]) -> None:
        self._workers, self._recorder, self._monotonic = workers, recorder, monotonic
        self._prepares, self._pods = Retries(PREPARE_MAX_S), Retries(POD_MAX_S)
        self._attempts: dict[int, int] = {}
        """By slot: the attempt number that was asked for last."""
        self._obstacle: EventNote | None = None
        self._told_s: dict[str, float] = {}
        self._spec_generation = 0

    async def prepare(self, job: Job, *, goes_on: bool) -> tuple[EventNote | None, float | None]:
        """Have what the job has once made. Returns what keeps it from starting, and when to look again (monotonic).

        A job that `goes_on`, because it has workers, is kept from nothing; the user is told by an event. For another one
        an error without a verdict is raised a few times before it becomes a sentence.
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

    async def change(self, job: Job, plan: JobPlan, pods: Collection[Pod]) -> float | None:
        """Delete and create the pods that the plan asks for, as far as that is due. Returns when to look again, monotonic.

        Where the API server gives no answer, the rest waits too: time-outs in a row would hold up the next plan.
        """
        self._look_at(job, pods)
        dues_s: list[float] = []
        told = away = False
        for key, reason, act in self._steps(job, plan):
            now_s = self._monotonic()
            due_s = self._pods.due_s(key)
            if away or due_s > now_s:
                dues_s.append(max(due_s, now_s + FIRST_S) if away else due_s)
                continue
            count = self._pods.tried(key, now_s)
            try:
                await act()
            except RegroupError as error:
                dues_s.append(self._pods.due_s(key))
                away = isinstance(error, UnavailableError)
                logger.warning("%s/%s: %s", *job.key, error)
                note = verdict_of(error, count, reason)
                if note is not None and not told:
                    self._tell(job, note)
                    told = True  # of many slots that fit into no quota, one is enough
        return min(dues_s, default=None)

    def _steps(self, job: Job, plan: JobPlan) -> list[Step]:
        """Return the deletions, then the creations, since what fits into no quota beside the old pods may fit without them.

        Among each, what was not tried yet comes first: it must not starve behind what always fails.
        """
        deletes: list[Step] = [
            (("delete", pod.uid), "DeleteFailed", partial(self._workers.delete, pod)) for pod in plan.delete
        ]
        creates: list[Step] = [
            (("create", slot), "CreateFailed", partial(self._create, job, slot, attempt, avoid_nodes))
            for slot, attempt, avoid_nodes in plan.create
        ]
        return [step for part in (deletes, creates) for step in sorted(part, key=lambda s: self._pods.due_s(s[0]))]

    async def _create(self, job: Job, slot: int, attempt: int, avoid_nodes: tuple[str, ...]) -> None:
        """Create a worker; where a pod of that name is not ours or is going, under the next free number."""
        while True:
            self._attempts[slot] = attempt
            try:
                await self._workers.create(job, slot, attempt, avoid_nodes)
            except AlreadyExists:
                attempt += 1
            else:
                return

    def _look_at(self, job: Job, pods: Collection[Pod]) -> None:
        """Forget the back-off of a slot whose newest pod has run, and of the deletion of a pod that is gone; all of it when
        the spec changes, which may be the remedy."""
        if job.spec_generation != self._spec_generation:
            self._spec_generation = job.spec_generation
            self._pods.forget(lambda _: True)
        ran = {("create", p.slot) for p in pods if _has_run(p) and p.attempt >= self._attempts.get(p.slot, 0)}
        there = {("delete", p.uid) for p in pods}
        self._pods.forget(
            lambda key: key in ran or (key not in there and isinstance(key, tuple) and key[0] == "delete")
        )

    def _tell(self, job: Job, note: EventNote) -> None:
        now_s = self._monotonic()
        self._told_s = {text: at_s for text, at_s in self._told_s.items() if now_s < at_s + TELL_AGAIN_S}
        if note.note not in self._told_s:
            self._told_s[note.note] = now_s
            self._recorder.record(job, note)


def verdict_of(error: RegroupError, count: int, reason: str) -> EventNote | None:
    """Return what people are told of an error at the `count`-th try, None while it may pass by itself."""
    if isinstance(error, UnavailableError | ConflictError) and count < TOLD_AFTER:
        return None
    return EventNote("Warning", error.reason if isinstance(error, SpecError) else reason, str(error))


def _has_run(pod: Pod) -> bool:
    return pod.running_since_s is not None or pod.container_restarts > 0
