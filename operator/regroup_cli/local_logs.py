"""Keep what each worker of `regroup run` writes. `regroup_client/local_logs.py` reads it.

A worker has two files at most, `log` and the older `log.1`, so a job that runs for weeks fills no disk. Each line begins with the
time at which it was read, as in a log of a pod.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

MAX_BYTES = 16 << 20
"""Size of one file of a worker."""
MAX_PARTIAL = 1 << 16
"""Bytes of an unfinished line that are held back."""
DRAIN_S = 5.0
"""Longest wait for the rest of a worker's output, which a process that outlives it may hold open."""
_LOOK_S = 0.02


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
