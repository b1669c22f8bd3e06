"""A cache on a node's own disk for data from slow storage: `cached` turns `read(name) -> bytes` into a function that keeps them.

Owns the directory, which the processes of a node share, of one job or of several. An entry appears whole or not at all, is checked
each time it is read, and is fetched again if it is damaged. A failure of the cache never stops training: if the directory cannot be
written, the bytes are returned and not kept. The reasons are in docs/design/adr/0043-data-cache-and-streams.md.

Files below the directory:

- `size`: bytes of all entries. Entries are removed only under its lock.
- `ab/cd..`: an entry, by the SHA-256 of its name
- `ab/cd...part`: an entry that is being written. The writer holds its lock, which ends with the process. Other processes wait.
  A file that a crash left is taken over by the next process that needs it, or removed to make room.
"""

import fcntl
import hashlib
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from .errors import DataError

Read = Callable[[str], bytes]

_HEADER = struct.Struct("<8sQI")
"""Header of an entry: magic, number of bytes that follow, CRC-32 of the entry's name and of these bytes."""
_MAGIC = b"RGCACHE1"
_SIZE = struct.Struct("<q")
_PART = ".part"
KEPT = 0.9
"""Share of `max_bytes` to which entries are removed, so that not every new entry has to remove others."""
POLL_S = 0.02
"""Time between two attempts to take a lock that another process holds."""


class Entry(NamedTuple):
    """An entry of the cache, in the order in which entries are removed."""

    used_s: float
    """Time of the last read or write, in seconds since the epoch."""
    size: int
    path: str


def to_remove(entries: Sequence[Entry], most_bytes: int) -> list[Entry]:
    """Return the least recently used entries, without which the rest has at most `most_bytes`. Pure."""
    left = sum(entry.size for entry in entries)
    found = []
    for entry in sorted(entries):
        if left <= most_bytes:
            break
        found.append(entry)
        left -= entry.size
    return found


def cached(read: Read, directory: str | os.PathLike[str], max_bytes: int, *, wait_s: float = 60.0) -> "CachedRead":
    """Return a function like `read` that keeps the bytes in a directory, so that a node reads each name once.

    Raises DataError for arguments that cannot work.

    - `read`: function from a name to bytes, which are the same each time
    - `directory`: a directory on the node's own disk; it is made if it is missing. Processes and jobs may share it, if a name means
      the same to all of them.
    - `max_bytes`: size of all entries together. The least recently used ones are removed first.
    - `wait_s`: time for which a process waits for another one that reads the same name. After it the process reads by itself.
    """
    if not callable(read):
        raise DataError(f"read of cached() is a {type(read).__name__}; it must be a function from a name to bytes.")
    if not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 1:
        raise DataError(f"max_bytes of cached() is {max_bytes!r}; it must be a whole number of bytes, at least 1.")
    if not isinstance(wait_s, (int, float)) or isinstance(wait_s, bool) or not wait_s >= 0:
        raise DataError(f"wait_s of cached() is {wait_s!r}; it must be a number of seconds, at least 0.")
    return CachedRead(read, Path(directory), max_bytes, float(wait_s))


