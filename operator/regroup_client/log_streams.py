"""Read the logs of several workers at once, to their end or as they are written.

A `Reader` names the logs that there are and opens one. Logs of pods and of local workers are read by the same code.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from regroup_client.errors import ClientError, LostError
from regroup_client.log_lines import Cutter, Line, Reorder, Worker, lines_of, merged

MAX_STREAMS = 50
"""Logs that are read at once. Each is a connection to the API server."""
REFRESH_S = 3.0
"""Time between two looks at which workers there are, while logs are followed."""
_TICK_S = 0.1
_QUEUED = 1000
"""Chunks of output that wait. A stream that writes faster than lines are shown waits for its reader."""


PATIENCE_S = 60.0
"""Time for which requests of a command that follows a job may fail before it gives up."""


class LogsError(ClientError):
    """Logs cannot be read. The message is one sentence for the user."""

    def __init__(self, said: str, *, is_final: bool = False) -> None:
        """`is_final`: another attempt would fail, too."""
        super().__init__(said)
        self.is_final = is_final


class Patience:
    """Knows for how long all requests have failed."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def succeeded(self) -> None:
        """Note that a request was answered."""
        self._since_s = None

    def ends(self, now_s: float) -> bool:
        """Note a failure, and return whether requests have failed for PATIENCE_S seconds."""
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s >= PATIENCE_S


@dataclass(frozen=True)
class Log:
    """One log: of one container of a pod, until that container ends, or of a local worker."""

    key: str
    """Identity. A container that starts again in the same pod has another one."""
    worker: Worker
    rank: int | None = None
    """Rank of the worker's process, if it has only one. Processes of other workers label their lines."""
    previous: bool = False
    """It is the log of the container before the last restart."""
    is_open: bool = True
    """The container may still write."""


@dataclass(frozen=True)
class Choice:
    """The lines of a log that are shown."""

    rank: int | None = None
    since_ns: int = 0
    """Earliest time, in nanoseconds since the epoch."""
    pattern: re.Pattern[str] | None = None

    def has(self, line: Line) -> bool:
        """Return whether a line is shown."""
        return (
            (self.rank is None or line.rank == self.rank)
            and (not self.since_ns or line.at_ns >= self.since_ns)
            and (self.pattern is None or self.pattern.search(line.text) is not None)
        )


class Opened(Protocol):
    """An open log. Its chunks end where the log does, or after `close`."""

    def start(self) -> None:
        """Begin to read, before `chunks` is asked for. So many logs begin at once. May be left out."""

    def chunks(self) -> Iterator[bytes]:
        """Yield output with a time before each line. Raises LogsError if the log cannot be read."""

    def close(self) -> None:
        """End `chunks`, from another thread. The log may have ended already."""


class Reader(Protocol):
    """The logs of one job."""

    def logs(self) -> tuple[list[Log], bool]:
        """Return the logs that there are now, and whether the job has ended. Raises LogsError."""

    def open(self, log: Log, *, follow: bool, tail: int | None, after_ns: int = 0) -> Opened:
        """Open a log: its last `tail` lines (None: all), or those from about `after_ns` on; `follow`: until it ends."""


def read(reader: Reader, choice: Choice, tail: int | None) -> Generator[Line, None, None]:
    """Yield the lines that the job's logs have now, by time. Raises LogsError if there is no log that can be read."""
    logs, _ = reader.logs()
    failures: list[LogsError] = []
    several: list[Iterator[Line]] = []
    begun: list[Opened] = []
    try:
        with tempfile.TemporaryFile(buffering=0) if len(logs) >= MAX_STREAMS else contextlib.nullcontext() as spool:
            for index, log in enumerate(logs):
                opened = reader.open(log, follow=False, tail=tail)
                chunks = _tried(opened, failures)
                if spool is None or index < MAX_STREAMS - 1:
                    begun.append(opened)
                    opened.start()
                else:
                    chunks = _kept(chunks, spool.fileno())
                several.append(_lines(chunks, log))
            yield from (line for line in merged(several) if choice.has(line))
    except OSError as error:
        raise LogsError(f"The logs cannot be read ({error.strerror}). Use --slot N or --tail LINES.") from None
    finally:
        for opened in begun:  # also those that were not read to their end
            opened.close()
    if logs and len(failures) == len(logs):
        raise failures[0]


