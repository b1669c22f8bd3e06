"""Timed steps with a progress bar, and a record of how long each took.

Every step has a kind (download, build, start), so that the tour can print the time without downloads. The record is
`times.json` in the cache directory, with the last run of each step and the time of its end:

    {step: {"seconds": 12.3, "kind": "build", "at": 1795270000.0}}
"""

import fcntl
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from cluster import paths

Kind = Literal["download", "build", "start"]
_BAR_CELLS = 24
_REDRAW_S = 0.2
_PLAIN_LINE_EVERY_S = 30.0


class Step:
    """One step in progress. Its code reports the progress, and a thread redraws the line."""

    def __init__(self, name: str, expected_s: float | None) -> None:
        self.name = name
        self.expected_s = expected_s
        self.fraction: float | None = None
        self.note = ""
        self.started_s = time.monotonic()

    def line(self, now_s: float) -> str:
        """Return the line to show at `now_s` (monotonic seconds)."""
        elapsed_s = now_s - self.started_s
        fraction = self.fraction
        if fraction is None and self.expected_s:
            fraction = min(0.99, elapsed_s / self.expected_s)
        bar = ""
        if fraction is not None:
            full = int(_BAR_CELLS * min(1.0, fraction))
            bar = f" [{'#' * full}{'.' * (_BAR_CELLS - full)}]"
        expected = f" of about {self.expected_s:.0f} s" if self.expected_s else " s"
        note = f"  {self.note}" if self.note else ""
        return f"{self.name:<34}{bar} {elapsed_s:.0f}{expected}{note}"


@contextmanager
def step(name: str, kind: Kind, *, expected_s: float | None = None) -> Iterator[Step]:
    """Show a step on standard error until the `with` block ends. Record its wall time if the block succeeds."""
    current = Step(name, expected_s)
    done = threading.Event()
    drawer = threading.Thread(target=_draw, args=(current, done), daemon=True)
    drawer.start()
    outcome = "failed after"
    try:
        yield current
        outcome = "done in"
    finally:
        done.set()
        drawer.join()
        seconds = time.monotonic() - current.started_s
        clear = "\r\033[K" if sys.stderr.isatty() else ""
        sys.stderr.write(f"{clear}{name:<34} {outcome} {seconds:.1f} s\n")
        sys.stderr.flush()
    record(name, kind, seconds)


def record(name: str, kind: Kind, seconds: float) -> None:
    """Record how long a step took. It replaces the same step of an earlier run."""
    file = paths.cache() / "times.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        handle.seek(0)
        times = json.loads(handle.read() or "{}")
        times[name] = {"seconds": round(seconds, 2), "kind": kind, "at": round(time.time(), 2)}
        handle.seek(0)
        handle.truncate()
        json.dump(times, handle, indent=1)


def recorded_since(within_s: float) -> dict[str, dict[str, Any]]:
    """Return the steps that ended within the last `within_s` seconds, by name, as they are recorded."""
    try:
        times = json.loads((paths.cache() / "times.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}
    now = time.time()
    return {name: step for name, step in times.items() if now - step.get("at", 0) <= within_s}


def _draw(current: Step, done: threading.Event) -> None:
    if sys.stderr.isatty():
        while not done.wait(_REDRAW_S):
            sys.stderr.write("\r\033[K" + current.line(time.monotonic())[:110])
            sys.stderr.flush()
    else:
        while not done.wait(_PLAIN_LINE_EVERY_S):
            sys.stderr.write(current.line(time.monotonic()) + "\n")
            sys.stderr.flush()
