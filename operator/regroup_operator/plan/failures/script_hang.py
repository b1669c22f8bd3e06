"""Find out whether an unmodified script hangs, by the times at which its progress changes. Pure (docs/design/adr/0079).

The clock runs from the last change of what any member says. A script that is at its end has no steps to make, and one of which a
member has returned is at its end. Nothing is known of a script's pace before the second change. Until then, and if the user has set
spec.recovery.hangSeconds, it has as long as the first step of a session.

A script may never say anything of its progress and be healthy. So before the first word of new processes the clock runs only if
processes before them have said a step, or if there is spec.progress.log. A pattern that has never matched may be wrong, and then
the condition says so and nothing is restarted.

A long evaluation looks like a hang. So only a user who has set spec.recovery.hangSeconds has the processes restarted. Else the
condition Degraded says what was seen. No rank of a script says whether it waits for others, and all ranks start again in any
case. So one process is killed: a stopped one, else that of the lowest rank. The others end once the next generation is announced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from regroup.protocol.wire import REPORT_EVERY_S, ProcessStack
from regroup_operator.api.status import Progress
from regroup_operator.model.records import AgentSession, Settings
from regroup_operator.model.worker import Current, Standing, Worker
from regroup_operator.plan.facts.script_words import ScriptWords
from regroup_operator.plan.failures.hangs import (
    GAPS,
    KILL_AGAIN_S,
    STEPS,
    Culprit,
    Hang,
    ask_for_stacks,
    rank_stacks,
)

LATE_S = 10.0
"""Longest time after which the operator hears of a change, in a job of up to 500 processes (_regroup_agent.progress)."""
PROCESSES_PER_LATE_S = 50.0


@dataclass(frozen=True)
class Silence:
    """Facts that say what it means if new processes say nothing of their progress."""

    has_spoken: bool = False
    """Processes before have said how far they were, and were not at their end."""
    has_pattern: bool = False
    """There is spec.progress.log."""


@dataclass(frozen=True)
class _Clock:
    """`what` has stood still since `began_s`, and may do so for `bound_s` seconds."""

    began_s: float
    bound_s: float
    what: str
    may_be_wrong: bool = False
    """The script may be healthy, because its pattern may be wrong."""


def silence_of(stored: Progress | None, *, has_pattern: bool) -> Silence:
    """Return what the silence of new processes means. `stored` is status.progress, which has the last word of those before."""
    if stored is None:
        return Silence(has_pattern=has_pattern)
    reached = stored.step is not None and stored.total_steps is not None and stored.step >= stored.total_steps
    said = (stored.step, stored.optimizer_steps, stored.percent)
    has_spoken = any(one is not None for one in said) and not reached and (stored.percent or 0.0) < 100
    return Silence(has_spoken, has_pattern)


def find_script_hang(
    *,
    current: Current | None,
    words: ScriptWords | None,
    workers: Iterable[Worker],
    processes: int,
    hang_seconds: float | None,
    silence: Silence,
    now_s: float,
    settings: Settings,
) -> Hang:
    """Return what is known of a hang of the newest generation. `processes` is the number of a worker's processes.

    Without `hang_seconds` it has a message only, and nobody is killed.
    """
    members = [w for w in workers if w.is_member]
    training = [w for w in members if w.standing == Standing.TRAINING]
    if current is None or len(training) < len(members):
        return Hang()
    sessions = [w.session for w in training if w.session is not None]
    clock = _clock(words, sessions, hang_seconds, silence, settings)
    if clock is None:
        return Hang()
    factor = max((s.report_every_s for s in sessions), default=REPORT_EVERY_S) / REPORT_EVERY_S
    late_s = factor * max(LATE_S, len(members) * processes / PROCESSES_PER_LATE_S)
    overdue_s = clock.began_s + clock.bound_s + late_s
    if now_s < overdue_s:
        return Hang(due_s=overdue_s)
    what = f"{clock.what} for {overdue_s - clock.began_s:.0f} s"
    asked = ask_for_stacks(training, current, overdue_s, what, now_s)
    if asked is not None:
        return asked
    stacks = rank_stacks(training, current, processes, overdue_s)
    stacks.sort(key=lambda one: (one[2].place != ProcessStack.STOPPED, one[0]))
    where = f": {_words(*stacks[0])}" if stacks else ""
    if hang_seconds is None:
        then = "A long evaluation or checkpoint looks the same. To have the script restarted, set spec.recovery.hangSeconds."
        return Hang(message=f"{what}{where}. {then}", is_only_said=True)
    if clock.may_be_wrong:
        then = "Nothing is restarted, since the pattern of spec.progress.log may be wrong. Compare it with the script's lines."
        return Hang(message=f"{what}{where}. {then}", is_only_said=True)
    found_s = max((s.stacks_at_s or 0.0 for s in sessions), default=now_s)
    culprits = {w.id: Culprit((stack.incarnation,), f"{what}{where}") for _, w, stack in stacks[:1]}
    return Hang(now_s + KILL_AGAIN_S, f"{what}{where}", culprits=culprits, found_s=found_s)


def _clock(
    words: ScriptWords | None,
    sessions: Sequence[AgentSession],
    hang_seconds: float | None,
    silence: Silence,
    settings: Settings,
) -> _Clock | None:
    """Return the clock that runs, None if none does."""
    unchanged = "The script's progress has not changed"
    if words is not None and (words.is_at_end or (words.word.step is None and words.word.percent is None)):
        return None
    if words is not None and words.every_s is not None:
        bound_s = max(settings.hang_s, STEPS * words.every_s, GAPS * words.longest_s)
        if hang_seconds is not None:
            bound_s = max(hang_seconds, GAPS * words.every_s)
        return _Clock(words.moved_s, bound_s, unchanged)
    if hang_seconds is None:
        return None
    bound_s = max(hang_seconds, settings.first_step_s)
    if words is not None:
        return _Clock(words.moved_s, bound_s, unchanged)
    if not sessions or not (silence.has_spoken or silence.has_pattern):
        return None
    began_s = max(session.condition_at_s for session in sessions)
    silent = "Since their start the script's processes have not said how far they are"
    return _Clock(began_s, bound_s, silent, may_be_wrong=not silence.has_spoken)


def _words(rank: int, worker: Worker, stack: ProcessStack) -> str:
    """Return what the kernel says of a process."""
    return f"rank {rank} (worker {worker.id}, process {stack.local_rank}) is {stack.where}"
