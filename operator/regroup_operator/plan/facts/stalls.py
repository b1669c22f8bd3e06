"""Find the newest progress of a generation, and say when its steps are overdue. Pure.

Only the newest generation's word counts (rule FENCE), and the one before while a planned one is pending: its members
train on. No policy: several of them read it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from regroup.protocol.document import PLANNED
from regroup.protocol.wire import REPORT_EVERY_S, Progress
from regroup_operator.model.records import AgentSession
from regroup_operator.model.worker import Current

ANSWER_S = 0.5
"""An agent that does not answer for so long while its group stalls cannot be reached."""
SCRIPT_ASK_EVERY_S = 60.0
"""No step of a script proves that its agents are there: one that has said nothing for so long is asked."""
SCRIPT_ANSWER_S = 30.0
"""So long the agent of a script that runs may take to answer: its node may be busy, and its processes are well."""
SCRIPT_RESTART_S = 2.0
"""Time for a script's agent to answer before it is left out. When it joins again, the script restarts."""
STALL_STEPS = 3
STALL_SLACK_S = 0.1
FIRST_STALL_S = 15.0
"""A group of which no step time is known counts as stalled after so long: its agents are then asked if they are there."""


@dataclass(frozen=True)
class Reported:
    """The newest progress that counts."""

    generation: int
    step: int
    at_s: float
    report: Progress
    told_s: float
    step_s: float | None
    """Duration of a step, by the worker that reported; None: it has seen no second report yet."""
    due_s: float | None = None
    """The time at which its next report is due."""

    @property
    def stalls_at_s(self) -> float:
        """The time at which the group counts as stalled if nothing more is reported. That is three steps after the next report was
        due. It is at once if the newest commit was older than that when it was reported."""
        if self.step_s is None:
            return self.told_s + FIRST_STALL_S
        overdue_s = max(STALL_SLACK_S, STALL_STEPS * self.step_s)
        if self.told_s - self.at_s >= overdue_s:
            return self.told_s
        return (self.told_s + REPORT_EVERY_S if self.due_s is None else self.due_s) + overdue_s


def is_unresponsive(session: AgentSession, now_s: float) -> bool:
    """Return whether an agent has not answered for ANSWER_S: it may be frozen, or its node without power. An open stream says
    nothing against that."""
    asked_s = session.unanswered_since_s
    return asked_s is not None and now_s >= asked_s + ANSWER_S


def counted_generations(current: Current) -> tuple[int, ...]:
    """Return the numbers of the generations whose reports count."""
    return (current.number, current.number - 1) if current.kind == PLANNED else (current.number,)


def newest_progress(sessions: Iterable[AgentSession], counted: Collection[int]) -> Reported | None:
    """Return the furthest report of one of these generations, the latest of equal ones. Its checkpoint is the newest that any
    report of its generation names: one worker writes it, and all may be equally far."""
    found = [(s, s.progress) for s in sessions if s.progress is not None and s.progress_generation in counted]
    if not found:
        return None
    newest, progress = max(found, key=lambda f: (f[0].progress_generation, f[1].step, f[0].progress_at_s or 0.0))
    named = [p.checkpoint for s, p in found if p.checkpoint and s.progress_generation == newest.progress_generation]
    if named:
        progress = replace(progress, checkpoint=max(named, key=lambda one: (one["generation"], one["step"])))
    return Reported(
        newest.progress_generation,
        progress.step,
        newest.progress_at_s or 0.0,
        progress,
        newest.progress_told_s,
        newest.step_s,
        newest.progress_due_s,
    )
