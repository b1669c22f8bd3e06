"""Process 1 of a node: mounts the node's own view of the machine, then keeps containerd, kubelet and kube-proxy running.

nodes.py runs it as `python -m cluster.node_init CONFIG.json` inside fresh network, mount, pid, uts and ipc namespaces.
It has two passes: the first enters the node's cgroup and executes itself again in a cgroup namespace rooted there. When
process 1 is killed, the kernel kills everything in its pid namespace. Power-off is that kill.
"""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from cluster.host import V1_CONTROLLERS, cgroup_mode

CGROUPS = Path("/sys/fs/cgroup")
MOUNTS = {
    "kubelet": "/var/lib/kubelet",
    "containerd": "/var/lib/containerd",
    "cni": "/var/lib/cni",
    "cni.d": "/etc/cni/net.d",
    "pods": "/var/log/pods",
    "containers": "/var/log/containers",
}
"""Directory of the node's disk -> its mount point. nodes.py makes the mount points, since they are directories of the machine."""
_RESTART_DELAY_S = 0.5


@dataclass(frozen=True)
class NodeConfig:
    """The configuration of process 1. nodes.py writes it as JSON."""

    name: str
    cgroup: str
    directory: str
    cgroup_mode: str
    commands: dict[str, list[str]]
    """Name -> command, in the order of their start. The first is containerd."""


def main() -> None:
    """Run one of the two passes."""
    config = NodeConfig(**json.loads(Path(sys.argv[1]).read_text()))
    if len(sys.argv) == 2:
        _enter_cgroup(config)
        os.execvp("unshare", ["unshare", "--cgroup", sys.executable, "-m", "cluster.node_init", sys.argv[1], "inside"])
    _mount_cgroups(config)
    socket.sethostname(config.name)
    _mount_directories(Path(config.directory))
    _supervise(config)


def cgroup_directories(name: str) -> list[Path]:
    """Return the node's cgroup in each hierarchy of this machine."""
    if cgroup_mode() == "v2":
        return [CGROUPS / name]
    hierarchies = (*V1_CONTROLLERS, "systemd", "unified")
    return [CGROUPS / h / name for h in hierarchies if (CGROUPS / h / "cgroup.procs").exists()]


def _enter_cgroup(config: NodeConfig) -> None:
    if config.cgroup_mode == "v2":
        _hand_down_controllers(CGROUPS)
    for directory in cgroup_directories(config.cgroup):
        directory.mkdir(exist_ok=True)
        if directory.parent.name == "cpuset":
            for file in ("cpuset.cpus", "cpuset.mems"):
                (directory / file).write_text((directory.parent / file).read_text())
        (directory / "cgroup.procs").write_text(str(os.getpid()))


def _hand_down_controllers(directory: Path) -> None:
    """Enable each controller of a cgroup (v2) for its children, if the kernel allows it."""
    for controller in (directory / "cgroup.controllers").read_text().split():
        try:
            (directory / "cgroup.subtree_control").write_text(f"+{controller}")
        except OSError:  # some are not to be delegated; the kubelet names what it misses
            pass


def _mount_cgroups(config: NodeConfig) -> None:
    _run("umount", "-R", "-l", str(CGROUPS))
    if config.cgroup_mode == "v2":
        _run("mount", "-t", "cgroup2", "cgroup2", str(CGROUPS))
        # Controllers can be handed down only by a cgroup without processes of its own.
        leaf = CGROUPS / "init"
        leaf.mkdir()
        (leaf / "cgroup.procs").write_text(str(os.getpid()))
        _hand_down_controllers(CGROUPS)
        return
    _run("mount", "-t", "tmpfs", "-o", "mode=755", "cgroup", str(CGROUPS))
    for controller in V1_CONTROLLERS:
        (CGROUPS / controller).mkdir()
        _run("mount", "-t", "cgroup", "-o", controller, "cgroup", str(CGROUPS / controller))
    (CGROUPS / "systemd").mkdir()
    _run("mount", "-t", "cgroup", "-o", "none,name=systemd", "cgroup", str(CGROUPS / "systemd"))


def _mount_directories(directory: Path) -> None:
    _run("mount", "--make-rshared", "/")
    _run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    for runtime in ("containerd", "netns", "lock", "xtables"):
        Path("/run", runtime).mkdir()
    for source, target in MOUNTS.items():
        _run("mount", "--bind", str(directory / source), target)
    for checkpoint in ("cpu_manager_state", "memory_manager_state"):
        (directory / "kubelet" / checkpoint).unlink(missing_ok=True)


def _supervise(config: NodeConfig) -> None:
    """Start the three services, start a service again when it ends, and reap every orphan of the node."""
    running: dict[int, str] = {}
    for name, command in config.commands.items():
        running[_spawn(config, name, command)] = name
        if name == "containerd":
            _wait_for_socket("/run/containerd/containerd.sock")
    while True:
        pid, _ = os.wait()
        ended = running.pop(pid, None)
        if ended:
            time.sleep(_RESTART_DELAY_S)
            running[_spawn(config, ended, config.commands[ended])] = ended


def _spawn(config: NodeConfig, name: str, command: list[str]) -> int:
    # subprocess.Popen would wait for its child. Process 1 itself reaps all processes of the node.
    log = os.open(f"{config.directory}/log/{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
    pid = os.posix_spawnp(command[0], command, os.environ, file_actions=actions)
    os.close(log)
    os.close(null)
    return pid


def _wait_for_socket(path: str, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(path)
            return
        except OSError:
            time.sleep(0.05)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
