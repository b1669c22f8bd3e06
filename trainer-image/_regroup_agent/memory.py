"""Reads from the container's cgroup whether the kernel killed a process of it for lack of memory.

`parse` and `Kills` are pure; `MemoryCgroup` reads the files. A kill raises a counter and leaves no other trace. So the counter
is read regularly to date a kill, and the report has the highest usage that the kernel saw. Under cgroup v2 the
kubelet may have the kernel kill the whole container, with this agent. The kubelet then says OOMKilled itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CGROUPS = "/sys/fs/cgroup"
OOM_KILLED = "OOMKilled"
"""Reason of such an exit, in the kubelet's word."""
LOOK_EVERY_S = 1.0
"""Interval between two readings of the counter. A kill is dated at most this much too late."""
EXPLAINS_S = 5.0
"""Longest time between a kill and an exit that it explains. A trainer fails soon after its helper is killed."""
UNLIMITED_BYTES = 1 << 60
"""A limit from here on means none. cgroup v1 writes a number near 2**63 then."""
V2 = {"events": "memory.events", "limit": "memory.max", "peak": "memory.peak"}
V1 = {
    "events": "memory.oom_control",
    "limit": "memory.limit_in_bytes",
    "peak": "memory.max_usage_in_bytes",
}


@dataclass(frozen=True)
class Memory:
    """The memory of a container, as its cgroup tells."""

    kills: int
    """Processes that the kernel has killed for lack of memory since the container started."""
    limit_bytes: int | None = None
    """Limit of the container; None: it has none."""
    peak_bytes: int | None = None
    """Highest usage so far; None: the kernel does not tell it."""


def parse(events: str, limit: str, peak: str) -> Memory:
    """Return the memory from the texts of three files of a cgroup. Both versions differ only in how "no limit" is written."""
    kills = 0
    for line in events.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdigit():
            kills = int(value)
    limit_bytes = _bytes(limit)
    unlimited = limit_bytes is None or limit_bytes >= UNLIMITED_BYTES
    return Memory(kills, None if unlimited else limit_bytes, _bytes(peak))


class Kills:
    """Times at which the counter was seen to rise, for the kills that have explained no exit yet. Pure."""

    def __init__(self, seen: int) -> None:
        """Begin with the counter at `seen`. Earlier kills explain nothing."""
        self._seen = seen
        self._unexplained_s: list[float] = []

    def look(self, kills: int, now_s: float) -> None:
        """Take in the counter, and forget kills that are too old to explain an exit."""
        self._unexplained_s = [at_s for at_s in self._unexplained_s if now_s <= at_s + EXPLAINS_S]
        self._unexplained_s += [now_s] * (kills - self._seen)
        self._seen = max(self._seen, kills)

    def explain(self) -> bool:
        """Return whether a kill explains an exit that happens at the time of the last `look`.

        Each kill explains one exit, since two processes that were killed together are reported one by one.
        """
        if not self._unexplained_s:
            return False
        del self._unexplained_s[0]
        return True


def out_of_memory(memory: Memory) -> str:
    """Return limit and peak usage behind a kill as a short text."""
    peak = "" if memory.peak_bytes is None else f", at most {in_words(memory.peak_bytes)} used"
    if memory.limit_bytes is None:
        return f"no limit of its own{peak}"
    return f"limit {in_words(memory.limit_bytes)}{peak}"


def in_words(size_bytes: int) -> str:
    """Return a size in the largest unit that fits: 512 MiB, 1.5 GiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= size:
            return f"{size_bytes / size:.1f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{size_bytes} bytes"


class MemoryCgroup:
    """The memory cgroup of this process, which is that of the container."""

    def __init__(self, root: str = CGROUPS, own: str | None = None) -> None:
        """Find the cgroup's files below `root`. Tests pass the text of /proc/self/cgroup as `own`."""
        self._files = _find(Path(root), _read(Path("/proc/self/cgroup")) if own is None else own)
        memory = self.read()
        self._kills = Kills(memory.kills if memory is not None else 0)

    def read(self) -> Memory | None:
        """Return the present memory, or None if the cgroup was not found."""
        if not self._files:
            return None
        return parse(**{name: _read(file) for name, file in self._files.items()})

    def look(self, now_s: float) -> Memory | None:
        """Return the present memory, and date new kills with `now_s`, a monotonic time. Call it every LOOK_EVERY_S."""
        memory = self.read()
        if memory is not None:
            self._kills.look(memory.kills, now_s)
        return memory

    def newly_killed(self, now_s: float) -> Memory | None:
        """Return the present memory if a kill for lack of memory explains an exit that happens now, else None."""
        memory = self.look(now_s)
        return memory if memory is not None and self._kills.explain() else None


def _find(root: Path, own: str) -> Mapping[str, Path]:
    """Return the files of the cgroup that `own` names, or of the root: a container often sees its own cgroup as the root."""
    paths = dict.fromkeys(("", "memory"), "")
    for line in own.splitlines():
        _, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if not controllers or "memory" in controllers.split(","):
            paths["memory" if controllers else ""] = path.strip("/")
    for mount, names in (("", V2), ("memory", V1)):
        for directory in (root / mount / paths[mount], root / mount):
            if (directory / names["events"]).is_file():
                return {name: directory / file for name, file in names.items()}
    return {}


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _bytes(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None
