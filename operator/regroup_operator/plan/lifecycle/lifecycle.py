"""Decide the state of the job as a whole: one value, from which every later stage reads what it may do. Pure.

Refused -> Active -> Ended, and Active -> Suspending -> Suspended -> Active as the user wants. A job is refused only before its
first generation. A condition tells of a refusal that comes later, and the job goes on. A suspension comes before a failure: a
process that fails while it is told to stop does not fail the job.

A job whose members have all committed the last step is Finishing until the script has returned 0 in each of them. With roles that
are required for its completion it is then Completing. It can be suspended from either. The end of the steps is written to
status.finished before any member is told to leave its loop. From then on no generation is announced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from regroup_operator.api.conditions import COMPLETE, FAILED, SUSPENDED
from regroup_operator.model.plan import Failure, Verdict
from regroup_operator.plan.facts.current import named_checkpoint
from regroup_operator.plan.facts.facts import Facts
from regroup_operator.plan.facts.finished import Finished
from regroup_operator.plan.failures.failures import Failures
from regroup_operator.plan.failures.restarts import exit_words, log_words
from regroup_operator.plan.lifecycle.finished import places_of, see_finished
from regroup_operator.plan.lifecycle.run_policy import Start, expiry_s, has_begun, overdue

END_FAILED = "EndFailed"
"""Reason of Failed=True: what follows the script's loop has failed, or was lost, and cannot run again."""


@dataclass(frozen=True)
class Refused:
    """It cannot run as written, or its Service or ConfigMap cannot be made. It gets no pods."""

    why: Verdict
    due_s: float | None = None
    """When one of its deadlines is over, monotonic."""


@dataclass(frozen=True)
class Active:
    """It trains, or is on its way there."""

    finished: Finished | None = None
    """Script tier: some of its scripts have returned 0, and the others still run."""
    due_s: float | None = None
    """When one of its deadlines is over, monotonic."""


@dataclass(frozen=True)
class Finishing:
    """All steps are committed, and the script still runs in some members, or has to run again there."""

    finished: Finished
    due_s: float | None = None
    """When one of its deadlines is over, monotonic."""


@dataclass(frozen=True)
class Completing:
    """Its scripts have returned 0, and its workers are stopped. It waits for roles (spec.roles[].requiredForCompletion)."""

    finished: Finished
    due_s: float | None = None
    """When one of its deadlines is over, monotonic."""


@dataclass(frozen=True)
class Suspending:
    """Its processes are told to stop after a step, and its pods are deleted as they end."""

    finished: Finished | None = None
    """As of Finishing, where its steps are over; None: they are not."""
    due_s: None = None
    """The end of a pod ends it."""


@dataclass(frozen=True)
class Suspended:
    """The job has no pods, and continues from its newest checkpoint.

    If its suspension was taken back meanwhile, it is Suspended once, so that the status says in which generation it was. From the
    next plan on it is Active, Finishing or Completing.
    """

    finished: Finished | None = None
    """The end of its steps, as in Suspending."""
    due_s: float | None = None
    """When it is planned again, because its suspension was taken back; None: it stays suspended."""


@dataclass(frozen=True)
class Ended:
    """Nothing is made any more, and its workers are stopped. Once ended, a job stays so."""

    succeeded: bool
    why: Verdict | None = None
    """The reason for which it failed, or the text that its condition has already."""
    finished: Finished | None = None
    """The end of the steps, if that has just ended the job."""

    had_ended: bool = False
    """Its status says so already."""
    completed: str = ""
    """RFC 3339 time of its end."""
    due_s: float | None = None
    """When it is deleted, monotonic; None: it stays."""

    @property
    def outcome(self) -> str:
        """The condition that is True."""
        return COMPLETE if self.succeeded else FAILED


RESUME_S = 0.1
"""A job whose suspension was taken back before its pods were gone is planned again after this time."""
SUSPENDING = "Suspending"
"""Reason of condition Suspended while the pods end. Once they are told to, the job is suspended whatever the user wants then."""

Lifecycle = Refused | Active | Finishing | Completing | Suspending | Suspended | Ended


def decide_lifecycle(facts: Facts, failures: Failures) -> Lifecycle:
    """Return what the job is in now. What ended it stays: others of its processes may fail a moment later."""
    stored = facts.status
    for condition in stored.conditions:
        if condition.type in (COMPLETE, FAILED) and condition.status == "True":
            why = Verdict(condition.reason, condition.message, stored.exit_code, stored.failed_pod or "")
            return _ended(facts, Ended(condition.type == COMPLETE, why, had_ended=True))
    # A script that has been told to stop does not run what follows its last step.
    is_told = any(c.type == SUSPENDED and c.reason == SUSPENDING for c in stored.conditions)
    finished = see_finished(facts, failures.workers)
    if facts.finished is None and (is_told or failures.unread is not None):
        finished = None
    is_done = finished is not None and not finished.open
    if is_done and not any(facts.awaited.values()):
        return _ended(facts, Ended(succeeded=True, finished=finished))
    if facts.inputs.job.spec.run_policy.suspend or is_told:
        has_pods = facts.inputs.obs.pods or facts.inputs.obs.roles
        if not is_done and not facts.ends_alone:
            finished = None  # resumed, all members run their end again
        if has_pods:
            return Suspending(finished)
        is_wanted = not facts.inputs.job.spec.run_policy.suspend
        return Suspended(finished, facts.inputs.clock.now_s + RESUME_S if is_wanted else None)
    is_script = facts.tier == "Script"
    failure = failures.of_roles if is_done else failures.verdict
    ends = finished or facts.finished
    if failure is None and ends is not None and ends.open and not is_script:
        failure = not_repeatable(facts, failures, ends)
    if failure is not None:
        return _ended(facts, Ended(succeeded=False, why=failure))
    refusal = facts.inputs.refusal
    is_refused = refusal is not None and stored.start_time is None
    verdict, due_s = _deadline(facts, failures, finished, refusal=refusal if is_refused else None)
    if verdict is not None:
        return _ended(facts, Ended(succeeded=False, why=verdict))
    if refusal is not None and is_refused:
        return Refused(refusal, due_s)
    if finished is None or (is_script and not is_done):
        return Active(finished, due_s)
    return Completing(finished, due_s) if is_done else Finishing(finished, due_s)


