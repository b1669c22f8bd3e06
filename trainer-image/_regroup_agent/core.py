"""The agent's decisions: `Core.handle(event, now)` -> effects. No I/O, no clock; tests/unit/agent/test_core.py is its table.

Owns: what this worker has heard, entered and adopted; which process may enter what (rules FENCE, INC, MAD); what is
reported when (RESAY: always the whole condition). The two tiers: in a session a generation is handed to living processes;
a script's processes are ended and started again with its environment (`script`). `aggregate` says what p processes mean.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from typing import Any

from regroup.protocol import VERSION, local, wire
from regroup.protocol.document import Document
from regroup.protocol.state import Condition, Seal, StatePair

from . import aggregate, ending, progress
from . import events as ev
from .aggregate import SCRIPT, SESSION, UNKNOWN_TIER, Facts, Process
from .statefile import UNKNOWN, Saved

CHANGED_DELAY_S = 0.01
"""A changed condition waits this long for a report that says more: forming is mostly followed by `formed` at once."""
SCRIPT_GRACE_S = 10.0
"""A script's time between SIGTERM and SIGKILL when a newer generation replaces its processes."""
SCRIPT_STEADY_S = 30.0
"""A script that ran this long has not crashed at its start: the restart delay begins anew."""


@dataclass(frozen=True)
class Identity:
    job_uid: str
    pod_uid: str
    boot: str
    processes: int
    grace_s: float = 25.0
    """Seconds between SIGTERM to the agent and the kubelet's SIGKILL."""


