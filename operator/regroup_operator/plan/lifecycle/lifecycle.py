"""What the job as a whole is in: one value, from which every later stage reads what it may do. Pure.

Refused -> Active -> Ended, and Active -> Suspending -> Suspended -> Active as the user wants. A job is refused only before its
first generation; a refusal that comes later is said in a condition, and the job goes on. Where a job is to be suspended, that
comes before what would fail it: a process that fails while it is told to stop fails nothing.

A job with roles that are required for its completion is Completing between Active and Ended, and can be suspended from there.
That its workers have finished is written to status.finished before they are told to stop; from then on none is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from regroup.protocol.document import PLANNED
from regroup.protocol.state import Phase
from regroup_operator.api.conditions import COMPLETE, FAILED, SUSPENDED
from regroup_operator.model.plan import Verdict
from regroup_operator.model.worker import Current, Standing, Worker
from regroup_operator.plan.facts.facts import Facts
from regroup_operator.plan.failures.failures import Failures
from regroup_operator.plan.lifecycle.run_policy import expires_in_s, has_begun, overdue


@dataclass(frozen=True)
class Refused:
    """It cannot run as written, or what it needs once cannot be made. Nothing is made for it."""

    why: Verdict
    due_s: float | None = None
    """As of Active."""


@dataclass(frozen=True)
class Active:
    """It trains, or is on its way there."""

    due_s: float | None = None
    """When one of its deadlines is over, monotonic."""


@dataclass(frozen=True)
class Completing:
    """Its workers have finished, and are stopped; it waits for roles to succeed (spec.roles[].requiredForCompletion)."""

    finished: tuple[int, int]
    """Number and members of the generation that has finished, which may be the one before the newest."""
    due_s: float | None = None
    """As of Active."""


@dataclass(frozen=True)
class Suspending:
    """Its processes are told to stop after a step, and its pods are deleted as they end."""

    finished: tuple[int, int] | None = None
    """As of Completing, where its workers have finished; None: they have not."""


@dataclass(frozen=True)
class Suspended:
    """It has no pods. What it continues from is its newest checkpoint. One whose suspension was taken back meanwhile is Suspended
    once, so that the status says in which generation it was, and Active (or Completing) from the next plan on."""

    finished: tuple[int, int] | None = None
    """As of Suspending."""


@dataclass(frozen=True)
class Ended:
    """Nothing is made any more, and its workers are stopped. Once ended, a job stays so."""

    succeeded: bool
    why: Verdict | None = None
    """Why it failed; or what its condition says already."""
    finished: tuple[int, int] | None = None
    """Number and members of the generation whose end has just ended it, which may be the one before the newest."""

    had_ended: bool = False
    """Its status says so already."""
    completed: str = ""
    """RFC 3339 time of its end."""
    expires_s: float | None = None
    """When it is deleted, monotonic; None: it stays."""

    @property
    def outcome(self) -> str:
        """The condition that is True."""
        return COMPLETE if self.succeeded else FAILED


SUSPENDING = "Suspending"
"""Reason of condition Suspended while the pods end. Once they are told to, the job is suspended whatever the user wants then."""

Lifecycle = Refused | Active | Completing | Suspending | Suspended | Ended


def decide_lifecycle(facts: Facts, failures: Failures) -> Lifecycle:
    """Return what the job is in now. What ended it stays: others of its processes may fail a moment later."""
    for condition in facts.status.get("conditions", ()):
        if condition["type"] in (COMPLETE, FAILED) and condition["status"] == "True":
            why = Verdict(condition["reason"], condition["message"])
            return _ended(facts, Ended(condition["type"] == COMPLETE, why, had_ended=True))
    # Who has been told to stop cannot do after its last step what it would have done.
    is_told = any(c["type"] == SUSPENDED and c["reason"] == SUSPENDING for c in facts.status.get("conditions", ()))
    finished = _known_finished(facts.status)
    if finished is None and not is_told and failures.unread is None:
        finished = _finished_generation(facts.current, failures.workers)
    if finished is not None and not any(facts.awaited.values()):
        return _ended(facts, Ended(succeeded=True, finished=finished))
    if facts.inputs.job.spec.run_policy.suspend or is_told:
        has_pods = facts.inputs.obs.pods or facts.inputs.obs.roles
        return Suspending(finished) if has_pods else Suspended(finished)
    failure = failures.verdict if finished is None else failures.of_roles
    if failure is not None:
        return _ended(facts, Ended(succeeded=False, why=failure))
    refusal = facts.inputs.refusal
    is_refused = refusal is not None and facts.status.get("startTime") is None
    verdict, due_s = _deadline(facts, failures, waits=finished is None, refusal=refusal if is_refused else None)
    if verdict is not None:
        return _ended(facts, Ended(succeeded=False, why=verdict))
    if refusal is not None and is_refused:
        return Refused(refusal, due_s)
    return Active(due_s) if finished is None else Completing(finished, due_s)


def stop_word(lifecycle: Lifecycle) -> str | None:
    """Return what the agents are told with `stop`, None: they are not."""
    if isinstance(lifecycle, Ended):
        return lifecycle.outcome
    if finished_of(lifecycle) is not None:
        return COMPLETE
    return SUSPENDED if isinstance(lifecycle, Suspending) else None


def finished_of(lifecycle: Lifecycle) -> tuple[int, int] | None:
    """Return number and members of the generation that has finished while the job waits for roles, None: it does not."""
    return lifecycle.finished if isinstance(lifecycle, Completing | Suspending | Suspended) else None


def _known_finished(status: Mapping[str, Any]) -> tuple[int, int] | None:
    known = status.get("finished")
    return None if known is None else (known["generation"], known["workers"])


def _ended(facts: Facts, ended: Ended) -> Ended:
    clock, policy = facts.inputs.clock, facts.inputs.job.spec.run_policy
    completed = facts.status.get("completionTime") or clock.timestamp()
    in_s = expires_in_s(policy, completed, clock.wall)
    return replace(ended, completed=completed, expires_s=None if in_s is None else clock.now_s + in_s)


def _deadline(
    facts: Facts, failures: Failures, *, waits: bool, refusal: Verdict | None
) -> tuple[Verdict | None, float | None]:
    """Return which deadline of the job is over, and when the next one will be, monotonic. `waits`: it may still have to begin."""
    job, clock = facts.inputs.job, facts.inputs.clock
    verdict, in_s = overdue(
        job.spec.run_policy,
        facts.status,
        created=job.created,
        waits=waits and not has_begun(facts.known),
        ready=sum(w.available for w in failures.workers),
        needed=job.min_replicas,
        refusal="" if refusal is None else refusal.message,
        now=clock.wall,
    )
    return verdict, None if in_s is None else clock.now_s + in_s


def _finished_generation(current: Current | None, workers: tuple[Worker, ...]) -> tuple[int, int] | None:
    """Return number and members of the generation that has finished, None: none has."""
    members = [w for w in workers if w.is_member]
    if current is None or not members:
        return None
    if all(_has_finished(w, current.number) for w in members):
        return current.number, len(current.members)
    if _finished_before(current, workers):
        return current.older[0].number, len(current.older[0].pod_uids)
    return None


def _finished_before(current: Current, workers: tuple[Worker, ...]) -> bool:
    """Whether the last step was committed before anybody entered the newest generation, a planned one: it has come too
    late, finished ranks ignore it, and the set that has finished is the one before."""
    if current.adopted or current.kind != PLANNED or len(current.older) != 1:
        return False
    before = current.older[0]
    uids = frozenset(before.pod_uids)
    set_before = [w for w in workers if w.pod is not None and w.pod.uid in uids]
    return len(set_before) == len(uids) and all(_has_finished(w, before.number) for w in set_before)


def _has_finished(worker: Worker, generation: int) -> bool:
    """Whether a member has said finished: what it says once stays true, whether it can be reached or not."""
    condition = worker.session.condition if worker.session else None
    said = condition is not None and (condition.phase, condition.generation) == (Phase.FINISHED, generation)
    return worker.standing == Standing.FINISHED or (said and worker.pod is not None and worker.pod.phase != "Failed")
