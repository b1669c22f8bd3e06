"""Learning rates that follow the batch: multiplied while a commit applies, by a factor that ramps after each change of the batch.

Owns the factor, which is a part of the state. The optimizer's own settings are as the script and its schedule left them, before
and after each commit, so any scheduler works unchanged. P. Goyal et al., Accurate, large minibatch SGD, 2017 (linear, with
warm-up); A. Krizhevsky, One weird trick for parallelizing convolutional neural networks, 2014 (square root).
"""

import math
from typing import Any, NamedTuple

from regroup.strategies import RateScaling


class Ramp(NamedTuple):
    """A factor that goes from `low` to `high` in some steps, of which `since` is the first."""

    low: float
    high: float
    since: int


class ScaledRates:
    """The rates of one optimizer, or of several as one."""

    def __init__(self, described: RateScaling, optimizer: Any) -> None:
        self._described, self._optimizer = described, optimizer
        self._ramp = self._before = Ramp(1.0, 1.0, 0)
        """`_before`: what it was, until a step is committed with the newer one."""
        self._kept: list[tuple[dict[str, Any], Any]] = []
        """(param group, its own rate), while they are multiplied."""

    def follow(self, step: int, batch: int) -> None:
        """From `step` on, which is not committed, a step has `batch` samples. All ranks do this at one step. What was said for the
        same step before is as not said: ranks that were in a generation without a commit must come to the same as the others."""
        before = self._before if self._ramp.since == step else self._ramp
        target = target_of(self._described, batch)
        self._before = before
        if target == before.high:
            self._ramp = before
        else:
            self._ramp = Ramp(factor_at(before, step, self._described.warmup_steps), target, step)

    def factor(self, step: int) -> float:
        """Return what the rates are multiplied by in a step."""
        return factor_at(self._ramp, step, self._described.warmup_steps)

    def multiply(self, step: int) -> None:
        """The optimizer is stepped next."""
        factor = self.factor(step)
        self._kept = [(group, group["lr"]) for group in self._optimizer.param_groups if "lr" in group]
        for group, rate in self._kept:
            group["lr"] = rate * factor

    def restore(self) -> None:
        """It has been."""
        for group, rate in self._kept:
            group["lr"] = rate
        self._kept = []

    def state_dict(self) -> dict[str, Any]:
        """Return the factor's course, as a part of the state."""
        return {"ramp": list(self._ramp), "before": list(self._before)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another rank was."""
        self._ramp, self._before = Ramp(*state["ramp"]), Ramp(*state["before"])


def target_of(described: RateScaling, batch: int) -> float:
    """Return the factor for a batch, after warm-up. Pure."""
    ratio = batch / described.base_batch
    return ratio if described.rule == "linear" else math.sqrt(ratio)


def factor_at(ramp: Ramp, step: int, warmup_steps: int) -> float:
    """Return the factor in a step: in the first step of a ramp that of before, after `warmup_steps` the new one. Pure."""
    done = (step - ramp.since) / warmup_steps if warmup_steps else 1.0
    return ramp.high if done >= 1 else ramp.low + (ramp.high - ramp.low) * max(0.0, done)
