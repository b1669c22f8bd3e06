"""Reads from /proc the state of a process that does not answer, and where each of its threads waits in the kernel.

The agent cannot get the native stack: /proc/PID/stack needs root, a debugger the capability SYS_PTRACE. `wchan` is
readable for processes of the same user on most kernels; otherwise it says 0.
"""

from __future__ import annotations

import re
from pathlib import Path

from regroup.protocol.wire import ProcessStack

MAX_THREADS = 64
MAX_CALLS = 8
_CALL = re.compile(r'\s*File "(.*)", line (\d+) in (.+)')
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
