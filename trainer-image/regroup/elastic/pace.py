"""How fast this process commits steps: samples per second, and the first step of a generation. The caller brings the clock."""

from collections import deque
from statistics import median


class Pace:
    """Fed with the monotonic time of every commit, in seconds."""

    def __init__(self) -> None:
        self._durations_s: deque[float] = deque(maxlen=20)
        self._last_s: float | None = None
        self._adopted_s: float | None = None

    def begin_generation(self, adopted_s: float) -> None:
        """Adoption was complete at `adopted_s`; the pause before it is no step."""
        self._adopted_s, self._last_s = adopted_s, None

    def committed(self, now_s: float) -> float | None:
        """Count a commit; return the milliseconds since adoption if it is the generation's first, else None."""
        if self._last_s is not None:
            self._durations_s.append(now_s - self._last_s)
        self._last_s = now_s
        adopted_s, self._adopted_s = self._adopted_s, None
        return None if adopted_s is None else (now_s - adopted_s) * 1e3

    def steps_per_s(self, times: float = 1.0) -> float | None:
        """Return steps per second, by the median of the last 20, multiplied by `times`; None before the second step."""
        if not self._durations_s:
            return None
        return round(times / max(median(self._durations_s), 1e-9), 3)
