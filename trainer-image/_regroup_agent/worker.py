"""The state of one agent, and the acts of which decisions consist: report, tell, persist, start, signal.

Pure: an act only appends an effect. `core`, `session` and `script` decide which act comes next.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from regroup.protocol import frameworks, local, wire
from regroup.protocol.document import Document
from regroup.protocol.snapshot import SnapshotState
from regroup.protocol.state import Condition, Seal

from . import aggregate, ending, progress, script_progress
from . import events as ev
from .aggregate import SCRIPT, SESSION, UNKNOWN_TIER, Facts, Process
from .memory import OOM_KILLED, out_of_memory
from .observing import Watch
from .statefile import UNKNOWN, Saved

SAVE_WATCHERS = 2
"""Number of members whose agents watch the checkpoint directory."""


@dataclass(frozen=True)
class Identity:
    job_uid: str
    pod_uid: str
    boot: str
    processes: int
    grace_s: float = 25.0
    """Seconds between SIGTERM to the agent and the kubelet's SIGKILL."""
    saves: bool = False
    """The script writes checkpoints."""
    observed_port: int = 0
    """Port on which this pod's kernel answers the probes of other agents; 0: there is none."""
    terms: ending.Terms = field(default_factory=ending.Terms)
    framework: str = frameworks.PYTORCH
    """`spec.framework`: how a script's processes find each other."""


