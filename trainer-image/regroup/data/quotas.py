"""How many microbatches of a step each rank computes: equal shares, or shares that follow how long ranks took for theirs.

Pure: the times come with the rows of committed steps, which are the same on all ranks, so every rank comes to the same deal at the
same step without asking anybody. Nothing else may go in: no clock, no row of a step that is not committed, nothing from before
the generation, which a rank that has just joined cannot know. Why so: docs/design/adr/0041-uneven-shares.md.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from statistics import median, median_low

from .ids import SamplePlan

WINDOW = 10
"""Steps whose median says how long a rank takes for a microbatch: a few odd steps do not move it."""
GAIN = 0.1
"""A deal is changed if that makes the slowest rank's part of a step shorter by this share. A change costs what was read ahead."""
STAYS = 10
"""For so many steps in a row it has to promise that, the first time in a generation; each change doubles the number .."""
MOST_STAYS = 320
""".. up to this one. So ranks that are slow in turn are dealt evenly, on the whole, and change little."""
_FASTEST = 16.0
"""A rank counts as at most so many times as fast as the median: a time of almost nothing is no measurement."""
_SLOWEST = 1e6
"""And as at most so many times as slow: then it has one microbatch in any case."""


def counts_for(num_virtual: int, costs: Sequence[float]) -> tuple[int, ...]:
    """Return how many microbatches each rank gets so that the last one is done as early as possible; together `num_virtual`.

    costs: how long each takes for one, in any unit, positive. Each rank gets at least one; there must be as many. A microbatch
    goes to whoever would be done with it first, which gives the shortest time; of equals the lower rank gets it.
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
    """Return the virtual workers of each rank: contiguous, in rank order."""
    return tuple(range(end - count, end) for count, end in zip(counts, accumulate(counts)))


def bounded(costs: Sequence[float]) -> list[float] | None:
    """Return costs that a deal can be made of: near the median of those that were measured. None: none was."""
    measured = [cost for cost in costs if cost > 0]
    if not measured:
        return None
    middle = median_low(measured)
    return [min(max(cost, middle / _FASTEST), middle * _SLOWEST) for cost in costs]


class Quotas:
    """The deal of one generation. Begins with equal shares, and keeps them unless it may be uneven."""

    def __init__(self, plan: SamplePlan, *, uneven: bool = False) -> None:
        self._plan, self._uneven = plan, uneven
        self.shares: tuple[range, ...] = ()
        """Virtual workers of each rank in the next step. Empty before the first generation: there are no ranks."""
        self._adapts = False
        self._costs: deque[list[float]] = deque(maxlen=WINDOW)
        """Of the last steps with this deal: nanoseconds for a microbatch, by rank."""
        self._skips = True
        """The next step is left out: it compiles, or begins to read ahead."""
        self._promised = 0
        """So many steps in a row, another deal would have been better."""
        self._needed = STAYS

    def begin_generation(self, world_size: int) -> None:
        """Other ranks: equal shares, and nothing is known. After `SamplePlan.change_batch`."""
        self.shares = self._plan.shares(world_size)
        self._adapts = self._uneven and 1 < world_size <= self._plan.num_virtual
        self._needed = STAYS
        self._changed()

    def committed(self, work_ns: Sequence[int]) -> None:
        """A step is committed with the deal as it is. work_ns: how long each rank worked on its share, in rank order."""
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
        """What was measured is of another deal: part of a step's time does not depend on the share."""
        self._costs.clear()
        self._skips = True
        self._promised = 0


def _longest(counts: Sequence[int], costs: Sequence[float]) -> float:
    return max(count * cost for count, cost in zip(counts, costs))
