"""Decides when a script has completed a checkpoint, from the files in its checkpoint directory. Pure; `save_watcher` lists them.

A saver writes aside and renames, or writes in place and closes. A checkpoint may be many files, which come one after the other. So
a checkpoint is complete once a file is new or has changed, and no file has changed for SETTLED_S since. Files that exist at the
first look are old. Files that vanish say nothing: savers delete old checkpoints.

Modification times are only compared for equality. The clocks of a file server and of several nodes differ.
"""

from __future__ import annotations

from collections.abc import Mapping

SETTLED_S = 1.0
"""Seconds without a change after which the files of a checkpoint are complete."""
_UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".incomplete", ".lock", ".swp", "~")
_NO_CHECKPOINT = (".log", ".txt", ".csv", ".jsonl", ".out", ".err")

Files = Mapping[str, "tuple[int, int]"]
"""Maps the path of each file to its modification time in nanoseconds and its size in bytes."""


def is_ignored(name: str) -> bool:
    """Return whether a file or directory is no completed part of a checkpoint, by its name.

    Temporary files, hidden ones, logs and TensorBoard's events are none. They change while no checkpoint is written.
    """
    lower = name.lower()
    if lower.startswith((".", "tmp", "_tmp", "events.out.tfevents")):
        return True
    return lower.endswith(_UNFINISHED + _NO_CHECKPOINT)


class Saves:
    """The changes that were seen in a checkpoint directory. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._files: Files | None = None
        self._changed_s: float | None = None
        """Time of the newest change that belongs to no completed checkpoint; None: there is none."""

    @property
    def is_settling(self) -> bool:
        """True while a change has been seen, and it is not known yet whether more will follow."""
        return self._changed_s is not None

    def look(self, files: Files, now_s: float) -> bool:
        """Take in the files that there are, and return whether a checkpoint has just become complete."""
        before, self._files = self._files, files
        if before is None:
            return False
        if any(before.get(path) != seen for path, seen in files.items()):
            self._changed_s = now_s
        if self._changed_s is None or now_s < self._changed_s + SETTLED_S:
            return False
        self._changed_s = None
        return True
