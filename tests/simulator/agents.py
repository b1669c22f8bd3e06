"""One simulated worker's container: the real agent core, what its link does with reports, and its processes."""

from __future__ import annotations

import signal
from collections import deque
from typing import TYPE_CHECKING, Any

from _regroup_agent import events as ev
from _regroup_agent.core import Core
from _regroup_agent.faults import Faults, Kept
from _regroup_agent.statefile import Saved
from _regroup_agent.worker import Identity
from _regroup_agent.writers import Look
from regroup.protocol import VERSION, codec, wire
from regroup.protocol.snapshot import SnapshotState
from regroup_operator.endpoint.registry import Stream
from regroup_operator.model.records import Pod
from tests.simulator.observing import Observer
from tests.simulator.trainers import Trainer

if TYPE_CHECKING:
    from tests.simulator.operators import Operator
    from tests.simulator.world import World

ANSWER_TIMEOUT_S = 10.0
"""As in _regroup_agent/link.py: a report that is not answered for so long ends the connection."""

ZYGOTE_S = 4.0
"""Until a zygote that takes another's place has imported."""


class Agent:
    """A real agent core, its link and its processes. `boots` again with the pod's disk when its container restarts.

    `stopped`: by SIGSTOP; its stream stays open, and what happens to it waits. `muted`: nothing passes between it and the
    operator, and neither side knows yet.
    """

    def __init__(self, world: World, pod: Pod, saved: Saved, boot: int, memory: SnapshotState | None = None) -> None:
        self.world, self.uid, self.name = world, pod.uid, pod.name
        self.saved, self.boot = saved, f"{pod.uid}/{boot}"
        self.core = Core(
            Identity(
                pod.job_uid, pod.uid, self.boot, world.processes, observed_port=6000 + pod.slot if world.observes else 0
            ),
            saved,
            session=world.known_session,
            snapshots={} if memory is None else {0: memory},
        )
        self.memory = memory
        """What lies in the pod's memory snapshot."""
        self.trainers: dict[int, Trainer] = {}
        self.faults = Faults()
        self.num_exits = 0
        """Exits that it has reported, or will."""
        self.stream: Stream | None = None
        self.operator: Operator | None = None
        """The one at the other end of the stream."""
        self.observer = Observer(self)
        self.alive = True
        self.stopped = self.muted = False
        self._stopped_s = 0.0
        self.next_call_s = 0.0
        self.due_s: float | None = None
        self._zygote_s = 0.0
        """When its zygote can fork."""
        self._backlog: deque[ev.Event] = deque()
        self._unanswered: deque[tuple[wire.Report, Kept | None]] = deque()
        self.handle(ev.StoreOpened(5000 + pod.slot))

    # --- the link --------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self.stream is not None

    @property
    def may_connect(self) -> bool:
        world = self.world
        return (
            self.alive
            and not self.stopped
            and not self.connected
            and world.operator is not None
            and not world.operator.paused
            and self.uid not in world.unreachable
            and self.uid not in world.network.dark
            and self.uid in world.pods.by_uid
            and self.next_call_s <= world.now_s
        )

    def connect(self) -> None:
        operator = self.world.operator
        if not self.may_connect or operator is None:
            return
        self.operator, self.muted = operator, False
        faults = self.faults.again(self.world.now_s, anew=True)
        self._post(self.core.report(wire.Hello(VERSION, self.world.processes, len(faults)), self.world.now_s))
        for kept, fault in faults:
            self._post(self.core.report(fault, self.world.now_s), kept)
        self.stream = operator.registry.open(self.world.pods.by_uid[self.uid])
        self.handle(ev.Connected())

    def disconnect(self) -> None:
        stream, self.stream = self.stream, None
        if stream is None:
            return
        self._unanswered.clear()
        self.muted = False
        self.next_call_s = self.world.now_s + self.world.pace.some(self.world.pace.reconnect_s)
        if self.operator is not None and not self.operator.dead:
            self.operator.end_stream(self.uid, stream)
        if self.alive:
            self.handle(ev.Disconnected())

    def mute(self) -> None:
        """Cut the link; the kernels find out after their probes."""
        self.muted = True
        stream = self.stream
        self.world.after(
            self.world.pace.probe_s, lambda: self.disconnect() if self.muted and self.stream is stream else None
        )

    def unmute(self) -> None:
        self.muted = False
        self.flush()

    def flush(self) -> None:
        """What waited for the operator is answered."""
        while self._unanswered and not self._is_silent:
            self._deliver(*self._unanswered.popleft())

    def read(self) -> bool:
        """Take one command from the stream; False if there is none."""
        if not self.alive or self.stopped or self.muted or self.stream is None or self.stream._lines.empty():
            return False
        line = self.stream._lines.get_nowait()
        if line is None:
            self.disconnect()
            return True
        command = wire.Command.decode(line)
        if isinstance(command.body, wire.Generation):
            self.world.ledger.saw_generation(command.body.number, command.body.uid, command.body.document_digest)
        self.handle(ev.Commanded(command))
        if isinstance(command.body, wire.Generation):
            self.world.happened("heard", self.uid)
        return True

    @property
    def _is_silent(self) -> bool:
        return self.muted or self.operator is None or self.operator.paused

    def _post(self, report: wire.Report, kept: Kept | None = None) -> None:
        self._unanswered.append((report, kept))
        self.flush()  # in their order, as on a TCP connection: what an operator has not read while it was paused comes first
        if len(self._unanswered) == 1:
            stream = self.stream

            def give_up() -> None:
                if self.stream is stream and any(one is report for one, _ in self._unanswered):
                    self.disconnect()

            self.world.after(ANSWER_TIMEOUT_S, give_up)

    def _deliver(self, report: wire.Report, kept: Kept | None) -> None:
        operator, pod = self.operator, self.world.pods.by_uid.get(self.uid)
        if operator is None or operator.dead or pod is None:
            return
        if self.world.by_json:
            report = wire.Report.decode(codec.line(report))
        assert isinstance(report.body, wire.Hello) or operator.registry.knows(pod.uid, report.boot)
        body = report.body
        if isinstance(body, wire.Fault) and body.ended and kept is not None and not kept.answered:
            self.world.ledger.ended(
                self.name, body.generation, body.exit_code, reason=body.reason or "", hung=body.cause == "hung",
                local_rank=body.local_rank or 0,
            )  # fmt: skip
        if kept is not None:
            self.faults.answered(kept, self.world.now_s)
        operator.registry.report(pod, report)
        if isinstance(report.body, wire.Progress):
            self.world.later(lambda: self.handle(ev.Paced(operator.registry.progress_factor)))

    # --- events ----------------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> None:
        if not self.alive:
            return
        if self.stopped:
            self._backlog.append(event)
            return
        for effect in self.core.handle(event, self.world.now_s):
            if self.alive:
                self._act(effect)
        self.due_s = self.core.due_s

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped, self._stopped_s = True, self.world.now_s

    def silent_for(self, seconds: float) -> bool:
        """Return whether it has been stopped for so long."""
        return self.stopped and self.world.now_s >= self._stopped_s + seconds

    def go_on(self) -> None:
        """SIGCONT."""
        self.stopped = False
        while self._backlog and not self.stopped:
            self.handle(self._backlog.popleft())

    def trainer_says(self, trainer: Trainer, message: Any) -> None:
        if trainer.alive:
            if self.world.by_json:
                message = codec.from_json(type(message), codec.parse(codec.line(message)))
            self.handle(ev.FromTrainer(trainer.local_rank, trainer.incarnation, message))

    def exited(self, trainer: Trainer, code: int, last_line: str = "") -> None:
        if trainer.alive:
            if code > 0:
                trainer.take_last()
            trainer.die()
            if self.world.snapshot_every:
                self.handle(ev.Held(0, self.memory))
            self.handle(ev.Exited(trainer.local_rank, trainer.incarnation, code, last_line))

    def die(self) -> None:
        """The whole container is gone."""
        self.alive = False
        for trainer in self.trainers.values():
            trainer.die()
        self.disconnect()

    def signalled(self, trainer: Trainer, signum: int) -> None:
        """A signal of ours. A stopped process takes only SIGKILL; anything else once it goes on.

        The agent's SIGSTOP and SIGCONT of a planned end are a moment apart, in which nothing would happen to the process.
        """
        if (self.name, trainer.local_rank) in self.world.immortal or signum in (signal.SIGSTOP, signal.SIGCONT):
            return
        if not trainer.forked:
            trainer.signals.append(signum)
        elif trainer.stopped and signum != signal.SIGKILL:
            trainer.run(lambda: self.signalled(trainer, signum))
        else:
            self.exited(trainer, -signum)

    def _act(self, effect: ev.Effect) -> None:
        world = self.world
        if isinstance(effect, ev.Send):
            body = effect.report.body
            world.has_hung |= isinstance(body, wire.Fault) and body.cause == "hung"
            kept = self.faults.add(body, world.now_s) if isinstance(body, wire.Fault) else None
            self.num_exits += isinstance(body, wire.Fault) and body.ended > 0
            if self.connected:
                self._post(effect.report, kept)
        elif isinstance(effect, ev.Tell):
            trainer = self.trainers[effect.local_rank]
            world.later(lambda: trainer.receive(effect.message))
        elif isinstance(effect, ev.Probe):
            probed = ev.Probed(effect.local_rank, effect.incarnation, "stopped", "stopped by a signal (state T)", "")
            world.later(lambda: self.handle(probed))
        elif isinstance(effect, ev.LookAtFiles):
            world.later(lambda: self.handle(ev.Looked(Look())))
        elif isinstance(effect, ev.Persist):
            if self.uid in self.world.full:
                self.world.container_ended(self, 1)  # what is not on disk must not be promised (_regroup_agent/main.py)
            else:
                self.saved = effect.saved
        elif isinstance(effect, ev.Start):
            trainer = Trainer(self, effect.local_rank, effect.incarnation)
            trainer.launched = effect.generation.number if effect.generation else 0
            self.trainers[effect.local_rank] = trainer
            world.later(lambda: self._fork(trainer))
        elif isinstance(effect, ev.Signal):
            trainer = self.trainers[effect.local_rank]
            world.later(lambda: self.signalled(trainer, effect.signum))
        elif isinstance(effect, ev.Observe):
            self.observer.observe(effect.observed)
        elif isinstance(effect, ev.Exit):
            world.later(lambda: world.container_ended(self, effect.code))

    def lose_zygote(self) -> None:
        """Its zygote is dead; another one imports what processes need."""
        self._zygote_s = self.world.now_s + ZYGOTE_S

    def _fork(self, trainer: Trainer) -> None:
        if not trainer.alive or not self.alive:
            return
        if self._zygote_s > self.world.now_s:
            self.world.after(self._zygote_s - self.world.now_s, lambda: self._fork(trainer))
            return
        trainer.forked = True
        self.handle(ev.Spawned(trainer.local_rank, trainer.incarnation))
        for signum in trainer.signals:
            self.signalled(trainer, signum)
        if not trainer.alive:
            return
        if self.world.script == "crash":
            self.exited(trainer, 1, "ModuleNotFoundError: No module named 'nothing'")
        elif (self.name, trainer.local_rank) not in self.world.slow:
            pace = self.world.pace
            trainer.begin(pace.some(pace.start_s) + self.world.slow_start_s)
