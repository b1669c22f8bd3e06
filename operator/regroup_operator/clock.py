"""The operator's clock: monotonic seconds in which its event loop came round.

What an agent has not said counts against it after half a second or five. While the loop stands still (thousands of answers are
read in one turn, the process was stopped, or its CPU was taken away), the answers wait in the kernel: that time is the operator's
own and counts against nobody. See docs/design/adr/0064-the-operators-clock.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

TURN_S = 0.05
"""The loop is asked to come round this often."""
MOST_S = 0.2
"""So much of the time between two turns counts. A free loop comes round well within it."""


class LoopClock:
    """Seconds that never go back, and never faster than `source`. It stands still unless `run` runs."""

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._turned_s = self._now_s = source()

    def __call__(self) -> float:
        """Return the time."""
        return self._now_s + min(self._source() - self._turned_s, MOST_S)

    def turn(self) -> None:
        """Say that the loop has come round."""
        source_s = self._source()
        self._now_s += min(source_s - self._turned_s, MOST_S)
        self._turned_s = source_s

    async def run(self) -> None:
        """Keep the clock going until cancelled."""
        while True:
            self.turn()
            await asyncio.sleep(TURN_S)
