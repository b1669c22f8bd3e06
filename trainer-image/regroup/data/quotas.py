"""Deals the microbatches of a step to the ranks, in equal shares or in shares by the ranks' speed.

Pure. Times come with the rows of committed steps, which are the same on all ranks. So every rank makes the same deal at the same
step, without communication. A deal must depend on nothing else: on no clock, no step that is not committed and no earlier
generation. A rank that has just joined does not know the latter (docs/design/adr/0041-uneven-shares.md).
"""

import heapq
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from statistics import median, median_low

from .ids import SamplePlan

WINDOW = 10
"""Number of steps over which the median of a rank's time for a microbatch is taken. A few odd steps do not move it."""
GAIN = 0.1
"""A new deal must shorten the slowest rank's part of a step by this share, since a change drops batches that were read ahead."""
STAYS = 10
"""Number of steps in a row that must promise this gain before the deal changes. Each change in a generation doubles it."""
MOST_STAYS = 320
"""Upper bound of that number. With it the deal changes seldom if ranks are slow in turn, and stays even on the whole."""
_FASTEST = 16.0
"""A rank counts as at most this many times as fast as the median, since a time near zero is no measurement."""
_SLOWEST = 1e6
"""A rank counts as at most this many times as slow as the median. It has one microbatch then in any case."""


def counts_for(num_virtual: int, costs: Sequence[float]) -> tuple[int, ...]:
    """Return the number of microbatches of each rank, `num_virtual` in all, with which the slowest rank is done earliest.

    `costs` are the ranks' times for one microbatch, positive and in any unit. Each rank gets at least one microbatch, so there must
    be as many. Each further one goes to the rank that would be done with it first, of equals to the lower rank.
    """
    counts = [1] * len(costs)
    done = [(2 * cost, rank) for rank, cost in enumerate(costs)]
    heapq.heapify(done)
    for _ in range(num_virtual - len(costs)):
        _, rank = done[0]
        counts[rank] += 1
        heapq.heapreplace(done, ((counts[rank] + 1) * costs[rank], rank))
    return tuple(counts)


def ranges_of(counts: Sequence[int]) -> tuple[range, ...]:
    """Return the virtual workers of each rank from their counts: contiguous, in rank order."""
    return tuple(range(end - count, end) for count, end in zip(counts, accumulate(counts)))


def bounded(costs: Sequence[float]) -> list[float] | None:
    """Return the costs with outliers moved towards the median of the measured ones. None if nothing was measured."""
    measured = [cost for cost in costs if cost > 0]
    if not measured:
        return None
    middle = median_low(measured)
    return [min(max(cost, middle / _FASTEST), middle * _SLOWEST) for cost in costs]


class Quotas:
    """The deal of a generation. It begins with equal shares, and changes only with `uneven`."""

    def __init__(self, plan: SamplePlan, *, uneven: bool = False) -> None:
        self._plan, self._uneven = plan, uneven
        self.shares: tuple[range, ...] = ()
        """Virtual workers of each rank in the next step. Empty before the first generation."""
        self._adapts = False
        self._costs: deque[list[float]] = deque(maxlen=WINDOW)
        """Nanoseconds for a microbatch by rank, in each of the last steps with this deal."""
        self._skips = True
        """The next step is not measured, since it compiles or begins to read ahead."""
        self._promised = 0
        """Number of steps in a row in which another deal would have been better."""
        self._needed = STAYS

    def begin_generation(self, world_size: int) -> None:
        """Begin with equal shares of the new ranks. Called after `SamplePlan.change_batch`."""
        self.shares = self._plan.shares(world_size)
        self._adapts = self._uneven and 1 < world_size <= self._plan.num_virtual
        self._needed = STAYS
        self._changed()

    def committed(self, work_ns: Sequence[int]) -> None:
        """Take in a step that was committed with the present deal. `work_ns` is the time of each rank for its share, in ns."""
        if not self._adapts:
            return
        if self._skips:
            self._skips = False
            return
        counts = [len(share) for share in self.shares]
        self._costs.append([work / count for work, count in zip(work_ns, counts)])
        costs = bounded([median(of_rank) for of_rank in zip(*self._costs)])
        if len(self._costs) < WINDOW or costs is None:
            return
        wanted = counts_for(self._plan.num_virtual, costs)
        is_better = _longest(wanted, costs) <= (1 - GAIN) * _longest(counts, costs)
        self._promised = self._promised + 1 if is_better else 0
        if self._promised >= self._needed:
            self.shares = ranges_of(wanted)
            self._needed = min(2 * self._needed, MOST_STAYS)
            self._changed()

    def _changed(self) -> None:
        """Forget the measurements of the last deal, since a part of a step's time does not depend on the share."""
        self._costs.clear()
        self._skips = True
        self._promised = 0


def _longest(counts: Sequence[int], costs: Sequence[float]) -> float:
    return max(count * cost for count, cost in zip(counts, costs))
