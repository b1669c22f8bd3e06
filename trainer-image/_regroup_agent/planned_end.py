"""Ends the processes of a script so that no file is broken that they write: hold, wait for writers, then SIGTERM. Pure.

Used where a change is planned: another number of workers, a drain, suspension, the end of the job. If a rank is dead, the change is
*forced*, since the others hang in a collective. It waits only for a file that is being written, for FORCED_S at most.

1. *Hold.* Each process that makes optimizer steps is asked to stop after its next one (group_hook.py). Between two files of one
   save no file is open, so this comes first. A process may not arrive, because it waits in a collective for one that holds.
2. *Writers.* Savers in threads and children go on meanwhile. Their files are waited for (writers.py).
3. *Freeze.* A process that does not hold may begin to save at any moment. It is stopped, looked at once more, and goes on if it
   has just begun.

A script may want to be told instead (recovery.gracefulStop.signal). It then gets this signal and its time, and nothing is held.
The end is over when the caller may send SIGTERM, at the latest at the bound. docs/design/adr/0080-planned-changes-harm-no-file.md
"""

from __future__ import annotations

import signal

from regroup.protocol import local

from . import events as ev
from .aggregate import Process
from .worker import Worker
from .writers import Look, Writers

LOOK_EVERY_S = 0.1
KILLED_S = 15.0
"""Time that the operator allows from SIGTERM to the death of the processes."""
FROZEN_S = 0.05
"""Time from SIGSTOP to the look: each thread stops when it leaves the kernel."""
GAP_S = 2.0
"""Longest time between two files of one save in which a thread or a child writes them."""
ARRIVE_S = 5.0
"""A process that makes steps, does not write, and has not come to the end of one for so long waits for others."""
ARRIVE_STEPS = 3
"""The same in steps, where they take longer."""

FORCED_S = 10.0
"""Longest wait for writers in a forced change. With the grace it is within the time that a generation has to form."""
FORCED_IDLE_S = 0.5
"""The same as IDLE_S and GAP_S in a forced change. Each recovery would pay those 2 s where a log stays open."""

HOLDING, TOLD, FROZEN, WRITING = "holding", "told", "frozen", "writing"
"""Stages. An empty text: no planned end runs."""


