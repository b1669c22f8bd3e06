"""What the job as a whole is in: one value, from which every later stage reads what it may do. Pure.

Refused -> Active -> Ended. A job is refused only before its first generation; a refusal that comes later is said in a
condition, and the job goes on.
"""

from __future__ import annotations

from dataclasses import dataclass

from regroup.protocol.document import PLANNED
from regroup.protocol.state import Phase
from regroup_operator.api.conditions import COMPLETE, FAILED
from regroup_operator.model.plan import Verdict
from regroup_operator.model.worker import Current, Standing, Worker
from regroup_operator.plan.facts.facts import Facts
from regroup_operator.plan.failures.failures import Failures


@dataclass(frozen=True)
class Refused:
    """It cannot run as written, or what it needs once cannot be made. Nothing is made for it."""

    why: Verdict


@dataclass(frozen=True)
class Active:
    """It trains, or is on its way there. `refusal`: why what the user wants of it now cannot be had."""

    refusal: Verdict | None = None


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

    @property
    def outcome(self) -> str:
        """The condition that is True, which agents are told with `stop`."""
        return COMPLETE if self.succeeded else FAILED


Lifecycle = Refused | Active | Ended


def decide_lifecycle(facts: Facts, failures: Failures) -> Lifecycle:
    """Return what the job is in now. What ended it stays: others of its processes may fail a moment later."""
    for condition in facts.status.get("conditions", ()):
        if condition["type"] in (COMPLETE, FAILED) and condition["status"] == "True":
            return Ended(
                condition["type"] == COMPLETE, Verdict(condition["reason"], condition["message"]), had_ended=True
            )
    if failures.verdict is not None:
        return Ended(succeeded=False, why=failures.verdict)
    finished = _finished_generation(facts.current, failures.workers)
    if finished is not None:
        return Ended(succeeded=True, finished=finished)
    refusal = facts.inputs.refusal
    if refusal is not None and facts.status.get("startTime") is None:
        return Refused(refusal)
    return Active(refusal)


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
    set_before = [w for w in workers if w.pod is not None and w.pod.uid in before.pod_uids]
    return len(set_before) == len(before.pod_uids) and all(_has_finished(w, before.number) for w in set_before)


def _has_finished(worker: Worker, generation: int) -> bool:
    """Whether a member has said finished: what it says once stays true, whether it can be reached or not."""
    condition = worker.session.condition if worker.session else None
    said = condition is not None and (condition.phase, condition.generation) == (Phase.FINISHED, generation)
    return worker.standing == Standing.FINISHED or (said and worker.pod is not None and worker.pod.phase != "Failed")