class CachedRead:
    """The function that `cached` returns. Several processes and threads may use it. It can be pickled if `read` can be."""

    def __init__(self, read: Read, directory: Path, max_bytes: int, wait_s: float) -> None:
        self._read, self._directory, self._max_bytes, self._wait_s = read, directory, max_bytes, wait_s
        self._has_complained = False

    def __call__(self, name: str) -> bytes:
        """Return the bytes of a name. Raises any exception of `read`, and DataError if it does not return bytes."""
        if not isinstance(name, str):
            raise DataError(f"A name for cached() is a {type(name).__name__}; it must be a string.")
        path = self._path(name)
        try:
            data = _load(path, name)
            if data is not None:
                return data
            path.parent.mkdir(parents=True, exist_ok=True)
            part = self._take_part(path, name)
        except OSError as error:
            self._complain(error)
            return self._fetch(name)
        if isinstance(part, bytes):
            return part
        if part is None:  # the process that reads this name takes too long
            return self._fetch(name)
        try:
            data = self._fetch(name)
            try:
                if self._make_room(part, _HEADER.size + len(data)):
                    _write(part, name, data)
                    _part_of(path).replace(path)
            except OSError as error:
                self._complain(error)
            return data
        finally:
            _drop(part, _part_of(path))

    def _fetch(self, name: str) -> bytes:
        data = self._read(name)
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise DataError(f"read({name!r}) returned a {type(data).__name__}; it must return bytes.")
        return bytes(data)

    def _path(self, name: str) -> Path:
        key = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
        return self._directory / key[:2] / key[2:]

    def _take_part(self, path: Path, name: str) -> int | bytes | None:
        """Return the locked file to write to, or the bytes if another process has written them meanwhile.

        Returns None if another process still writes them after `wait_s`.
        """
        deadline_s = time.monotonic() + self._wait_s
        while True:
            part = os.open(_part_of(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                is_mine = _try_lock(part) and _is_at(part, _part_of(path))
            except BaseException:
                os.close(part)
                raise
            data = _load(path, name) if is_mine else None
            if is_mine and data is None:
                return part
            if is_mine:
                _drop(part, _part_of(path))
                return data
            os.close(part)
            if time.monotonic() >= deadline_s:
                return None
            time.sleep(POLL_S)
            data = _load(path, name)
            if data is not None:
                return data

    def _make_room(self, part: int, size: int) -> bool:
        """Give the file to write to `size` bytes, and remove other entries if the cache is full.

        Returns False if the cache cannot keep the entry.
        """
        if size > KEPT * self._max_bytes:
            return False
        with _locked(self._directory / "size", self._wait_s) as counter:
            if counter is None:
                return False
            known = os.pread(counter, _SIZE.size, 0)
            total = _SIZE.unpack(known)[0] if len(known) == _SIZE.size else -1
            os.ftruncate(part, size)  # from here on `_remove_oldest` counts it, in any process
            if total < 0 or total + size > self._max_bytes:
                total = self._remove_oldest(int(KEPT * self._max_bytes))
            else:
                total += size
            os.pwrite(counter, _SIZE.pack(total), 0)
            return total <= self._max_bytes  # False if other processes write so much that nothing is left to remove

    def _remove_oldest(self, most_bytes: int) -> int:
        """Remove files that crashes left, and entries until the rest has at most `most_bytes`. Returns the bytes that remain."""
        entries: dict[str, Entry] = {}
        being_written = 0
        for found in _files(self._directory):
            path, is_part = found.path.removesuffix(_PART), found.name.endswith(_PART)
            try:
                if is_part and not _remove_if_left(Path(found.path)):
                    being_written += found.stat().st_size
                    continue
            except FileNotFoundError:
                pass  # renamed meanwhile to an entry that the listing may lack
            with suppress(FileNotFoundError):
                about = Path(path).stat()
                entries[path] = Entry(about.st_mtime, about.st_size, path)
        going = to_remove(list(entries.values()), most_bytes - being_written)
        for entry in going:
            Path(entry.path).unlink(missing_ok=True)
        return being_written + sum(entry.size for entry in entries.values()) - sum(entry.size for entry in going)

    def _complain(self, error: OSError) -> None:
        """Print once that the cache keeps nothing, and why."""
        if not self._has_complained:
            self._has_complained = True
            what = f"cannot be used ({error.strerror or error})"
            hint = ""
            if isinstance(error, PermissionError):
                what = f"cannot be written by user {os.geteuid()} ({error.strerror}: {error.filename})"
                hint = " Give each user a directory of its own."
            print(f"The cache {self._directory} {what}. Training goes on and reads from storage.{hint}", flush=True)


def _part_of(path: Path) -> Path:
    return path.with_name(path.name + _PART)


def _checksum(name: str, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(name.encode("utf-8", "surrogatepass")))


def _load(path: Path, name: str) -> bytes | None:
    """Return the bytes of an entry and mark it as used. None if it is missing or damaged."""
    try:
        with path.open("rb", buffering=0) as file:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                return None
            magic, size, checksum = _HEADER.unpack(header)
            data = file.readall()
            if (magic, size) != (_MAGIC, len(data)) or checksum != _checksum(name, data):
                return None
            with suppress(OSError):  # another user's entry can be read but not marked
                os.utime(file.fileno())
            return data
    except OSError:  # missing, or the disk cannot read it
        return None


def _write(part: int, name: str, data: bytes) -> None:
    left = memoryview(_HEADER.pack(_MAGIC, len(data), _checksum(name, data)) + data)
    offset = 0
    while left:
        written = os.pwrite(part, left, offset)
        left, offset = left[written:], offset + written


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _close(descriptor: int) -> None:
    """Unlock and close a file. Closing alone is not enough: a process that was forked meanwhile has the lock as well."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file still has this path. An earlier holder of its lock may have renamed or removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _drop(part: int, path: Path) -> None:
    """Unlock and close a file to write to, and remove it unless it has become an entry."""
    with suppress(OSError):
        if _is_at(part, path):
            path.unlink()
    _close(part)


def _remove_if_left(path: Path) -> bool:
    """Remove a file that a killed process left unfinished. Returns False if its writer still lives."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if not _try_lock(descriptor):
        os.close(descriptor)
        return False
    _drop(descriptor, path)
    return True


@contextmanager
def _locked(path: Path, most_s: float) -> Iterator[int | None]:
    """Yield a descriptor of the locked file, or None if the lock is not free within `most_s` seconds."""
    deadline_s = time.monotonic() + most_s
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while not (is_mine := _try_lock(descriptor)) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        yield descriptor if is_mine else None
    finally:
        _close(descriptor)


def _files(directory: Path) -> Iterator[os.DirEntry[str]]:
    for folder in os.scandir(directory):
        if folder.is_dir(follow_symlinks=False):
            yield from (entry for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False))
