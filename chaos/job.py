"""What a job under chaos offers to `drive`, wherever it runs."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from chaos.plan import Fault, Scenario
from chaos.trace import Reader, Who


class NothingToHitError(Exception):
    """The fault has no target at this moment; the text says why. It is not counted."""


class JobError(Exception):
    """The job could not be started or looked at; the text is for the person who ran it."""


class Undo:
    """What a fault that lasts leaves to be undone, each at its time, and all of it at the end."""

    def __init__(self) -> None:
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._changed = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Have `action` called in so many seconds, in another thread; what it raises is dropped."""
        with self._changed:
            self._due.append((time.monotonic() + seconds, action))
            self._changed.notify()

    def pending(self) -> bool:
        """Return whether anything is left to be undone."""
        with self._changed:
            return bool(self._due)

    def close(self) -> None:
        """Undo everything that is left now."""
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._due.sort(key=lambda entry: entry[0])
                if not self._due:
                    if self._over:
                        return
                    self._changed.wait()
                    continue
                at_s, action = self._due[0]
                wait_s = 0.0 if self._over else at_s - time.monotonic()
                if wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
            with suppress(Exception):
                action()
            with self._changed:
                self._due.remove((at_s, action))


class Job(ABC):
    """One running job. `inject` breaks something in it; everything else looks."""

    def __init__(self, scenario: Scenario, directory: Path, traces: Path, steps: int) -> None:
        """`directory` takes the job's files, `traces` is where its processes write theirs."""
        self.scenario, self.directory, self.traces, self.steps = scenario, directory, traces, steps
        self.reader = Reader(self.traces)
        self.undo = Undo()
        self.wanted = scenario.workers
        self.alive_until_s: dict[Who, float] = {}
        """When each traced process was last seen alive while its worker had not been released, by this machine's clock."""

    @abstractmethod
    def start(self) -> None:
        """Start the job; returns before it trains."""

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """Return its status; empty before there is one."""

    @abstractmethod
    def inject(self, fault: Fault) -> str:
        """Inject a fault and return what was hit, in words. Raises NothingToHitError."""

    @abstractmethod
    def changing(self) -> str:
        """Return how far the newest change of members is: "forming", "adopting", or "" when there is none."""

    @abstractmethod
    def writes_checkpoint(self) -> bool:
        """Return whether a checkpoint is being written; never for a script, whose checkpoints are its own."""

    @abstractmethod
    def look(self) -> None:
        """Note which processes are alive; called often."""

    @abstractmethod
    def ended(self) -> str | None:
        """Return Succeeded, Failed, or why the job is gone; None while it runs."""

    @abstractmethod
    def diagnosis(self) -> str:
        """Return what a person needs who finds the job stuck."""

    @abstractmethod
    def close(self) -> None:
        """Undo what is left of the faults, end the job, and leave nothing but its files."""

    def pace(self, before_s: float, boundary: int, after_s: float) -> None:
        """Set what a step takes before step `boundary`, and from it on."""
        self.traces.mkdir(parents=True, exist_ok=True)
        aside = self.traces / "pace.new"
        aside.write_text(f"{before_s:.4f} {boundary} {after_s:.4f}")
        aside.rename(self.traces / "pace")

    def is_whole(self) -> bool:
        """Return whether all wanted workers are in the newest generation and have its state."""
        status = self.status()
        membership = status.get("membership") or {}
        ranks = self.wanted * self.scenario.processes
        return bool(membership.get("adopted")) and membership.get("worldSize") == ranks and not self.changing()
