"""The file that a container restart must not lose (rules INC, MAD, HEARD and END): highest entered, adopted, sealed; incarnation;
which processes have returned 0.

Its directory is a disk emptyDir: it outlives the container, not the pod. A missing file is a new pod's. An unreadable one
means "adopted all, state gone": `entered` and `adopted` are UNKNOWN until the operator's welcome says its newest generation,
which the core then writes in their place (nothing newer can have been entered), so that no generation of the past
is ever called "never adopted". The incarnation then continues from the clock's seconds, above any count.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

UNKNOWN = 2**31 - 1
"""`entered` and `adopted` of a worker whose file could not be read, until it knows the newest generation."""


@dataclass(frozen=True)
class Saved:
    entered: int = 0
    """Highest generation that any process of this worker has entered."""
    adopted: int = 0
    """Highest generation that any process of this worker has adopted."""
    incarnation: int = 0
    """Number of the last process start."""
    started: int = 0
    """Highest generation whose rank and world size a process was started with: never again with the same one."""
    sealed: int = 0
    """Highest generation that a seal has promised not to enter, where that is above `entered`."""
    finished: int = 0
    """The generation after whose last step processes have returned 0; 0: none has."""
    done: int = 0
    """Those processes: bit r is set for local rank r (rule END)."""

    def has_returned(self, local_rank: int) -> bool:
        """Return whether this process has returned 0 after the last step of the newest generation that was entered."""
        return self.finished > 0 and self.finished >= self.entered and bool(self.done >> local_rank & 1)


class StateFile:
    """Reads and writes `agent.json` in a directory. One agent at a time uses it."""

    def __init__(self, directory: str) -> None:
        self.path = Path(directory) / "agent.json"

    def load(self) -> tuple[Saved, str]:
        """Return what was saved and, where the file could not be read, the sentence that says so (else empty)."""
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
        return Saved(**values), ""

    def _lost(self, why: str) -> tuple[Saved, str]:
        saved = Saved(entered=UNKNOWN, adopted=UNKNOWN, incarnation=int(time.time()), started=0)
        return (
            saved,
            f"{self.path} cannot be read ({why}); this worker counts as having adopted every generation so far.",
        )

    def save(self, saved: Saved) -> None:
        """Replace the file, durable on return: written aside, fsynced, renamed. Raises OSError."""
        aside = self.path.with_suffix(".new")
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(fd, json.dumps(asdict(saved)).encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        aside.replace(self.path)
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
