"""The gradient noise scale: how large a batch may become before more samples a step stop paying off.

Owns the estimators and their averages, which are a part of the state. Reads no gradient: a strategy measures squared norms, and
the rows carry each rank's own. For a gradient G and the covariance Sigma of a sample's gradient, B_simple = tr(Sigma) / |G|^2
(S. McCandlish et al., An Empirical Model of Large-Batch Training, 2018, appendix A.1).
Why so: docs/design/adr/0042-noise-scale.md.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from regroup.bits import float_of

from .host import Scalar, to_host

DECAY = 0.99
"""Decay of both averages in a step. They cover about the last hundred steps."""
NAME = "regroup.noise_scale"
"""Name of the averages as a part of the state."""


class OwnNorm(NamedTuple):
    """One rank's part of a step, before the sum over ranks: the weight of its samples, the squared norm of their gradient."""

    weight: float
    """Weight of its samples, as `step.backward` was told."""
    norm_squared: float
    """Squared norm of the sum of its samples' gradients. Below 0: it was not measured."""


def weigh(parts: Sequence[OwnNorm]) -> tuple[float, float, float] | None:
    """Return (mean squared norm of the ranks' mean gradients, mean of 1 / weight, 1 / total weight). Pure.

    None: fewer than two ranks had samples, or one did not measure, or came to no finite number."""
    parts = [part for part in parts if part.weight > 0]
    if len(parts) < 2 or not all(0 <= part.norm_squared < math.inf for part in parts):
        return None
    mean = sum(part.norm_squared / part.weight**2 for part in parts) / len(parts)
    inverse = sum(1 / part.weight for part in parts) / len(parts)
    return mean, inverse, 1 / sum(part.weight for part in parts)


def estimate(small: float, inverse_small: float, large: float, inverse_large: float) -> tuple[float, float]:
    """Return unbiased estimates of (|G|^2, tr(Sigma)) from squared norms of mean gradients at two batches. Pure.

    E|G_B|^2 = |G|^2 + tr(Sigma) / B, at each of the two; `inverse_..` is 1 / B. `small` may be a mean over several batches,
    with the mean of their 1 / B: the equation is linear in it.
    """
    noise = (small - large) / (inverse_small - inverse_large)
    return large - noise * inverse_large, noise


class NoiseScale:
    """The averages of one job: equal on all ranks, as they follow from the rows and from gradients that are equal."""

    def __init__(self) -> None:
        self._signal = self._noise = 0.0
        """Averages of both estimates. They begin at 0, and so are too small by one factor, which their ratio has not."""
        self._pending: tuple[float, float, float, float, Scalar] | None = None
        """The newest step, if the norm of its summed gradient is still on the device: the result of `weigh`, the prescale, and
        the norm."""

    def add(self, parts: Sequence[OwnNorm], norm_squared: Scalar | None, prescale: float) -> None:
        """Take a step that is applied. Does not wait for the device.

        `parts` has one entry for each rank. `norm_squared` has the bits of the squared norm of the gradient's sum over all ranks;
        None: it was not measured. All gradients were multiplied by `prescale`.
        """
        self.tell(to_host(self.ask()))
        weighed = weigh(parts)
        if norm_squared is not None and weighed is not None:
            self._pending = *weighed, prescale, norm_squared
            if isinstance(norm_squared, int):
                self.tell([norm_squared])

    def ask(self) -> list[Scalar]:
        """Return the scalars of the device that `tell` takes as numbers."""
        return [] if self._pending is None else [self._pending[4]]

    def tell(self, values: Sequence[int]) -> None:
        """Take the values of the scalars of the last `ask`."""
        if self._pending is None or not values:
            return
        (mean, inverse, inverse_total, prescale, _), self._pending = self._pending, None
        large = float_of(values[0]) * inverse_total**2
        if not math.isfinite(large):
            return
        signal, noise = estimate(mean / prescale**2, inverse, large / prescale**2, inverse_total)
        self._signal += (1 - DECAY) * (signal - self._signal)
        self._noise += (1 - DECAY) * (noise - self._noise)

    @property
    def known(self) -> float | None:
        """The noise scale, in the unit of weights. On a GPU it may lack the newest step, which was not read yet.
        None: no step had two ranks with samples yet, or the noise hides the gradient."""
        return self._noise / self._signal if self._signal > 0 and self._noise >= 0 else None

    def now(self) -> float | None:
        """As `known`, with the newest step. Waits for the device."""
        self.tell(to_host(self.ask()))
        return self.known

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, as a part of the state. Waits for the device."""
        self.now()
        return {"signal": self._signal, "noise": self._noise}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another rank was."""
        self._pending = None
        self._signal, self._noise = state["signal"], state["noise"]
