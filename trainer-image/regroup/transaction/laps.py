"""The time of a step on this rank, cut into parts by laps of one clock.

Owns the parts of a step. Does not touch the device. On a GPU, `forward` and `backward` are the time in which the host starts work.
`device` is the time for which it then waits until that work is done. Costs a few readings of the clock a step. `progress.breakdown`
has the means over steps.
"""

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

DATA, FORWARD, BACKWARD, DEVICE, EXCHANGE, WAITS, APPLY, BETWEEN = range(8)
"""Parts of a step, in the order of `Times`. EXCHANGE is `communication` once the waits in it are known."""
NUM_PARTS = 8


class StepTimes(NamedTuple):
    """Seconds of one step on this rank, which add up to the time between two commits."""

    data: float
    """Fetching batches."""
    forward: float
    """The script's own code in the block: its forward pass, its loss, moving batches to the device."""
    backward: float
    """`step.backward()`."""
    device: float
    """The host waits for this process's GPU to finish forward and backward."""
    communication: float
    """Sums over ranks that backward did not hide."""
    waits: float
    """Waiting until the slowest rank has come to its commit."""
    apply: float
    """Clipping, the hooks and the optimizer's step."""
    between: float
    """From the previous commit to the block: the script's code between two steps, checkpoints, evaluation."""


class Laps:
    """The clock of one transaction; for the main thread."""

    def __init__(self) -> None:
        self.sums = [0.0] * NUM_PARTS
        """Seconds of the step in progress, or of the last one, by part."""
        self.busy_ns = 0
        """Nanoseconds in which this rank did not wait for others, from the last meeting until its device had computed its share.
        Before the device has computed a step, it is that of the step before."""
        self._last_s = self._committed_s = self._met_s = perf_counter()

    def begin_generation(self) -> None:
        """Begin the clock anew: ranks have just met at the end of adoption, and the time before is no part of a step."""
        self.busy_ns = 0
        self._committed_s = self._met_s = perf_counter()

    def begin(self) -> None:
        """Enter the block of a step: the first time, or again."""
        now_s = self._last_s = perf_counter()
        self.sums = [0.0] * NUM_PARTS
        self.sums[BETWEEN] = now_s - self._committed_s

    def lap(self, part: int) -> None:
        """Count the time since the last lap for a part."""
        now_s = perf_counter()
        self.sums[part] += now_s - self._last_s
        self._last_s = now_s

    def computed(self) -> None:
        """Note that the device has computed this rank's share of the step. From here on the rank waits for others."""
        self.lap(DEVICE)
        self.busy_ns = int((self._last_s - self._met_s) * 1e9)

    def work_ns(self) -> int:
        """Return for how long this rank has worked on its share of the step: nanoseconds, up to the last lap."""
        return int((self.sums[DATA] + self.sums[FORWARD] + self.sums[BACKWARD] + self.sums[DEVICE]) * 1e9)

    def met(self, rank: int, busy_ns: Sequence[int]) -> None:
        """All ranks have met: count the time since the last lap for the exchange, and take what it waited out of it.

        `busy_ns`: of each rank, as it came. They met last at one moment, so the difference is what one waits for another."""
        self.lap(EXCHANGE)
        self._met_s = self._last_s
        if len(busy_ns) > 1:
            waits_s = min(self.sums[EXCHANGE], (max(busy_ns) - busy_ns[rank]) * 1e-9)
            self.sums[WAITS] += waits_s
            self.sums[EXCHANGE] -= waits_s

    def committed(self) -> None:
        """Note that the step is applied."""
        self.lap(APPLY)
        self._committed_s = self._last_s
