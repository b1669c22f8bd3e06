"""The Script tier, and jobs whose tier is not known yet: every generation gets new processes with its environment.

A planned change ends the old processes so that no file is broken that they write. A forced one waits for such a file for 10 s at
most (planned_end.py). They get SIGTERM and a grace. If a process fails by itself, its siblings are ended as well, since they
would wait for it until a collective times out. That is one fault, and new processes wait for a newer generation.

A hook in each process tells when it has passed `init_process_group` (group_hook.py). Only then the worker trains.
Processes without such a word count as unobserved after a time (docs/design/adr/0011-running-in-the-script-tier.md). Those of a
framework that is not on torch never give that word.
"""

from __future__ import annotations

import signal

from regroup.protocol import frameworks, local, wire

from . import ending
from . import events as ev
from .aggregate import SCRIPT, Process
from .planned_end import PlannedEnd
from .worker import Worker

GRACE_S = 10.0
"""Time between SIGTERM and SIGKILL when a script's processes are replaced."""
STEADY_S = 30.0
"""A script that has run this long did not crash at its start, so the restart delay begins anew."""
UNOBSERVED_S = 30.0
"""Time after which processes without a hook count as unobserved, and a job's only process, which needs no process group."""
WATCHED_S = 120.0
"""The same for several processes with a hook. Imports may take long, and some scripts never form a process group."""


