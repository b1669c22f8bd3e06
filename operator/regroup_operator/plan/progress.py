"""Make status.progress, samples and checkpoint from what members report. Pure.

Only the newest generation's word counts (rule FENCE), and the one before while a planned one is pending: its members
train on. A checkpoint is named only once the generation's startStep is known (rule MAD), and never an older one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from regroup.protocol.document import PLANNED
from regroup.protocol.wire import Progress
from regroup_operator.model.plan import Clock
from regroup_operator.model.records import Session
from regroup_operator.model.worker import Current

REPORT_EVERY_S = 1.0
"""Agents report progress at most this often (_regroup_agent.progress.INTERVAL_S)."""
STALL_STEPS = 3
STALL_SLACK_S = 0.1


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

    @property
    def stalls_at_s(self) -> float:
        """When the group counts as stalled if nothing more is reported: three steps after the next report was due, or at
        once where the newest commit was older than that when it was told."""
        if self.step_s is None:
            return inf
        overdue_s = max(STALL_SLACK_S, STALL_STEPS * self.step_s)
        return self.told_s if self.told_s - self.at_s >= overdue_s else self.told_s + REPORT_EVERY_S + overdue_s


def newest_progress(sessions: Iterable[Session], current: Current) -> Reported | None:
    """Return the furthest report of a generation that counts, the latest of equal ones."""
    counted = (current.number, current.number - 1) if current.kind == PLANNED else (current.number,)
    found = [
        Reported(
            s.progress_generation, s.progress.step, s.progress_at_s or 0.0, s.progress, s.progress_told_s, s.step_s
        )
        for s in sessions
        if s.progress is not None and s.progress_generation in counted
    ]
    return max(found, key=lambda r: (r.generation, r.step, r.at_s), default=None)


def progress_status(newest: Reported, known: Mapping[str, Any], clock: Clock) -> dict[str, Any]:
    """Return status.progress. What is unchanged keeps its time, since the two clocks drift against each other."""
    report = newest.report
    # Who adopts says its step without a loss; a step that was committed without one had a loss that is not a number.
    loss = report.loss if report.loss is not None or newest.step > known.get("step", -1) else known.get("loss")
    progress = {
        "step": newest.step,
        "totalSteps": report.total_steps if report.total_steps is not None else known.get("totalSteps"),
        "loss": loss,
        "samplesPerSecond": report.samples_per_second,
    }
    same = known.get("at") is not None and all(known.get(key) == value for key, value in progress.items())
    progress["at"] = known["at"] if same else clock.stamp(newest.at_s)
    return {key: value for key, value in progress.items() if value is not None}


def checkpoint_status(
    newest: Reported, known: Mapping[str, Any] | None, current: Current, *, has_started: bool, keep: int, clock: Clock
) -> dict[str, Any] | None:
    """Return the new status.checkpoint, or None to leave the known one. `has_started`: startStep is in the status."""
    named = newest.report.checkpoint
    if named is None or newest.generation != current.number or not has_started:
        return None
    pair = (named["generation"], named["step"])
    if known is not None and pair <= (known["generation"], known["step"]):
        return None
    kept = [*(known or {}).get("kept", ()), named["directory"]][-keep:]
    return {
        "generation": pair[0],
        "step": pair[1],
        "directory": named["directory"],
        "at": clock.stamp(newest.at_s),
        "kept": kept,
    }
