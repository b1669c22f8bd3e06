"""Decides from looks at the open files of a worker's processes whether they are saving. Pure; `kernel_view` makes the looks.

A file that is open for writing may be a checkpoint, or a log that stays open for the whole run. A look shows no more of it than
its position. So a file counts as written while its position moves, and for IDLE_S after that. A file that was open before and
grows slowly all the time is a log that says much. The kernel also counts the bytes
that each process writes to disks. This count shows a small file that was opened and closed between two looks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

IDLE_S = 2.0
"""A file whose position has not moved for so long is none that a save writes at the moment."""
MOVED_BYTES = 4096
"""A position that has moved by less in IDLE_S is that of a log."""
LOG_S, LOG_BYTES_PER_S = 5.0, 32 << 10
"""A file that is open at the first look and has not grown faster than this since, for so long, is a log. No disk is so slow."""
SMALL_BYTES_PER_S = 256 << 10
"""Processes that write less than this, for LOG_S, in files that no look shows at work, are no save. They write small files all the
time, such as the number of the step. No gap between such files is waited for."""
SAVED_BYTES = 64 << 10
"""Processes that have written less than this to disks, since they were started, have saved nothing that could be broken."""

NO_CHECKPOINTS = ("/dev/", "/proc/", "/sys/", "/memfd:")
"""Beginnings of the paths of devices, of the kernel's own files and of shared memory."""


def may_hold_state(path: str) -> bool:
    """Return whether a path, as /proc shows it, is that of a file that may be a checkpoint."""
    return path.startswith("/") and not path.startswith(NO_CHECKPOINTS) and not path.endswith(" (deleted)")


def may_be_saved(fd: int, flags: int, path: str) -> bool:
    """Return whether an open file may be one that is being saved.

    - `fd`: descriptor in the process; 0 to 2 are the outputs of the script, which a shell may have sent to a file
    - `flags`: flags of open(2). A file that is opened for appending is a log: what it held before stays.
    - `path`: path as /proc shows it. Pipes and sockets have none, and a deleted file is of no use to the next process.
    """
    if fd <= 2 or flags & os.O_ACCMODE == os.O_RDONLY or flags & os.O_APPEND:
        return False
    return may_hold_state(path)


@dataclass(frozen=True)
class Look:
    """The open files of a worker's processes and of their children at one moment."""

    files: Mapping[tuple[int, int, str], int] = field(default_factory=dict)
    """Position in each file that may be saved, by pid, descriptor and path."""
    written_bytes: Mapping[int, int] = field(default_factory=dict)
    """Bytes that each process has written to disks since it was started, by pid."""
    waits: bool = False
    """A thread of a process that has such a file open waits for a disk, or is in a call that writes such a file."""


@dataclass(frozen=True)
class _Seen:
    """One open file in the looks so far."""

    position: int
    """Position at `since_s`, from which a move counts. It begins anew when IDLE_S is over."""
    since_s: float
    moved_s: float
    """Time of the last move. A file that is seen for the first time has just moved."""
    first: tuple[int, float] | None
    """Position and time at the first look of all; None: the file was opened later."""

    def next(self, position: int, now_s: float) -> _Seen:
        if position < self.position or position - self.position >= MOVED_BYTES:
            return _Seen(position, now_s, now_s, self.first)
        return self if now_s - self.since_s < IDLE_S else _Seen(position, now_s, self.moved_s, self.first)

    def is_log(self, position: int, now_s: float) -> bool:
        """Return whether the file has only ever grown slowly."""
        if self.first is None or now_s - self.first[1] < LOG_S:
            return False
        return 0 <= position - self.first[0] <= LOG_BYTES_PER_S * (now_s - self.first[1])


class Writers:
    """The result of all looks at a worker's processes. One object serves one end of them."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        """`idle_s`: a file is no longer being written once its position has not moved for so long."""
        self._idle_s = idle_s
        self._open: dict[tuple[int, int, str], _Seen] = {}
        self._positions: Mapping[tuple[int, int, str], int] = {}
        self._written_bytes: Mapping[int, int] | None = None
        self._began_s = 0.0
        """Time of the first look."""
        self._grown_bytes = 0
        """Bytes that the processes have written to disks since then."""
        self._file_s: float | None = None
        """Time of the last look that showed a file at work; None: none has."""
        self._small_s: float | None = None
        """Time of the last look that showed a small file, or bytes in files that were opened and closed since the look before."""
        self.newest: str = ""
        """Path of the file that was seen to be written last."""
        self._is_active = True

    @property
    def looked(self) -> bool:
        """True once there was a look."""
        return self._written_bytes is not None

    @property
    def is_active(self) -> bool:
        """True while a file is being written, as far as the last look shows."""
        return self._is_active

    @property
    def wrote_s(self) -> float | None:
        """Time of the last look that showed progress of a write; None: no look has."""
        return max((at_s for at_s in (self._file_s, self._small_s) if at_s is not None), default=None)

    @property
    def has_saved(self) -> bool:
        """True if the processes have written so much that a save may consist of more than one file.

        The kernel adds what a child has written to its parent once the child has ended.
        """
        return self.wrote_s is not None or sum((self._written_bytes or {}).values()) >= SAVED_BYTES

    def take(self, look: Look, now_s: float) -> None:
        """Take in a look. Files that are not open any more are forgotten."""
        before, is_first = self._open, not self.looked
        self._began_s = now_s if is_first else self._began_s
        self._open, self._is_active = {}, False
        logged_bytes = 0
        for key, position in look.files.items():
            seen = before.get(key)
            first = (position, now_s) if is_first else None
            new = _Seen(position, now_s, now_s, first) if seen is None else seen.next(position, now_s)
            self._open[key] = new
            if new.is_log(position, now_s):
                # The kernel counts whole pages.
                logged_bytes += position - self._positions.get(key, position) + MOVED_BYTES
                continue
            if new.moved_s == now_s and not is_first:
                self._saw(key[2], position, now_s)
            self._is_active |= now_s - new.moved_s < self._idle_s
        for key in before:
            if key not in look.files:  # it was written until it was closed
                self._saw(key[2], self._positions.get(key, 0), now_s)
        if look.files and look.waits:
            self._is_active, self._file_s = True, now_s
        earlier = look.written_bytes if self._written_bytes is None else self._written_bytes
        grown_bytes = sum(written - earlier.get(pid, 0) for pid, written in look.written_bytes.items())
        self._grown_bytes += max(0, grown_bytes)
        if grown_bytes - logged_bytes >= 2 * MOVED_BYTES:
            self._small_s = now_s
        took_s = now_s - self._began_s
        if took_s >= LOG_S and self._grown_bytes <= SMALL_BYTES_PER_S * took_s:
            self._small_s = None
        self._written_bytes, self._positions = look.written_bytes, look.files

    def _saw(self, path: str, position: int, now_s: float) -> None:
        """Note that a file was written, which is at this position or was closed there."""
        self.newest = path
        if position < MOVED_BYTES:
            self._small_s = now_s
        else:
            self._file_s = now_s
