"""Find a benchmark's processes, which carry its mark in their environment, and end those that are left behind, and no others."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from harness.polling import within

GONE_S = 10.0
"""How long killed processes may take to end: one in the middle of a call of a GPU's driver takes its time."""


def end_leftovers(name: str, value: str) -> bool:
    """Kill the processes whose environment says NAME=VALUE, by their ids; those that they start meanwhile, too.

    Returns whether all of them have ended. The caller itself, and whoever it may not look at, are left alone.
    """

    def all_gone() -> bool:
        found = marked(name, value)
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue  # it has just ended
        return not found

    return within(all_gone, GONE_S)


def marked(name: str, value: str) -> list[int]:
    """Return the ids of the living processes whose environment says NAME=VALUE, without the caller's."""
    mark = f"{name}={value}".encode()
    return [pid for pid in _pids() if _has(pid, mark)]


def _pids() -> list[int]:
    return [
        int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and int(entry.name) != os.getpid()
    ]


def _has(pid: int, mark: bytes) -> bool:
    """Return whether a process has the mark. One that has ended and waits for its parent has no environment any more."""
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has just ended, or is not ours
        return False
