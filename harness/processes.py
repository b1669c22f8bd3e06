"""Processes of this machine, from /proc."""

from __future__ import annotations

from pathlib import Path


def state_of(pid: int) -> str:
    """Return the kernel's letter for a process's state: R, S, T (stopped), Z, ...; empty: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def alive(pid: int) -> bool:
    """Return whether a process runs (a killed one may be a zombie for a moment)."""
    return state_of(pid) not in ("", "Z", "X")


def children(pid: int) -> set[int]:
    """Return the ids of a process's children; none if it has ended."""
    try:
        return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    except (FileNotFoundError, ProcessLookupError):
        return set()
