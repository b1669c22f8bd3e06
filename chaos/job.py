"""The interface of a job under chaos, which `drive` uses wherever the job runs."""

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
    """The job could not be started or observed. The text is for the person who ran it."""


class Undo:
    """Undoes faults that last, each at its time, and the rest at the end."""

    def __init__(self) -> None:
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._changed = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` after this time, in another thread. Its exceptions are dropped."""
        with self._changed:
            self._due.append((time.monotonic() + seconds, action))
            self._changed.notify()

    def pending(self) -> bool:
        """Return whether an action is still to come."""
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
    """One running job. `inject` breaks a part of it; the other methods observe it."""

    def __init__(self, scenario: Scenario, directory: Path, traces: Path, steps: int) -> None:
        """Keep the job's files in `directory`. Its processes write their traces to `traces`."""
        self.scenario, self.directory, self.traces, self.steps = scenario, directory, traces, steps
        self.reader = Reader(self.traces)
        self.undo = Undo()
        self.wanted = scenario.workers
        self.alive_until_s: dict[Who, float] = {}
        """Traced process -> the last time at which it was alive and its worker not released, by this machine's clock."""

    @abstractmethod
    def start(self) -> None:
        """Start the job; returns before it trains."""

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """Return the job's status. It is empty before there is one."""

    @abstractmethod
    def inject(self, fault: Fault) -> str:
        """Inject a fault and return its target, in words. Raises NothingToHitError."""

    @abstractmethod
    def changing(self) -> str:
        """Return how far the newest change of members is: "forming", "adopting", or "" if there is none."""

    @abstractmethod
    def writes_checkpoint(self) -> bool:
        """Return whether a checkpoint is being written. It is never so for a script, which has checkpoints of its own."""

    @abstractmethod
    def look(self) -> None:
        """Note the processes that are alive. Called often."""

    @abstractmethod
    def ended(self) -> str | None:
        """Return Succeeded, Failed, or the reason why the job is gone. None while it runs."""

    @abstractmethod
    def diagnosis(self) -> str:
        """Return the facts that explain a job that is stuck."""

    @abstractmethod
    def close(self) -> None:
        """Undo the faults that are left, end the job, and leave nothing but its files."""

    def pace(self, before_s: float, boundary: int, after_s: float) -> None:
        """Set the seconds of each step: `before_s` before step `boundary`, and `after_s` from it on."""
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
