"""Whether the kernel killed a process of this container for lack of memory, from the container's own cgroup.

`parse` and `Kills` are pure; `MemoryCgroup` reads the files. A kill shows in a counter only: the usage is gone with the process,
so what is reported is the highest that the kernel saw; and when it happened is known only to the one who reads the counter
regularly. With cgroup v2 the kubelet has the kernel kill the whole container, this agent
included; then the kubelet says OOMKilled, and nothing is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CGROUPS = "/sys/fs/cgroup"
OOM_KILLED = "OOMKilled"
"""The kubelet's reason for the same."""
LOOK_EVERY_S = 1.0
"""The counter is read this often, so that a kill is dated at most this much too late."""
EXPLAINS_S = 5.0
"""A kill explains an exit this long after it: a trainer fails once it notices that its helper is dead. A later exit has another
cause."""
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


class Kills:
    """The kills that no exit has been explained with yet, each with the time at which the counter was seen to rise. Pure."""

    def __init__(self, seen: int) -> None:
        """`seen`: the counter at the start; what was killed before is no news."""
        self._seen = seen
        self._unexplained_s: list[float] = []

    def look(self, kills: int, now_s: float) -> None:
        """Take in the counter; forget the kills that are too old to explain an exit."""
        self._unexplained_s = [at_s for at_s in self._unexplained_s if now_s <= at_s + EXPLAINS_S]
        self._unexplained_s += [now_s] * (kills - self._seen)
        self._seen = max(self._seen, kills)

    def explain(self) -> bool:
        """Return whether a kill explains an exit of the time of the last `look`. Each kill explains one exit: two processes
        that were killed together are reported one by one."""
        if not self._unexplained_s:
            return False
        del self._unexplained_s[0]
        return True


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
        self._kills = Kills(memory.kills if memory is not None else 0)

    @property
    def found(self) -> bool:
        """Whether there is a counter to look at."""
        return bool(self._files)

    def read(self) -> Memory | None:
        """Return what the cgroup says now; None where it cannot be read."""
        if not self._files:
            return None
        return parse(**{name: _read(file) for name, file in self._files.items()})

    def look(self, now_s: float) -> Memory | None:
        """Return what the cgroup says, and note when its counter rose; wanted every LOOK_EVERY_S. `now_s`: monotonic clock."""
        memory = self.read()
        if memory is not None:
            self._kills.look(memory.kills, now_s)
        return memory

    def newly_killed(self, now_s: float) -> Memory | None:
        """Return what the cgroup says if a process was killed for lack of memory just before an exit that happens now."""
        memory = self.look(now_s)
        return memory if memory is not None and self._kills.explain() else None


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
