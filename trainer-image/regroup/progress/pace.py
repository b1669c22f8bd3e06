"""Measures how fast this process commits steps. Pure, with the clock passed in."""

from collections import deque
from statistics import median


class Pace:
    """Durations of the steps of a generation. The caller passes the monotonic time of every commit, in seconds."""

    def __init__(self) -> None:
        self._durations_s: deque[float] = deque(maxlen=20)
        self._paused_s = 0.0
        self._longest_s: float | None = None
        self._first_s: float | None = None
        """Duration of the process's first step, with its compilation and without waits and pauses."""
        self._waited_s = 0.0
        self._last_s: float | None = None
        self._adopted_s: float | None = None

    def begin_generation(self, adopted_s: float, waited_s: float = 0.0) -> None:
        """Begin a generation whose adoption was complete at `adopted_s`. This process waited `waited_s` of it for other ranks."""
        self._adopted_s, self._last_s, self._paused_s, self._waited_s = adopted_s, None, 0.0, waited_s

    def paused(self, duration_s: float) -> None:
        """Leave a pause of the script out of the duration of the next step."""
        self._paused_s += duration_s

    def committed(self, now_s: float, waited_s: float = 0.0) -> float | None:
        """Count a commit, and return the milliseconds since adoption if it is the generation's first, else None.

        `waited_s` is the time for which the process has waited for other ranks in this generation, adoption included.
        """
        if self._first_s is None and self._adopted_s is not None:
            self._first_s = max(0.0, now_s - self._adopted_s - self._paused_s - (waited_s - self._waited_s))
        if self._last_s is not None:
            duration_s = max(0.0, now_s - self._last_s - self._paused_s)
            self._durations_s.append(duration_s)
            own_s = max(0.0, duration_s - (waited_s - self._waited_s))
            self._longest_s = max(self._longest_s or 0.0, own_s)
        self._last_s, self._paused_s, self._waited_s = now_s, 0.0, waited_s
        adopted_s, self._adopted_s = self._adopted_s, None
        return None if adopted_s is None else (now_s - adopted_s) * 1e3

    @property
    def longest_s(self) -> float | None:
        """Longest time between two commits of one generation, without pauses and without waits for other ranks.

        Before the second commit it is the duration of the process's first step, None before the first. The operator takes a process
        for hung after a multiple of it, and after a first step of minutes the second may take as long.
        """
        return self._first_s if self._longest_s is None else self._longest_s

    @property
    def step_s(self) -> float | None:
        """Median duration of the last 20 steps; None before the second step."""
        return median(self._durations_s) if self._durations_s else None

    def steps_per_s(self, times: float = 1.0) -> float | None:
        """Return steps per second, by the median of the last 20, multiplied by `times`; None before the second step."""
        step_s = self.step_s
        return None if step_s is None else round(times / max(step_s, 1e-9), 3)
