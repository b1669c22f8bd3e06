"""Back-off of repeated tries: 1, 2, 4 .. seconds after the last try, until the key is forgotten. Pure: the clock is passed in."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import inf

FIRST_S = 1.0


class Retries:
    """Keeps for each key the number of tries and the time of the next one."""

    def __init__(self, max_s: float) -> None:
        """Begin without tries. `max_s` is the longest wait, in seconds."""
        self._max_s = max_s
        self._tries: dict[Hashable, tuple[int, float]] = {}

    def due_s(self, key: Hashable) -> float:
        """Return the time from which on `key` may be tried; -inf if it was not tried yet."""
        return self._tries.get(key, (0, -inf))[1]

    def tried(self, key: Hashable, now_s: float) -> int:
        """Count a try, and return the number of tries."""
        count = self._tries.get(key, (0, -inf))[0] + 1
        self._tries[key] = (count, now_s + min(FIRST_S * 2.0 ** min(count - 1, 30), self._max_s))
        return count

    def forget(self, unwanted: Callable[[Hashable], bool]) -> None:
        """Forget the tries of every key for which `unwanted` is true."""
        self._tries = {key: tries for key, tries in self._tries.items() if not unwanted(key)}
