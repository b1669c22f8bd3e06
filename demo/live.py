"""The live table of the tour: one job and the acts, redrawn twice a second.

State, ready, generation, members and incidents come from the job's status, as kubectl shows it. Step and loss come from
the trainers' log, because the status has progress only every ten seconds.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.errors import ClusterError
from harness.job import JobView
from harness.steps import Steps

REDRAW_S = 0.5
READ_S = 1.0
"""Seconds between two reads of the status."""


class LiveTable:
    """Shows a job until the `with` block ends. `act` adds the present act. Without a terminal it prints one line per change."""

    def __init__(self, console: Console, job: JobView, steps: Steps) -> None:
        self._console, self._job, self._steps = console, job, steps
        self._done = threading.Event()
        self._status: dict[str, Any] = {}
        self._act = ""
        self._last = ""
        self._began_s = time.monotonic()
        self._live = Live(console=console, refresh_per_second=4, transient=False) if console.is_terminal else None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> LiveTable:
        if self._live:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        if self._live:
            self._live.stop()

    def act(self, text: str) -> None:
        """Print what happens now."""
        self._act = text
        self._console.print(f"[dim]{self._clock()}[/] [bold]{text}[/]")

    def note(self, text: str) -> None:
        """Print the outcome of an act."""
        self._console.print(f"[dim]{self._clock()}[/]   {text}")

    def _clock(self) -> str:
        return f"{time.monotonic() - self._began_s:5.1f}s"

    def _run(self) -> None:
        read_s = -READ_S
        while not self._done.wait(REDRAW_S):
            if time.monotonic() >= read_s + READ_S:
                read_s = time.monotonic()
                with suppress(ClusterError):  # no answer this time
                    self._status = self._job.status()
            if self._live:
                self._live.update(self._table())
            else:
                line = self._line("state", "ready", "generation", "members")
                if line != self._last:
                    self._last = line
                    self._console.print(f"[dim]{self._clock()}   {line}{self._line('step', 'loss')}[/]", soft_wrap=True)

    def _cells(self) -> dict[str, str]:
        status = self._status
        membership, summary = status.get("membership") or {}, status.get("summary") or {}
        newest = self._steps.newest
        return {
            "state": summary.get("state", ""),
            "ready": summary.get("ready", ""),
            "generation": str(membership.get("generation", "")),
            "members": membership.get("members", ""),
            "step": str(newest.number) if newest else "",
            "loss": newest.loss if newest else "",
            "incidents": str(len(status.get("incidents") or ())),
        }

    def _line(self, *names: str) -> str:
        cells = self._cells()
        return "".join(f"{name} {cells[name]}  " for name in names if cells[name])

    def _table(self) -> Group:
        table = Table(box=None, pad_edge=False)
        cells = self._cells()
        for name in cells:
            table.add_column(name)
        table.add_row(*cells.values())
        return Group(Text(""), table, Text(self._act, style="italic"))
