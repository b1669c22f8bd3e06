"""A cache on a node's own disk for what is read from slow storage: `cached` turns `read(name) -> bytes` into one that keeps them.

Owns the directory, which the processes of a node share, of one job or of several. An entry appears whole or not at all, is checked
each time it is read, and is fetched again if it is damaged. Nothing here is an error of training: where the directory cannot be
written, what was read is returned and not kept. Why so: docs/design/adr/0043-data-cache-and-streams.md.

Files below `directory`: `size`, the bytes of all entries, under whose lock room is made; `ab/cd..`, an entry, by the SHA-256 of its
name; `ab/cd...part`, one that is being written. Who writes holds the lock of that file, which ends with its process; who finds it
held waits. So a file that a crash left is taken over by the next that needs it, and removed when room is made.
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
"""Magic, number of bytes that follow, CRC-32 of the entry's name and of these bytes."""
_MAGIC = b"RGCACHE1"
_SIZE = struct.Struct("<q")
_PART = ".part"
KEPT = 0.9
"""Share of `max_bytes` that is left when room is made: so that it is not made for each entry."""
POLL_S = 0.02
"""Between two looks at a lock that another process holds."""


class Entry(NamedTuple):
    """What the decision to remove needs to know."""

    used_s: float
    """When it was read or written last, seconds since the epoch."""
    size: int
    path: str


def to_remove(entries: Sequence[Entry], most_bytes: int) -> list[Entry]:
    """Return the entries that have to go for the rest to have at most `most_bytes`: those that were not used for longest. Pure."""
    left = sum(entry.size for entry in entries)
    found = []
    for entry in sorted(entries):
        if left <= most_bytes:
            break
        found.append(entry)
        left -= entry.size
    return found


def cached(read: Read, directory: str | os.PathLike[str], max_bytes: int, *, wait_s: float = 60.0) -> "CachedRead":
    """Return a function like `read` that keeps what it returns in a directory, and reads each name once a node.

    read: from a name to bytes, which are the same each time. directory: on the node's own disk; processes and jobs may share it, if
    a name means the same to all of them. It is made where it is missing. max_bytes: of all entries together; those that were not
    used for longest go first. wait_s: for how long a process waits for another one that reads the same name, before it reads by
    itself. Raises DataError for arguments that cannot be.
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
        """Return the bytes of a name. Raises what `read` raises, and DataError for what are no bytes."""
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
        if part is None:  # whoever reads it takes long
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
        """Return a descriptor of the locked file to write to; or the bytes, where another process has written them meanwhile;
        or None: it still does after `wait_s`."""
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
        """Let the file to write to have `size` bytes, and remove others where they would be too many. False: it is not kept."""
        if size > KEPT * self._max_bytes:
            return False
        with _locked(self._directory / "size", self._wait_s) as counter:
            if counter is None:
                return False
            known = os.pread(counter, _SIZE.size, 0)
            total = _SIZE.unpack(known)[0] if len(known) == _SIZE.size else -1
            os.ftruncate(part, size)  # from here on who counts finds it
            if total < 0 or total + size > self._max_bytes:
                total = self._remove_oldest(int(KEPT * self._max_bytes))
            else:
                total += size
            os.pwrite(counter, _SIZE.pack(total), 0)
            return total <= self._max_bytes  # else others write so much at once that nothing is left to remove

    def _remove_oldest(self, most_bytes: int) -> int:
        """Remove entries until all files have at most `most_bytes`, and what crashes left; return the bytes that remain."""
        entries: dict[str, Entry] = {}
        being_written = 0
        for found in _files(self._directory):
            path, is_part = found.path.removesuffix(_PART), found.name.endswith(_PART)
            try:
                if is_part and not _remove_if_left(Path(found.path)):
                    being_written += found.stat().st_size
                    continue
            except FileNotFoundError:
                pass  # it has just become the entry, which may not be listed
            with suppress(FileNotFoundError):
                about = Path(path).stat()
                entries[path] = Entry(about.st_mtime, about.st_size, path)
        going = to_remove(list(entries.values()), most_bytes - being_written)
        for entry in going:
            Path(entry.path).unlink(missing_ok=True)
        return being_written + sum(entry.size for entry in entries.values()) - sum(entry.size for entry in going)

    def _complain(self, error: OSError) -> None:
        """Say once that nothing is kept."""
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
    """Return what an entry holds, and count it as used; None: it is not there, or is damaged."""
    try:
        with path.open("rb", buffering=0) as file:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                return None
            magic, size, checksum = _HEADER.unpack(header)
            data = file.readall()
            if (magic, size) != (_MAGIC, len(data)) or checksum != _checksum(name, data):
                return None
            with suppress(OSError):  # of another user: it is read all the same
                os.utime(file.fileno())
            return data
    except OSError:  # not there, or the disk cannot read it
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
    """Close a file that may be locked. A process that was forked meanwhile has the lock, too, until it is given up."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file still has this path: who held its lock before may have renamed or removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _drop(part: int, path: Path) -> None:
    """Give up a locked file, and remove it if it was not renamed."""
    with suppress(OSError):
        if _is_at(part, path):
            path.unlink()
    _close(part)


def _remove_if_left(path: Path) -> bool:
    """Remove a file to write to that nobody writes to: its process was killed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if not _try_lock(descriptor):
        os.close(descriptor)
        return False
    _drop(descriptor, path)
    return True


@contextmanager
def _locked(path: Path, most_s: float) -> Iterator[int | None]:
    """Yield a descriptor of the locked file, or None if it is not to be had in `most_s` seconds."""
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
