"""The agent's decisions: `Core.handle(event, now)` -> effects. No I/O, no clock; tests/unit/agent/test_core.py is its table.

This module decides about commands and their refusal (rule FENCE), timers, the end, and the time of a report. Each report has
the whole condition (rule RESAY). `session` and `script` decide what differs between the tiers.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from regroup.protocol import local, wire
from regroup.protocol.document import PLANNED
from regroup.protocol.snapshot import SnapshotState
from regroup.protocol.state import Phase

from . import ending
from . import events as ev
from .aggregate import SESSION
from .hangs import Hangs
from .planned_end import PlannedEnd
from .script import Script
from .script_progress import Words
from .session import Session
from .statefile import UNKNOWN, Saved
from .worker import Identity, Worker

CHANGED_DELAY_S = 0.01
"""Seconds for which a changed condition waits for a report that says more."""
FORMING_DELAY_S = 0.5
"""The same of a worker on its way into a generation: it mostly reports `adopted` sooner, which says all of it. Nobody waits for
less, except for the arrival of those that join a planned generation (rule JOIN)."""


class Core:
    """The decisions of one agent. Only `handle` changes the state; it is not re-entrant.

    - `session`: the script is known to use the library. Its processes start as soon as the operator is reached.
    - `preloading`: a zygote is importing, or a launcher reads its command, and a `Preloaded` or a `Refused` event will follow. A
      script's worker is not ready before.
    - `cannot_run`: reason why no process can train here. The core then starts none and tells each operator the reason.
    """

    def __init__(
        self,
        identity: Identity,
        saved: Saved,
        *,
        session: bool = False,
        preloading: bool = False,
        cannot_run: str = "",
        snapshots: Mapping[int, SnapshotState] | None = None,
    ) -> None:
        self._worker = Worker(identity, saved, snapshots or {})
        self._worker.preloading, self._worker.cannot_run = preloading or cannot_run != "", cannot_run
        if session:
            self._worker.session, self._worker.tier = True, SESSION
        self._planned_end = PlannedEnd(self._worker)
        self._session, self._script = Session(self._worker), Script(self._worker, self._planned_end)
        self._hangs = Hangs(self._worker)
        self._changed_s: float | None = None
        self._changed_due_s: float | None = None
        """Time at which the condition began to differ from the last report, and time at which it is reported."""

    # --- what the edge asks ----------------------------------------------------------------------------------------

    def handle(self, event: ev.Event, now_s: float) -> list[ev.Effect]:
        """Take in an event and return the effects that the caller must execute, in their order.

        `now_s` is the time on a monotonic clock.
        """
        worker = self._worker
        worker.now_s = now_s
        self._dispatch(event, now_s)
        self._run_timers(now_s)
        worker.keep_seal()
        # Hello carries the whole condition. A later change is compared with it once the stream is open.
        if not worker.connected or worker.key() == worker.said:
            self._changed_s = self._changed_due_s = None
        else:
            self._changed_s = now_s if self._changed_s is None else self._changed_s
            self._changed_due_s = self._changed_s + self._changed_delay_s()
        effects, worker.effects = worker.effects, []
        return effects

    @property
    def due_s(self) -> float | None:
        """Time at which the caller must hand in a `Tick`, on the clock of `handle`; None: only another event matters."""
        worker = self._worker
        dues = [p.start_at_s for p in worker.processes]
        reports = [worker.progress.due_s, worker.script_progress.due_s] if worker.connected else []
        dues += [*reports, self._changed_due_s, self._hangs.due_s]
        if not worker.stopped:  # a worker that ends has no timers of its tier
            dues += [worker.ending.due_s if worker.ending else self._script.due_s, self._planned_end.due_s]
        return min((due for due in dues if due is not None), default=None)

    @property
    def by_session(self) -> bool:
        """True once the agent knows that the script uses the library."""
        return self._worker.by_session

    @property
    def sees_saves(self) -> bool:
        """True if the edge watches the script's checkpoint directory."""
        return self._worker.sees_saves and not self._worker.stopped

    def report(self, body: Any, now_s: float) -> wire.Report:
        """Return a report that the caller is about to write: `body` with the present condition and seal."""
        worker = self._worker
        worker.now_s = now_s  # ages in the report count from here; the last event may be long ago
        report = worker.report(body)
        worker.said = worker.key()
        return report

    def rank_of(self, local_rank: int) -> int | None:
        """Return a process's rank in the newest generation that was heard; None: the worker is no member of it."""
        newest = self._worker.generation
        return newest.rank_offset + local_rank if newest is not None and newest.member else None

    def expects(self, local_rank: int, incarnation: int) -> bool:
        """Return whether the running process of this local rank has this incarnation."""
        return self._worker.expects(local_rank, incarnation)

    def gives_store(self, generation: int) -> bool:
        """Return whether the fresh listening socket is the store of this generation.

        If so, the process that asks gets its descriptor.
        """
        newest = self._worker.generation
        return (
            newest is not None
            and newest.number == generation
            and newest.hosts_store
            and newest.store_port == self._worker.store_port
        )

    def _changed_delay_s(self) -> float:
        """Return how long the changed condition may wait for a report that says more."""
        worker, newest = self._worker, self._worker.generation
        condition, _, unheard, _ = worker.key()
        is_on_its_way = condition.phase in (Phase.FORMING, Phase.ARRIVED, Phase.ADOPTING)
        if not is_on_its_way or worker.said is None or unheard != worker.said[2]:
            return CHANGED_DELAY_S
        is_waited_for = newest is not None and newest.kind == PLANNED and worker.joins
        return CHANGED_DELAY_S if is_waited_for and condition.phase == Phase.ARRIVED else FORMING_DELAY_S

    # --- events ----------------------------------------------------------------------------------------------------

    def _dispatch(self, event: ev.Event, now_s: float) -> None:
        worker = self._worker
        if isinstance(event, (ev.FromTrainer, ev.Told, ev.Spawned, ev.Detached, ev.Unhooked, ev.Exited, ev.Probed)):
            if worker.expects(event.local_rank, event.incarnation):
                self._of_process(event, now_s)
        elif isinstance(event, ev.Commanded):
            self._commanded(event.command, now_s)
        elif isinstance(event, ev.StoreOpened):
            worker.store_port = event.port
        elif isinstance(event, ev.PortsOpened):
            worker.ports = event.ports
        elif isinstance(event, ev.Watched):
            worker.watches = event.watches
        elif isinstance(event, ev.Saved):
            worker.saved_s = now_s
        elif isinstance(event, ev.Looked):
            self._planned_end.looked(event.look, now_s)
        elif isinstance(event, ev.Connected):
            worker.connected = True
            self._resay(now_s)
            self._say_cannot_run()
            if worker.saved.entered != UNKNOWN:
                self._start_session(now_s)
        elif isinstance(event, ev.Disconnected):
            worker.connected, worker.lost_s = False, now_s
            self._disconnected(now_s)
        elif isinstance(event, ev.Paced):
            worker.progress_factor = event.progress_factor
            worker.progress.hurry(worker.progress_interval_s)
            worker.script_progress.hurry(worker.progress_interval_s)
        elif isinstance(event, ev.PatternGivenUp):
            if not worker.by_session:
                number, interval_s = worker.saved.incarnation, worker.progress_interval_s
                worker.script_progress.drop(wire.LOGGED, number, interval_s=interval_s, now_s=now_s)
        elif isinstance(event, ev.Terminated):
            self._terminated(event, now_s)
        elif isinstance(event, ev.Preloaded):
            worker.preloading = worker.cannot_run != ""
        elif isinstance(event, ev.Refused):
            worker.preloading, worker.cannot_run = True, event.why
            if worker.connected:
                self._say_cannot_run()
        elif isinstance(event, ev.Held):
            worker.snapshotted(event.local_rank, event.snapshot)

    def _say_cannot_run(self) -> None:
        """Tell the operator why no process can train here, as the exit of a process, so that it has one case to handle."""
        worker = self._worker
        if worker.cannot_run:
            why, number = worker.cannot_run, worker.saved.incarnation + 1
            worker.send(
                wire.Fault("exit", why, local_rank=0, exit_code=2, reason=wire.CANNOT_RUN, detail=why, ended=number)
            )

    def _of_process(
        self,
        event: ev.FromTrainer | ev.Told | ev.Spawned | ev.Detached | ev.Unhooked | ev.Exited | ev.Probed,
        now_s: float,
    ) -> None:
        process = self._worker.processes[event.local_rank]
        if isinstance(event, ev.Probed):
            self._hangs.probed(process, event)
        elif isinstance(event, ev.FromTrainer) and isinstance(event.message, local.Stack):
            self._hangs.answered(process, event.message)
        elif isinstance(event, ev.FromTrainer) and isinstance(event.message, local.Observed):
            self._script.observed(process, event.message, now_s)
        elif isinstance(event, ev.FromTrainer) and isinstance(event.message, local.Stepped):
            process.step_s = event.message.step_s
            words = Words(step=event.message.steps, step_s=event.message.step_s or None)
            self._worker.told(process, wire.COUNTED, words)
            self._planned_end.stepped(process)
        elif isinstance(event, ev.FromTrainer) and isinstance(event.message, local.Held):
            process.held = True
        elif isinstance(event, ev.Told):
            self._worker.told(process, event.way, event.words)
        elif isinstance(event, ev.FromTrainer):
            self._session.take(process, event.message, now_s)
        elif isinstance(event, ev.Spawned):
            process.spawned = True
            interval_s = self._worker.progress_interval_s
            self._worker.script_progress.spawned(process.incarnation, interval_s=interval_s, now_s=now_s)
            self._script.spawned(now_s)
        elif isinstance(event, ev.Unhooked):
            # It goes on, and is asked when it comes back.
            process.step_s, process.asked, process.held = None, False, False
        elif isinstance(event, ev.Detached):
            self._worker.say_last_progress(now_s)
            process.attached, process.inside, process.state = False, 0, None
            process.busy = process.first_step_since_s = None
        else:
            self._exited(event, now_s)

    def _exited(self, event: ev.Exited, now_s: float) -> None:
        worker = self._worker
        process = worker.processes[event.local_rank]
        if process.inside:
            worker.say_last_progress(now_s)
        if worker.script_progress.due_s is not None:  # its last word, before the agent may be told to end
            worker.script_progress.due_s = now_s
            self._say_script_progress(now_s)
        process.running = process.attached = False
        process.inside, process.state, process.state_adopted = 0, None, 0
        process.busy = process.first_step_since_s = None
        if worker.ending is None or worker.ending.trains_on:
            by_session = worker.by_session and not self._script.ends_processes
            (self._session if by_session else self._script).exited(process, event, now_s)
        self._exit_if_ended()

    def _run_timers(self, now_s: float) -> None:
        worker = self._worker
        if worker.connected and worker.progress.due_s is not None and now_s >= worker.progress.due_s:
            said = worker.progress.take(now_s)
            if said is not None:
                worker.send(said)
        self._say_script_progress(now_s)
        self._hangs.tick(now_s)
        is_over = self._planned_end.tick(now_s)
        if worker.ending is not None:
            if worker.ending.is_leaving_due(now_s):
                self._end_processes(local.DRAINED, now_s)
                self._exit_if_ended()
            if is_over:
                worker.ending.hasten(now_s)
            signum = worker.ending.signal_due(now_s)
            if signum is not None:
                worker.signal_all(signum)
            elif worker.ending.killed and now_s >= worker.ending.given_up_at_s and not worker.stopped:
                worker.give_up(worker.ending.code)
        else:
            if is_over:
                self._script.end(now_s)
            self._script.tick(now_s)
            due = [p.local_rank for p in worker.processes if p.start_at_s is not None and now_s >= p.start_at_s]
            if due:
                worker.start(due, None, now_s)
        if is_over:
            self._planned_end.let_go()
        if self._changed_due_s is not None and now_s >= self._changed_due_s:
            self._changed_s = self._changed_due_s = None
            if worker.key() != worker.said:
                worker.send(wire.Changed())

    def _say_script_progress(self, now_s: float) -> None:
        """Report what a script has said of its progress, once the time for it has come."""
        worker = self._worker
        due_s = worker.script_progress.due_s
        if not worker.connected or due_s is None or now_s < due_s:
            return
        said = worker.script_progress.take(now_s)
        if said is not None:
            worker.send(said)

    # --- commands --------------------------------------------------------------------------------------------------

    def _commanded(self, command: wire.Command, now_s: float) -> None:
        worker, body = self._worker, command.body
        refused = self._refusal(command)
        if refused is not None:
            if refused:
                worker.effects.append(ev.Log(refused))
        elif isinstance(body, wire.Welcome):
            self._welcomed(body, command.generation, now_s)
        elif isinstance(body, wire.Generation):
            self._heard(body, now_s)
        elif isinstance(body, wire.DocumentCommand):
            worker.document = body.document
            worker.hand(worker.processes[0])
            self._script.documented(now_s)
        elif isinstance(body, wire.Prune):
            for process in worker.processes:
                if process.attached:
                    worker.tell(process, local.PruneLocally(body.keep))
        elif isinstance(body, wire.ProgressRequest):
            worker.send(worker.progress.take(now_s) or wire.Changed())
        elif isinstance(body, wire.Ping):
            worker.send(wire.Changed())
        elif isinstance(body, wire.DumpStacks):
            self._hangs.ask(now_s)
        elif isinstance(body, wire.Kill):
            self._hangs.kill(body)
        elif isinstance(body, wire.Restart):
            self._restart(body)
        elif isinstance(body, wire.Finish):
            self._finish(command, body, now_s)
        elif isinstance(body, wire.Stop):
            self._stop(body, now_s)

    def _refusal(self, command: wire.Command) -> str | None:
        """Return the sentence with which a command is refused (rule FENCE), or None if the agent must obey it.

        The sentence is empty for a command that only repeats an earlier one; nothing is logged then.
        """
        worker, body, mine = self._worker, command.body, self._worker.identity
        name = getattr(body, "TYPE", "command")
        newest = worker.generation
        if (command.job_uid, command.pod_uid) != (mine.job_uid, mine.pod_uid):
            return f"Refused {name}: it is for job {command.job_uid}, pod {command.pod_uid}, not for this worker."
        if isinstance(body, wire.Generation):
            if newest is not None and (body.number, body.uid) == (newest.number, newest.uid):
                return ""
            if body.number <= worker.heard:
                return f"Refused generation {body.number}: {worker.heard} has been heard."
            if worker.finish is not None and worker.finish.repeats:
                return f"Refused generation {body.number}: the steps are over (generation {worker.finish.generation})."
        elif isinstance(body, wire.DocumentCommand):
            document = body.document
            if newest is None or document.number != newest.number or document.digest() != newest.document_digest:
                return f"Refused the document of generation {document.number}: the newest heard ({worker.heard}) has another."
        elif isinstance(body, wire.Finish) and worker.finish is not None:
            same = (worker.finish.generation, worker.finish.rank_offset) == (body.generation, body.rank_offset)
            return "" if same else f"Refused finish of generation {body.generation}: another one was told before."
        elif command.generation < worker.heard:
            return f"Refused {name} of generation {command.generation}: {worker.heard} has been heard."
        return None

    def _welcomed(self, body: wire.Welcome, newest: int, now_s: float) -> None:
        worker = self._worker
        if worker.saved.entered == UNKNOWN:
            # A new incarnation: within one incarnation `entered` and `adopted` of a condition never fall.
            incarnation = worker.saved.incarnation + 1
            worker.persist(entered=newest, adopted=newest, started=newest, incarnation=incarnation)
            worker.heard = max(worker.heard, newest)
            for process in worker.processes:
                process.floor = newest
        worker.tier = body.tier if not worker.session else SESSION
        self._start_session(now_s)
        self._script.say_adopted()

    def _start_session(self, now_s: float) -> None:
        """Start the processes of a session that do not run, unless they have ended or wait for their restart."""
        worker = self._worker
        if worker.tier != SESSION or worker.ending is not None:
            return
        idle = [p for p in worker.processes if not (p.running or p.done or p.finished or p.start_at_s)]
        if idle:
            worker.start([p.local_rank for p in idle], None, now_s)

    def _heard(self, body: wire.Generation, now_s: float) -> None:
        worker = self._worker
        worker.heard, worker.generation, worker.document = body.number, body, None
        worker.joins = not any(process.inside and process.adopted >= process.inside for process in worker.processes)
        if body.observes != worker.observes:
            worker.observes = body.observes
            worker.watches = tuple(watch for watch in worker.watches if watch.observed in body.observes)
            worker.effects.append(ev.Observe(body.observes))
        if worker.by_session and (worker.finish is not None or body.member):
            worker.take_back()  # also for processes that returned 0 before the end of the steps was told
        for process in worker.processes:
            if not body.member and not process.inside:
                process.broken = None  # the worker is ready, and waits for the next generation
            worker.hand(process)
        is_planned = body.kind == PLANNED
        if not worker.by_session and worker.ending is None:
            self._script.replace(now_s, is_planned=is_planned)
        elif not worker.by_session and worker.ending is not None and is_planned and not body.member:
            worker.ending.leave_by(now_s)  # the others end their processes now, and wait for nothing here

    def _restart(self, body: wire.Restart) -> None:
        """Kill the processes that keep this worker out of the newest generation. They restart as after a crash."""
        worker = self._worker
        newest = worker.generation
        if worker.ending is not None:
            return
        for process in worker.processes:
            where = (process.arrived if newest and newest.member else process.inside) or process.launched
            is_late = newest is not None and (where < newest.number if newest.member else 0 < where < newest.number)
            if process.running and (is_late or (worker.by_session and not process.attached)):
                process.hung = f"Process {process.local_rank} is restarted: {body.reason}"
                worker.effects += [ev.Log(process.hung), ev.Signal(process.local_rank, signal.SIGKILL)]

    # --- the end ---------------------------------------------------------------------------------------------------

    def _finish(self, command: wire.Command, body: wire.Finish, now_s: float) -> None:
        """End the steps: every script leaves its loop, and a script that starts later does not begin it."""
        worker = self._worker
        worker.finish = body
        worker.heard = max(worker.heard, command.generation)  # a generation that was announced too late stays closed
        for process in worker.processes:
            worker.let_go(process)
        self._start_session(now_s)

    def _stop(self, body: wire.Stop, now_s: float) -> None:
        worker = self._worker
        if worker.ending is not None and not worker.ending.draining:
            return
        if worker.is_done and body.outcome == local.SUSPENDED:
            return  # the operator had not heard that all scripts returned 0; it will send `Complete` once it has stored that
        attached = any(p.attached and not p.let_go for p in worker.processes)
        worker.ending = ending.after_stop(body.outcome, attached, worker.ending, now_s, script_s=self._script_s)
        self._end_processes(body.outcome, now_s)
        self._exit_if_ended()

    @property
    def _script_s(self) -> float:
        """Longest planned end of the processes before SIGTERM; 0 for a session, and if SIGTERM was sent."""
        worker = self._worker
        return 0.0 if worker.by_session or self._script.has_sent_sigterm else worker.identity.terms.seconds

    def _end_processes(self, outcome: str, now_s: float) -> None:
        """Tell the attached processes to stop, and begin the planned end of a script's processes. Others get SIGTERM.

        No process restarts from now on.
        """
        worker = self._worker
        assert worker.ending is not None
        waits = self._script_s > 0
        if waits:
            self._planned_end.begin(worker.ending.term_at_s, now_s)
        for process in worker.processes:
            process.start_at_s = None
            if process.attached and not process.let_go:
                worker.tell(process, local.StopLocally(outcome))
                waits = True
            elif process.running and not self._script_s:
                worker.effects.append(ev.Signal(process.local_rank, signal.SIGTERM))
        worker.ending.termed = not waits

    def _terminated(self, event: ev.Terminated, now_s: float) -> None:
        worker = self._worker
        if worker.ending is not None:
            worker.ending.waits &= event.waits
            if not worker.connected:
                self._disconnected(now_s)
            return
        # The worker may be the only one that has the state, a script that saves the model, or the word that it returned 0.
        holds = event.waits and any(p.state is not None or p.let_go or p.done for p in worker.processes)
        mine = worker.identity
        worker.ending = ending.after_sigterm(
            worker.connected, holds, mine.grace_s, now_s, saves=mine.saves, script_s=self._script_s
        )
        worker.ending.waits = event.waits
        for process in worker.processes:
            process.start_at_s = None
        if worker.ending.leave_at_s is not None and worker.connected:
            worker.send(wire.Draining(worker.ending.leave_at_s - now_s))
        self._exit_if_ended()

    def _disconnected(self, now_s: float) -> None:
        """End the processes now if their worker is draining and no operator will come back.

        This is the case under `regroup run`, which closes its connections and signals its agents at the same moment.
        """
        worker = self._worker
        if self._planned_end.runs:
            return
        if worker.ending is not None and worker.ending.draining and not worker.ending.waits:
            grace_s = worker.identity.grace_s
            worker.ending = ending.after_sigterm(False, False, grace_s, now_s, script_s=self._script_s)
            self._exit_if_ended()

    def _exit_if_ended(self) -> None:
        """Exit once no process runs any more.

        A worker whose scripts have returned 0 stays during its grace, until the operator has stored that and sends `stop`.
        """
        worker = self._worker
        if worker.ending is not None and worker.ending.trains_on and worker.is_done:
            return
        if worker.ending is not None and not worker.stopped and not worker.running:
            worker.stopped = True
            worker.send(wire.Changed())
            worker.effects.append(ev.Exit(worker.ending.code))

    def _resay(self, now_s: float) -> None:
        """Send the reports again that the condition does not contain (rule RESAY).

        They belong to the generation that the condition names. The newest commit names its own, which the worker may have left.
        """
        worker = self._worker
        generation = worker.condition_and_seal()[0].generation
        if worker.adopted_body is not None and worker.adopted_body[0] == generation:
            worker.send(worker.adopted_body[1])
        if worker.progress.newest is not None:
            worker.send(worker.progress.take_again(now_s, worker.lost_s))
        words = worker.script_progress.take(now_s)
        if words is not None:
            worker.send(words)
        if worker.finished_body is not None and worker.finished_body[0] == generation:
            worker.send(worker.finished_body[1])
        if worker.ending is not None and worker.ending.leave_at_s is not None:
            worker.send(wire.Draining(max(0.0, worker.ending.leave_at_s - now_s)))