def _tried(opened: Opened, failures: list[LogsError]) -> Iterator[bytes]:
    """Yield the chunks of a log, and note why it cannot be read: other logs are shown all the same."""
    try:
        yield from opened.chunks()
    except LogsError as error:
        failures.append(error)
    finally:
        opened.close()


def _kept(chunks: Iterable[bytes], spool: int) -> Iterator[bytes]:
    """Read a log to its end into the file that all such logs share, and yield it from there.

    So its connection is closed before the next one is opened, and its part of the file is in one piece.
    """
    at = os.lseek(spool, 0, os.SEEK_END)
    for data in chunks:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(spool, rest) :]
    end = os.lseek(spool, 0, os.SEEK_CUR)
    while data := os.pread(spool, min(1 << 16, end - at), at):
        at += len(data)
        yield data


def _lines(chunks: Iterable[bytes], log: Log) -> Iterator[Line]:
    cutter = Cutter()
    for data in chunks:
        for raw, dropped in cutter.feed(data):
            yield from lines_of(raw, log.worker, log.rank, dropped)
    for raw, dropped in cutter.end():
        yield from lines_of(raw, log.worker, log.rank, dropped)


@dataclass
class _Stream:
    """A log that is being followed."""

    log: Log
    opened: Opened
    skip_ns: int = 0
    """Lines up to this time were shown before the connection broke."""
    cutter: Cutter = field(default_factory=Cutter)
    newest_ns: int = 0


_Message = tuple["_Stream | None", "bytes | LogsError | tuple[list[Log], bool] | None"]


