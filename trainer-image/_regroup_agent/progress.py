"""Decides when a committed step is reported: at most once an interval, and at once for a generation's first step. Pure.

The two lowest members report once a second; the operator takes the job's progress from them. The others report step times and the
state of their snapshots every ten seconds, and less often in a large job. The operator can ask for a report (`progress?`).
So its work grows with the number of jobs more than with their workers. One that serves many jobs asks all
agents to report less often (wire.Answered).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from regroup.protocol import local, wire
from regroup.protocol.state import Times

KEPT = (
    "checkpoint", "checkpoint_problem", "checkpoints_late", "snapshot_step", "snapshot_problem", "snapshots_late"
)  # fmt: skip
"""Fields of a report that stay as they were if a commit has None in them."""
OTHERS_S = 10.0
REPORTS_PER_S = 50.0
MAX_FACTOR = 20.0
"""Largest factor by which an operator can stretch the interval. Its knowledge of a job would be too old beyond."""
NEWS_S = 60.0
"""Age up to which a fact that is reported once in a generation may be unknown to the next operator.

A lost operator may not have written it to the status. Agents of a job that has trained for longer do not repeat it to each new one.
"""


class Progress:
    """The newest commit of the current generation, and the time at which it is reported."""

    def __init__(self) -> None:
        self.generation = 0
        self.newest: wire.Progress | None = None
        self.due_s: float | None = None
        """Time at which the newest commit is reported; None: the operator knows it."""
        self._sent_s = float("-inf")
        self._committed_s = 0.0
        self._first: local.Committed | None = None
        """First commit of the generation, which alone has the duration of the first step and the steps redone."""
        self._first_s = 0.0

    @property
    def step(self) -> int:
        """Newest step that may be reported (rule ACK); 0 before the first commit of the generation."""
        return self.newest.step if self.newest else 0

    def begin(self, generation: int) -> None:
        """Forget the commits of older generations."""
        if generation != self.generation:
            self.generation, self.newest, self.due_s, self._first = generation, None, None, None

    def committed(self, message: local.Committed, interval_s: float, now_s: float) -> None:
        """Take in a commit of one process. The same step from another process of the worker counts only if it waited less."""
        first = message.generation != self.generation or self.newest is None
        if message.generation < self.generation:
            return
        self.begin(message.generation)
        old = self.newest
        said: dict[str, Any] = {name: getattr(message, name) for name in KEPT}
        kept: dict[str, Any] = {
            name: getattr(old, name, None) if value is None else value for name, value in said.items()
        }
        has_news = any(getattr(old, name, None) != value for name, value in kept.items())
        if old is not None and message.reportable_step <= old.step and not has_news:
            # The slowest process of the worker waits least for others; its times explain the step.
            if message.reportable_step == old.step and _waits(message.times) < _waits(old.times):
                self.newest = replace(old, times=message.times)
            return
        self._committed_s = now_s
        if message.first_step_ms is not None:
            self._first, self._first_s = message, now_s
        unsaid = old if old is not None and self.due_s is not None else None
        self.newest = wire.Progress(
            step=max(message.reportable_step, old.step if old else 0),
            loss=message.loss,
            samples=message.samples,
            digest=message.digest,
            total_steps=message.total_steps,
            samples_per_second=message.samples_per_second,
            first_step_ms=message.first_step_ms or (unsaid.first_step_ms if unsaid else None),
            steps_redone=message.steps_redone or (unsaid.steps_redone if unsaid else 0),
            step_s=message.step_s,
            longest_s=message.longest_s,
            times=message.times,
            noise_scale=message.noise_scale,
            generation=message.generation,
            **kept,
        )
        if first or message.first_step_ms is not None:
            self.due_s = now_s
        elif self.due_s is None:
            self.due_s = max(now_s, self._sent_s + interval_s)

    def hurry(self, interval_s: float) -> None:
        """Shorten the delay of the newest commit to `interval_s` after the last report. The operator has just asked for that."""
        if self.due_s is not None:
            self.due_s = min(self.due_s, self._sent_s + interval_s)

    def take(self, now_s: float) -> wire.Progress | None:
        """Return the report of the newest commit, and note it as sent. None before the generation's first commit."""
        said = self.again(now_s)
        self.due_s, self._sent_s = None, now_s
        if said is not None:
            self.newest = replace(said, first_step_ms=None, steps_redone=0, age_ms=0.0)
        return said

    def take_again(self, now_s: float, lost_s: float) -> wire.Progress | None:
        """Return the report of the newest commit for a new connection, and note it as sent.

        If the operator that was lost at `lost_s` may not have stored the generation's first commit, its facts are repeated.
        """
        said = self.take(now_s)
        if said is not None and self._first is not None and is_news(self._first_s, lost_s):
            return replace(said, first_step_ms=self._first.first_step_ms, steps_redone=self._first.steps_redone)
        return said

    def again(self, now_s: float) -> wire.Progress | None:
        """Return the report of the newest commit with its present age, without noting it as sent."""
        if self.newest is None:
            return None
        return replace(self.newest, age_ms=round((now_s - self._committed_s) * 1000, 1))


def is_news(at_s: float, lost_s: float) -> bool:
    """Return whether an event at `at_s` may be unknown to the successor of the operator that was lost at `lost_s`."""
    return at_s + NEWS_S > lost_s


def _waits(times: Times | None) -> float:
    return math.inf if times is None else times.waits


def interval_s(group_rank: int, world_size: int, factor: float = 1.0) -> float:
    """Return the seconds between two progress reports of a member. The operator sets `factor` (wire.Answered)."""
    usual_s = wire.REPORT_EVERY_S if group_rank < 2 else max(OTHERS_S, world_size / REPORTS_PER_S)
    return usual_s * min(max(1.0, factor), MAX_FACTOR)
