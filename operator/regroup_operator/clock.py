"""The operator's clock: monotonic seconds that stand still while its event loop does.

An agent's silence counts against it after half a second or five. But its answers wait in the kernel while the loop stands
still. The loop may read thousands of answers in one turn, or the process may be stopped, or be without CPU. That time is the
operator's own and counts against no agent (docs/design/adr/0064-the-operators-clock.md).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

TURN_S = 0.05
"""Sleep between two turns that move the clock."""
MOST_S = 0.2
"""Most seconds that count between two turns. A free loop turns well within that time."""


class LoopClock:
    """Seconds that never go back, and never run faster than `source`. The clock stands still unless `run` runs."""

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._turned_s = self._now_s = source()

    def __call__(self) -> float:
        """Return the time."""
        return self._now_s + min(self._source() - self._turned_s, MOST_S)

    def turn(self) -> None:
        """Count a turn of the loop."""
        source_s = self._source()
        self._now_s += min(source_s - self._turned_s, MOST_S)
        self._turned_s = source_s

    async def run(self) -> None:
        """Keep the clock going until cancelled."""
        while True:
            self.turn()
            await asyncio.sleep(TURN_S)