class Script:
    """The decisions of the Script tier for one worker."""

    def __init__(self, worker: Worker, planned: PlannedEnd) -> None:
        self._worker, self._planned = worker, planned
        self._kill_at_s: float | None = None
        """Time of SIGKILL while the agent ends the processes; after it, the time at which the agent gives up."""
        self._gives_up = False
        """The processes have got SIGKILL."""
        self._launch_at_s: float | None = None
        """Earliest start of the newest generation's processes."""
        self._waits_for_members = False
        """The newest generation's processes could start, and the list of its members has not come."""
        self._unobserved_at_s: float | None = None
        """Deadline for a process to enter `init_process_group`. After it the worker counts as unobserved. None: none runs."""

    @property
    def due_s(self) -> float | None:
        """Time at which `tick` must be called; None: no timer runs."""
        dues = (self._kill_at_s, self._launch_at_s, self._unobserved_at_s)
        return min((due for due in dues if due is not None), default=None)

    @property
    def ends_processes(self) -> bool:
        """True from the begin of a planned end, or from SIGTERM, until the last process is gone.

        Exits in between are no faults, even of a session.
        """
        return self._kill_at_s is not None or self._planned.runs

    @property
    def has_sent_sigterm(self) -> bool:
        """True from the agent's SIGTERM until the last process is gone."""
        return self._kill_at_s is not None

    def tick(self, now_s: float) -> None:
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            self._kill(now_s)
        if self._unobserved_at_s is not None and now_s >= self._unobserved_at_s:
            self._unobserved_at_s, self._worker.unobserved = None, True
        if self._launch_at_s is not None and now_s >= self._launch_at_s:
            self._launch(now_s)

    def spawned(self, now_s: float) -> None:
        """Take in that a process has been started."""
        if all(p.spawned for p in self._worker.processes):
            self._watch(now_s)
        self.say_adopted()

    def observed(self, process: Process, message: local.Observed, now_s: float) -> None:
        """Note how far `init_process_group` has come in a process, as its hook reports. Set `_unobserved_at_s` anew."""
        process.observed = message.group
        self._watch(now_s)

    def replace(self, now_s: float, *, is_planned: bool) -> None:
        """Replace the processes, because a newer generation was heard. It starts none here if the worker is no member."""
        worker = self._worker
        worker.script_cause = None
        if worker.running:
            worker.replacing = True
            if self.has_sent_sigterm:
                return
            if not is_planned:
                self._planned.force(now_s)
            else:
                self._planned.begin(now_s + worker.identity.terms.seconds, now_s)
        else:
            self._launch_at_s = max(now_s, self._launch_at_s or now_s)

    def documented(self, now_s: float) -> None:
        """Start the processes that waited for the list of members, which has come."""
        if self._waits_for_members and self._worker.ending is None:
            self._launch(now_s)

    def exited(self, process: Process, event: ev.Exited, now_s: float) -> None:
        """Take in the exit of a process, which ended by itself or by a signal of the agent."""
        worker = self._worker
        worker.persist(entered=max(worker.saved.entered, process.launched))
        if not self.ends_processes:
            self._exited_by_itself(process, event, now_s)
        if not worker.running:
            self._planned.forget()
            self._kill_at_s, self._unobserved_at_s, self._gives_up = None, None, False
            if worker.replacing:
                worker.replacing = False
                self._launch_at_s = max(now_s, self._launch_at_s or now_s)

    def say_adopted(self) -> None:
        """Report the generation as adopted once all its processes run and the operator has named the tier Script."""
        worker = self._worker
        launched = worker.processes[0].launched
        if worker.tier != SCRIPT or not launched or worker.replacing or worker.said_adopted >= launched:
            return
        if all((p.running and p.spawned) or p.done for p in worker.processes):
            worker.said_adopted = launched
            worker.persist(entered=max(worker.saved.entered, launched), adopted=max(worker.saved.adopted, launched))
            worker.adopted_body = (launched, wire.Adopted(start_step=0, source="self"))
            worker.send(worker.adopted_body[1])

    def _watch(self, now_s: float) -> None:
        """Set the time at which the processes count as unobserved.

        No time is set once a process has called init_process_group, which either returns or fails.
        """
        worker = self._worker
        processes = [p for p in worker.processes if p.running]
        self._unobserved_at_s = None
        if worker.by_session or worker.unobserved or not all(p.spawned for p in processes):
            return
        if not any(p.observed in ("entered", "formed") for p in processes):
            alone = worker.generation is None or worker.generation.world_size == 1
            forms = not alone and worker.identity.framework in frameworks.ON_TORCH
            watched = forms and all(p.observed for p in processes)
            self._unobserved_at_s = max(now_s, worker.launched_s + (WATCHED_S if watched else UNOBSERVED_S))

    def _kill(self, now_s: float) -> None:
        """Send SIGKILL, and at the second call, UNKILLABLE_S later, give up and exit without the processes."""
        worker = self._worker
        if self._gives_up:
            self._kill_at_s = None
            worker.give_up(1)
            return
        self._gives_up, self._kill_at_s = True, now_s + ending.UNKILLABLE_S
        worker.signal_all(signal.SIGKILL)

    def _exited_by_itself(self, process: Process, event: ev.Exited, now_s: float) -> None:
        worker = self._worker
        if event.code == 0:
            worker.returned(process, process.launched)
            if worker.is_done:
                worker.finished_body = (process.launched, wire.Finished(0))
                worker.send(worker.finished_body[1])
            return
        worker.script_cause = ending.exit_sentence(process.local_rank, event.code, event.memory)
        worker.send_exit(process, event)
        if worker.ending is not None:
            return
        if now_s - worker.launched_s > STEADY_S:
            worker.crashes = 0
        self._launch_at_s = now_s + worker.next_delay_s()
        if worker.running:
            self._planned.force(now_s)

    def end(self, now_s: float) -> None:
        """Send SIGTERM to the processes, unless it was sent before. SIGKILL follows after the grace."""
        if self._kill_at_s is None:
            self._kill_at_s = now_s + GRACE_S
            self._worker.signal_all(signal.SIGTERM)

    def _launch(self, now_s: float) -> None:
        worker, newest = self._worker, self._worker.generation
        self._launch_at_s, self._waits_for_members = None, False
        if worker.by_session:
            idle = [p.local_rank for p in worker.processes if not p.running and p.start_at_s is None]
            if idle:
                worker.start(idle, None, now_s)
        elif newest is not None and newest.member and newest.number > worker.saved.started and not worker.running:
            if worker.identity.framework in frameworks.LISTS_MEMBERS and worker.document is None:
                self._waits_for_members = True
                return
            worker.start(list(range(len(worker.processes))), newest, now_s)
