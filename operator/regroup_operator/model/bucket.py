"""A bound for what is done at once, and in the long run: status writes, events, token reviews."""

from __future__ import annotations


class TokenBucket:
    """Allows `burst` at once and `per_s` a second in the long run. Pure: the clock is passed in."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._tokens = burst
        self._at_s: float | None = None

    def take(self, now_s: float) -> bool:
        """Take one token if there is one."""
        self._fill(now_s)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def reserve(self, now_s: float) -> float:
        """Take one token, perhaps one that is still to come; return from when on it is there."""
        self._fill(now_s)
        self._tokens -= 1
        return now_s + max(0.0, -self._tokens / self._per_s)

    def _fill(self, now_s: float) -> None:
        if self._at_s is not None:
            self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
