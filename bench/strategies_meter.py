"""The clock of one side of `bench.strategies`: a block of steps when the benchmark says so, and what it came to.

The benchmark makes the file `go-N`; rank 0 waits for it, and the other ranks wait for rank 0 in their next collective, so that
the side whose turn it is not leaves the cores alone. Standard library only.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

from harness.polling import until

WARM = 3
"""Steps before anything is measured: allocations, and what strategies find out in the first ones."""
WAIT_S = 600.0


class Meter:
    """One process's. `steps` in a block; nothing is done on ranks that do not `speak`, which is asked in each step."""

    def __init__(self, steps: int, speaks: Callable[[], bool]) -> None:
        self._steps, self._speaks = steps, speaks
        self._directory = Path(os.environ["BENCH_OUT"])
        self._began_s = self._cpu_s = 0.0
        self._sent = 0

    def before(self, index: int) -> None:
        """Call before each step, from 0."""
        number, place = divmod(index - WARM, self._steps)
        if number < 0 or place or not self._speaks():
            return
        go = self._directory / f"go-{number}"
        until(go.exists, f"the benchmark asks for block {number}", timeout_s=WAIT_S, every_s=0.002)
        self._began_s, self._cpu_s, self._sent = time.perf_counter(), time.process_time(), sent_bytes()

    def after(self, index: int) -> None:
        """Call after each step."""
        number, place = divmod(index - WARM, self._steps)
        if number < 0 or place < self._steps - 1 or not self._speaks():
            return
        line = {
            "ms": (time.perf_counter() - self._began_s) / self._steps * 1e3,
            "cpu_ms": (time.process_time() - self._cpu_s) / self._steps * 1e3,
            "sent": (sent_bytes() - self._sent) / self._steps,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        written = self._directory / f"block-{number}.part"
        written.write_text(json.dumps(line))
        written.rename(self._directory / f"block-{number}")


def sent_bytes() -> int:
    """Return how many bytes have been sent over the loopback of this network namespace, by all processes in it."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    return 0
