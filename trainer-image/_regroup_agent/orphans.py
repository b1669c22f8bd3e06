"""What a trainer process has left behind: helpers that are in a session of their own, so that its group's end is not theirs.

The agent is a subreaper, so they become its children when the trainer ends. Whose they are is in the environment that they were
started with; a fork without an exec keeps the name that the zygote gave the trainer.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from regroup.protocol import env


def left_behind(place: str, name: str, known: Collection[int]) -> list[int]:
    """Return the processes that an ended trainer has left. Call it once the kernel has ended the trainer, also before it is reaped.

    `place`: its REGROUP_GROUP_PLACE; `name`: what a fork of the zygote is called; `known`: the agent's children that are no
    orphans, with all that is below them.
    """
    found = []
    pending = [pid for pid in _children(os.getpid()) if pid not in known]
    while pending:
        pid = pending.pop()
        pending += _children(pid)
        if _is_of(pid, place, name):
            found.append(pid)
    return found


def _is_of(pid: int, place: str, name: str) -> bool:
    try:
        if Path(f"/proc/{pid}/comm").read_text(errors="replace").rstrip("\n") == name:
            return True
        return f"{env.GROUP_PLACE}={place}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False  # it has ended meanwhile, or is another user's


def _children(pid: int) -> Iterator[int]:
    """Yield a process's children; none where the kernel does not list them."""
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            yield from map(int, (task / "children").read_text().split())
    except OSError:
        return
