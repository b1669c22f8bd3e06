"""How fast a run is: samples or tokens a second, and the share of the GPU's arithmetic that the model uses (MFU). Pure."""

from typing import NamedTuple

from regroup.transaction.laps import StepTimes

from .tasks.task import Task


class Speed(NamedTuple):
    """Of the whole job, over the steps since the last line."""

    step_s: float
    per_second: float
    """Tokens a second where a sample has tokens, else samples."""
    unit: str
    """tokens or samples."""
    mfu: float | None
    """Model FLOPs utilization, 0 to 1; None: the model's FLOPs or the GPU's peak are not known."""


class Meter:
    """Adds up steps between two lines. What comes between steps (evaluation, checkpoints) does not count."""

    def __init__(self, task: Task, global_batch: int, peak: float | None) -> None:
        """`peak`: FLOP/s of one process's GPU."""
        self._per_step, self._unit = (
            (global_batch, "samples") if task.tokens is None else (global_batch * task.tokens, "tokens")
        )
        self._flops_per_token, self._peak = task.flops_per_token, peak
        self._num_steps, self._seconds = 0, 0.0

    def add(self, times: StepTimes, num_steps: int = 1) -> None:
        """Count a step, or those that a parameter server made in a block."""
        self._num_steps += num_steps
        self._seconds += sum(times) - times.between

    def take(self, world_size: int) -> Speed:
        """Return the speed since the last call, and begin anew. At least one step has been counted."""
        step_s = self._seconds / self._num_steps
        per_second = self._per_step / step_s
        mfu = None
        if self._flops_per_token is not None and self._peak is not None:
            mfu = per_second * self._flops_per_token / (self._peak * world_size)
        self._num_steps, self._seconds = 0, 0.0
        return Speed(step_s, per_second, self._unit, mfu)
