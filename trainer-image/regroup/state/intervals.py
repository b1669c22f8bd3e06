"""Checks that copies of the state begin as often as the spec asks for. Pure."""

import math
from collections import deque

TIMES = 1.5
"""Factor by which an interval must be too long for a sentence. Copies begin after a step, so it is a whole number of steps."""
LEAST_S = 1.0
"""Seconds by which an interval must be longer at least."""
_CHANGE = 0.25
"""Relative change of the interval after which the sentence is made anew. Each new sentence is a write of the status."""


class Interval:
    """The time between the starts of two copies. `name` and `field` are for its sentence: "Memory snapshots", the spec's field."""

    def __init__(self, name: str, field: str, asked_s: float) -> None:
        self._name, self._field, self.asked_s = name, field, asked_s
        self._began_s: float | None = None
        self._apart_s: deque[float] = deque(maxlen=2)
        """The last two intervals, since one alone may contain a pause of the script."""
        self._told_s: float | None = None
        self.sentence = ""
        """Sentence on an interval that is too long, its reason and the remedy; empty: it is as asked for, or not known yet."""

    def begin_generation(self) -> None:
        """Forget the intervals before a new generation, which contain time without training."""
        self._began_s = None
        self._apart_s.clear()

    def began(self, now_s: float, reason: str) -> None:
        """Note the start of a copy, at `now_s` of a monotonic clock. `reason` is a clause on why it did not begin earlier."""
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
            # Rounded down: with 321 for steps of 320.4 s only every second step would be copied.
            self.sentence = (
                f"{self._name} begin every {_seconds(real_s)} s, and {self._field} is {self.asked_s:g}: {reason}. Raise it to "
                f"{math.floor(real_s)}, or keep the longer interval."
            )


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"
