"""Pods of one place that fail one after the other: the next one is made after a pause, which grows with each. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

FORGOTTEN_S = 600.0
"""A row of failed pods is over after so long without another one: twice the longest pause before the next pod."""
MAX_DOUBLINGS = 10
"""A power of two that is large enough for every `Pauses`."""


@dataclass(frozen=True)
class Pauses:
    """The pauses for which a place stays empty after failures in a row: `first_s`, then twice as long each time, at most `last_s`.
    The first `free` failures cost no pause."""

    first_s: float
    last_s: float
    free: int = 0


REPLACED = Pauses(10.0, 300.0, free=1)
"""Pods that end or fail: the first is replaced at once. The kubelet has these pauses for a container."""
TRIED_AGAIN = Pauses(60.0, 1800.0)
"""Pods that found no node."""


@dataclass(frozen=True)
class PodRow:
    """`count` pods of one place came to nothing in a row. The newest one has the number `attempt` and was seen at `at_s`
    (monotonic). `reason` is set if it was evicted or preempted."""

    count: int
    attempt: int
    at_s: float
    reason: str = ""

    @staticmethod
    def after(before: PodRow | None, attempt: int, at_s: float, *, num: int = 1, reason: str = "") -> PodRow:
        """Return the row with `num` pods more, of which the newest has the number `attempt`."""
        return PodRow((before.count if before is not None else 0) + num, attempt, at_s, reason)

    def pause_s(self, pauses: Pauses) -> float:
        """Return the seconds from the newest failure to the next pod."""
        num_paused = self.count - pauses.free
        return 0.0 if num_paused < 1 else min(pauses.last_s, pauses.first_s * 2.0 ** min(num_paused - 1, MAX_DOUBLINGS))

    def held_until_s(self, pauses: Pauses) -> float:
        """Return when the next pod is made (monotonic); before all times if nothing holds it back."""
        pause_s = self.pause_s(pauses)
        return self.at_s + pause_s if pause_s else -inf

    def is_over(self, now_s: float) -> bool:
        """Return whether the newest pod failed so long ago that the next one begins a new row."""
        return now_s >= self.at_s + FORGOTTEN_S
