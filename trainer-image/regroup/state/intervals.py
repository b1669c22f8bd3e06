"""Whether copies of the state begin as often as was asked for; one sentence where they do not. Pure."""

import math
from collections import deque

TIMES = 1.5
"""Copies begin after a step, so an interval is a whole number of steps. One that is so many times too long is worth a sentence."""
LEAST_S = 1.0
"""... and by so many seconds at least."""
_CHANGE = 0.25
"""The sentence is made again once the interval has changed by this part of it: each new sentence is a write of the status."""


class Interval:
    """The time between the starts of two copies. `name`: of what is copied, such as "Memory snapshots"; `field`: in the spec."""

    def __init__(self, name: str, field: str, asked_s: float) -> None:
        self._name, self._field, self.asked_s = name, field, asked_s
        self._began_s: float | None = None
        self._apart_s: deque[float] = deque(maxlen=2)
        """The last two: one alone may contain a pause of the script."""
        self._told_s: float | None = None
        self.sentence = ""
        """What the interval is, why, and what to do; empty: it is as was asked for, or not known yet."""

    def begin_generation(self) -> None:
        """The time before it was no training."""
        self._began_s = None
        self._apart_s.clear()

    def began(self, now_s: float, reason: str) -> None:
        """A copy begins, at this time of a monotonic clock. reason: why it did not begin earlier, a clause."""
        if self._began_s is not None:
            self._apart_s.append(now_s - self._began_s)
        self._began_s = now_s
        if len(self._apart_s) < 2:
            return
        real_s = min(self._apart_s)
        if real_s <= max(TIMES * self.asked_s, self.asked_s + LEAST_S):
            self._told_s, self.sentence = None, ""
        elif self._told_s is None or abs(real_s - self._told_s) > _CHANGE * self._told_s:
            self._told_s = real_s
            # Rounded down: with 321 for steps of 320.4 s only every second one would be copied.
            self.sentence = (
                f"{self._name} begin every {_seconds(real_s)} s, and {self._field} is {self.asked_s:g}: {reason}. Raise it to "
                f"{math.floor(real_s)}, or keep the longer interval."
            )


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"
