"""Tier Script (and a job whose tier is not known yet): every generation gets new processes, with its environment.

The old ones get SIGTERM and a grace. One that fails by itself is one fault: its siblings are ended too, since they would
wait for it until a collective's timeout, and new processes wait for a newer generation.

Whether they train is told by the hook in them (group_hook.py): every process has passed `init_process_group`. Where it
does not speak, they count as unobserved after a time (docs/design/adr/0011-running-in-the-script-tier.md).
"""

from __future__ import annotations

import signal

from regroup.protocol import local, wire

from . import ending
from . import events as ev
from .aggregate import SCRIPT, Process
from .worker import Worker

GRACE_S = 10.0
"""A script's time between SIGTERM and SIGKILL when its processes are replaced."""
STEADY_S = 30.0
"""A script that ran this long has not crashed at its start: the restart delay begins anew."""
UNOBSERVED_S = 30.0
"""Processes without a hook that ran this long count as unobserved; so does one alone, which needs no process group."""
WATCHED_S = 120.0
"""The same for several processes with a hook: their imports may take long, but a script without a process group exists."""


class Script:
    """The script tier of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._kill_at_s: float | None = None  # set while processes are being ended for a reason of ours
        self._gives_up = False  # they have got SIGKILL: `_kill_at_s` is when they are waited for no longer
        self._launch_at_s: float | None = None  # earliest start of the newest generation's processes
        self._unobserved_at_s: float | None = None  # when the processes that run count as unobserved

    @property
    def due_s(self) -> float | None:
        """When `tick` is wanted."""
        dues = (self._kill_at_s, self._launch_at_s, self._unobserved_at_s)
        return min((due for due in dues if due is not None), default=None)

    @property
    def ends_processes(self) -> bool:
        """True from our SIGTERM until the last process is gone: their ends are no faults, whoever attached meanwhile."""
        return self._kill_at_s is not None

    def tick(self, now_s: float) -> None:
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            self._kill(now_s)
        if self._unobserved_at_s is not None and now_s >= self._unobserved_at_s:
            self._unobserved_at_s, self._worker.unobserved = None, True
        if self._launch_at_s is not None and now_s >= self._launch_at_s:
            self._launch(now_s)

    def spawned(self, now_s: float) -> None:
        """A process runs."""
        if all(p.spawned for p in self._worker.processes):
            self._watch(now_s)
        self.say_adopted()

    def observed(self, process: Process, message: local.Observed, now_s: float) -> None:
        """The hook in a process has spoken."""
        process.observed = message.group
        self._watch(now_s)

    def replace(self, now_s: float) -> None:
        """A newer generation is heard: it needs processes of its own, or none here."""
        worker = self._worker
        worker.script_cause = None
        if worker.running:
            self._end(now_s)
            worker.replacing = True
        else:
            self._launch_at_s = max(now_s, self._launch_at_s or now_s)

    def exited(self, process: Process, event: ev.Exited, now_s: float) -> None:
        """A process has ended, by itself or by us."""
        worker = self._worker
        worker.persist(entered=max(worker.saved.entered, process.launched))
        if self._kill_at_s is None:
            self._exited_by_itself(process, event, now_s)
        if not worker.running:
            self._kill_at_s, self._unobserved_at_s, self._gives_up = None, None, False
            if worker.replacing:
                worker.replacing = False
                self._launch_at_s = max(now_s, self._launch_at_s or now_s)

    def say_adopted(self) -> None:
        """A generation counts as adopted when its processes run, once the operator has said that they are a script's."""
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
        """Set when the processes count as unobserved: who has called init_process_group will pass it or fail."""
        worker = self._worker
        processes = [p for p in worker.processes if p.running]
        self._unobserved_at_s = None
        if worker.by_session or worker.unobserved or not all(p.spawned for p in processes):
            return
        if not any(p.observed in ("entered", "formed") for p in processes):
            alone = worker.generation is None or worker.generation.world_size == 1
            watched = not alone and all(p.observed for p in processes)
            self._unobserved_at_s = max(now_s, worker.launched_s + (WATCHED_S if watched else UNOBSERVED_S))

    def _kill(self, now_s: float) -> None:
        """Send SIGKILL; what it does not end is waited for no longer than UNKILLABLE_S."""
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
            self._end(now_s)

    def _end(self, now_s: float) -> None:
        if self._kill_at_s is None:
            self._kill_at_s = now_s + GRACE_S
            self._worker.signal_all(signal.SIGTERM)

    def _launch(self, now_s: float) -> None:
        worker, newest = self._worker, self._worker.generation
        self._launch_at_s = None
        if worker.by_session:
            idle = [p.local_rank for p in worker.processes if not p.running and p.start_at_s is None]
            if idle:
                worker.start(idle, None, now_s)
        elif newest is not None and newest.member and newest.number > worker.saved.started and not worker.running:
            worker.start(list(range(len(worker.processes))), newest, now_s)
