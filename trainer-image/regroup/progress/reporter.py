"""What a session tells the agent after each commit: how far it is, how fast, and how much of it was done twice.

Owns the figures that are not part of the training state. In plain `python` it tells nobody.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from regroup.data import SamplePlan
from regroup.generation.watcher import Watcher
from regroup.protocol import local
from regroup.state.durable import Durable
from regroup.state.memory import Memory

from .breakdown import Smoothed
from .pace import Pace


class Attempts:
    """Counts the steps that a new generation does again: those that were begun before, up to the one in flight. Pure."""

    def __init__(self) -> None:
        self.redone = 0
        """Of the current generation."""
        self._newest = -1
        self._continues = False

    def begin_generation(self) -> None:
        self.redone, self._continues = 0, True

    def begin(self, index: int) -> None:
        """A step is begun; the first one says where the generation continues."""
        if self._continues:
            self.redone, self._continues = max(0, self._newest - index + 1), False
        self._newest = max(self._newest, index)

    def told(self, index: int) -> None:
        """The generation's first commit, of this step, was reported: what comes after it counts as new."""
        self._newest = index


@dataclass(frozen=True)
class Progress:
    """How far a job is after a commit. `step`: number of committed steps."""

    step: int
    loss: float | None
    reportable: int
    """Number of steps that all ranks are certain to hold (rule ACK)."""
    total: int | None
    """Number of steps that the script asks for."""
    waited_s: float = 0.0
    """Seconds that were waited for other ranks in this generation, in all."""
    empty: bool = False
    """This rank's share of the step was empty."""
    snapshot_step: int | None = None
    """Every worker has this step in its memory snapshot."""
    times: Sequence[float] = ()
    """`Laps.sums` of the step."""
    noise_scale: float | None = None
    """As far as it is known."""


class Reporter:
    """One job's reports. Steps are numbers of committed steps, unless they are called index."""

    def __init__(self, watcher: Watcher | None, plan: SamplePlan, durable: Durable, memory: Memory) -> None:
        self._watcher, self._plan, self._durable, self._memory = watcher, plan, durable, memory
        self._pace = Pace()
        self._smoothed = Smoothed()
        self._attempts = Attempts()
        self._generation = 0
        self._noise_scale: float | None = None
        self._printed: set[str] = set()
        """Kinds of copies of which it was printed that they come late."""
        self._last: local.Committed | None = None
        """What was said last."""

    def begin_generation(self, generation: int, adopted_s: float, waited_s: float = 0.0) -> None:
        """Adoption was complete at `adopted_s`, monotonic seconds, in which `waited_s` were waited for other ranks."""
        self._generation = generation
        self._attempts.begin_generation()
        self._pace.begin_generation(adopted_s, waited_s)
        self._smoothed.begin_generation()

    def paused(self, duration_s: float) -> None:
        """A pause that the script asked for is over."""
        self._pace.paused(duration_s)

    def begin_step(self, index: int) -> None:
        self._attempts.begin(index)

    def committed(self, progress: Progress) -> None:
        """Report a step that was committed."""
        if self._watcher is None:
            return
        self._noise_scale = progress.noise_scale
        if progress.times:
            self._smoothed.add(progress.times)
        first_step_ms = self._pace.committed(time.monotonic(), progress.waited_s)
        if first_step_ms is None:
            self._send(progress)
            return
        self._send(progress, first_step_ms, self._attempts.redone)
        self._attempts.told(progress.step - 1)

    def finished(self, step: int, loss: float | None) -> None:
        """The last step is committed on all ranks. Its loss is said again: a step without one had a loss that is no number."""
        self._send(Progress(step, loss, reportable=step, total=step))
        if self._watcher is not None:
            self._watcher.send(local.FinishedLocally(self._generation, step))

    def say_late(self) -> None:
        """Print once for each kind of copy that it comes less often than was asked for. Called by rank 0, after a commit."""
        for kind, sentence in (("checkpoint", self._durable.late()), ("snapshot", self._memory.late)):
            if sentence and kind not in self._printed:
                self._printed.add(kind)
                print(sentence, flush=True)

    def saved(self) -> None:
        """A checkpoint was written, or not, after the last step of this process: no further commit will say so."""
        last = self._last
        if self._watcher is None or last is None or last.generation != self._generation:
            return
        now = replace(last, checkpoint=self._durable.report(), checkpoint_problem=self._durable.problem())
        if now != last:
            self._watcher.send(replace(now, first_step_ms=None, steps_redone=0))

    def _send(self, progress: Progress, first_step_ms: float | None = None, steps_redone: int = 0) -> None:
        if self._watcher is None:
            return
        # What only the first commit of a generation says must not be replaced by the next one's report.
        send = (
            self._watcher.send_soon if first_step_ms is None and progress.step != progress.total else self._watcher.send
        )
        self._last = local.Committed(
            generation=self._generation,
            step=progress.step,
            reportable_step=progress.reportable,
            loss=progress.loss if progress.loss is not None and math.isfinite(progress.loss) else None,
            samples=self._plan.samples(progress.reportable),
            digest=self._plan.digest(progress.reportable),
            total_steps=progress.total,
            samples_per_second=self._pace.steps_per_s(self._plan.step_samples),
            first_step_ms=first_step_ms,
            steps_redone=steps_redone,
            checkpoint=self._durable.report(),
            checkpoint_problem=self._durable.problem(),
            checkpoints_late=self._durable.late(),
            step_s=_rounded(self._pace.step_s),
            longest_s=_rounded(self._pace.longest_s),
            empty=progress.empty,
            snapshot_step=progress.snapshot_step,
            snapshot_problem=self._memory.problem,
            snapshots_late=self._memory.late,
            times=self._smoothed.times(),
            noise_scale=self._noise_scale,
        )
        send(self._last)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
