"""Finds and ends the processes of a benchmark, by a mark in their environment. No other process is touched."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from harness.polling import within

GONE_S = 10.0
"""Time in which killed processes have to end. A process inside a call of a GPU's driver takes some seconds."""


def end_leftovers(name: str, value: str) -> bool:
    """Kill all processes that have NAME=VALUE in their environment, also those that they start meanwhile.

    Return whether all of them have ended. The caller, and processes of other users, are left alone.
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
    """Return the ids of the living processes that have NAME=VALUE in their environment, without the caller's."""
    mark = f"{name}={value}".encode()
    return [pid for pid in _pids() if _has(pid, mark)]


def _pids() -> list[int]:
    return [
        int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and int(entry.name) != os.getpid()
    ]


def _has(pid: int, mark: bytes) -> bool:
    """Return whether a process has the mark. A zombie has no environment."""
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has just ended, or is not ours
        return False