class Worker:
    """The state of one agent. Only `core`, `session`, `script` and `hangs` read and write its public fields."""

    def __init__(self, identity: Identity, saved: Saved, snapshots: Mapping[int, SnapshotState]) -> None:
        self.identity = identity
        self._snapshots = dict(snapshots)
        """State in each memory snapshot by local rank. It begins with those of an earlier container of this pod."""
        # A process that was started with a generation's environment may have formed its group: that counts as entered.
        self.saved = saved = replace(saved, entered=max(saved.entered, saved.started))
        self.processes = [
            Process(rank, floor=saved.entered, done=saved.has_returned(rank)) for rank in range(identity.processes)
        ]
        self.heard = max(saved.sealed, 0 if saved.entered == UNKNOWN else saved.entered)
        self._sealed = saved.sealed
        self.tier = UNKNOWN_TIER
        self.session = False
        """The script is known to use the library: its text imports it, or a process has attached."""
        self.connected = False
        self.lost_s = -math.inf
        """Time at which the last connection was lost; -inf before the first loss."""
        self.store_port = 0
        self.ports: tuple[int, ...] | None = None
        """Ports that are held for the processes of the next generation; None: they need none."""
        self.generation: wire.Generation | None = None
        """Newest generation that this agent process has heard."""
        self.joins = False
        """None of its processes was in a group when it heard of that generation."""
        self.observes: tuple[wire.Observed, ...] = ()
        self.watches: tuple[Watch, ...] = ()
        """Watches of the observed members. Empty until the level of one has changed."""
        self.document: Document | None = None
        self.finish: wire.Finish | None = None
        """The operator's word that the job's steps have ended; None: it has not come."""
        self.ending: ending.Ending | None = None
        self.stopped = False
        self.progress = progress.Progress()
        self.script_progress = script_progress.ScriptProgress()
        self.progress_factor = 1.0
        """Factor of the report interval in the operator's last answer (wire.Answered)."""
        self.adopted_body: tuple[int, wire.Adopted] | None = None
        self.finished_body: tuple[int, wire.Finished] | None = None
        self.said_adopted = 0
        self.replacing = False
        """The agent ends a script's processes because a newer generation needs new ones."""
        self.parting: tuple[float, float] | None = None
        """Begin of the planned end of a script's processes, and the seconds that it may take; None: there is none."""
        self.preloading = False
        """The zygote's first import is not over."""
        self.cannot_run = ""
        """Reason why no process can train here; empty: none is known. The agent starts no process then, and reports the reason."""
        self.unobserved = False
        """A script's processes have run so long without a word of the hook that they count as training."""
        self.script_cause: str | None = None
        """Reason why a script's last processes ended."""
        self.crashes = 0
        """Processes that ended by themselves since the last committed step."""
        self.starts = 0
        self.launched_s = 0.0
        self.now_s = 0.0
        """Time of the event that is being handled."""
        self.saved_s: float | None = None
        """Time at which the script last completed a checkpoint that this agent saw; None: it saw none."""
        self.effects: list[ev.Effect] = []
        self.said: Any = None
        """`key` of the last report that was written, which the operator knows."""

    @property
    def by_session(self) -> bool:
        """True once the agent knows that the script uses the library."""
        return self.session or self.tier == SESSION

    @property
    def refused(self) -> int:
        """Highest generation that no process of this worker enters any more (rule HEARD).

        It is the one below the newest heard, or the newest heard itself if this worker is no member of it.
        """
        newest = self.generation
        if newest is None:
            return self._sealed
        return max(self._sealed, newest.number - 1 if newest.member else newest.number)

    @property
    def progress_interval_s(self) -> float:
        """Seconds between two reports of progress."""
        newest = self.generation
        rank, world_size = (newest.group_rank, newest.world_size) if newest else (0, 1)
        return progress.interval_s(rank, world_size, self.progress_factor)

    @property
    def sees_saves(self) -> bool:
        """True if this agent watches the script's checkpoint directory: it is one of the two lowest members. Rank 0 is in one of
        them, and a file server is not asked by thousands."""
        newest = self.generation
        watches = newest is not None and newest.member and newest.group_rank < SAVE_WATCHERS
        return self.identity.saves and self.tier == SCRIPT and watches

    @property
    def running(self) -> bool:
        return any(p.running for p in self.processes)

    @property
    def is_done(self) -> bool:
        """True once every process has returned 0 by itself."""
        return all(p.done for p in self.processes)

    @property
    def snapshot(self) -> SnapshotState | None:
        """The newest state in the worker's memory snapshots; None: there is no snapshot."""
        held = sorted(self._snapshots.values(), key=lambda one: (one.state, one.adopted, one.is_last))
        return held[-1] if held else None

    def snapshotted(self, local_rank: int, held: SnapshotState | None) -> None:
        """Take in the state that a process's memory snapshot holds now; None: it holds none."""
        if held is None:
            self._snapshots.pop(local_rank, None)
        else:
            self._snapshots[local_rank] = held

    def expects(self, local_rank: int, incarnation: int) -> bool:
        """Return whether the running process of this local rank has this incarnation."""
        if not 0 <= local_rank < len(self.processes):
            return False
        process = self.processes[local_rank]
        return process.running and process.incarnation == incarnation

    def condition_and_seal(self) -> tuple[Condition, Seal | None]:
        in_generation = max((p.inside or p.finished for p in self.processes), default=0)
        step = self.progress.step if self.progress.generation == in_generation else 0
        facts = Facts(
            saved=self.saved,
            heard=self.heard,
            refused=self.refused,
            tier=self.tier,
            session=self.session,
            finish=self.finish.generation if self.finish is not None else 0,
            stopped=self.stopped,
            replacing=self.replacing,
            preloading=self.preloading,
            unobserved=self.unobserved,
            cause=self.script_cause,
            step=step or (max(p.step for p in self.processes) if in_generation else 0),
            now_s=self.now_s,
            parting=self.parting,
            snapshot=self.snapshot,
        )
        return aggregate.condition(self.processes, facts), aggregate.seal(self.processes, facts)

    def key(self) -> Any:
        """Return a value whose every change must be reported. Ages, the step and the heard generation are no part of it."""
        condition, seal = self.condition_and_seal()
        busy = tuple(replace(one, age_s=0.0) for one in condition.busy)
        unheard = tuple((watch.observed.pod_uid, watch.level) for watch in self.watches if watch.level)
        return replace(condition, step=0, heard=0, busy=busy), seal, unheard, self.saved_s

    def report(self, body: Any) -> wire.Report:
        """Return a report with `body` and the present condition and seal."""
        self.keep_seal()
        condition, seal = self.condition_and_seal()
        mine = self.identity
        return wire.Report(
            mine.job_uid,
            mine.pod_uid,
            mine.boot,
            condition,
            seal,
            self.store_port,
            body,
            observed_port=mine.observed_port,
            unheard=tuple(
                wire.Unheard(watch.observed.pod_uid, round(watch.silent_s(self.now_s), 3))
                for watch in self.watches
                if watch.level
            ),
            saved_age_s=None if self.saved_s is None else round(self.now_s - self.saved_s, 3),
            ports=self.ports,
        )

    def keep_seal(self) -> None:
        """Write the seal's promise to the state file, before a report makes it (rule HEARD). Entered generations are there."""
        seal = self.condition_and_seal()[1]
        if seal is None:
            return
        self._sealed = max(self._sealed, seal.left_up_to)
        if self._sealed > max(self.saved.entered, self.saved.sealed):
            self.persist(sealed=self._sealed)

    def send(self, body: Any) -> None:
        report = self.report(body)
        if isinstance(body, wire.Fault):  # names its generation itself, since a later report may carry it again
            condition = report.condition
            body = replace(
                body,
                generation=max(0, condition.generation, condition.entered),
                incarnation=condition.incarnation,
            )
            report = replace(report, body=body)
        if self.connected:  # a report that nobody hears changes nothing of the operator's knowledge
            self.said = self.key()
        self.effects.append(ev.Send(report))

    def told(self, process: Process, way: str, words: script_progress.Words) -> None:
        """Take in what a script's process says of its progress. The word of a process that is being replaced comes too late."""
        if self.by_session or self.replacing or self.script_cause is not None:
            return
        self.script_progress.told(
            way,
            (process.local_rank, process.incarnation),
            words,
            interval_s=self.progress_interval_s,
            now_s=self.now_s,
        )

    def say_last_progress(self, now_s: float) -> None:
        """Report a commit that still waits for its time. Called when a process leaves a generation, before reports name another."""
        said = self.progress.take(now_s) if self.connected and self.progress.due_s is not None else None
        if said is not None:
            self.send(said)

    def returned(self, process: Process, generation: int) -> None:
        """Note that a process has returned 0 after the last step of `generation`, on disk before any report (rule END)."""
        process.done = True
        known = self.saved.done if self.saved.finished == generation else 0
        self.persist(finished=generation, done=known | 1 << process.local_rank)

    def let_go(self, process: Process) -> None:
        """Tell an attached process to leave its loop. It counts as without a state, since its script may change the model now."""
        finish = self.finish
        if finish is None or not process.attached or process.let_go:
            return
        process.let_go = True
        process.left = max(process.left, finish.generation)
        process.inside, process.state, process.state_adopted = 0, None, 0
        rank = finish.rank_offset + process.local_rank
        self.tell(
            process, local.FinishLocally(finish.generation, finish.step, rank, finish.world_size, finish.checkpoint)
        )

    def take_back(self) -> None:
        """Withdraw the end of the steps, because all members run their end again in a newer generation.

        Processes that have left their loop or returned 0 start again.
        """
        self.finish = None
        if self.ending is not None:
            return
        for process in self.processes:
            if process.running and process.let_go:
                process.runs_again, process.attached = True, False
                self.effects.append(ev.Signal(process.local_rank, signal.SIGKILL))
            elif process.done:
                self.start([process.local_rank], None, self.now_s)

    def tell(self, process: Process, message: Any) -> None:
        self.effects.append(ev.Tell(process.local_rank, message))

    def persist(self, **changed: int) -> None:
        """Change fields of the state file. The file is on disk before any later effect."""
        saved = replace(self.saved, **changed)
        if saved != self.saved:
            self.saved = saved
            self.effects.append(ev.Persist(saved))

    def start(self, ranks: list[int], generation: wire.Generation | None, now_s: float) -> None:
        """Start processes for these local ranks, after their incarnations are on disk (rule INC). The earlier ones are dead.

        They get the rank and world size of `generation`; None: they start without, as in a session.
        """
        if self.cannot_run:
            return
        incarnation = self.saved.incarnation
        members = (
            self.document.members
            if self.identity.framework in frameworks.LISTS_MEMBERS and self.document is not None
            else ()
        )
        started = []
        for rank in ranks:
            incarnation += 1
            process = Process(rank, incarnation=incarnation, floor=self.saved.entered, running=True)
            process.launched = generation.number if generation else 0
            self.processes[rank] = process
            started.append(ev.Start(rank, incarnation, generation, self.starts, members))
        self.starts += 1
        self.launched_s = now_s
        self.script_progress.begin()
        self.unobserved = False
        if generation is None:
            self.persist(incarnation=incarnation)
        else:
            if generation.hosts_store:
                self.effects.append(ev.YieldStore())
            if self.ports is not None:
                self.effects.append(ev.YieldPorts())
            entered = max(self.saved.entered, generation.number) if self.tier == SCRIPT else self.saved.entered
            self.persist(incarnation=incarnation, started=max(self.saved.started, generation.number), entered=entered)
        self.effects.extend(started)

    def signal_all(self, signum: int) -> None:
        for process in self.processes:
            if process.running:
                self.effects.append(ev.Signal(process.local_rank, signum))

    def give_up(self, code: int) -> None:
        """Exit although processes run, because SIGKILL has not ended them."""
        self.stopped = True
        why = ending.unkillable_sentence([p.local_rank for p in self.processes if p.running])
        self.script_cause = why
        self.send(wire.Changed())
        self.effects += [ev.Log(why), ev.Exit(code)]

    def next_delay_s(self) -> float:
        """Count a process that ended by itself, and return the delay of its restart in seconds."""
        self.crashes += 1
        return ending.restart_delay_s(self.crashes)

    def send_exit(self, process: Process, event: ev.Exited) -> None:
        """Report a process that ended by itself."""
        memory = ending.blamed_memory(event.code, event.memory) if process.hung is None else None
        reason, detail = (None, None) if memory is None else (OOM_KILLED, out_of_memory(memory))
        if process.cannot_run:
            reason, detail = wire.CANNOT_RUN, process.cannot_run
        self.send(
            wire.Fault(
                cause="exit" if process.hung is None else "hung",
                message=process.hung or ending.exit_sentence(process.local_rank, event.code, memory),
                step=process.step,
                local_rank=process.local_rank,
                exit_code=event.code,
                last_line=event.last_line or None,
                tail=event.tail or None,
                reason=reason,
                detail=detail,
                # Number of processes that have ended. Each start counts one incarnation, so this grows with exits only.
                ended=self.saved.incarnation - sum(p.running for p in self.processes),
            )
        )

    def hand(self, process: Process) -> None:
        """Give an attached process the newest generation, if it may enter it and does not have it yet.

        The process that hosts the store gets it only with the document, which it publishes.
        """
        newest = self.generation
        if newest is None or not process.attached or process.let_go or process.handed >= newest.number:
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
        self.tell(process, assignment)
