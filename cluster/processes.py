"""Starts processes that outlive their command, each in a session of its own, and stops them by their record.

A record holds the pid and its start time in the kernel. So a pid that now belongs to another process is never killed.
"""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.polling import within


@dataclass(frozen=True)
class Process:
    """The identity of a process. `start_ticks` is field 22 of /proc/PID/stat."""

    pid: int
    start_ticks: int

    def alive(self) -> bool:
        """Return whether this very process still runs. A zombie does not."""
        return _start_ticks(self.pid) == self.start_ticks

    def kill(self, signum: int) -> None:
        """Send a signal if the process is still the one recorded."""
        if self.alive():
            try:
                os.kill(self.pid, signum)
            except ProcessLookupError:
                pass

    def gone_within(self, timeout_s: float) -> bool:
        """Wait until the process is gone; return False when it still runs after `timeout_s`."""
        return within(lambda: not self.alive(), timeout_s)


def identify(pid: int) -> Process:
    """Return the identity of a pid. If the process is already gone, the identity is not alive."""
    return Process(pid, _start_ticks(pid) or -1)


def spawn(
    directory: Path, name: str, command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None
) -> Process:
    """Start `command` in its own session with output in `directory`/log/NAME.log, and record it as NAME."""
    log = directory / "log" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        child = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=None if environment is None else dict(environment),
        )
    process = identify(child.pid)
    record(directory, name, process)
    return process


def record(directory: Path, name: str, process: Process) -> None:
    """Remember a process under a name."""
    file = _file(directory, name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"pid": process.pid, "start_ticks": process.start_ticks}))


def recorded(directory: Path, name: str) -> Process | None:
    """Return the process recorded under a name if it still runs."""
    try:
        data = json.loads(_file(directory, name).read_text())
    except (FileNotFoundError, ValueError):
        return None
    process = Process(data["pid"], data["start_ticks"])
    return process if process.alive() else None


def stop(directory: Path, name: str, *, grace_s: float = 5.0) -> None:
    """Stop a recorded process with SIGTERM, after `grace_s` with SIGKILL, and wait until it is gone."""
    process = recorded(directory, name)
    if process:
        process.kill(signal.SIGTERM)
        if not process.gone_within(grace_s):
            process.kill(signal.SIGKILL)
            process.gone_within(5.0)
    _file(directory, name).unlink(missing_ok=True)


def log_tail(directory: Path, name: str, num_lines: int = 3) -> str:
    """Return the last lines of a process's log, for an error sentence."""
    try:
        lines = (directory / "log" / f"{name}.log").read_text(errors="replace").strip().splitlines()
    except FileNotFoundError:
        return ""
    return " / ".join(lines[-num_lines:])[-800:]


def _file(directory: Path, name: str) -> Path:
    return directory / "run" / f"{name}.json"


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
