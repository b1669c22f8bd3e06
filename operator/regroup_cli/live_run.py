"""The terminal of `regroup run`: output of workers above, and below it one screen of the job that is drawn again.

Without a terminal, output is passed on as it is and the job's progress is a line with a time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from regroup_cli.local_logs import write_all
from regroup_cli.screen import Screen
from regroup_client import views
from regroup_client.log_lines import Cutter, Worker, lines_of, shown

LINE_S = 2.0
"""Shortest time between two lines of progress."""


class Terminal(Protocol):
    """A place to which `regroup run` writes. Several threads may call `write`."""

    def write(self, fd: int, worker: Worker, data: bytes) -> None:
        """Write whole lines of a worker. `fd` is the stream to which it wrote them, 1 or 2."""

    def show(self, job: views.Object) -> None:
        """Show the job as it is now."""

    def say(self, text: str) -> None:
        """Write a line of the command's own."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class Lines:
    """A Terminal that is a pipe or a file."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._line, self._next_s = "", 0.0

    def write(self, fd: int, worker: Worker, data: bytes) -> None:  # noqa: ARG002 (whose lines they are is not shown)
        write_all(fd, data)

    def show(self, job: views.Object) -> None:
        line, has_ended = views.line(job), views.state(job) in views.ENDED
        if line == self._line or (self._clock() < self._next_s and not has_ended) or not job.get("status"):
            return
        self._line, self._next_s = line, self._clock() + LINE_S
        self._say(f"{time.strftime('%H:%M:%S')}  {line}")

    def say(self, text: str) -> None:
        self._say(text)

    def close(self) -> None:
        """Do nothing."""


class Live:
    """A Terminal with a screen at its end. Lines of workers begin with [slot.rank]."""

    def __init__(self, screen: Screen, *, in_colour: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._screen, self._in_colour, self._clock = screen, in_colour, clock
        self._lock = threading.Lock()
        self._cutters: dict[tuple[int, Worker], Cutter] = {}
        """One for each stream of a worker that is within a line. Each worker's output ends with a whole line."""
        self._ranks: dict[views.Member, tuple[int, ...]] = {}
        self._version = ""

    def write(self, fd: int, worker: Worker, data: bytes) -> None:
        with self._lock:
            cutter = self._cutters.setdefault((fd, worker), Cutter())
            self._screen.add(self._shown(worker, cutter.feed(data)))
            if cutter.is_empty:
                del self._cutters[fd, worker]

    def show(self, job: views.Object) -> None:
        """Show the job, and the progress bars that workers draw. It is called at short intervals, though nothing changes."""
        # A terminal that does not read holds the lock of a worker's thread. The operator goes on, and draws later.
        if self._lock.acquire(timeout=0.05):
            try:
                self._draw(job)
            finally:
                self._lock.release()

    def _draw(self, job: views.Object) -> None:
        now_s = self._clock()
        for (_, worker), cutter in self._cutters.items():
            self._screen.add(self._shown(worker, cutter.frame(now_s)))
        if job["metadata"]["resourceVersion"] != self._version:
            self._version = job["metadata"]["resourceVersion"]
            self._ranks = views.ranks(job)
            self._screen.show(views.job_view(job))

    def _shown(self, worker: Worker, raws: list[tuple[bytes, int]]) -> list[str]:
        ranks = self._ranks.get(views.Member(worker.slot, worker.attempt), ())
        rank = ranks[0] if len(ranks) == 1 else None
        found = [line for raw, dropped in raws for line in lines_of(raw, worker, rank, dropped)]
        return [shown(line, colour=self._in_colour) for line in found]

    def say(self, text: str) -> None:
        with self._lock:
            self._screen.add([f"regroup: {text}"])

    def close(self) -> None:
        with self._lock:
            self._screen.close()


def terminal(say: Callable[[str], None], *, plain: bool) -> Terminal:
    """Return the terminal of this process. `plain`: lines are wanted even if it could draw."""
    if plain or not (sys.stdout.isatty() and sys.stderr.isatty()):
        return Lines(say)
    screen = Screen(sys.stdout)
    return Live(screen, in_colour=True) if screen.can_draw else Lines(say)
