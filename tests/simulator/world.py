"""A whole job in one process and no time at all: the real controller, registry, agent core and adoption rule;
played are only the clock, the store, the pods, the network, and trainers without tensors.

`World` turns until nothing is left to do at the present moment (`settle`), or lets time pass (`advance`). Commands and
reports go through their JSON form. What must hold at every turn is in ledger.py.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from _regroup_agent import events as ev
from _regroup_agent.statefile import UNKNOWN, Saved
from regroup.protocol.snapshot import SnapshotState
from regroup_operator.api import Job, parse_status
from regroup_operator.api.status import RefusedSize
from regroup_operator.decision_log import DecisionLog
from regroup_operator.model.plan import timestamp
from regroup_operator.model.ports import EventNote
from regroup_operator.model.records import UNSEEN_CODE, Settings
from regroup_operator.plan.facts.finished import Finished, read_finished
from tests.builders.plan import JobBuilder
from tests.simulator.agents import Agent
from tests.simulator.cluster import KEY, Pods, Store
from tests.simulator.disk import Disk
from tests.simulator.ledger import Ledger
from tests.simulator.network import Network
from tests.simulator.operators import WALL, Operator
from tests.simulator.pace import Pace
from tests.simulator.script import script_step
from tests.simulator.trainers import Group, Trainer

MAX_TURNS = 5000
START_S = 1000.0
FOREVER = 1e9
GRACE_S = 30.0
"""A pod's terminationGracePeriodSeconds."""

CRASH_LOOP_S = 1.0
"""Before a container that cannot write its state is started again."""