class Follower:
    """Follows the logs of a job: those of workers that start later, too, until the job has ended.

    One thread for each log reads, and one looks for new logs. `lines` runs in the caller's thread.
    """

    def __init__(
        self,
        reader: Reader,
        choice: Choice,
        tail: int | None,
        warn: Callable[[str], None],
        refresh_s: float = REFRESH_S,
    ) -> None:
        """`warn` is called with a sentence if a log is left out, and when requests begin to fail."""
        self._reader, self._choice, self._tail, self._warn, self._refresh_s = reader, choice, tail, warn, refresh_s
        self._messages: queue.Queue[_Message] = queue.Queue(_QUEUED)
        self._stopped = threading.Event()
        self._open: dict[str, _Stream] = {}
        self._newest: dict[str, int] = {}
        """Time of the newest line of each log that was read; only of logs that there still are."""
        self._broken: set[str] = set()
        """Logs whose reading failed: their rest is read even if the container has ended. Only of logs that there still are."""
        self._has_ended = False
        self._warned = False
        self._patience = Patience()
        self._fails = False

    def lines(self) -> Generator[Line, None, None]:
        """Yield lines as they are written. Raises LogsError if the job or its pods cannot be read at first, or for PATIENCE_S."""
        first = self._reader.logs()
        self._update(*first, first=True)
        reorder = Reorder()
        threading.Thread(target=self._refresh, daemon=True).start()
        try:
            while self._open or not self._has_ended:
                for line in self._next():
                    reorder.add(line, time.monotonic())
                yield from reorder.due(time.monotonic())
            yield from reorder.rest()
        finally:
            self._stopped.set()
            for stream in self._open.values():
                stream.opened.close()

    def _next(self) -> list[Line]:
        """Wait for a message for one tick, and return the lines that have come."""
        out: list[Line] = []
        until_s = time.monotonic() + _TICK_S
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                stream, what = self._messages.get(timeout=left_s)
            except queue.Empty:
                break
            if stream is None:
                if isinstance(what, LogsError):
                    self._failed(what)
                    continue
                assert isinstance(what, tuple)
                self._patience.succeeded()
                self._fails = False
                self._update(*what)
            elif isinstance(what, bytes):
                out += self._taken(stream, stream.cutter.feed(what))
            else:
                out += self._taken(stream, stream.cutter.end())
                key = stream.log.key
                self._open.pop(key, None)
                if what is None:
                    self._broken.discard(key)
                else:
                    self._broken.add(key)
                if what is None or stream.newest_ns:
                    self._newest[key] = max(stream.newest_ns, 1)
        for stream in self._open.values():
            out += self._taken(stream, stream.cutter.frame(time.monotonic()), is_frame=True)
        return out

    def _failed(self, error: LogsError) -> None:
        """Go on after a failed look at the job, unless it is the last of too many."""
        if error.is_final:
            raise error
        if self._patience.ends(time.monotonic()):
            raise LostError(f"{error} It has been so for {PATIENCE_S:.0f} s.")
        if not self._fails:
            self._fails = True
            self._warn(f"{error} It is tried again for {PATIENCE_S:.0f} s.")

    def _taken(self, stream: _Stream, raws: list[tuple[bytes, int]], *, is_frame: bool = False) -> list[Line]:
        found = [line for raw, dropped in raws for line in lines_of(raw, stream.log.worker, stream.log.rank, dropped)]
        shown = [line for line in found if is_frame or line.at_ns == 0 or line.at_ns > stream.skip_ns]
        stream.newest_ns = max([stream.newest_ns, *(line.at_ns for line in found)])
        return [line for line in shown if self._choice.has(line)]

    def _update(self, logs: list[Log], has_ended: bool, *, first: bool = False) -> None:
        """Open the logs that are not open yet: new ones, and those whose connection broke while their container runs."""
        self._has_ended = has_ended
        there = {log.key for log in logs}
        self._newest = {key: newest for key, newest in self._newest.items() if key in there}
        self._broken &= there
        for log in logs:
            newest = self._newest.get(log.key, 0)
            if log.key in self._open:
                self._open[log.key].log = log  # its rank may have changed
            goes_on = log.key in self._broken or (log.is_open and not has_ended)
            if log.key in self._open or (newest and not goes_on):
                continue
            if len(self._open) >= MAX_STREAMS:
                if first:
                    raise LogsError(
                        f"The job has {len(logs)} pods, and at most {MAX_STREAMS} logs can be followed at once. Use --slot N "
                        "or --rank N."
                    )
                if not self._warned:
                    self._warned = True
                    self._warn(
                        f"{MAX_STREAMS} logs are followed, and no more at once: those of further pods are left out."
                    )
                break
            tail = self._tail if first else None
            opened = self._reader.open(log, follow=True, tail=tail, after_ns=newest)
            stream = self._open[log.key] = _Stream(log, opened, newest, newest_ns=newest)
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: _Stream) -> None:
        ended: LogsError | None = None
        try:
            for data in stream.opened.chunks():
                if not self._put((stream, data)):
                    return
        except LogsError as error:
            ended = error
        except OSError as error:
            ended = LogsError(f"A log cannot be read ({error.strerror}).")
        finally:
            stream.opened.close()
        self._put((stream, ended))

    def _refresh(self) -> None:
        while not self._stopped.wait(self._refresh_s):
            found: tuple[list[Log], bool] | LogsError
            try:
                found = self._reader.logs()
            except LogsError as error:
                found = error
            if not self._put((None, found)):
                return

    def _put(self, message: _Message) -> bool:
        """Queue a message. Return False if nobody wants one any more."""
        while not self._stopped.is_set():
            try:
                self._messages.put(message, timeout=_TICK_S)
            except queue.Full:
                continue
            return True
        return False
