"""What a cluster could leave on this machine, seen without the cluster's own records: compared before `up` and after `down`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from cluster import node_init, paths

CGROUPS = Path("/sys/fs/cgroup")


def snapshot() -> frozenset[str]:
    """Return a line for everything that is there: processes, networks, mounts, control groups, firewall rules, directories."""
    return frozenset(
        f"{kind}: {line}"
        for kind, lines in (
            ("process", _processes()),
            ("network namespace", _names(Path("/run/netns"))),
            ("link", (line.split(": ")[1] for line in _run("ip", "-o", "link", "show"))),
            ("route", (line.strip() for line in _run("ip", "-4", "-o", "route", "show", "table", "all"))),
            ("mount", ours(Path("/proc/self/mounts").read_text())),
            ("control group", _cgroups()),
            ("firewall rule", (line for line in _run("iptables", "-S") if line.startswith("-A"))),
            ("directory", (path for path in (*node_init.MOUNTS.values(), str(paths.state())) if Path(path).exists())),
            ("file", _files()),
        )
        for line in lines
    )


def _run(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def _names(directory: Path) -> list[str]:
    return [entry.name for entry in directory.iterdir()] if directory.exists() else []


def _processes() -> Iterator[str]:
    """Return those of the cluster's programs, and those of any container: in a process namespace below this one."""
    own = len(_ids(Path("/proc/self")))
    for entry in Path("/proc").iterdir():
        try:
            command = " ".join((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split())
            if entry.name.isdigit() and (str(paths.cache()) in command or len(_ids(entry)) > own):
                yield f"{entry.name} {command[:120]}"
        except OSError:  # it has just ended, or it is no process
            continue


def _ids(process: Path) -> list[str]:
    """Return the process's ids in its own process namespace and in those around it."""
    (line,) = [line for line in (process / "status").read_text().splitlines() if line.startswith("NSpid:")]
    return line.split()[1:]


def _files() -> Iterator[str]:
    """Return what lies in the machine's own directories under the nodes' mounts, where a node must not write."""
    for directory in map(Path, node_init.MOUNTS.values()):
        yield from (str(entry) for entry in directory.iterdir()) if directory.exists() else ()


def ours(mounts: str) -> Iterator[str]:
    """Return the mounts that a cluster could have made: other programs mount and unmount meanwhile, where it never does."""
    places = [paths.cache().resolve(), *map(Path, node_init.MOUNTS.values()), Path("/run/netns"), CGROUPS]
    for line in mounts.splitlines():
        source, target, kind = line.split()[:3]
        if any(Path(target).is_relative_to(place) for place in places):
            yield f"{source} {target} {kind}"


def _cgroups() -> Iterator[str]:
    hierarchies = [CGROUPS] if (CGROUPS / "cgroup.controllers").exists() else list(CGROUPS.iterdir())
    for hierarchy in hierarchies:
        yield from (str(entry) for entry in hierarchy.iterdir() if entry.is_dir())
