"""Measures the speed of a run: samples or tokens a second, and the share of the GPU's arithmetic that is used (MFU). Pure."""

from typing import NamedTuple

from regroup.transaction.laps import StepTimes

from .tasks.task import Task


class Speed(NamedTuple):
    """The speed of the whole job over the steps since the last line."""

    step_s: float
    per_second: float
    """Number of `unit` a second."""
    unit: str
    """"tokens" if the task's samples have tokens, else "samples"."""
    mfu: float | None
    """Model FLOPs utilization, 0 to 1; None: the model's FLOPs or the GPU's peak are not known."""


class Meter:
    """Adds up steps between two lines. The time between steps (evaluation, checkpoints) does not count."""

    def __init__(self, task: Task, peak: float | None) -> None:
        """`peak` is the highest FLOP/s of one process's GPU."""
        self._per_sample, self._unit = (1, "samples") if task.tokens is None else (task.tokens, "tokens")
        self._flops_per_token, self._peak = task.flops_per_token, peak
        self._num_steps, self._num_samples, self._seconds = 0, 0, 0.0

    def add(self, times: StepTimes, num_samples: int) -> None:
        """Count a step with `num_samples` samples over all processes."""
        self._num_steps += 1
        self._num_samples += num_samples
        self._seconds += sum(times) - times.between

    def take(self, world_size: int) -> Speed:
        """Return the speed since the last call, and begin anew. At least one step must have been counted."""
        step_s = self._seconds / self._num_steps
        per_second = self._num_samples * self._per_sample / self._seconds
        mfu = None
        if self._flops_per_token is not None and self._peak is not None:
            mfu = per_second * self._flops_per_token / (self._peak * world_size)
        self._num_steps, self._num_samples, self._seconds = 0, 0, 0.0
        return Speed(step_s, per_second, self._unit, mfu)
