"""The logs of a local job: `regroup run` keeps what each worker writes, and `regroup logs` reads it.

A worker has two files at most, `log` and the older `log.1`, so a job that runs for weeks fills no disk. Each line begins with the
time at which it was read, as in a log of a pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from regroup_cli.pod_logs import Wanted, missing_rank
from regroup_client import views
from regroup_client.log_lines import Worker
from regroup_client.log_streams import Log, LogsError, Opened

MAX_BYTES = 16 << 20
"""Size of one file of a worker."""
MAX_PARTIAL = 1 << 16
"""Bytes of an unfinished line that are held back."""
POLL_S = 0.2
"""Time between two looks at the file of a worker whose log is followed."""
DRAIN_S = 5.0
"""Longest wait for the rest of a worker's output, which a process that outlives it may hold open."""
_LOOK_S = 0.02
_NAME = re.compile(r"-worker-(\d+)-(\d+)$")


class LogFile:
    """The log of one worker, to which several threads write."""

    def __init__(self, home: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._max_bytes = home / "log", max_bytes
        self._lock = threading.Lock()
        self._file: BinaryIO | None = self._path.open("ab", buffering=0)

    def write(self, lines: bytes, at_ns: int) -> None:
        """Write lines, each with its time. Without room on the disk, lines are lost, and the worker goes on."""
        seconds, rest = divmod(at_ns, 10**9)
        stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest:09}Z ".encode()
        data = b"".join(stamp + line + b"\n" for line in lines.removesuffix(b"\n").split(b"\n"))
        with self._lock:
            try:
                if self._file is None:
                    return
                if self._file.tell() + len(data) > self._max_bytes:
                    self._file.close()
                    self._path.rename(self._path.with_suffix(".1"))
                    self._file = self._path.open("ab", buffering=0)
                self._file.write(data)
            except OSError:
                return

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


def keep(source: int, write: Callable[[bytes], None], log: LogFile) -> threading.Thread:
    """Start the thread that passes a worker's whole lines on to `write`, and keeps them in the log. It ends with the output.

    While `write` waits for a reader, the worker's output stops, as if the worker wrote there itself."""
    thread = threading.Thread(target=_pass_on, args=(source, write, log), name="regroup-worker-output", daemon=True)
    thread.start()
    return thread


async def drain(readers: Sequence[threading.Thread], log: LogFile) -> None:
    """Wait until all output of a worker that has ended is passed on, but not for a process that outlives it and holds a pipe."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + DRAIN_S
    while any(reader.is_alive() for reader in readers) and loop.time() < deadline:
        await asyncio.sleep(_LOOK_S)
    if not any(reader.is_alive() for reader in readers):
        log.close()


def _pass_on(source: int, write: Callable[[bytes], None], log: LogFile) -> None:
    shown, kept, in_bar = b"", b"", False
    with os.fdopen(source, "rb", buffering=0) as pipe:
        while data := pipe.read(1 << 16):
            whole, shown = _whole(shown + data, b"\r")
            in_bar = whole.endswith(b"\r") if whole else in_bar
            write(whole)
            whole, kept = _whole(kept + data)
            if whole:
                log.write(whole, time.time_ns())
    if shown or in_bar:  # the next line may not come over the last state of a progress bar
        write(shown + b"\n")
    if kept:
        log.write(kept, time.time_ns())


def _whole(data: bytes, further_end: bytes = b"\n") -> tuple[bytes, bytes]:
    """Split output after its last line, so that lines of several workers do not mix. A very long rest is passed on as a line."""
    end = max(data.rfind(b"\n"), data.rfind(further_end)) + 1
    return (data, b"") if len(data) - end > MAX_PARTIAL else (data[:end], data[end:])


def write_all(fd: int, data: bytes) -> None:
    """Write to a terminal or pipe. If its reader has gone, the output goes to the log only."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            time.sleep(0.01)  # another process has made it non-blocking
        except OSError:
            return


class LocalLogs:
    """Implements Reader for the directory of a local job.

    `look` returns the job and whether it goes on; it raises LogsError.
    """

    def __init__(self, directory: Path, look: Callable[[], tuple[views.Object, bool]], wanted: Wanted) -> None:
        self._directory, self._look, self._wanted = directory, look, wanted

    def logs(self) -> tuple[list[Log], bool]:
        job, goes_on = self._look()
        ranks = views.ranks(job)
        slot = self._wanted.slot
        if self._wanted.rank is not None:
            slot = next((member.slot for member, of_it in ranks.items() if self._wanted.rank in of_it), None)
            if slot is None:
                raise LogsError(missing_rank(self._wanted.rank, job, sum(map(len, ranks.values()))))
        found: dict[Worker, str] = {}
        for path in self._directory.glob("*-worker-*/log"):
            name = _NAME.search(path.parent.name)
            if name is not None and slot in (None, int(name[1])):
                found[Worker(int(name[1]), int(name[2]))] = path.parent.name
        in_order = sorted(found, key=lambda one: (one.slot, one.attempt))
        chosen = in_order if self._wanted.all_attempts else list({one.slot: one for one in in_order}.values())
        out = []
        for worker in chosen:
            of_it = ranks.get(views.Member(worker.slot, worker.attempt), ())
            out.append(Log(found[worker], worker, of_it[0] if len(of_it) == 1 else None, is_open=goes_on))
        return out, not goes_on

    def open(self, log: Log, *, follow: bool, tail: int | None, after_ns: int = 0) -> Opened:
        del after_ns  # a file is never read again
        return _OpenFile(self._directory / log.key / "log", follow, tail, lambda: self._look()[1])


@dataclass
class _OpenFile:
    """The files of one worker, read from their end or their beginning."""

    path: Path
    follow: bool
    tail: int | None
    goes_on: Callable[[], bool]
    _closed: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Do nothing: a file is there at once."""

    def chunks(self) -> Iterator[bytes]:
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise LogsError(f"{self.path} cannot be read ({error.strerror}).") from None
        with contextlib.ExitStack() as opened:
            opened.callback(lambda: file.close())
            yield from self._kept(file)
            while self.follow and not self._closed.is_set():
                is_last = not self.goes_on()
                if data := file.read(1 << 16):
                    yield data
                    continue
                try:
                    was_replaced = not _is_same(file, self.path)
                except OSError:  # the run has ended and removed its directory
                    return
                if was_replaced:
                    yield file.read()
                    file.close()
                    file = self.path.open("rb")
                elif is_last:
                    return
                else:
                    self._closed.wait(POLL_S)

    def _kept(self, file: BinaryIO) -> Iterator[bytes]:
        older = self.path.with_suffix(".1")
        try:
            before = b"" if _is_same(file, older) else older.read_bytes()
        except OSError:
            before = b""
        now = file.read()
        if self.tail is None:
            yield from (before, now)
        elif self.tail:
            lines = (now if now.count(b"\n") > self.tail else before + now).removesuffix(b"\n").split(b"\n")
            yield b"".join(line + b"\n" for line in lines[-self.tail :] if line)

    def close(self) -> None:
        self._closed.set()


def _is_same(file: BinaryIO, path: Path) -> bool:
    return os.fstat(file.fileno()).st_ino == path.stat().st_ino
