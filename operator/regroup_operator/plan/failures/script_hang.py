"""Find out whether an unmodified script hangs, by the times at which its progress changes. Pure (docs/design/adr/0079).

The clock runs from the last change of what any member says. It begins with the second change, since nothing is known of a script's
pace before. A script that is at its end has no steps to make, and one of which a member has returned is at its end.

A long evaluation looks like a hang. So only a user who has set spec.recovery.hangSeconds has the processes restarted. Else the
condition Degraded says what was seen. No rank of a script says whether it waits for others, and all ranks start again in any
case. So one process is killed: a stopped one, else that of the lowest rank. The others end once the next generation is announced.
"""

from __future__ import annotations

from collections.abc import Iterable

from regroup.protocol.wire import REPORT_EVERY_S, ProcessStack
from regroup_operator.model.records import Settings
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


def find_script_hang(
    *,
    current: Current | None,
    words: ScriptWords | None,
    workers: Iterable[Worker],
    processes: int,
    hang_seconds: float | None,
    now_s: float,
    settings: Settings,
) -> Hang:
    """Return what is known of a hang of the newest generation. `processes` is the number of a worker's processes.

    Without `hang_seconds` it has a message only, and nobody is killed.
    """
    members = [w for w in workers if w.is_member]
    training = [w for w in members if w.standing == Standing.TRAINING]
    if current is None or words is None or words.every_s is None or words.is_at_end or len(training) < len(members):
        return Hang()
    bound_s = max(settings.hang_s, STEPS * words.every_s, GAPS * words.longest_s)
    if hang_seconds is not None:
        bound_s = max(hang_seconds, GAPS * words.every_s)
    sessions = [w.session for w in training if w.session is not None]
    factor = max((s.report_every_s for s in sessions), default=REPORT_EVERY_S) / REPORT_EVERY_S
    late_s = factor * max(LATE_S, len(members) * processes / PROCESSES_PER_LATE_S)
    overdue_s = words.moved_s + bound_s + late_s
    if now_s < overdue_s:
        return Hang(due_s=overdue_s)
    what = f"The script's progress has not changed for {overdue_s - words.moved_s:.0f} s"
    asked = ask_for_stacks(training, current, overdue_s, what, now_s)
    if asked is not None:
        return asked
    stacks = rank_stacks(training, current, processes, overdue_s)
    stacks.sort(key=lambda one: (one[2].place != ProcessStack.STOPPED, one[0]))
    where = f": {_words(*stacks[0])}" if stacks else ""
    if hang_seconds is None:
        then = "A long evaluation or checkpoint looks the same. To have the script restarted, set spec.recovery.hangSeconds."
        return Hang(message=f"{what}{where}. {then}", is_only_said=True)
    found_s = max((s.stacks_at_s or 0.0 for s in sessions), default=now_s)
    culprits = {w.id: Culprit((stack.incarnation,), f"{what}{where}") for _, w, stack in stacks[:1]}
    return Hang(now_s + KILL_AGAIN_S, f"{what}{where}", culprits=culprits, found_s=found_s)


def _words(rank: int, worker: Worker, stack: ProcessStack) -> str:
    """Return what the kernel says of a process."""
    return f"rank {rank} (worker {worker.id}, process {stack.local_rank}) is {stack.where}"
