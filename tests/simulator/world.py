"""A whole job in one process and no time at all: the real controller, registry, file store, agent core and adoption rule;
played are only the clock, the pods, the network, and trainers without tensors.

`World` turns until nothing is left to do at the present moment (`settle`), or lets time pass (`advance`). Commands and
reports go through their JSON form. Two things are held at every turn: no generation number ever stands for two lists of
members, a group that commits a step continues from the newest committed one, and nobody rolls back while it is held.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from _regroup_agent import events as ev
from _regroup_agent.core import Core, Identity
from _regroup_agent.statefile import Saved
from regroup.protocol import VERSION, codec, wire
from regroup.protocol.state import StatePair
from regroup_cli.local import FileStore
from regroup_operator.api import Job, worker_digest
from regroup_operator.api.names import worker_pod_name
from regroup_operator.controller import Controller
from regroup_operator.membership.registry import Registry, Stream
from regroup_operator.model.ports import EventNote
from regroup_operator.model.records import Key, Pod, Settings
from tests.builders.plan import JobBuilder
from tests.simulator.trainers import Group, Trainer

KEY: Key = ("default", "digits")
T = TypeVar("T")
MAX_TURNS = 2000
START_S = 1000.0
WALL = 1_800_000_000.0


class Store(FileStore):
    """The job's file, with a moment before each write of the status in which a test can let something happen."""

    def __init__(self, path: Path, wrote: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(path)
        self.before_write: Callable[[dict[str, Any]], None] | None = None
        self.num_writes = 0
        self._wrote = wrote

    async def write_status(self, job: Job, status: dict[str, Any]) -> Job:
        hook, self.before_write = self.before_write, None
        if hook:
            hook(status)
        stored = await super().write_status(job, status)
        self.num_writes += 1
        self._wrote(status)
        return stored


class Pods:
    """The Workers port in memory. New pods run at once unless `pending` names a slot."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.by_uid: dict[str, Pod] = {}
        self.pending: set[int] = set()
        self.deleted: list[str] = []
        self._uids = itertools.count(1)

    def list(self, key: Key, job_uid: str) -> tuple[Pod, ...]:  # noqa: ARG002
        return tuple(sorted((p for p in self.by_uid.values() if p.job_uid == job_uid), key=lambda p: p.id))

    def pod(self, namespace: str, name: str) -> Pod | None:
        return next((p for p in self.by_uid.values() if (p.namespace, p.name) == (namespace, name)), None)

    def on_change(self, callback: Callable[[Key], None]) -> None: ...

    async def prepare(self, job: Job) -> None: ...

    async def validate(self, job: Job) -> None: ...

    async def create(self, job: Job, slot: int, attempt: int, avoid_nodes: tuple[str, ...]) -> None:  # noqa: ARG002
        name = worker_pod_name(job.name, slot, attempt)
        if self.pod(job.namespace, name) is not None:
            return
        uid = f"pod{next(self._uids)}"
        pod = Pod(
            job.namespace, name, uid, job.name, job.uid, slot, attempt,
            ip=f"10.0.0.{slot}", node=f"node-{slot}", spec_digest=worker_digest(job),
        )  # fmt: skip
        self.by_uid[uid] = pod
        if slot not in self.pending:
            self._world.run_pod(uid)
        self._world.dirty()

    async def delete(self, pod: Pod) -> None:
        released = pod.uid in self._world.status.get("released", ())
        ended = self._world.phase in ("Succeeded", "Failed")
        assert released or pod.phase == "Pending" or ended, f"{pod.name} was deleted before its release was written"
        self.deleted.append(pod.uid)
        self._world.terminate(pod.uid)


class Agent:
    """A real agent core, its link and its processes. `boots` again with the pod's disk when its container restarts."""

    def __init__(self, world: World, pod: Pod, saved: Saved, boot: int) -> None:
        self.world, self.uid, self.name = world, pod.uid, pod.name
        self.saved, self.boot = saved, f"{pod.uid}/{boot}"
        self.core = Core(Identity(pod.job_uid, pod.uid, self.boot, world.processes), saved, session=world.known_session)
        self.trainers: dict[int, Trainer] = {}
        self.faults: list[wire.Fault] = []
        self.stream: Stream | None = None
        self.alive = True
        self.handle(ev.StoreOpened(5000 + pod.slot))

    @property
    def connected(self) -> bool:
        return self.stream is not None

    def connect(self) -> None:
        operator = self.world.operator
        if not self.alive or self.connected or operator is None or self.uid in self.world.unreachable:
            return
        self._post(operator, self.core.report(wire.Hello(VERSION, self.world.processes)))
        self.stream = operator.registry.open(self.world.pods.by_uid[self.uid], self.boot)
        self.handle(ev.Connected())
        for fault in self.faults:
            self._post(operator, self.core.report(fault))
        self.faults.clear()

    def disconnect(self) -> None:
        stream, self.stream = self.stream, None
        if stream is None:
            return
        if self.world.operator is not None and self.uid in self.world.pods.by_uid:
            self.world.operator.registry.close(self.world.pods.by_uid[self.uid], stream)
        if self.alive:
            self.handle(ev.Disconnected())

    def read(self) -> bool:
        """Take one command from the stream; False if there is none."""
        if not self.alive or self.stream is None or self.stream._lines.empty():
            return False
        line = self.stream._lines.get_nowait()
        if line is None:
            self.stream = None
            self.handle(ev.Disconnected())
            return True
        command = wire.Command.decode(line)
        if isinstance(command.body, wire.Generation):
            self.world.saw_generation(command.body.number, command.body.uid, command.body.document_digest)
        self.handle(ev.Commanded(command))
        return True

    def handle(self, event: ev.Event) -> None:
        for effect in self.core.handle(event, self.world.now_s):
            self._act(effect)

    def trainer_says(self, trainer: Trainer, message: Any) -> None:
        if trainer.alive:
            self.handle(ev.FromTrainer(trainer.local_rank, trainer.incarnation, codec_round(message)))

    def exited(self, trainer: Trainer, code: int, last_line: str = "") -> None:
        if trainer.alive:
            trainer.alive = False
            trainer.drop()
            self.handle(ev.Exited(trainer.local_rank, trainer.incarnation, code, last_line))

    def die(self) -> None:
        """The whole container is gone."""
        self.alive = False
        for trainer in self.trainers.values():
            trainer.alive = False
            trainer.drop()
        self.disconnect()

    def _act(self, effect: ev.Effect) -> None:
        if isinstance(effect, ev.Send):
            operator = self.world.operator
            if operator is not None and self.connected:
                self._post(operator, effect.report)
            elif isinstance(effect.report.body, wire.Fault):
                self.faults.append(effect.report.body)
        elif isinstance(effect, ev.Tell):
            self.world.later(lambda: self.trainers[effect.local_rank].receive(effect.message))
        elif isinstance(effect, ev.Persist):
            self.saved = effect.saved
        elif isinstance(effect, ev.Start):
            trainer = Trainer(self, effect.local_rank, effect.incarnation)
            self.trainers[effect.local_rank] = trainer
            self.world.later(lambda: self._started(trainer))
        elif isinstance(effect, ev.Signal):
            trainer = self.trainers[effect.local_rank]
            self.world.later(lambda: self.exited(trainer, -effect.signum))
        elif isinstance(effect, ev.Exit):
            self.world.later(lambda: self.world.container_ended(self, effect.code))

    def _started(self, trainer: Trainer) -> None:
        if not trainer.alive:
            return
        self.handle(ev.Spawned(trainer.local_rank, trainer.incarnation))
        if self.world.script == "crash":
            self.exited(trainer, 1, "ModuleNotFoundError: No module named 'nothing'")
        elif self.world.script == "session" and (self.name, trainer.local_rank) not in self.world.slow:
            trainer.attach()

    def _post(self, operator: Operator, report: wire.Report) -> None:
        report = wire.Report.decode(codec.line(report))
        pod = self.world.pods.by_uid[self.uid]
        assert isinstance(report.body, wire.Hello) or operator.registry.knows(pod.uid, report.boot)
        operator.registry.report(pod, report)


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns that never has to wait: nothing in this world does, so that no event loop is needed
    and a test can act in the middle of a write."""
    try:
        work.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    raise AssertionError("something waits")


def codec_round(message: Any) -> Any:
    """Send a local message through its JSON form."""
    return codec.from_json(type(message), codec.parse(codec.line(message)))


class Operator:
    """One operator process: a controller and a registry. Killed, it is forgotten."""

    def __init__(self, world: World, settings: Settings) -> None:
        self.registry = Registry(lambda: world.now_s, lambda _: world.dirty())
        self.controller = Controller(
            store=world.store,
            workers=world.pods,
            recorder=world,
            registry=self.registry,
            settings=settings,
            endpoint="regroup.ns.svc:8443",
            monotonic=lambda: world.now_s,
            wall=lambda: WALL + world.now_s,
            progress_writes_per_s=world.progress_writes_per_s,
        )


class World:
    """See the module's text. `script`: session, plain (never attaches), crash (exits 1 at once)."""

    def __init__(
        self,
        tmp_path: Path,
        job: JobBuilder,
        *,
        processes: int = 1,
        script: str = "session",
        known_session: bool = False,
        total_steps: int = 1_000_000,
        settings: Settings | None = None,
        progress_writes_per_s: float = 20.0,
        start: bool = True,
    ) -> None:
        self.now_s = START_S
        self.processes, self.script, self.known_session, self.total_steps = (
            processes,
            script,
            known_session,
            total_steps,
        )
        self.settings, self.progress_writes_per_s = settings or Settings(), progress_writes_per_s
        self.store = Store(tmp_path / "job.json", self._wrote)
        self.store.create(job.with_spec(processesPerWorker=processes).manifest())
        self.pods = Pods(self)
        self.agents: dict[str, Agent] = {}
        self.groups: dict[tuple[int, str], Group] = {}
        self.unreachable: set[str] = set()
        self.cut_links: set[frozenset[str]] = set()
        self.slow: set[tuple[str, int]] = set()
        self.sidecar = False
        """Whether the template has a container that runs on when the trainer's has ended."""
        self.notes: list[EventNote] = []
        self.generations: dict[int, str] = {}
        self.committed: list[tuple[int, int]] = []
        self.released: list[str] = []
        self.trace: list[str] = []
        """What a test did, for the message of a failure."""
        self.operator: Operator | None = None
        self._todo: deque[Callable[[], None]] = deque()
        self._is_dirty = False
        self._look_s: float | None = None
        self._boots = itertools.count(1)
        self._disks: dict[str, Saved] = {}
        if start:
            self.start_operator()

    # --- time ------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Do everything that is to be done at this moment."""
        for _ in range(MAX_TURNS):
            if self._turn():
                continue
            return
        raise AssertionError(f"The world does not come to rest at {self.now_s - START_S:.2f} s: something spins.")

    def advance(self, seconds: float, step_every_s: float | None = None) -> None:
        """Let time pass; with `step_every_s` every group commits a step that often."""
        end_s = self.now_s + seconds
        next_step_s = self.now_s + step_every_s if step_every_s else None
        self.settle()
        for _ in range(100_000):
            dues = [d for d in (self._look_s, next_step_s, end_s, *self._agent_dues()) if d is not None]
            self.now_s = max(self.now_s, min(dues))
            if next_step_s is not None and self.now_s >= next_step_s:
                self.step()
                next_step_s += step_every_s or 0.0
            self.settle()
            if self.now_s >= end_s:
                return
        raise AssertionError("Time does not pass: something spins.")

    def until(self, condition: Callable[[], bool], limit_s: float = 120.0, step_every_s: float | None = None) -> float:
        """Let time pass until the condition holds; return the seconds that it took."""
        began_s = self.now_s
        self.settle()
        while not condition():
            assert self.now_s < began_s + limit_s, f"still not after {limit_s} s: {self.summary()}"
            self.advance(step_every_s or 0.05, step_every_s)
        return self.now_s - began_s

    def later(self, action: Callable[[], None]) -> None:
        """Have an action done in this moment, after those before it."""
        self._todo.append(action)

    def dirty(self) -> None:
        self._is_dirty = True

    def _agent_dues(self) -> list[float]:
        return [a.core.due_s for a in self.agents.values() if a.alive and a.core.due_s is not None]

    def _turn(self) -> bool:
        if self._todo:
            self._todo.popleft()()
            return True
        for agent in list(self.agents.values()):
            if agent.alive and not agent.connected and self.operator and agent.uid not in self.unreachable:
                agent.connect()
                return True
            if agent.read():
                return True
            if agent.alive and agent.core.due_s is not None and agent.core.due_s <= self.now_s:
                agent.handle(ev.Tick())
                return True
        if self.operator and (self._is_dirty or (self._look_s is not None and self._look_s <= self.now_s)):
            self._is_dirty = False
            self.reconcile(self.operator)
            return True
        return False

    def reconcile(self, operator: Operator) -> None:
        """Have one operator reconcile once."""
        wait_s = finish(operator.controller.reconcile(KEY))
        if operator is self.operator:
            self._look_s = None if wait_s is None else self.now_s + wait_s

    # --- operators and users ---------------------------------------------------------------------------------------

    def start_operator(self) -> Operator:
        self.operator = Operator(self, self.settings)
        self.dirty()
        return self.operator

    def kill_operator(self) -> None:
        """SIGKILL: nothing is written or said any more; agents notice."""
        self.operator = None
        self._look_s = None
        for agent in self.agents.values():
            agent.stream = None
            if agent.alive:
                agent.handle(ev.Disconnected())

    def scale(self, replicas: int) -> None:
        self.store.change_spec(lambda spec: spec.update(replicas=replicas))
        self.dirty()

    def record(self, job: Job, note: EventNote) -> None:  # noqa: ARG002
        self.notes.append(note)
        if note.reason == "RolledBack":
            self.committed.clear()

    # --- pods ------------------------------------------------------------------------------------------------------

    def run_pod(self, uid: str) -> None:
        pod = self.pods.by_uid[uid]
        self.pods.by_uid[uid] = replace(pod, phase="Running", running_since_s=self.now_s)
        self.agents[uid] = Agent(self, self.pods.by_uid[uid], self._disks.get(uid, Saved()), next(self._boots))
        self.dirty()

    def terminate(self, uid: str) -> None:
        """The API server takes a deletion: the pod terminates with its grace; an agent that runs gets SIGTERM."""
        pod = self.pods.by_uid.get(uid)
        if pod is None or pod.terminating:
            return
        self.pods.by_uid[uid] = replace(pod, terminating=True)
        agent = self.agents.get(uid)
        if agent is not None and agent.alive and pod.node_ready:
            self.later(lambda: agent.handle(ev.Terminated()))
        elif pod.node_ready:
            self.later(lambda: self.vanish(uid))
        self.dirty()

    def vanish(self, uid: str) -> None:
        """The pod is gone from the API (kubectl delete --force, or the end of its grace)."""
        agent = self.agents.pop(uid, None)
        if agent is not None:
            agent.die()
        self.pods.by_uid.pop(uid, None)
        self.dirty()

    def container_ended(self, agent: Agent, code: int) -> None:
        """The agent exited: 0 ends the pod, anything else restarts the container (restartPolicy OnFailure)."""
        if not agent.alive:
            return
        self._disks[agent.uid] = agent.saved
        agent.die()
        pod = self.pods.by_uid.get(agent.uid)
        if pod is None:
            return
        if pod.terminating:
            self.vanish(agent.uid)
        elif code == 0:
            phase = "Running" if self.sidecar else "Succeeded"
            self.pods.by_uid[agent.uid] = replace(pod, phase=phase, running_since_s=None)
        else:
            restarts = pod.container_restarts + 1
            self.pods.by_uid[agent.uid] = replace(pod, container_restarts=restarts, last_exit_code=code)
            self.run_pod(agent.uid)
        self.dirty()

    def power_off(self, uid: str) -> None:
        """The node loses power: everything stops without a word; streams break when the kernel's probes say so."""
        agent, pod = self.agents[uid], self.pods.by_uid[uid]
        agent.alive = False
        for trainer in agent.trainers.values():
            trainer.alive = False  # its group hangs: nobody hears of it
        self.unreachable.add(uid)
        self.pods.by_uid[uid] = replace(pod, node_ready=True)

    def node_not_ready(self, uid: str) -> None:
        self.pods.by_uid[uid] = replace(self.pods.by_uid[uid], node_ready=False)
        self.dirty()

    def cut_off(self, uid: str) -> None:
        """The agent and the operator cannot reach each other; the group is not touched."""
        self.unreachable.add(uid)
        self.agents[uid].disconnect()

    def reach_again(self, uid: str) -> None:
        self.unreachable.discard(uid)

    def kill_process(self, uid: str, local_rank: int = 0, code: int = -9, last_line: str = "") -> None:
        agent = self.agents[uid]
        agent.exited(agent.trainers[local_rank], code, last_line)

    # --- training --------------------------------------------------------------------------------------------------

    def step(self, count: int = 1) -> None:
        """Have every group that can commit `count` steps."""
        for _ in range(count):
            self.settle()
            for group in list(self.groups.values()):
                done = group.commit_step()
                if done is not None:
                    if self.committed:
                        assert done[1] == max(s for _, s in self.committed) + 1, (
                            f"step {done} after {self.committed[-1]}"
                        )
                        assert done[0] >= self.committed[-1][0], f"a fenced group committed {done}"
                    self.committed.append(done)
            self.settle()

    def nobody_holds_more_than(self, state: StatePair) -> None:
        """A group is about to continue from `state`: no process that lives may hold a newer committed step."""
        if not self.committed or state >= self.committed[-1]:
            return
        held = [t for a in self.agents.values() for t in a.trainers.values() if t.alive and t.state is not None]
        holders = [
            t.agent.name for t in held if t.state is not None and t.state > state and tuple(t.state) in self.committed
        ]
        assert not holders, f"rolled back to {state} while {holders} hold more"

    def saw_generation(self, number: int, uid: str, digest: str = "") -> None:
        said = self.generations.setdefault(number, uid)
        assert said == uid, f"generation {number} stands for two lists of members"
        if digest:
            membership = self.status["membership"]
            assert membership["generation"] >= number, f"generation {number} was announced before it was written"

    def _wrote(self, status: dict[str, Any]) -> None:
        self.released += [uid for uid in status.get("released", ()) if uid not in self.released]
        if "membership" in status:
            self.saw_generation(status["membership"]["generation"], status["membership"]["uid"])

    # --- what a test looks at --------------------------------------------------------------------------------------

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.store.read().get("status", {})
        return status

    @property
    def generation(self) -> int:
        number: int = self.status.get("membership", {}).get("generation", 0)
        return number

    @property
    def members(self) -> str:
        members: str = self.status.get("membership", {}).get("members", "")
        return members

    @property
    def phase(self) -> str:
        phase: str = self.status.get("phase", "")
        return phase

    def condition(self, kind: str) -> dict[str, Any]:
        found: dict[str, Any] = next((c for c in self.status["conditions"] if c["type"] == kind), {})
        return found

    def training(self) -> str:
        """Return the members of the one group that trains, "" without one; more than one is an error."""
        groups = [g for g in self.groups.values() if g.trains]
        assert len(groups) <= 1, f"{len(groups)} groups train at once"
        return (
            ",".join(sorted({t.agent.name.removeprefix("digits-worker-") for t in groups[0].ranks.values()}))
            if groups
            else ""
        )

    def uid(self, slot: int, attempt: int = 0) -> str:
        return next(p.uid for p in self.pods.by_uid.values() if (p.slot, p.attempt) == (slot, attempt))

    def names(self) -> list[str]:
        """Return the pods that exist, as slot-attempt."""
        return [f"{p.slot}-{p.attempt}" for p in self.pods.list(KEY, self.store.read()["metadata"]["uid"])]

    def summary(self) -> str:
        status = self.status
        trains = status.get("conditions", []) and self.condition("Training")["message"]
        return f"{self.phase} generation {self.generation} ({self.members}) pods {self.names()}: {trains}"
