"""Decides when a script has completed a checkpoint, from the files in its checkpoint directory. Pure; `save_watcher` lists them.

A saver writes aside and renames, or writes in place and closes. A checkpoint may be many files, which come one after the other. So
a checkpoint is complete once a file is new or has changed, and no file has changed for SETTLED_S since. Files that exist at the
first look are old. Files that vanish say nothing: savers delete old checkpoints.

A script may save so often that its files are never quiet. A file that is written anew before it has settled delays nothing, and
proves that its last write was complete. It is a checkpoint itself only if no file is larger: a small one may be a counter. New
names without an end count after LONGEST_S, once one of them has settled.

Modification times are only compared for equality. The clocks of a file server and of several nodes differ.
"""

from __future__ import annotations

from collections.abc import Mapping

SETTLED_S = 1.0
"""Seconds without a change after which the files of a checkpoint are complete."""
LONGEST_S = 30.0
"""Seconds after which a checkpoint is complete although more files change, once one file has settled."""
_UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".incomplete", ".lock", ".swp", "~")
_NO_CHECKPOINT = (".log", ".txt", ".csv", ".jsonl", ".yaml", ".yml", ".out", ".err")

Files = Mapping[str, "tuple[int, int]"]
"""Maps the path of each file to its modification time in nanoseconds and its size in bytes."""


def is_ignored(name: str) -> bool:
    """Return whether a file or directory is no completed part of a checkpoint, by its name.

    Temporary files, hidden ones, logs, configurations and the files of TensorBoard and wandb are none. They change while no
    checkpoint is written.
    """
    lower = name.lower()
    if lower.startswith((".", "tmp", "_tmp", "events.out.tfevents", "wandb")):
        return True
    return lower.endswith(_UNFINISHED + _NO_CHECKPOINT)


class Saves:
    """The changes that were seen in a checkpoint directory. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._files: Files | None = None
        self._changed: dict[str, float] = {}
        """Time of the newest change of each path that belongs to no completed checkpoint."""
        self._rewritten: set[str] = set()
        """The paths of them that were written anew before they had settled."""
        self._since_s = 0.0
        """Time since which there are such paths."""

    @property
    def is_settling(self) -> bool:
        """True while a change has been seen, and it is not known yet whether more will follow."""
        return bool(self._changed)

    def look(self, files: Files, now_s: float) -> bool:
        """Take in the files that there are, and return whether a checkpoint has just become complete."""
        before, self._files = self._files, files
        if before is None:
            return False
        changed = [path for path, seen in files.items() if before.get(path) != seen]
        if changed and not self._changed:
            self._since_s = now_s
        again = [path for path in changed if path in self._changed and _is_new(before.get(path), files[path])]
        self._changed.update(dict.fromkeys(changed, now_s))
        self._rewritten.update(again)
        settled = [path for path, at_s in self._changed.items() if now_s >= at_s + SETTLED_S]
        open_ = self._changed.keys() - self._rewritten - set(settled)
        if settled and (not open_ or now_s >= self._since_s + LONGEST_S):
            for path in settled:
                del self._changed[path]
            self._rewritten &= self._changed.keys()
            self._since_s = now_s
            return True
        largest = max((size for _, size in files.values()), default=0)
        return any(files[path][1] == largest for path in again)


def _is_new(before: tuple[int, int] | None, now: tuple[int, int]) -> bool:
    """Return whether a file was written from its start again, and not continued."""
    return before is None or now[1] <= before[1]
