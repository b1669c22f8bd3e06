"""When a committed step is reported: at most once an interval, but at once where somebody waits for it. Pure.

The two lowest members speak once a second, since what they say is the job's progress. The others, of whom the operator wants where
the time of a step goes and what their snapshots lack, speak every ten seconds, as often as a status is written, and less often in a
large job; the operator asks them when it needs them (`progress?`). So its work grows with the jobs more than with their workers,
and one that serves many jobs asks for fewer reports of each (wire.Accepted).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeVar

from regroup.protocol import local, wire
from regroup.protocol.state import Times

Value = TypeVar("Value")

OTHERS_S = 10.0
REPORTS_PER_S = 50.0
MAX_FACTOR = 20.0
"""No operator makes an agent say less than that: what it knows of a job would be too old."""
NEWS_S = 60.0
"""What is said once in a generation is said again if the operator was lost within this time: it may not have written it to the
status. Agents of a job that has trained for longer do not say it to each new operator."""


class Progress:
    """The newest commit of the current generation, and whether the operator knows it."""

    def __init__(self) -> None:
        self.generation = 0
        self.newest: wire.Progress | None = None
        self.due_s: float | None = None
        """When the newest commit is to be reported; None: nothing to say."""
        self._sent_s = float("-inf")
        self._committed_s = 0.0
        self._first: local.Committed | None = None
        """The first commit of the generation, with what it alone says."""
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
        """Take in one process's commit. The same step from a second process of the worker changes nothing."""
        first = message.generation != self.generation or self.newest is None
        if message.generation < self.generation:
            return
        self.begin(message.generation)
        old = self.newest
        if old is not None and message.reportable_step <= old.step and _says_the_same(message, old):
            # Of a worker's processes the slowest is the one to know of: the others wait for it.
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
            checkpoint=message.checkpoint or (old.checkpoint if old else None),
            checkpoint_problem=_first(message.checkpoint_problem, old.checkpoint_problem if old else None),
            checkpoints_late=_first(message.checkpoints_late, old.checkpoints_late if old else None),
            step_s=message.step_s,
            longest_s=message.longest_s,
            snapshot_step=_first(message.snapshot_step, old.snapshot_step if old else None),
            snapshot_problem=_first(message.snapshot_problem, old.snapshot_problem if old else None),
            snapshots_late=_first(message.snapshots_late, old.snapshots_late if old else None),
            times=message.times,
            noise_scale=message.noise_scale,
        )
        if first or message.first_step_ms is not None:
            self.due_s = now_s
        elif self.due_s is None:
            self.due_s = max(now_s, self._sent_s + interval_s)

    def hurry(self, interval_s: float) -> None:
        """Report the newest commit no later than so long after the last report: the operator waits for it then."""
        if self.due_s is not None:
            self.due_s = min(self.due_s, self._sent_s + interval_s)

    def take(self, now_s: float) -> wire.Progress | None:
        """Return what to report now, and count it as said."""
        said = self.again(now_s)
        self.due_s, self._sent_s = None, now_s
        if said is not None:
            self.newest = replace(said, first_step_ms=None, steps_redone=0, age_ms=0.0)
        return said

    def take_again(self, now_s: float, lost_s: float) -> wire.Progress | None:
        """Return what a new connection is told, and count it as said: also what only the first commit says, if it may be news.
        `lost_s`: when the last connection was lost."""
        said = self.take(now_s)
        if said is not None and self._first is not None and is_news(self._first_s, lost_s):
            return replace(said, first_step_ms=self._first.first_step_ms, steps_redone=self._first.steps_redone)
        return said

    def again(self, now_s: float) -> wire.Progress | None:
        """Return the newest commit as it is to be said at this time, without counting it as said."""
        if self.newest is None:
            return None
        return replace(self.newest, age_ms=round((now_s - self._committed_s) * 1000, 1))


def is_news(at_s: float, lost_s: float) -> bool:
    """Return whether what happened then may be unknown to whoever follows the operator that was lost at `lost_s`."""
    return at_s + NEWS_S > lost_s


def _says_the_same(message: local.Committed, old: wire.Progress) -> bool:
    """Return whether there is nothing new about checkpoints and snapshots."""
    return (
        message.checkpoint in (None, old.checkpoint)
        and message.checkpoint_problem in (None, old.checkpoint_problem)
        and message.snapshot_step in (None, old.snapshot_step)
        and message.snapshot_problem in (None, old.snapshot_problem)
        and message.checkpoints_late in (None, old.checkpoints_late)
        and message.snapshots_late in (None, old.snapshots_late)
    )


def _waits(times: Times | None) -> float:
    return math.inf if times is None else times.waits


def _first(said: Value | None, before: Value | None) -> Value | None:
    return before if said is None else said


def interval_s(group_rank: int, world_size: int, factor: float = 1.0) -> float:
    """Return the seconds between two progress reports of a member. `factor`: what the operator asks for (wire.Accepted)."""
    usual_s = wire.REPORT_EVERY_S if group_rank < 2 else max(OTHERS_S, world_size / REPORTS_PER_S)
    return usual_s * min(max(1.0, factor), MAX_FACTOR)
