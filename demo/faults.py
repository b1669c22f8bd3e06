"""Break things for real: signals to the very processes, pods deleted, power cut.

The one-machine cluster's containers are processes of this machine, so that a signal arrives at once and exactly where
it is meant; nothing in the container helps to die.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster import lifecycle


@dataclass(frozen=True)
class ContainerProcess:
    """A process of a pod: its id on this machine, its id in the container, its parent's, and its command line."""

    pid: int
    inner_pid: int
    parent: int
    command: str


def processes(pod_uid: str) -> list[ContainerProcess]:
    """Return all processes of a pod, the pause process included."""
    return list(_processes(pod_uid))


def _processes(pod_uid: str) -> Iterator[ContainerProcess]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if pod_uid not in (entry / "cgroup").read_text():
                continue
            status = dict(line.split(":\t", 1) for line in (entry / "status").read_text().splitlines() if ":\t" in line)
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # it has just ended
        yield ContainerProcess(int(entry.name), int(status["NSpid"].split()[-1]), int(status["PPid"]), command)


def kill_inner(pod_uid: str, inner_pid: int) -> float:
    """SIGKILL the process that has this id inside its container; return when, in seconds since the epoch."""
    victim = next(p for p in processes(pod_uid) if p.inner_pid == inner_pid and "pause" not in p.command)
    os.kill(victim.pid, signal.SIGKILL)
    return time.time()


def kill_main(pod_uid: str, word: str) -> float:
    """SIGKILL the container's first process, whose command line has `word`; return when, in seconds since the epoch."""
    victim = next(p for p in processes(pod_uid) if p.inner_pid == 1 and word in p.command)
    os.kill(victim.pid, signal.SIGKILL)
    return time.time()


def signal_main(pod_uid: str, word: str, number: signal.Signals) -> None:
    """Send another signal to the container's first process."""
    victim = next(p for p in processes(pod_uid) if p.inner_pid == 1 and word in p.command)
    os.kill(victim.pid, number)


def power_off(node: str) -> float:
    """Cut a node's power; return when, in seconds since the epoch."""
    lifecycle.power_off(node)
    return time.time()


def power_on(node: str) -> None:
    """Give a node its power back and return when it is Ready."""
    lifecycle.power_on(node)
