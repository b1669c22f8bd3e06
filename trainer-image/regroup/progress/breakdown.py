"""Averages the parts of a step's time over steps, for the agent. `transaction.laps` measures them."""

from collections.abc import Sequence
from dataclasses import fields

from regroup.protocol.state import Times

SMOOTHED_STEPS = 20
"""Number of steps after which a mean has followed a change."""
_NUM_PARTS = len(fields(Times))


class Smoothed:
    """Means over the last steps of a generation, by part. Its first step is left out, since it compiles and fills caches."""

    def __init__(self) -> None:
        self.begin_generation()

    def begin_generation(self) -> None:
        """Forget the times of the last generation, which had other ranks."""
        self._num_steps, self._means = -1, [0.0] * _NUM_PARTS

    def add(self, sums: Sequence[float]) -> None:
        """Take in the parts of a step's time, in seconds and in the order of `Times`."""
        self._num_steps += 1
        if self._num_steps < 1:
            return
        share = 1 / min(self._num_steps, SMOOTHED_STEPS)
        self._means = [mean + (value - mean) * share for mean, value in zip(self._means, sums)]

    def times(self) -> "Times | None":
        """Return the means in seconds; None before the second step."""
        return Times(*(round(mean, 6) for mean in self._means)) if self._num_steps > 0 else None