class PlannedEnd:
    """The planned end of one worker's processes, which `Script` or `Core` begins and takes over when it is over."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._stage = ""
        self._writers = Writers()
        self._began_s = self._until_s = 0.0
        self._look_s: float | None = None
        """Time of the next look; None: none is needed."""
        self._said_file = ""
        self._frozen: list[Process] = []
        """Processes that were stopped, of which some may have said meanwhile that they hold."""

    @property
    def runs(self) -> bool:
        """True from the begin until it is over."""
        return self._stage != ""

    @property
    def due_s(self) -> float | None:
        """Time at which `tick` must be called; None: no planned end runs."""
        if not self.runs:
            return None
        return self._until_s if self._look_s is None else min(self._look_s, self._until_s)

    def begin(self, until_s: float, now_s: float) -> None:
        """Begin, or bring the bound of one that runs forward to `until_s`, the latest time at which it is over."""
        worker, terms = self._worker, self._worker.identity.terms
        until_s = min(until_s, now_s + terms.seconds)
        if self.runs:
            self._until_s = min(self._until_s, until_s)
            return
        self._began_s, self._until_s = now_s, until_s
        worker.parting = now_s, until_s - now_s + KILLED_S
        self._writers, self._said_file = Writers(), ""
        if terms.signum is not None:
            self._stage, self._look_s = TOLD, None
            for process in self._running:
                # A process that does not exist yet is ended by its first signal.
                signum = terms.signum if process.spawned else signal.SIGTERM
                worker.effects.append(ev.Signal(process.local_rank, signum, alone=process.spawned))
            return
        self._stage, self._look_s = HOLDING, now_s
        for process in self._running:
            self._ask(process)

    def force(self, now_s: float) -> None:
        """Begin a forced end, or make one of an end that runs. It is over once no file is being written, or after FORCED_S."""
        until_s = now_s + min(FORCED_S, self._worker.identity.terms.seconds)
        if self.runs:
            self._until_s = min(self._until_s, until_s)
            self._thaw()
        else:
            self._began_s, self._until_s, self._said_file = now_s, until_s, ""
        if self._stage not in (TOLD, WRITING):
            self._stage, self._look_s, self._writers = WRITING, now_s, Writers(FORCED_IDLE_S)

    def stepped(self, process: Process) -> None:
        """Take in that a process has made steps, which its hook reports. One that was not asked before is asked to hold."""
        if self._stage in (HOLDING, FROZEN):
            self._ask(process)

    def looked(self, look: Look, now_s: float) -> None:
        """Take in a look at the open files, and decide what follows from it."""
        if self._stage not in (HOLDING, FROZEN, WRITING):
            return
        writers = self._writers
        writers.take(look, now_s)
        if self._stage == WRITING:
            self._wait_for_writers(now_s)
            return
        if self._stage == FROZEN:
            if self._is_quiet(now_s):
                self._until_s = now_s
            else:
                self._stage, self._look_s = HOLDING, now_s + LOOK_EVERY_S
                self._thaw()
        elif self._is_quiet(now_s):
            if self._free:
                self._stage, self._look_s, self._frozen = FROZEN, now_s + FROZEN_S, self._free
                self._worker.effects += [ev.Signal(p.local_rank, signal.SIGSTOP) for p in self._frozen]
            else:
                self._until_s = now_s
        else:
            self._look_s = now_s + LOOK_EVERY_S
            self._say_file(now_s)

    def _wait_for_writers(self, now_s: float) -> None:
        """Go on looking while a file is written. A process that has come to the end of its save holds before it begins another."""
        wrote_s = self._writers.wrote_s
        if not self._writers.is_active and (wrote_s is None or now_s - wrote_s >= FORCED_IDLE_S):
            self._until_s = now_s
            return
        self._look_s = now_s + LOOK_EVERY_S
        self._worker.parting = self._worker.parting or (self._began_s, self._until_s - self._began_s + KILLED_S)
        for process in self._running:
            self._ask(process)
        self._say_file(now_s)

    def tick(self, now_s: float) -> bool:
        """Run the timers. Return True once, when it is over and the caller must send SIGTERM and then call `let_go`."""
        if not self.runs:
            return False
        if now_s >= self._until_s:
            if self._stage != TOLD and self._writers.is_active and self._writers.newest:
                text = f"{self._writers.newest} was still being written after {now_s - self._began_s:.0f} s; its process is ended."
                bounded = now_s - self._began_s < self._worker.identity.terms.seconds
                hint = "" if bounded else " Raise spec.recovery.gracefulStop.seconds."
                self._worker.effects.append(ev.Log(text + hint))
            return True
        if self._look_s is not None and now_s >= self._look_s:
            self._look_s = None
            self._worker.effects.append(ev.LookAtFiles())
        return False

    def let_go(self) -> None:
        """End it, after SIGTERM was sent: stopped processes run again and take the signal, those that hold go on.

        A script with a handler for SIGTERM can only end by itself if it goes on.
        """
        self._thaw()
        for process in self._running:
            if process.asked:
                self._worker.tell(process, local.Go())
        self._stage, self._look_s = "", None

    def forget(self) -> None:
        """End it, because no process runs any more."""
        self._stage, self._look_s, self._frozen = "", None, []
        self._worker.parting = None

    @property
    def _running(self) -> list[Process]:
        return [p for p in self._worker.processes if p.running]

    @property
    def _free(self) -> list[Process]:
        """Processes that do not hold, and may begin to save at any moment."""
        return [p for p in self._running if p.spawned and not p.held]

    def _ask(self, process: Process) -> None:
        if process.step_s is not None and not process.asked:
            process.asked = True
            self._worker.tell(process, local.Hold())

    def _thaw(self) -> None:
        """Let exactly those go on that were stopped and still run."""
        self._worker.effects += [ev.Signal(p.local_rank, signal.SIGCONT) for p in self._frozen if p.running]
        self._frozen = []

    def _is_quiet(self, now_s: float) -> bool:
        """Return whether nothing is being saved, as far as the looks show."""
        writers, free = self._writers, self._free
        if writers.is_active:
            return False
        steps_s = [p.step_s for p in free if p.step_s is not None]
        if steps_s:
            patience_s = max(ARRIVE_S, *(ARRIVE_STEPS * step_s for step_s in steps_s))
        else:
            # A thread or a child may be between two files of one save, and only earlier saves tell that there is one.
            patience_s = GAP_S if writers.has_saved else 0.0
        return now_s - max(self._began_s, writers.wrote_s or 0.0) >= patience_s

    def _say_file(self, now_s: float) -> None:
        """Log the first file that is waited for, once it has been for a second."""
        newest = self._writers.newest
        if newest and not self._said_file and now_s - self._began_s >= 1.0:
            self._said_file = newest
            self._worker.effects.append(
                ev.Log(f"Waiting for {newest}, which is being written, before the processes are ended.")
            )
