"""What tests with real processes wait by: a deadline and a condition, never a pause."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def until(done: Callable[[], Any], timeout_s: float = 30.0, said: Callable[[], str] = lambda: "") -> None:
    """Return once `done()` is true; fail after `timeout_s` with what `said()` says."""
    deadline_s = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline_s, said() or "did not happen in time"
        time.sleep(0.005)


def state_of(pid: int) -> str:
    """Return the kernel's letter for a process's state: R, S, T (stopped), Z, ...; empty: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def alive(pid: int) -> bool:
    """Return whether a process runs (a killed one may be a zombie for a moment)."""
    return state_of(pid) not in ("", "Z", "X")
