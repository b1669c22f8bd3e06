"""The file of the promises that a container restart must not lose (rules INC, MAD, HEARD and END).

Its directory is a disk emptyDir, which outlives the container but not the pod. A missing file means that the pod is new. A lost
one means that every generation so far may have been adopted, and that the state is gone. `entered` and `adopted` are then
UNKNOWN, until the operator's welcome names its newest generation: no newer one can have been entered. The incarnation
continues from the seconds of the clock, above any count.

A file is lost if it cannot be read, and if an earlier boot of the node has written it. Only the first write waits for the
disk. What the kernel holds outlives processes and containers, and only a node that restarts can lose it. Members of a generation
wait for this file twice, and a busy disk takes 8 to 40 ms for each fsync.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from dataclasses import asdict, dataclass, fields
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
UNKNOWN = 2**31 - 1
"""Value of `entered` and `adopted` if the file could not be read, until the worker hears of the newest generation."""


@dataclass(frozen=True)
class Saved:
    entered: int = 0
    """Highest generation that any process of this worker has entered."""
    adopted: int = 0
    """Highest generation that any process of this worker has adopted."""
    incarnation: int = 0
    """Number of the last process start."""
    started: int = 0
    """Highest generation whose rank and world size a process was started with. No other process is started with the same."""
    sealed: int = 0
    """Highest generation that a seal has promised not to enter. Stored only if it is above `entered`."""
    finished: int = 0
    """Generation after whose last step processes have returned 0; 0: none has."""
    done: int = 0
    """Processes that have returned 0: bit r is set for local rank r (rule END)."""

    def has_returned(self, local_rank: int) -> bool:
        """Return whether the process of this local rank has returned 0 after the last step of the newest entered generation."""
        return self.finished > 0 and self.finished >= self.entered and bool(self.done >> local_rank & 1)


def boot_id() -> str:
    """Return the kernel's name for the time since the node was started, or a new name where the kernel tells none."""
    try:
        name = BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        name = ""
    return name or str(uuid.uuid4())  # without a name a restart of the container counts as one of the node


class StateFile:
    """The file `agent.json` in a directory, which one agent at a time uses."""

    def __init__(self, directory: str, boot: str | None = None) -> None:
        """Name the file. `boot` is the name of the node's boot; None asks the kernel."""
        self.path = Path(directory) / "agent.json"
        self._boot = boot or boot_id()

    def load(self) -> tuple[Saved, str]:
        """Return the saved values, and a sentence if the file could not be read, else an empty one."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return Saved(), ""
        except (OSError, UnicodeDecodeError) as error:
            return self._lost(str(error))
        try:
            data = json.loads(text)
            values = {field.name: data[field.name] for field in fields(Saved)}
        except (ValueError, KeyError, TypeError) as error:
            return self._lost(f"{type(error).__name__}: {error}")
        if any(not isinstance(value, int) or isinstance(value, bool) or value < 0 for value in values.values()):
            return self._lost("a field is not a number")
        if data.get("boot") != self._boot:
            return self._lost("the node has restarted since it was written", values["incarnation"])
        return Saved(**values), ""

    def _lost(self, why: str, incarnation: int = 0) -> tuple[Saved, str]:
        # Milliseconds: each start of a process adds one, and a file may be lost twice within a second. The clock may be behind
        # that of an earlier loss.
        incarnation = max(incarnation, time.time_ns() // 1_000_000)
        saved = Saved(entered=UNKNOWN, adopted=UNKNOWN, incarnation=incarnation, started=0)
        return (
            saved,
            f"{self.path} cannot be used ({why}); this worker counts as having adopted every generation so far.",
        )

    def save(self, saved: Saved) -> None:
        """Replace the file atomically. A process that starts after the return reads it. Raises OSError.

        The first write waits for the disk. So after a power cut the file is unreadable or of an earlier boot, and never missing,
        which would say that the pod is new.
        """
        is_new = not self.path.exists()
        aside = self.path.with_suffix(".new")
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(json.dumps(asdict(saved) | {"boot": self._boot}).encode())
            if is_new:
                file.flush()
                os.fsync(file.fileno())
        aside.replace(self.path)
        if is_new:
            directory = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
