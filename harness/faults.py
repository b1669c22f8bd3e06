"""Breaks things for real: signals to processes, pods deleted, power cut.

The one-machine cluster's containers are processes of this machine. So a signal reaches exactly its process, at once,
and nothing in the container takes part in its death.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster import lifecycle
from cluster.errors import ClusterError
from harness.processes import name_of


@dataclass(frozen=True)
class ContainerProcess:
    """A process of a pod: its id on this machine, its id in the container, its parent's id, and its command line."""

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


def trainers(pod_uid: str) -> list[int]:
    """Return the process ids of a pod's trainers on this machine, without the process that they were forked from."""
    every = processes(pod_uid)
    agents = {p.pid for p in every if p.inner_pid == 1}
    return [p.pid for p in every if p.parent in agents and _is_trainer(p.pid)]


def kill_trainer(pod_uid: str) -> float:
    """SIGKILL a trainer process of a pod. Return the time, in seconds since the epoch."""
    victims = trainers(pod_uid)
    if not victims:
        raise ClusterError(f"The pod {pod_uid} has no trainer process on this machine that could be killed.")
    return _kill(victims[0])


def kill_inner(pod_uid: str, inner_pid: int) -> float:
    """SIGKILL the process with this id inside its container. Return the time, in seconds since the epoch."""
    victim = _only(pod_uid, f"process {inner_pid}", lambda p: p.inner_pid == inner_pid and "pause" not in p.command)
    return _kill(victim.pid)


def signal_inner(pod_uid: str, inner_pid: int, number: signal.Signals) -> float:
    """Send a signal to the process with this id inside its container. Return the time, in seconds since the epoch."""
    target = _only(pod_uid, f"process {inner_pid}", lambda p: p.inner_pid == inner_pid and "pause" not in p.command)
    sent = time.time()
    os.kill(target.pid, number)
    return sent


def kill_main(pod_uid: str, word: str) -> float:
    """SIGKILL the container's first process, whose command line has `word`. Return the time, in seconds since the epoch."""
    return _kill(_main(pod_uid, word).pid)


def signal_main(pod_uid: str, word: str, number: signal.Signals) -> int:
    """Send a signal to the container's first process, whose command line has `word`. Return its id on this machine."""
    pid = _main(pod_uid, word).pid
    os.kill(pid, number)
    return pid


def _main(pod_uid: str, word: str) -> ContainerProcess:
    return _only(pod_uid, f"first process with {word!r}", lambda p: p.inner_pid == 1 and word in p.command)


def _only(pod_uid: str, what: str, fits: Callable[[ContainerProcess], bool]) -> ContainerProcess:
    for process in processes(pod_uid):
        if fits(process):
            return process
    raise ClusterError(f"The pod {pod_uid} has no {what} on this machine: it has ended, or it runs elsewhere.")


def _kill(pid: int) -> float:
    sent = time.time()
    os.kill(pid, signal.SIGKILL)
    return sent


def _is_trainer(pid: int) -> bool:
    """Return whether the agent has named this process as one that it forked: trainer-<local rank>."""
    return name_of(pid).startswith("trainer-")


def power_off(node: str) -> float:
    """Cut a node's power. Return the time at which that began, in seconds since the epoch."""
    began = time.time()
    lifecycle.power_off(node)
    return began


def power_on(node: str) -> None:
    """Give a node its power back and return when it is Ready."""
    lifecycle.power_on(node)


def pause_network(node: str, seconds: float) -> float:
    """Cut a node off from everything for some seconds. Return how long that was."""
    return lifecycle.pause_network(node, seconds)


def restart_kubelet(node: str) -> None:
    """Kill a node's kubelet, and return when the next one reports. Its containers run on."""
    lifecycle.restart_kubelet(node)
