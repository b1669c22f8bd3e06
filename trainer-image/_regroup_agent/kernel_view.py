"""Reads from /proc what processes do not say: where their threads wait in the kernel, and the files that they write.

The agent cannot get the native stack: /proc/PID/stack needs root, a debugger the capability SYS_PTRACE. `wchan` is
readable for processes of the same user on most kernels; otherwise it says 0.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from regroup.protocol.wire import ProcessStack

from .writers import Look, may_be_saved, may_hold_state

MAX_THREADS = 64
MAX_CALLS = 8
_CALL = re.compile(r'\s*File "(.*)", line (\d+) in (.+)')
WRITES = {
    "x86_64": {1, 18, 20, 74, 75, 296},
    "aarch64": {64, 66, 68, 70, 82, 83},
}.get(platform.machine(), set())
"""Numbers of the system calls write, pwrite64, writev, pwritev, fsync and fdatasync, whose first argument is the descriptor."""
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk or a volume, cannot be killed meanwhile",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "ended",
}


def look(pid: int) -> tuple[str, str, str]:
    """Return a process's place (wire.ProcessStack), a sentence on its state, and a text with a line for each thread."""
    state = _state(Path(f"/proc/{pid}/status"))
    place = ProcessStack.STOPPED if state in ("T", "t") else ProcessStack.SILENT
    lines = [f"process {pid}: state {state or '?'} ({STATES.get(state, 'unknown')})"]
    try:
        tasks = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: int(task.name))[:MAX_THREADS]
    except OSError:
        tasks = []
    for task in tasks:
        wchan = _text(task / "wchan") or "0"
        lines.append(
            f"  thread {task.name} ({_text(task / 'comm')}): state {_state(task / 'status')}, waits in {wchan}"
        )
    return place, f"{STATES.get(state, 'unknown')} (state {state or '?'})", "\n".join(lines)


def look_at_files(pids: Iterable[int]) -> Look:
    """Return the files that these processes have open for writing, and how much they have written to disks.

    No file system is asked, since one that hangs would hang the agent. So the position in a file is read, and not its size.
    """
    files: dict[tuple[int, int, str], int] = {}
    written_bytes: dict[int, int] = {}
    waits = False
    for pid in pids:
        open_files = dict(_open_files(Path(f"/proc/{pid}")))
        files.update({(pid, *key): position for key, position in open_files.items()})
        written = re.search(r"^write_bytes: (\d+)$", _text(Path(f"/proc/{pid}/io")), re.MULTILINE)
        written_bytes[pid] = int(written[1]) if written else 0
        waits = waits or (bool(open_files) and _writes(Path(f"/proc/{pid}/task"), {fd for fd, _ in open_files}))
    return Look(files, written_bytes, waits)


def _open_files(process: Path) -> Iterator[tuple[tuple[int, str], int]]:
    """Yield descriptor, path and position of each file that the process may be saving. A process that has ended has none."""
    try:
        descriptors = list((process / "fd").iterdir())
    except OSError:
        return
    for descriptor in descriptors:
        try:
            path = str(descriptor.readlink())
            if not may_hold_state(path):
                continue  # most are sockets, pipes and devices
            info = dict(line.split(":", 1) for line in _text(process / "fdinfo" / descriptor.name).splitlines()[:2])
            fd, flags, position = int(descriptor.name), int(info["flags"], 8), int(info["pos"])
        except (OSError, KeyError, ValueError):
            continue  # it was closed meanwhile
        if may_be_saved(fd, flags, path):
            yield (fd, path), position


def _writes(tasks: Path, descriptors: Collection[int]) -> bool:
    """Return whether a thread waits for a disk, or is in a call that writes one of these descriptors.

    A file system in user space may take long for one call, in which no position moves. Its callers do not wait in state D.
    """
    try:
        return any(_state(task / "status") == "D" or _written(task) in descriptors for task in tasks.iterdir())
    except OSError:
        return False


def _written(task: Path) -> int | None:
    """Return the descriptor that a thread writes in its present system call; None: it writes none, or may not be asked."""
    call = _text(task / "syscall").split()
    try:
        return int(call[1], 16) if len(call) > 1 and int(call[0]) in WRITES else None
    except ValueError:
        return None


def calls_in(stderr: str) -> str:
    """Return the innermost calls of the main thread from the last stacks that faulthandler wrote, or an empty text."""
    calls: list[str] = []
    for line in reversed(stderr.splitlines()):
        found = _CALL.match(line)
        if found is None:
            if calls:
                break
            continue
        calls.append(f"{found[3]} ({Path(found[1]).name}:{found[2]})")
    return " < ".join(list(reversed(calls))[:MAX_CALLS])


def _state(status: Path) -> str:
    for line in _text(status).splitlines():
        if line.startswith("State:"):
            return line.split()[1]
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
