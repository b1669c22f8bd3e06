"""Finds the descendants of trainer processes, and those that an ended one has left in sessions of their own.

A signal to the group of an ended process does not reach the latter.

The agent is a subreaper, so such helpers become its children when the trainer ends. Their environment at the start shows the
trainer's REGROUP_GROUP_PLACE. A fork without an exec shows the zygote's environment, but keeps the trainer's process name.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from regroup.protocol import env


def left_behind(place: str, name: str, known: Collection[int]) -> list[int]:
    """Return the pids of the processes that a trainer has left. Call it once the trainer is dead; it need not be reaped yet.

    - `place`: the trainer's REGROUP_GROUP_PLACE
    - `name`: process name that the zygote gives this trainer's forks
    - `known`: children of the agent that are no orphans; neither are their descendants
    """
    found = []
    pending = [pid for pid in children(os.getpid()) if pid not in known]
    while pending:
        pid = pending.pop()
        pending += children(pid)
        if _is_of(pid, place, name):
            found.append(pid)
    return found


def families(trainers: Mapping[int, tuple[str, str]], known: Collection[int]) -> list[int]:
    """Return the pids of running trainers, of their descendants, and of what they have left in sessions of their own.

    - `trainers`: place and name of each trainer as `left_behind` takes them, by pid
    - `known`: children of the agent that are no orphans

    /proc is read once. To list the children of one process, the kernel must be asked for each of its threads.
    """
    by_parent: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            stat = (process / "stat").read_text(errors="replace")
        except OSError:
            continue  # it has ended meanwhile
        by_parent.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(process.name))
    found = dict.fromkeys(trainers)
    pending = list(trainers)
    while pending:
        below = by_parent.get(pending.pop(), [])
        found.update(dict.fromkeys(below))
        pending += below
    pending = [pid for pid in by_parent.get(os.getpid(), []) if pid not in known and pid not in found]
    while pending:
        pid = pending.pop()
        pending += by_parent.get(pid, [])
        if any(_is_of(pid, place, name) for place, name in trainers.values()):
            found[pid] = None
    return list(found)


def descendants(pid: int) -> list[int]:
    """Return the pids of a process's children, of their children, and so on."""
    found = []
    pending = [*children(pid)]
    while pending:
        found.append(pending.pop())
        pending += children(found[-1])
    return found


def _is_of(pid: int, place: str, name: str) -> bool:
    try:
        if Path(f"/proc/{pid}/comm").read_text(errors="replace").rstrip("\n") == name:
            return True
        return f"{env.GROUP_PLACE}={place}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False  # the process has ended meanwhile, or belongs to another user


def children(pid: int) -> Iterator[int]:
    """Yield the pids of a process's children. Yields none if the kernel does not list them."""
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            yield from map(int, (task / "children").read_text().split())
    except OSError:
        return