class Core:
    """State of one agent. `handle` is the only way to change it; not re-entrant."""

    def __init__(self, identity: Identity, saved: Saved) -> None:
        self.identity = identity
        # A process that was started with a generation's environment may have formed it: it counts as entered.
        self.saved = saved = replace(saved, entered=max(saved.entered, saved.started))
        self.processes = [Process(rank, floor=saved.entered) for rank in range(identity.processes)]
        self.heard = 0 if saved.entered == UNKNOWN else saved.entered
        self.tier = UNKNOWN_TIER
        self.session = False
        self.connected = False
        self.store_port = 0
        self.generation: wire.Generation | None = None
        self.document: Document | None = None
        self.ending: ending.Ending | None = None
        self.progress = progress.Progress()
        self._adopted_body: tuple[int, wire.Adopted] | None = None
        self._said_formed = self._said_adopted = 0
        self._finished_body: tuple[int, wire.Finished] | None = None
        self._adoptions: dict[int, local.AdoptedLocally] = {}
        self._form_ms = 0.0
        self._crashes = 0
        self._starts = 0
        self._stopped = False
        self._replace_kill_s: float | None = None  # script tier: SIGKILL for processes that a newer generation replaces
        self._replacing = False
        self._script_cause: str | None = None
        self._launch_at_s: float | None = None  # script tier: earliest start of the newest generation's processes
        self._launched_s = 0.0
        self._sealed = 0
        self._said: Any = None
        self._changed_due_s: float | None = None
        self._effects: list[ev.Effect] = []

    # --- what the edge asks ----------------------------------------------------------------------------------------

    def handle(self, event: ev.Event, now_s: float) -> list[ev.Effect]:
        """Return the effects of one event, to be executed in their order. `now_s`: seconds on a monotonic clock."""
        self._effects = []
        self._dispatch(event, now_s)
        self._run_timers(now_s)
        if self._key() == self._said:
            self._changed_due_s = None
        elif self._changed_due_s is None:
            self._changed_due_s = now_s + CHANGED_DELAY_S
        effects, self._effects = self._effects, []
        return effects

    @property
    def due_s(self) -> float | None:
        """When `Tick` is wanted, on the clock of `handle`; None: only another event can change anything."""
        dues = [p.start_at_s for p in self.processes]
        dues += [self.progress.due_s, self._changed_due_s, self._replace_kill_s, self._launch_at_s]
        dues.append(self.ending.due_s if self.ending else None)
        return min((due for due in dues if due is not None), default=None)

    def report(self, body: Any) -> wire.Report:
        """Return a report of this moment: the whole condition and seal around `body`."""
        condition, seal = self._condition_and_seal()
        if seal is not None:
            self._sealed = max(self._sealed, seal.left_up_to)
        self._said = self._key()
        return wire.Report(
            self.identity.job_uid, self.identity.pod_uid, self.identity.boot, condition, seal, self.store_port, body
        )

    def hello(self) -> wire.Report:
        """Return the first report of a connection."""
        return self.report(wire.Hello(VERSION, self.identity.processes))

    def expects(self, local_rank: int, incarnation: int) -> bool:
        """Return whether a process that attaches so is one that runs."""
        if not 0 <= local_rank < len(self.processes):
            return False
        process = self.processes[local_rank]
        return process.running and process.incarnation == incarnation

    def gives_store(self, generation: int) -> bool:
        """Return whether the fresh listening socket is the store of this generation: the process gets the descriptor."""
        newest = self.generation
        return (
            newest is not None
            and newest.number == generation
            and newest.hosts_store
            and newest.store_port == self.store_port
        )

    # --- dispatch --------------------------------------------------------------------------------------------------

    def _dispatch(self, event: ev.Event, now_s: float) -> None:
        if isinstance(event, ev.FromTrainer):
            if self.expects(event.local_rank, event.incarnation):
                self._from_trainer(self.processes[event.local_rank], event.message, now_s)
        elif isinstance(event, ev.Commanded):
            self._commanded(event.command, now_s)
        elif isinstance(event, ev.Exited):
            self._exited(event, now_s)
        elif isinstance(event, ev.Spawned):
            if self.expects(event.local_rank, event.incarnation):
                self.processes[event.local_rank].spawned = True
                self._script_adopted()
        elif isinstance(event, ev.Detached):
            if self.expects(event.local_rank, event.incarnation):
                process = self.processes[event.local_rank]
                process.attached, process.inside, process.state = False, 0, None
        elif isinstance(event, ev.StoreOpened):
            self.store_port = event.port
        elif isinstance(event, ev.Connected):
            self.connected = True
            self._resay(now_s)
        elif isinstance(event, ev.Disconnected):
            self.connected = False
        elif isinstance(event, ev.Terminated):
            self._terminated(now_s)

    def _run_timers(self, now_s: float) -> None:
        if self.progress.due_s is not None and now_s >= self.progress.due_s:
            body = self.progress.take(now_s)
            if body is not None:
                self._send(body)
        if self._replace_kill_s is not None and now_s >= self._replace_kill_s:
            self._replace_kill_s = None
            self._signal_all(signal.SIGKILL)
        if self.ending is not None:
            signum = self.ending.signal_due(now_s)
            if signum is not None:
                self._signal_all(signum)
            return
        if self._launch_at_s is not None and now_s >= self._launch_at_s:
            self._launch_script(now_s)
        due = [p.local_rank for p in self.processes if p.start_at_s is not None and now_s >= p.start_at_s]
        if due:
            self._start(due, None, now_s)
        if self._changed_due_s is not None and now_s >= self._changed_due_s:
            self._changed_due_s = None
            if self._key() != self._said:
                self._send(wire.Changed())

    # --- commands --------------------------------------------------------------------------------------------------

    def _commanded(self, command: wire.Command, now_s: float) -> None:
        refusal = self._refusal(command)
        if refusal:
            self._effects.append(ev.Log(refusal))
            return
        body = command.body
        if isinstance(body, wire.Welcome):
            self._welcomed(body, command.generation, now_s)
        elif isinstance(body, wire.Generation):
            self._heard_generation(body, now_s)
        elif isinstance(body, wire.DocumentCommand):
            self.document = body.document
            self._hand(self.processes[0])
        elif isinstance(body, wire.Prune):
            for process in self.processes:
                if process.attached:
                    self._tell(process, local.PruneLocally(body.keep))
        elif isinstance(body, wire.ProgressRequest):
            self._send(self.progress.take(now_s) or wire.Changed())
        elif isinstance(body, wire.Ping):
            self._send(wire.Changed())
        elif isinstance(body, wire.Stop):
            self._stop(body, now_s)

    def _refusal(self, command: wire.Command) -> str:
        """Return the sentence that refuses a command (rule FENCE); empty: obey."""
        body, mine = command.body, self.identity
        name = getattr(body, "TYPE", "command")
        if (command.job_uid, command.pod_uid) != (mine.job_uid, mine.pod_uid):
            return f"Refused {name}: it is for job {command.job_uid}, pod {command.pod_uid}, not for this worker."
        if isinstance(body, wire.Generation):
            if body.number <= self.heard:
                return f"Refused generation {body.number}: {self.heard} has been heard."
        elif isinstance(body, wire.DocumentCommand):
            newest, document = self.generation, body.document
            if newest is None or document.number != newest.number or document.digest() != newest.document_digest:
                return (
                    f"Refused the document of generation {document.number}: it is not the newest one's ({self.heard})."
                )
        elif command.generation < self.heard:
            return f"Refused {name} of generation {command.generation}: {self.heard} has been heard."
        return ""

    def _welcomed(self, body: wire.Welcome, newest: int, now_s: float) -> None:
        if self.saved.entered == UNKNOWN:
            # A new incarnation, because a condition never goes back within one.
            incarnation = self.saved.incarnation + 1
            self._persist(Saved(entered=newest, adopted=newest, incarnation=incarnation, started=newest))
            self.heard = max(self.heard, newest)
            for process in self.processes:
                process.floor = newest
        self.tier = body.tier if not self.session else SESSION
        if self.tier == SESSION and self.ending is None:
            idle = [p.local_rank for p in self.processes if not (p.running or p.done or p.finished or p.start_at_s)]
            if idle:
                self._start(idle, None, now_s)
        self._script_adopted()

    def _heard_generation(self, body: wire.Generation, now_s: float) -> None:
        self.heard, self.generation = body.number, body
        if self.document is not None and self.document.number < body.number:
            self.document = None
        for process in self.processes:
            if not body.member and not process.inside:
                process.broken = None
            self._hand(process)
        if not self._by_session() and self.ending is None:
            self._replace_script(now_s)

    def _hand(self, process: Process) -> None:
        """Give an attached process the newest generation, if it may enter it and has not got it."""
        newest = self.generation
        if newest is None or not process.attached or process.handed >= newest.number:
            return
        if not process.may_enter(newest.number) or not (newest.member or process.inside or process.left):
            return
        hosts_store = newest.member and newest.hosts_store and process.local_rank == 0
        if hosts_store and self.document is None:
            return
        process.handed = newest.number
        assignment = local.Assignment(
            number=newest.number,
            uid=newest.uid,
            kind=newest.kind,
            member=newest.member,
            rank=newest.rank_offset + process.local_rank if newest.member else -1,
            world_size=newest.world_size,
            local_rank=process.local_rank,
            local_world_size=len(self.processes),
            group_rank=newest.group_rank,
            pod_uid=self.identity.pod_uid,
            store_host=newest.store_host,
            store_port=newest.store_port,
            store_prefix=newest.store_prefix,
            hosts_store=hosts_store,
            document_digest=newest.document_digest,
            document=self.document if hosts_store else None,
            reason=newest.reason,
        )
        self._tell(process, assignment)

    # --- trainers --------------------------------------------------------------------------------------------------

    def _from_trainer(self, process: Process, message: Any, now_s: float) -> None:
        if isinstance(message, local.Committed):
            self._committed(process, message, now_s)
        elif isinstance(message, local.Attach):
            self._attached(process)
        elif isinstance(message, local.Entering):
            self._entering(process, message)
        elif isinstance(message, local.FormedLocally):
            self._formed(process, message)
        elif isinstance(message, local.AdoptedLocally):
            self._adopted(process, message)
        elif isinstance(message, local.Left):
            self._left(process, message)
        elif isinstance(message, local.FinishedLocally) and message.generation == process.inside:
            process.finished, process.step = message.generation, message.step
            self._say_finished(message.generation, message.step)

    def _attached(self, process: Process) -> None:
        process.attached, process.handed = True, 0
        if not self.session:
            self._said_adopted = 0  # what was said for a script says nothing of a session
        self.session, self.tier = True, SESSION
        if self.ending is not None and not self.ending.draining:
            self._tell(process, local.StopLocally("Released"))
        else:
            self._hand(process)

    def _entering(self, process: Process, message: local.Entering) -> None:
        number = message.generation
        allowed = process.may_enter(number) and number == self.heard and number > self._sealed
        why = ""
        if not allowed:
            floor = max(process.floor, process.left, process.entered, self._sealed)
            why = (
                f"Generation {number} may not be entered: the newest heard is {self.heard}, none up to {floor} is open."
            )
        else:
            process.inside = process.entered = number
            process.broken, process.finished = None, 0
            if number > self.saved.entered:
                self._adoptions, self._form_ms = {}, 0.0
                self._persist(replace(self.saved, entered=number))
        self._tell(process, local.Answer("entering", number, allowed, self.saved.adopted, why))

    def _formed(self, process: Process, message: local.FormedLocally) -> None:
        number = message.generation
        if number != process.inside:
            return
        process.formed = number
        self._form_ms = max(self._form_ms, message.form_ms)
        if self._said_formed < number and all(p.formed == number for p in self.processes):
            self._said_formed = number
            self._send(wire.Formed(self._form_ms))

    def _adopted(self, process: Process, message: local.AdoptedLocally) -> None:
        number = message.generation
        if number != process.inside:
            why = f"Generation {number} is not the one that this process is in ({process.inside})."
            self._tell(process, local.Answer("adopted", number, False, self.saved.adopted, why))
            return
        if number > self.saved.adopted:
            self._persist(replace(self.saved, adopted=number))
        process.formed = process.adopted = number
        process.state, process.state_adopted, process.step = message.state, number, message.start_step
        self._adoptions[process.local_rank] = message
        self._tell(process, local.Answer("adopted", number, True, self.saved.adopted))
        if self._said_adopted < number and all(p.adopted == number for p in self.processes):
            self._said_adopted = number
            self._adopted_body = (number, _merge(list(self._adoptions.values())))
            self._send(self._adopted_body[1])

    def _committed(self, process: Process, message: local.Committed, now_s: float) -> None:
        if message.generation != process.inside:
            return
        self._crashes = 0
        process.step, process.state = message.step, StatePair(message.generation, message.step)
        newest = self.generation
        interval_s = progress.interval_s(newest.group_rank, newest.world_size) if newest else progress.INTERVAL_S
        self.progress.committed(message, interval_s, now_s)

    def _left(self, process: Process, message: local.Left) -> None:
        was_inside = process.inside
        process.left = max(process.left, message.left_up_to)
        process.state, process.state_adopted = message.state, message.state_adopted
        process.broken = None
        if process.inside <= process.left:
            process.inside = 0
        if message.cause is not None:
            process.broken = message.message or message.cause
            body = wire.Fault(
                cause=message.cause,
                message=message.message,
                step=message.step,
                local_rank=process.local_rank,
                peer=self._pod_of(message.peer_rank, was_inside),
                peer_rank=message.peer_rank,
            )
            self._send(body)
        self._hand(process)

    def _pod_of(self, rank: int | None, generation: int) -> str | None:
        if rank is None or self.document is None or self.document.number != generation:
            return None
        return self.document.member_of_rank(rank).pod_uid if 0 <= rank < self.document.world_size else None

    def _say_finished(self, generation: int, step: int) -> None:
        if all(p.finished == generation for p in self.processes):
            body = self.progress.take(0.0) if self.progress.due_s is not None else None
            if body is not None:
                self._send(body)
            self._finished_body = (generation, wire.Finished(step))
            self._send(self._finished_body[1])

    # --- processes -------------------------------------------------------------------------------------------------

    def _start(self, ranks: list[int], generation: wire.Generation | None, now_s: float) -> None:
        """Start new processes, their incarnations on disk first (rule INC)."""
        saved = self.saved
        started = []
        for rank in ranks:
            saved = replace(saved, incarnation=saved.incarnation + 1)
            process = Process(rank, incarnation=saved.incarnation, floor=saved.entered, running=True)
            process.launched = generation.number if generation else 0
            self.processes[rank] = process
            started.append(ev.Start(rank, saved.incarnation, generation, self._starts))
        if generation is not None:
            entered = max(saved.entered, generation.number) if self.tier == SCRIPT else saved.entered
            saved = replace(saved, entered=entered, started=max(saved.started, generation.number))
            if generation.hosts_store:
                self._effects.append(ev.YieldStore())
        self._starts += 1
        self._launched_s = now_s
        self._persist(saved)
        self._effects.extend(started)

    def _exited(self, event: ev.Exited, now_s: float) -> None:
        if not self.expects(event.local_rank, event.incarnation):
            return
        process = self.processes[event.local_rank]
        process.running = process.attached = False
        process.inside, process.state, process.state_adopted = 0, None, 0
        if self.ending is not None and not (self.ending.draining and event.code != 0):
            self._ended()
        elif self._by_session():
            self._session_exited(process, event, now_s)
        else:
            self._script_exited(process, event, now_s)

    def _session_exited(self, process: Process, event: ev.Exited, now_s: float) -> None:
        if process.finished and event.code == 0:
            return
        process.finished = 0
        self._send_exit(process, event)
        if self.ending is not None:  # draining: it would only be ended again
            self._ended()
            return
        delay_s = self._next_delay_s()
        process.start_at_s = now_s + delay_s

    def _next_delay_s(self) -> float:
        self._crashes += 1
        return ending.restart_delay_s(self._crashes)

    def _send_exit(self, process: Process, event: ev.Exited) -> None:
        body = wire.Fault(
            cause="exit",
            message=exit_sentence(process.local_rank, event.code),
            step=process.step,
            local_rank=process.local_rank,
            exit_code=event.code,
            last_line=event.last_line or None,
        )
        self._send(body)

    # --- script tier -----------------------------------------------------------------------------------------------

    def _replace_script(self, now_s: float) -> None:
        """The newest generation needs processes of its own: end the old ones first."""
        self._script_cause = None
        if any(p.running for p in self.processes):
            self._end_script(now_s)
            self._replacing = True
        elif self.generation is not None and self.generation.member:
            self._launch_at_s = max(now_s, self._launch_at_s or now_s)

    def _end_script(self, now_s: float) -> None:
        if self._replace_kill_s is None:
            self._replace_kill_s = now_s + SCRIPT_GRACE_S
            self._signal_all(signal.SIGTERM)

    def _launch_script(self, now_s: float) -> None:
        newest = self.generation
        self._launch_at_s = None
        if newest is None or not newest.member or newest.number <= self.saved.started or self._by_session():
            return
        self._start(list(range(len(self.processes))), newest, now_s)

    def _script_exited(self, process: Process, event: ev.Exited, now_s: float) -> None:
        self._persist(replace(self.saved, entered=max(self.saved.entered, process.launched)))
        if self._replace_kill_s is None:  # it ended by itself
            process.done = event.code == 0
            if event.code != 0:
                self._script_cause = exit_sentence(process.local_rank, event.code)
                self._send_exit(process, event)
                if self.ending is not None:
                    self._ended()
                    return
                if now_s - self._launched_s > SCRIPT_STEADY_S:
                    self._crashes = 0
                self._launch_at_s = now_s + self._next_delay_s()
                if any(p.running for p in self.processes):
                    self._end_script(now_s)  # without it they would wait for the lost one until a timeout
            elif all(p.done for p in self.processes):
                self._finished_body = (process.launched, wire.Finished(0))
                self._send(self._finished_body[1])
        if not any(p.running for p in self.processes):
            self._replace_kill_s = None
            if self._replacing:
                self._replacing = False
                self._launch_at_s = max(now_s, self._launch_at_s or now_s)

    def _script_adopted(self) -> None:
        """Script tier: a generation counts as adopted when its processes run."""
        launched = self.processes[0].launched
        if self.tier != SCRIPT or not launched or self._replacing or self._said_adopted >= launched:
            return
        if all(p.running and p.spawned for p in self.processes):
            self._said_adopted = launched
            entered, adopted = max(self.saved.entered, launched), max(self.saved.adopted, launched)
            self._persist(replace(self.saved, entered=entered, adopted=adopted))
            self._adopted_body = (launched, wire.Adopted(start_step=0, source="self"))
            self._send(self._adopted_body[1])

    # --- the end ---------------------------------------------------------------------------------------------------

    def _stop(self, body: wire.Stop, now_s: float) -> None:
        if self.ending is not None and not self.ending.draining:
            return
        attached = [p for p in self.processes if p.attached]
        self.ending = ending.after_stop(body.outcome, bool(attached), self.ending, now_s)
        for process in self.processes:
            process.start_at_s = None
            if process.attached:
                self._tell(process, local.StopLocally(body.outcome))
            elif process.running:
                self._effects.append(ev.Signal(process.local_rank, signal.SIGTERM))
        self._ended()

    def _terminated(self, now_s: float) -> None:
        if self.ending is not None:
            return
        self.ending = ending.after_sigterm(self.connected, self.identity.grace_s, now_s)
        for process in self.processes:
            process.start_at_s = None
        if self.ending.draining:
            self._send(wire.Draining(self.ending.term_at_s - now_s))
        self._ended()

    def _ended(self) -> None:
        """Exit once nothing runs any more."""
        if self.ending is not None and not self._stopped and not any(p.running for p in self.processes):
            self._stopped = True
            self._send(wire.Changed())
            self._effects.append(ev.Exit(self.ending.code))

    # --- saying ----------------------------------------------------------------------------------------------------

    def _resay(self, now_s: float) -> None:
        """Say again what only a report can tell, for the generation that the condition names (rule RESAY)."""
        generation = self._condition_and_seal()[0].generation
        if self._adopted_body is not None and self._adopted_body[0] == generation:
            self._send(self._adopted_body[1])
        if self.progress.newest is not None and self.progress.generation == generation:
            self._send(self.progress.newest)
        if self._finished_body is not None and self._finished_body[0] == generation:
            self._send(self._finished_body[1])
        if self.ending is not None and self.ending.draining:
            self._send(wire.Draining(max(0.0, self.ending.term_at_s - now_s)))

    def _condition_and_seal(self) -> tuple[Condition, Seal | None]:
        in_generation = max((p.inside or p.finished for p in self.processes), default=0)
        step = self.progress.step if self.progress.generation == in_generation else 0
        facts = Facts(
            saved=self.saved,
            heard=self.heard,
            tier=self.tier,
            session=self.session,
            stopped=self._stopped,
            replacing=self._replacing,
            cause=self._script_cause,
            step=step or (max(p.step for p in self.processes) if in_generation else 0),
        )
        return aggregate.condition(self.processes, facts), aggregate.seal(self.processes, facts)

    def _key(self) -> Any:
        """What must not change without a report."""
        condition, seal = self._condition_and_seal()
        return replace(condition, step=0, heard=0), seal

    def _by_session(self) -> bool:
        return self.session or self.tier == SESSION

    def _send(self, body: Any) -> None:
        self._effects.append(ev.Send(self.report(body)))

    def _tell(self, process: Process, message: Any) -> None:
        self._effects.append(ev.Tell(process.local_rank, message))

    def _persist(self, saved: Saved) -> None:
        if saved != self.saved:
            self.saved = saved
            self._effects.append(ev.Persist(saved))

    def _signal_all(self, signum: int) -> None:
        for process in self.processes:
            if process.running:
                self._effects.append(ev.Signal(process.local_rank, signum))


def _merge(adoptions: list[local.AdoptedLocally]) -> wire.Adopted:
    """Return what the worker says when all its processes have adopted: the slowest copy, the source that is not itself."""
    first = adoptions[0]
    source = next((a.source for a in adoptions if a.source != "self"), first.source)
    return wire.Adopted(
        start_step=first.start_step,
        source=source,
        state=max(a.state for a in adoptions),
        transfer_ms=max(a.transfer_ms for a in adoptions),
        rolled_back=any(a.rolled_back for a in adoptions),
    )


def exit_sentence(local_rank: int, code: int) -> str:
    """Return one sentence for the end of a process: exit code, or negative signal number."""
    if code == 0:
        return f"Process {local_rank} ended (exit code 0) without finishing its steps."
    if code > 0:
        return f"Process {local_rank} ended with exit code {code}."
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"Process {local_rank} was ended by {name}."