class World:
    """See the module's text. `script`: session, plain (never attaches), crash (exits 1 at once)."""

    decisions: DecisionLog | None = None
    """What operators that start from now on write their decisions to."""

    def __init__(
        self,
        tmp_path: Path | None,  # noqa: ARG002 (what the tests pass; nothing is written)
        job: JobBuilder,
        *,
        processes: int = 1,
        script: str = "session",
        known_session: bool = False,
        total_steps: int = 1_000_000,
        settings: Settings | None = None,
        progress_writes_per_s: float = 20.0,
        pace: Pace | None = None,
        num_nodes: int = 0,
        checkpoint_every: int = 0,
        by_json: bool = True,
        snapshot_every: int = 0,
        backs_off: bool = False,
        observes: bool = False,
        progress_factors: Sequence[float] = (1.0,),
        end_s: float = 0.0,
        resumes: str = "",
        start: bool = True,
    ) -> None:
        """`observes`: agents observe each other from other nodes, else the operator alone hears of them. `progress_factors`: as
        in wire.Answered, of one operator after the other, which serve many other jobs. `end_s`: how long at most a script takes
        from its last step to its end. `resumes`: `policies.Policy.resumes`."""
        self.now_s = START_S
        self.processes, self.script, self.known_session = processes, script, known_session
        self.total_steps = total_steps
        self.settings, self.progress_writes_per_s = settings or Settings(), progress_writes_per_s
        self.pace, self.by_json, self.backs_off = pace or Pace(), by_json, backs_off
        self.observes, self.progress_factors, self.end_s = observes, progress_factors, end_s
        self.ledger = Ledger(self)
        self.network = Network(self)
        self.operators: list[Operator] = []
        self.num_operators = 0
        """How many there have been."""
        self.store = Store(self._wrote, self._job_changed)
        self.store.asked = self._asked
        self.asked_s = self.now_s
        """When the status was to be written last."""
        raw = job.with_spec(processesPerWorker=processes).manifest()
        self.store.removed = self._removed
        self.created = raw["metadata"]["creationTimestamp"] = timestamp(WALL + self.now_s)
        self.store.create(raw)
        self.pods = Pods(self, num_nodes)
        self.disk = Disk(self, checkpoint_every, resumes)
        self.agents: dict[str, Agent] = {}
        self.groups: dict[tuple[int, str], Group] = {}
        self.unreachable: set[str] = set()
        """Pod UIDs of agents that the operator cannot reach, nor they it."""
        self.immortal: set[tuple[str, int]] = set()
        """(Pod, local rank) of processes that wait for a disk: no signal ends them."""
        self.full: set[str] = set()
        """Pod UIDs of agents whose state file cannot be written."""
        self.stalled_logs: set[str] = set()
        """Pod UIDs of workers whose processes' lines nobody reads: a process stands once it has printed one."""
        self.wall_skew_s = 0.0
        """How wrong the operators' wall clock is."""
        self.slow: set[tuple[str, int]] = set()
        self.slow_start_s = 0.0
        """How much longer the imports of processes take that start now."""
        self.sidecar = False
        """Whether the template has a container that runs on when the trainer's has ended."""
        self.notes: list[EventNote] = []
        self.has_hung = False
        """Whether an agent has said that it killed a process because it hung."""
        self.on_ask: Callable[[], None] = lambda: None
        self.on_write: Callable[[dict[str, Any]], None] = lambda _: None
        """Is called with each status that an operator has written."""
        self.on_removed: Callable[[], None] = lambda: None
        """Is called when an operator has deleted the job."""
        self.operator: Operator | None = None
        self.on_moment: Callable[[str, str], bool] | None = None
        """Is called with a name and a pod's UID where a fault may come in the middle of something; if it says True, time
        stops there."""
        self._halts = False
        self._todo: deque[Callable[[], object]] = deque()
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._timer_ids = itertools.count()
        self._undo: dict[int, Callable[[], None]] = {}
        self._boots = itertools.count(1)
        self.saved: dict[str, Saved] = {}
        """What the agent that was there before has left on each pod's disk."""
        self._memories: dict[str, SnapshotState | None] = {}
        """Of pods whose container restarts; a machine without power loses them."""
        self.snapshot_every = snapshot_every
        """After so many steps each worker has a snapshot in memory; 0: none."""
        if start:
            self.start_operator()

    # --- time ------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Do everything that is to be done at this moment."""
        for _ in range(MAX_TURNS):
            if self._halts or not self._turn():
                return
        raise AssertionError(f"The world does not come to rest at {self.now_s - START_S:.2f} s: something spins.")

    def advance(
        self, seconds: float, step_every_s: float | None = None, done: Callable[[], bool] | None = None
    ) -> None:
        """Let time pass, less of it where `done` becomes true; with `step_every_s` every group commits a step that often."""
        end_s = self.now_s + seconds
        next_step_s = self.now_s + step_every_s if step_every_s else None
        self.settle()
        for _ in range(100_000):
            if self._halts:
                self._halts = False
                return
            dues = [d for d in (next_step_s, end_s, *self._dues()) if d is not None]
            self.now_s = max(self.now_s, min(dues))
            if next_step_s is not None and self.now_s >= next_step_s:
                self.step()
                next_step_s += step_every_s or 0.0
            self.settle()
            halts, self._halts = self._halts, False
            if halts or self.now_s >= end_s or (done is not None and done()):
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

    def later(self, action: Callable[[], object]) -> None:
        """Have an action done in this moment, after those before it."""
        self._todo.append(action)

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        """Have an action done in `delay_s` seconds."""
        if delay_s <= 0.0:
            self.later(action)
        else:
            heapq.heappush(self._timers, (self.now_s + delay_s, next(self._timer_ids), action))

    def lasts(self, for_s: float, undo: Callable[[], None]) -> None:
        """Have something that was done undone after `for_s` seconds, or when the world is healed before that."""
        number = next(self._timer_ids)
        self._undo[number] = undo

        def end() -> None:
            if self._undo.pop(number, None) is not None:
                undo()

        if for_s < FOREVER:
            self.after(for_s, end)

    def heal(self) -> None:
        """Undo everything that would last."""
        undo, self._undo = self._undo, {}
        for action in undo.values():
            action()
        self.disk.repair()

    def dirty(self) -> None:
        """Something of the job has changed that operators watch."""
        for operator in self.operators:
            operator.dirty()

    def happened(self, moment: str, uid: str) -> None:
        """Say that a moment has come at which a fault may be waiting."""
        if self.on_moment is not None and self.on_moment(moment, uid):
            self._halts = True

    def _dues(self) -> list[float]:
        dues = [a.due_s for a in self.agents.values() if a.due_s is not None and a.alive and not a.stopped]
        dues += [
            a.next_call_s for a in self.agents.values() if a.alive and not a.connected and a.next_call_s > self.now_s
        ]
        dues += [
            max(at_s, o.rests_until_s)
            for o in self.operators
            if not o.paused
            for at_s in (o.look_s, o.expected_s, 0.0 if self.now_s < o.rests_until_s else None)
            if at_s is not None
        ]
        if self._timers:
            dues.append(self._timers[0][0])
        return dues

    def _turn(self) -> bool:
        if self._todo:
            self._todo.popleft()()
            return True
        if self._timers and self._timers[0][0] <= self.now_s:
            heapq.heappop(self._timers)[2]()
            return True
        agents = list(self.agents.values())
        if self.pace.shuffles:
            self.pace.rng.shuffle(agents)
        for agent in agents:
            if agent.may_connect:
                agent.connect()
                return True
            if agent.read():
                return True
            if agent.due_s is not None and agent.due_s <= self.now_s and agent.alive and not agent.stopped:
                agent.handle(ev.Tick())
                return True
        for operator in self.operators:
            if operator.is_due:
                operator.is_dirty = False
                operator.reconcile()
                return True
        return False

    def reconcile(self, operator: Operator) -> None:
        """Have one operator reconcile once."""
        operator.reconcile()

    def _asked(self) -> None:
        self.asked_s = self.now_s
        self.on_ask()

    def _wrote(self, status: dict[str, Any]) -> None:
        self.ledger.wrote(status)
        self.on_write(status)

    def _job_changed(self, raw: dict[str, Any], gone: bool) -> None:
        for operator in (operator for operator in self.operators if not operator.dead):
            wait_s = self.pace.some(self.pace.watch_s)
            if wait_s > 0:
                self.after(wait_s, partial(operator.see, raw, gone))
            else:
                operator.see(raw, gone)

    # --- operators and users ---------------------------------------------------------------------------------------

    def start_operator(self) -> Operator:
        """Start an operator that agents call from now on; one that ran before runs on with the streams that it has."""
        self.operator = Operator(self, self.settings)
        self.operators.append(self.operator)
        self.operator.dirty()
        return self.operator

    def kill_operator(self, operator: Operator | None = None) -> None:
        """SIGKILL: nothing is written or said any more; agents notice."""
        operator = operator or self.operator
        if operator is None:
            return
        operator.dead = True
        if operator in self.operators:
            self.operators.remove(operator)
        if operator is self.operator:
            self.operator = None
            self.store.suspends_next_write = False  # it was to be in the middle of it; the next leader is not
        for agent in self.agents.values():
            if agent.operator is operator:
                agent.disconnect()

    def scale(self, replicas: int) -> None:
        self.store.change_spec(lambda spec: spec.update(replicas=replicas))
        self.dirty()

    def suspend(self, suspended: bool) -> None:
        self.store.change_spec(lambda spec: spec.setdefault("runPolicy", {}).update(suspend=suspended))
        self.dirty()

    def record(self, job: Job, note: EventNote) -> None:  # noqa: ARG002
        self.notes.append(note)

    # --- pods ------------------------------------------------------------------------------------------------------

    def _removed(self) -> None:
        """An operator has deleted the job: its pods go with it, by their owner references."""
        self.on_removed()
        for uid in list(self.pods.by_uid):
            self.terminate(uid)
        self.pods.of_roles.clear()

    def run_pod(self, uid: str, num_pulls: int = 0) -> None:
        """The kubelet starts a pod's container. `num_pulls`: how often it has tried to pull the image."""
        pod, before = self.pods.by_uid.get(uid), self.agents.get(uid)
        if pod is None or not self.pods.has_power(pod) or (before is not None and before.alive):
            return
        if not pod.alive or (pod.terminating and before is None):
            return
        if pod.phase == "Pending" and not self.pods.starts(pod, num_pulls):
            return
        self.pods.by_uid[uid] = replace(pod, phase="Running", running_since_s=self.now_s, waiting_reason="")
        self.agents[uid] = Agent(
            self, self.pods.by_uid[uid], self.saved.get(uid, Saved()), next(self._boots), self._memories.pop(uid, None)
        )
        self.dirty()

    def terminate(self, uid: str) -> None:
        """The API server takes a deletion: the pod terminates with its grace; an agent that runs gets SIGTERM."""
        pod = self.pods.by_uid.get(uid)
        if pod is None or pod.terminating:
            return
        self.pods.by_uid[uid] = replace(pod, terminating=True)
        agent = self.agents.get(uid)
        if self.pods.nodes:
            self.after(GRACE_S, lambda: self._end_grace(uid))
        if not self.pods.has_power(pod):
            pass
        elif agent is not None and agent.alive and pod.node_ready:
            self.later(lambda: agent.handle(ev.Terminated()))
        elif pod.node_ready:
            self.later(lambda: self.vanish(uid))
        self.dirty()

    def _end_grace(self, uid: str) -> None:
        pod = self.pods.by_uid.get(uid)
        if pod is not None and self.pods.has_power(pod):
            self.vanish(uid)

    def vanish(self, uid: str) -> None:
        """The pod is gone from the API (kubectl delete --force, or the end of its grace)."""
        agent = self.agents.pop(uid, None)
        if agent is not None:
            agent.die()
        pod = self.pods.by_uid.pop(uid, None)
        if pod is not None and all(p.slot != pod.slot for p in self.pods.by_uid.values()):
            self.pods.refused.pop(pod.slot, None)
        if self.pods.per_node is not None:
            self.pods.schedule_all()
        self.dirty()

    def container_ended(self, agent: Agent, code: int, reason: str = "") -> None:
        """The agent exited: 0 ends the pod, anything else restarts the container (restartPolicy OnFailure)."""
        if not agent.alive:
            return
        self.saved[agent.uid], self._memories[agent.uid] = agent.saved, agent.memory
        agent.die()
        pod = self.pods.by_uid.get(agent.uid)
        if pod is None:
            return
        if pod.terminating:
            self.vanish(agent.uid)
        elif code == 0:
            phase = "Running" if self.sidecar else "Succeeded"
            self.pods.by_uid[agent.uid] = replace(pod, phase=phase, running_since_s=None, last_exit_code=0)
        else:
            self.restart_container(agent.uid, code, reason)
        self.dirty()

    def restart_container(self, uid: str, code: int, reason: str = "") -> None:
        """The kubelet starts the container again, with the pod's disk."""
        pod = self.pods.by_uid.get(uid)
        if pod is None:
            return
        restarts = pod.container_restarts + 1
        self.pods.by_uid[uid] = replace(pod, container_restarts=restarts, last_exit_code=code, last_exit_reason=reason)
        if code != UNSEEN_CODE:
            self.ledger.ended(pod.name, self.generation, code, reason=reason)
        if uid in self.full:
            self.after(CRASH_LOOP_S, lambda: self.run_pod(uid))
        else:
            self.run_pod(uid)

    def lost_file(self) -> Saved:
        """Return what an agent has whose file cannot be read, or is of an earlier boot of its node."""
        return Saved(UNKNOWN, UNKNOWN, incarnation=int(self.now_s * 1000) + 1_000_000)

    def power_off(self, uid: str) -> None:
        """The node loses power: everything stops without a word; streams break when the kernel's probes say so."""
        agent, pod = self.agents[uid], self.pods.by_uid[uid]
        self.saved[uid] = self.lost_file()
        agent.alive = False
        for trainer in agent.trainers.values():
            trainer.alive = False  # its group hangs: nobody hears of it
        self.unreachable.add(uid)
        self.pods.by_uid[uid] = replace(pod, node_ready=True)
        self.network.dark.add(uid)
        self.network.watch_out()

    def lose_power(self, agent: Agent) -> None:
        """A worker's machine is off: who talked to it finds out when the kernel gives up."""
        self.saved[agent.uid] = self.lost_file()
        agent.alive = False
        for trainer in agent.trainers.values():
            trainer.die(self.pace.probe_s)
        self.after(self.pace.probe_s + self.pace.some(self.pace.probe_late_s), agent.disconnect)

    def node_not_ready(self, uid: str) -> None:
        self.pods.by_uid[uid] = replace(self.pods.by_uid[uid], node_ready=False)
        self.dirty()

    def cut_off(self, uid: str) -> None:
        """The agent and the operator cannot reach each other; the group is not touched."""
        self.unreachable.add(uid)
        self.agents[uid].disconnect()

    def reach_again(self, uid: str) -> None:
        self.unreachable.discard(uid)
        if uid in self.agents:
            self.agents[uid].unmute()

    def kill_process(self, uid: str, local_rank: int = 0, code: int = -9, last_line: str = "") -> None:
        agent = self.agents[uid]
        agent.exited(agent.trainers[local_rank], code, last_line)

    # --- training --------------------------------------------------------------------------------------------------

    def is_slow(self, trainers: list[Trainer]) -> bool:
        """Return whether one of these has not done its part of the step yet."""
        return self.now_s < self.ledger.last_commit_s + max(t.slow_s for t in trainers)

    def print_a_line(self, trainers: list[Trainer]) -> None:
        """Every process prints after its step."""
        for trainer in trainers:
            trainer.frozen = trainer.frozen or trainer.agent.uid in self.stalled_logs

    def read_log_again(self, uid: str) -> None:
        self.stalled_logs.discard(uid)
        for trainer in self.agents[uid].trainers.values() if uid in self.agents else ():
            trainer.thaw()

    def step(self, count: int = 1) -> None:
        """Have every group that can commit `count` steps."""
        for _ in range(count):
            self.settle()
            if self.script == "plain":
                script_step(self)
            for group in list(self.groups.values()):
                done = group.commit_step()
                if done is not None:
                    self.ledger.group_committed(done)
            self.settle()
            if len(self.groups) > 8:
                self.groups = {key: g for key, g in self.groups.items() if any(t.group is g for t in g.ranks.values())}

    # --- what a test looks at --------------------------------------------------------------------------------------

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.store.view.get("status", {})
        return status

    @property
    def has_ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def finished(self) -> Finished | None:
        """The members whose steps are over, as the status says it; None: there are steps to train."""
        return read_finished(parse_status({"status": self.status}))

    @property
    def has_trained(self) -> bool:
        """Whether the status says that all scripts have returned, or that the job has ended: no worker is needed any more."""
        return self.has_ended or (self.finished is not None and not self.finished.open)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left that could be committed."""
        committed = self.ledger.committed
        return self.has_ended or self.finished is not None or (bool(committed) and committed[-1][1] >= self.total_steps)

    @property
    def replicas(self) -> int:
        replicas: int = self.store.view["spec"]["replicas"]
        return replicas

    @property
    def refused(self) -> RefusedSize | None:
        """Return the size that the script refused."""
        return parse_status(self.store.view).refused_size

    @property
    def wanted(self) -> int:
        """Return the number of workers that the job should train with, by its sizes and what its script refused."""
        if self.refused is not None:
            return self.refused.size
        multiple = (self.store.view["spec"].get("elasticPolicy") or {}).get("sizeMultipleOf", 1)
        return self.replicas - self.replicas % int(multiple)

    @property
    def per_group(self) -> int:
        """Workers of a group."""
        size: int = self.store.view["spec"].get("workersPerGroup", 1)
        return size

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
        return [f"{p.slot}-{p.attempt}" for p in self.pods.list(KEY, self.store.view["metadata"]["uid"])]

    def summary(self) -> str:
        status = self.status
        trains = status.get("conditions", []) and self.condition("Training")["message"]
        return f"{self.phase} generation {self.generation} ({self.members}) pods {self.names()}: {trains}"