def stop_word(lifecycle: Lifecycle) -> str | None:
    """Return what agents are told with `stop`, None: they are not. Those whose scripts have returned 0 are told `Complete`."""
    if isinstance(lifecycle, Ended):
        return lifecycle.outcome
    if isinstance(lifecycle, Completing):
        return COMPLETE
    return SUSPENDED if isinstance(lifecycle, Suspending) else None


def finished_of(lifecycle: Lifecycle) -> Finished | None:
    """Return who has finished, None: the job has steps to train, or has failed."""
    return None if isinstance(lifecycle, Refused) else lifecycle.finished


def _ended(facts: Facts, ended: Ended) -> Ended:
    clock, policy = facts.inputs.clock, facts.inputs.job.spec.run_policy
    completed = facts.status.completion_time or clock.timestamp()
    return replace(ended, completed=completed, due_s=expiry_s(policy, completed, clock))


def not_repeatable(facts: Facts, failures: Failures, finished: Finished) -> Verdict | None:
    """Return why the job fails in its end; None: it does not.

    A script whose end has failed, or whose pod is gone, runs again if a checkpoint or snapshot has the state of the last step. The
    state in the other members does not count: their scripts may have changed the model.
    """
    checkpoint = named_checkpoint(facts.status)
    where = f"the state of step {finished.step}, the last one, is in no checkpoint"
    if facts.ends_alone:
        can = checkpoint is not None and checkpoint.step == finished.step
    else:  # an ordinary generation: it may begin at an older step, and train those that follow again
        has_snapshots = facts.inputs.job.spec.memory_snapshot is not None
        can, where = checkpoint is not None or has_snapshots, "there is no checkpoint"
    if can:
        return None
    advice = ""
    if facts.inputs.job.spec.checkpoint is None:
        advice = " Set spec.checkpoint, so that a script that fails after its last step can run again."
    places = places_of(finished, failures.workers)
    # A spare that fails, or the container of a script that has returned 0, has no end to run again.
    needed = set(map(str, finished.open))
    ended = [f for f in failures.ended if f.worker in needed and not _has_snapshot(facts, failures, f, finished)]
    if ended:
        last = ended[-1]
        line = f': "{last.last_line}"' if last.last_line else ""
        text = (
            f"{exit_words(last)}{line} after the last step, and {where}, so it cannot run again. "
            f"{log_words(last, facts.inputs.logs)}{advice}"
        )
        return Verdict(END_FAILED, text, last.script_code, last.pod)
    gone = [] if facts.finished is None else [member for member in finished.open if member not in places]
    if not gone:
        return None
    return Verdict(
        END_FAILED,
        f"The pod of worker {gone[0]} has gone before its script returned, and {where}, so it cannot run again.{advice}",
    )


def _has_snapshot(facts: Facts, failures: Failures, last: Failure, finished: Finished) -> bool:
    """Return whether the worker whose script has failed may have the state of the last step in its memory snapshot."""
    if facts.inputs.job.spec.memory_snapshot is None:
        return False
    sessions = (w.session for w in failures.workers if w.pod is not None and w.pod.name == last.pod)
    seal = next((session.seal for session in sessions if session is not None), None)
    if seal is None:
        return True  # it has not said yet what it holds
    return seal.state is not None and (seal.state.step, seal.state_adopted) == (finished.step, finished.generation)


def _deadline(
    facts: Facts, failures: Failures, finished: Finished | None, *, refusal: Verdict | None
) -> tuple[Verdict | None, float | None]:
    """Return which deadline of the job is over, and when the next one will be, monotonic."""
    job, clock = facts.inputs.job, facts.inputs.clock
    ends = facts.taken_back if finished is None else finished
    start = None
    if finished is None and job.created is not None and not has_begun(facts.updated):
        num_ready = sum(w.available for w in failures.workers)
        start = Start(job.created, num_ready, job.min_replicas, "" if refusal is None else refusal.message)
    return overdue(
        job.spec.run_policy,
        facts.status,
        clock,
        start=start,
        # Once all scripts have returned 0, the job waits for its roles only.
        ended_at=None if ends is None or (finished is not None and not finished.open) else ends.at,
    )
