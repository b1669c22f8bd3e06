"""The clock of one side of `bench.strategies`. It times a block of steps when the benchmark asks for one.

The benchmark makes the file `go-N`. Rank 0 waits for that file, and the other ranks wait for rank 0 in their next
collective. So the side that is not measured leaves the cores alone. Standard library only.
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
"""Steps before anything is measured: first steps allocate memory, and some strategies gather facts in them."""
WAIT_S = 600.0


class Meter:
    """Times the blocks of one process. A block has `steps` steps. `speaks` is asked in each step whether this rank measures."""

    def __init__(self, steps: int, speaks: Callable[[], bool]) -> None:
        self._steps, self._speaks = steps, speaks
        self._directory = Path(os.environ["BENCH_OUT"])
        self._began_s = self._cpu_s = 0.0
        self._sent = 0

    def before(self, index: int) -> None:
        """Wait for the benchmark where a block begins. Called before each step; `index` counts from 0."""
        number, place = divmod(index - WARM, self._steps)
        if number < 0 or place or not self._speaks():
            return
        go = self._directory / f"go-{number}"
        until(go.exists, f"the benchmark asks for block {number}", timeout_s=WAIT_S, every_s=0.002)
        self._began_s, self._cpu_s, self._sent = time.perf_counter(), time.process_time(), sent_bytes()

    def after(self, index: int) -> None:
        """Write the block's figures where it ends. Called after each step."""
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
    """Return the number of bytes that all processes of this network namespace have sent over its loopback."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    return 0
