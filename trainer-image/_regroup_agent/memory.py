"""Whether the kernel killed a process of this container for lack of memory, from the container's own cgroup.

`parse` is pure; `MemoryCgroup` reads the files. A kill shows in a counter only: the usage is gone with the process, so what is
reported is the highest that the kernel saw. With cgroup v2 the kubelet has the kernel kill the whole container, this agent
included; then the kubelet says OOMKilled, and nothing is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CGROUPS = "/sys/fs/cgroup"
OOM_KILLED = "OOMKilled"
"""The kubelet's reason for the same."""
UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes a number near 2**63 where there is no limit."""
V2 = {"events": "memory.events", "limit": "memory.max", "peak": "memory.peak"}
V1 = {
    "events": "memory.oom_control",
    "limit": "memory.limit_in_bytes",
    "peak": "memory.max_usage_in_bytes",
}


@dataclass(frozen=True)
class Memory:
    """`kills`: processes that the kernel has killed for lack of memory, since the container started. Bytes: None: not known,
    or no limit."""

    kills: int
    limit_bytes: int | None = None
    peak_bytes: int | None = None


def parse(events: str, limit: str, peak: str) -> Memory:
    """Return what three files of a cgroup say; the texts of v1 and v2 differ only in how "no limit" is written."""
    kills = 0
    for line in events.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdigit():
            kills = int(value)
    limit_bytes = _bytes(limit)
    unlimited = limit_bytes is None or limit_bytes >= UNLIMITED_BYTES
    return Memory(kills, None if unlimited else limit_bytes, _bytes(peak))


def out_of_memory(memory: Memory) -> str:
    """Return the numbers behind a kill, in a few words."""
    peak = "" if memory.peak_bytes is None else f", at most {in_words(memory.peak_bytes)} used"
    if memory.limit_bytes is None:
        return f"no limit of its own{peak}"
    return f"limit {in_words(memory.limit_bytes)}{peak}"


def in_words(size_bytes: int) -> str:
    """Return a size as people read it: 512 MiB, 1.5 GiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= size:
            return f"{size_bytes / size:.1f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{size_bytes} bytes"


class MemoryCgroup:
    """The memory cgroup of this process; `root` is where the hierarchies are mounted."""

    def __init__(self, root: str = CGROUPS, own: str | None = None) -> None:
        """`own`: the text of /proc/self/cgroup."""
        self._files = _find(Path(root), _read(Path("/proc/self/cgroup")) if own is None else own)
        memory = self.read()
        self._seen = memory.kills if memory is not None else 0

    def read(self) -> Memory | None:
        """Return what the cgroup says now; None where it cannot be read."""
        if not self._files:
            return None
        return parse(**{name: _read(file) for name, file in self._files.items()})

    def newly_killed(self) -> Memory | None:
        """Return what the cgroup says if another process was killed for lack of memory since the last call, else None."""
        memory = self.read()
        if memory is None or memory.kills <= self._seen:
            return None
        self._seen += 1  # one process for one kill: two that died together are told one by one
        return memory


def _find(root: Path, own: str) -> Mapping[str, Path]:
    """Return the files of the cgroup that `own` names, or of the mounted one: a container often sees its own as the root."""
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
