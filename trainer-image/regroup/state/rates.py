"""Learning rates that follow the batch. A commit multiplies them by a factor, which ramps after each change of the batch.

Owns the factor, which is a part of the state. Outside the commit the optimizer has its own rates, so any scheduler works unchanged.
The linear rule with warm-up is from P. Goyal et al., Accurate, large minibatch SGD, 2017. The square root is from A. Krizhevsky,
One weird trick for parallelizing convolutional neural networks, 2014.
"""

import math
from typing import Any, NamedTuple

from regroup.strategies import RateScaling


class Ramp(NamedTuple):
    """A factor that goes from `low` to `high` over some steps, of which `since` is the first."""

    low: float
    high: float
    since: int


class ScaledRates:
    """The learning rates of one optimizer, or of several as one (`optimizers.Together`)."""

    def __init__(self, described: RateScaling, optimizer: Any) -> None:
        self._described, self._optimizer = described, optimizer
        self._ramp = self._before = Ramp(1.0, 1.0, 0)
        """`_before` is the ramp before the last change of the batch, until a step is committed after it."""
        self._kept: list[tuple[dict[str, Any], Any]] = []
        """Param groups and their own rates, while the rates are multiplied."""

    def follow(self, step: int, batch: int) -> None:
        """Let the factor follow a batch of `batch` samples from `step` on, which is not committed. All ranks call this.

        A second call for the same step replaces the first one. So ranks that were in a generation without a commit have the same
        factor as the others.
        """
        before = self._before if self._ramp.since == step else self._ramp
        target = target_of(self._described, batch)
        self._before = before
        if target == before.high:
            self._ramp = before
        else:
            self._ramp = Ramp(factor_at(before, step, self._described.warmup_steps), target, step)

    def factor(self, step: int) -> float:
        """Return the factor of the rates in a step."""
        return factor_at(self._ramp, step, self._described.warmup_steps)

    def multiply(self, step: int) -> None:
        """Multiply the rates. Called before the optimizer is stepped."""
        factor = self.factor(step)
        self._kept = [(group, group["lr"]) for group in self._optimizer.param_groups if "lr" in group]
        for group, rate in self._kept:
            group["lr"] = rate * factor

    def restore(self) -> None:
        """Give the param groups their own rates back. Called after the optimizer was stepped."""
        for group, rate in self._kept:
            group["lr"] = rate
        self._kept = []

    def state_dict(self) -> dict[str, Any]:
        """Return both ramps. They are a part of the state."""
        return {"ramp": list(self._ramp), "before": list(self._before)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the ramps of another rank."""
        self._ramp, self._before = Ramp(*state["ramp"]), Ramp(*state["before"])


def target_of(described: RateScaling, batch: int) -> float:
    """Return the factor for a batch, after warm-up. Pure."""
    ratio = batch / described.base_batch
    return ratio if described.rule == "linear" else math.sqrt(ratio)


def factor_at(ramp: Ramp, step: int, warmup_steps: int) -> float:
    """Return the factor in a step. It is `low` in the first step of the ramp, and `high` after `warmup_steps`. Pure."""
    done = (step - ramp.since) / warmup_steps if warmup_steps else 1.0
    return ramp.high if done >= 1 else ramp.low + (ramp.high - ramp.low) * max(0.0, done)
