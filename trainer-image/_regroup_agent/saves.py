"""Decides when a script has completed a checkpoint, from the files in its checkpoint directory. Pure; `save_watcher` lists them.

A saver writes aside and renames, or writes in place and closes. A checkpoint may be many files, which come one after the other. So
a checkpoint is complete once a file is new or has changed, and no file has changed for SETTLED_S since. Files that exist at the
first look are old. Files that vanish say nothing: savers delete old checkpoints.

A script may save so often that its files are never quiet. A file that is written anew before it has settled delays nothing, and
proves that its last write was complete. It is a checkpoint itself only if no file is larger: a small one may be a counter. New
names without an end count after LONGEST_S, once one of them has settled.

A `.json` file describes a run or a checkpoint: metrics, a configuration, the state of a trainer. It delays a checkpoint that is
written beside it, and is none itself. If a directory has `.json` files alone, they are checkpoints, as those of XGBoost are.

Modification times are only compared for equality, since the clocks of a file server and of several nodes differ. One exception is a
listing that did not read all entries. A file that was not in it may have been there, and came into the next one because others
were deleted. So it is new only if it is younger than all files of that listing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

SETTLED_S = 1.0
"""Seconds without a change after which the files of a checkpoint are complete."""
LONGEST_S = 30.0
"""Seconds after which a checkpoint is complete although more files change, once one file has settled."""
_UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".incomplete", ".lock", ".swp", "~")
_NO_CHECKPOINT = (".log", ".txt", ".csv", ".jsonl", ".yaml", ".yml", ".out", ".err")

_DESCRIPTION = ".json"

Files = Mapping[str, "tuple[int, int]"]
"""Maps the path of each file to its modification time in nanoseconds and its size in bytes."""


class Listing(NamedTuple):
    """The files that one look at a checkpoint directory has found."""

    files: Files
    directories: list[str]
    """The directories that were read."""
    is_cut: bool
    """True if there are more entries than one look reads."""


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
        self._youngest = -1
        """Newest modification time of the files of the listing before, if that was cut; -1: it was not."""

    @property
    def is_settling(self) -> bool:
        """True while a change has been seen, and it is not known yet whether more will follow."""
        return bool(self._changed)

    def look(self, listing: Listing, now_s: float) -> bool:
        """Take in the files that there are, and return whether a checkpoint has just become complete."""
        files = listing.files
        before, self._files = self._files, files
        youngest, self._youngest = self._youngest, _youngest(files) if listing.is_cut else -1
        if before is None:
            return False
        changed = [
            path for path, seen in files.items() if before.get(path) != seen and (path in before or seen[0] > youngest)
        ]
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
            return bool(_checkpoints(settled, files))
        largest = max((size for _, size in files.values()), default=0)
        return any(files[path][1] == largest for path in _checkpoints(again, files))


def _checkpoints(paths: Iterable[str], files: Files) -> list[str]:
    """Return the paths that are no descriptions. All are returned if there is nothing but descriptions."""
    found = [path for path in paths if not _is_description(path)]
    return found or ([] if any(not _is_description(path) for path in files) else list(paths))


def _is_description(path: str) -> bool:
    return path.lower().endswith(_DESCRIPTION)


def _youngest(files: Files) -> int:
    return max((changed_ns for changed_ns, _ in files.values()), default=-1)


def _is_new(before: tuple[int, int] | None, now: tuple[int, int]) -> bool:
    """Return whether a file was written from its start again, and not continued."""
    return before is None or now[1] <= before[1]
