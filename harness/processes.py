"""Processes of this machine, from /proc."""

from __future__ import annotations

from pathlib import Path


def state_of(pid: int) -> str:
    """Return the kernel's letter for a process's state: R, S, T (stopped), Z, ...; empty if there is no such process."""
    return (_read(pid, "stat").rpartition(")")[2].split() or [""])[0]


def start_of(pid: int) -> int:
    """Return the start of a process in clock ticks since the machine's boot; -1 if there is no such process."""
    return int((_read(pid, "stat").rpartition(")")[2].split()[19:20] or ["-1"])[0])


def name_of(pid: int) -> str:
    """Return a process's name; empty if there is no such process. The agent names the processes that it forks."""
    return _read(pid, "comm").strip()


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if there is no such process."""
    return dict(pair.split("=", 1) for pair in _read(pid, "environ").split("\0") if "=" in pair)


def waits_in(pid: int) -> str:
    """Return the kernel function that a process sleeps in; empty if there is none, or it cannot be read."""
    return _read(pid, "wchan")


def alive(pid: int) -> bool:
    """Return whether a process runs (a killed one may be a zombie for a moment)."""
    return state_of(pid) not in ("", "Z", "X")


def children(pid: int) -> list[int]:
    """Return the ids of a process's children. The list is empty if the process has ended."""
    return [int(child) for child in _read(pid, f"task/{pid}/children").split()]


def _read(pid: int, what: str) -> str:
    # A process may end between the look and the read: ENOENT before open, ESRCH after it.
    try:
        return Path(f"/proc/{pid}/{what}").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
