"""Reports each commit to the agent: progress, speed, and the number of steps that were redone.

Owns the figures that are not part of the training state. In plain `python` nothing is reported.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import SupportsFloat

from regroup.data import SamplePlan
from regroup.generation.watcher import Watcher
from regroup.protocol import local
from regroup.state.durable import Durable
from regroup.state.memory import Memory

from .breakdown import Smoothed
from .pace import Pace


class Attempts:
    """Counts the steps that a generation redoes: those that had begun before it, with the one in flight. Pure."""

    def __init__(self) -> None:
        self.redone = 0
        """Steps that the current generation redoes."""
        self._newest = -1
        self._continues = False

    def begin_generation(self) -> None:
        self.redone, self._continues = 0, True

    def begin(self, index: int) -> None:
        """Note the begin of a step. The generation continues at its first one, which decides how many are redone."""
        if self._continues:
            self.redone, self._continues = max(0, self._newest - index + 1), False
        self._newest = max(self._newest, index)

    def told(self, index: int) -> None:
        """Note that the generation's first commit, of this step, was reported. Later steps count as new."""
        self._newest = index


@dataclass(frozen=True)
class Progress:
    """The progress of a job after a commit."""

    step: int
    """Number of committed steps."""
    loss: SupportsFloat | None
    reportable: int
    """Number of steps that every rank is certain to have committed (rule ACK)."""
    total: int | None
    """Number of steps that the script asks for."""
    waited_s: float = 0.0
    """Seconds for which this process has waited for other ranks in this generation."""
    empty: bool = False
    """This rank had no microbatch in the step."""
    snapshot_step: int | None = None
    """Newest step that every worker has in its memory snapshot."""
    times: Sequence[float] = ()
    """Parts of the step's time, `Laps.sums`."""
    noise_scale: float | None = None
    """Gradient noise scale; None: it is not measured, or not known yet."""


class Reporter:
    """The reports of one job. A `step` is a number of committed steps, an `index` counts steps from 0."""

    def __init__(self, watcher: Watcher | None, plan: SamplePlan, durable: Durable, memory: Memory) -> None:
        self._watcher, self._plan, self._durable, self._memory = watcher, plan, durable, memory
        self._pace = Pace()
        self._smoothed = Smoothed()
        self._attempts = Attempts()
        self._generation = 0
        self._noise_scale: float | None = None
        self._unread: SupportsFloat | None = None
        """Loss of the last commit, if it was on the device then."""
        self._printed: set[str] = set()
        """Kinds of copies whose lateness was printed: "checkpoint", "snapshot"."""
        self._last: local.Committed | None = None
        """Last report of a commit."""

    def begin_generation(self, generation: int, adopted_s: float, waited_s: float = 0.0) -> None:
        """Begin a generation whose adoption was complete at `adopted_s`, in monotonic seconds, of which `waited_s` were waits."""
        self._generation, self._unread = generation, None
        self._attempts.begin_generation()
        self._pace.begin_generation(adopted_s, waited_s)
        self._smoothed.begin_generation()

    def paused(self, duration_s: float) -> None:
        """Leave a pause of the script, which is over, out of the duration of a step."""
        self._pace.paused(duration_s)

    def begin_step(self, index: int) -> None:
        self._attempts.begin(index)

    def committed(self, progress: Progress) -> None:
        """Report a committed step to the agent."""
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
        """Report that all ranks have committed the last step, and report its loss again if it is known."""
        self._send(Progress(step, loss, reportable=step, total=step))
        if self._watcher is not None:
            self._watcher.send(local.FinishedLocally(self._generation, step))

    def say_late(self) -> None:
        """Print once for each kind of copy that it comes later than the spec asks for. Rank 0 calls this after a commit."""
        for kind, sentence in (("checkpoint", self._durable.late()), ("snapshot", self._memory.late)):
            if sentence and kind not in self._printed:
                self._printed.add(kind)
                print(sentence, flush=True)

    def saved(self) -> None:
        """Report the checkpoint that was tried after this process's last step, since no further commit will carry it."""
        last = self._last
        if self._watcher is None or last is None or last.generation != self._generation:
            return
        now = replace(last, checkpoint=self._durable.report(), checkpoint_problem=self._durable.problem())
        if now != last:
            self._watcher.send(replace(now, first_step_ms=None, steps_redone=0))

    def _send(self, progress: Progress, first_step_ms: float | None = None, steps_redone: int = 0) -> None:
        if self._watcher is None:
            return
        # The next report must not replace that of a generation's first commit, which alone has the steps redone.
        send = (
            self._watcher.send_soon if first_step_ms is None and progress.step != progress.total else self._watcher.send
        )
        loss = self._known(progress.loss)
        self._last = local.Committed(
            generation=self._generation,
            step=progress.step,
            reportable_step=progress.reportable,
            loss=loss if loss is not None and math.isfinite(loss) else None,
            samples=self._plan.samples(progress.reportable),
            digest=self._plan.digest(progress.reportable),
            total_steps=progress.total,
            samples_per_second=self._pace.steps_per_s(self._plan.step_samples) or None,  # a plan may count none
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

    def _known(self, loss: SupportsFloat | None) -> float | None:
        """Return a loss that is known without a wait: that of the step before, if this one is still on the device."""
        if isinstance(loss, float):
            return loss
        before, self._unread = self._unread, loss
        return None if before is None else float(before)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
