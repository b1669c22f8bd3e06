"""Read the logs of a local job. `regroup run` writes them: a file for each worker, `log`, and the older `log.1`."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from regroup_client import views
from regroup_client.jobs import Wanted, slot_of
from regroup_client.log_lines import Worker
from regroup_client.log_streams import Log, LogsError, Opened

POLL_S = 0.2
"""Time between two looks at the file of a worker whose log is followed."""
_NAME = re.compile(r"-worker-(\d+)-(\d+)$")


class LocalLogs:
    """Implements Reader for the directory of a local job.

    `look` returns the job and whether it goes on; it raises LogsError.
    """

    def __init__(self, directory: Path, look: Callable[[], tuple[views.Object, bool]], wanted: Wanted) -> None:
        self._directory, self._look, self._wanted = directory, look, wanted

    def logs(self) -> tuple[list[Log], bool]:
        job, goes_on = self._look()
        ranks = views.ranks(job)
        names = [path.parent.name for path in self._directory.glob("*-worker-*/log")]
        of_all = {Worker(int(part[1]), int(part[2])): name for name in names if (part := _NAME.search(name))}
        slot = slot_of(job, self._wanted, (worker.slot for worker in of_all))
        found = {worker: name for worker, name in of_all.items() if slot in (None, worker.slot)}
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
