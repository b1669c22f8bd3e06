"""The I/O of `saves`: lists a script's checkpoint directory in a thread of its own, and is woken by inotify.

A volume may be a file server that does not answer. Then only this thread waits. inotify tells of what this node does, and nothing
of what other nodes write to a shared volume. So the directory is also listed every POLL_S. The listing alone decides, and inotify
only makes it come sooner.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from regroup.protocol import env

from .saves import SETTLED_S, Listing, Saves, is_ignored

POLL_S = 5.0
"""Seconds between two listings if inotify tells of nothing."""
LEAST_S = 0.2
"""Seconds between two listings at least, however often files change."""
MAX_ENTRIES = 4096
"""Entries that one listing reads at most, of all directories together."""
MAX_DEPTH = 5
"""Directories inside of each other that are listed, the checkpoint directory included."""
MAX_WATCHED = 64
"""Directories that inotify watches at most."""

_IN_CLOSE_WRITE, _IN_MOVED_TO, _IN_CREATE = 0x8, 0x80, 0x100
_IN_IGNORED = 0x8000
_EVENT = struct.Struct("iIII")


def watched_directory(environ: Mapping[str, str]) -> str:
    """Return the checkpoint directory that is watched; empty: none is.

    Only growth waits for a checkpoint (spec.elasticPolicy.growAt), which may be asked for while the job runs.
    """
    return environ.get(env.CHECKPOINT_DIR, "") if environ.get(env.ELASTIC) else ""


def list_files(directory: str) -> Listing:
    """Return the files under a checkpoint directory that count.

    What cannot be read is left out: a saver may delete it at this moment. Links are not followed. Directories that changed last are
    read first, so that the newest checkpoint is found where there are more than MAX_ENTRIES.
    """
    files: dict[str, tuple[int, int]] = {}
    directories, left, level = list[str](), MAX_ENTRIES, [directory]
    for _ in range(MAX_DEPTH):
        below: list[tuple[int, str]] = []
        for path in level:
            directories.append(path)
            for entry in _entries(path):
                if left == 0:
                    return Listing(files, directories, True)
                left -= 1
                if is_ignored(entry.name):
                    continue
                try:
                    found = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if stat.S_ISDIR(found.st_mode):
                    below.append((found.st_mtime_ns, entry.path))
                elif stat.S_ISREG(found.st_mode) and found.st_size > 0:
                    files[entry.path] = (found.st_mtime_ns, found.st_size)
        level = [path for _, path in sorted(below, reverse=True)]
    return Listing(files, directories, False)


def _entries(path: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            yield from entries
    except OSError:
        return


class SaveWatcher:
    """Watches a checkpoint directory between `start` and `stop`. `on_saved` is called in the watching thread."""

    def __init__(self, directory: str, on_saved: Callable[[], None], *, poll_s: float = POLL_S) -> None:
        self._directory, self._on_saved, self._poll_s = directory, on_saved, poll_s
        self._ended: threading.Event | None = None

    def start(self) -> None:
        """Begin to watch; again: nothing changes."""
        if self._ended is None:
            self._ended = threading.Event()
            threading.Thread(target=self._run, args=(self._ended,), name="saves", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer. The thread ends by itself, at once or when the volume answers."""
        if self._ended is not None:
            self._ended.set()
            self._ended = None

    def _run(self, ended: threading.Event) -> None:
        saves, woken = Saves(), _Inotify()
        try:
            while not ended.is_set():
                listing = list_files(self._directory)
                if saves.look(listing, time.monotonic()) and not ended.is_set():
                    self._on_saved()
                # What changed in a directory between its listing and its watch wakes nobody: it is listed once more.
                is_new = woken.watch(listing.directories)
                if ended.wait(LEAST_S):
                    break
                if not is_new:
                    woken.wait(SETTLED_S if saves.is_settling else self._poll_s, ended)
        finally:
            woken.close()


class _Inotify:
    """Wakes a thread when a file in a watched directory is closed or renamed. Where there is no inotify it only waits."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._watched: dict[str, int] = {}
        try:
            self._fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        except AttributeError:
            self._fd = -1

    def watch(self, directories: list[str]) -> bool:
        """Watch these directories, too, and return whether one of them is new. Ones that are gone are forgotten by the kernel."""
        is_new = False
        if self._fd < 0:
            return is_new
        wanted = directories[:MAX_WATCHED]
        self._watched = {path: number for path, number in self._watched.items() if path in wanted}
        for path in wanted:
            if path in self._watched:
                continue
            mask = _IN_CLOSE_WRITE | _IN_MOVED_TO | _IN_CREATE
            number = self._libc.inotify_add_watch(self._fd, os.fsencode(path), mask)
            if number >= 0:
                self._watched[path], is_new = number, True
            elif ctypes.get_errno() == errno.ENOSPC:  # the user's limit of watches: listing goes on without
                break
        return is_new

    def wait(self, timeout_s: float, ended: threading.Event) -> None:
        """Return at the next event, after `timeout_s`, or soon after `ended` is set."""
        until_s = time.monotonic() + timeout_s
        while not ended.is_set() and (left_s := until_s - time.monotonic()) > 0:
            if self._fd < 0:
                ended.wait(left_s)
            elif select.select([self._fd], [], [], min(left_s, 1.0))[0]:
                self._drain()
                return

    def close(self) -> None:
        """Give the kernel's watches back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _drain(self) -> None:
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:
            return
        at = 0
        while at + _EVENT.size <= len(data):
            number, mask, _, length = _EVENT.unpack_from(data, at)
            at += _EVENT.size + length
            if mask & _IN_IGNORED:  # the directory is gone
                self._watched = {path: known for path, known in self._watched.items() if known != number}
