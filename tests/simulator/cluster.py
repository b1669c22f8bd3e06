"""What the simulated cluster has: the job's object (`Store`), pods and nodes (`Pods`). No decisions of ours are in here."""

from __future__ import annotations

import itertools
import json
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from regroup_operator.api import (
    ConflictError,
    Job,
    NotFoundError,
    UnavailableError,
    check_change,
    parse_stored,
    worker_digest,
)
from regroup_operator.api.job import role_digest
from regroup_operator.api.names import role_pod_name, worker_pod_name
from regroup_operator.model.records import UNSEEN_CODE, Key, Pod

if TYPE_CHECKING:
    from tests.simulator.world import World

KEY: Key = ("default", "digits")
JOB_UID = "1f4a-uid"
KEPT_VERSIONS = 50
REFUSED = "UnexpectedAdmissionError"
"""status.reason of a pod that its kubelet refused: no container of it ever ran."""
PULL_FIRST_S, PULL_LAST_S = 10.0, 300.0
"""The kubelet's pause before it tries to pull an image again, doubled each time up to the second."""


class Suspension:
    """Awaiting it stops a coroutine where it is, until somebody sends it on: a process that is paused in mid-request."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class Store:
    """The job's object in memory, changed by compare-and-swap. `before_write` is a moment before a write of the status in
    which a test can let something happen."""

    def __init__(
        self, wrote: Callable[[dict[str, Any]], None], changed: Callable[[dict[str, Any], bool], None]
    ) -> None:
        """`changed(object, gone)` is what a watch of it would show."""
        self.before_write: Callable[[dict[str, Any]], None] | None = None
        self.num_writes = 0
        self.is_down = False
        """The API server does not answer."""
        self.is_deleted = False
        self.loses_answers = False
        """Writes take effect, and their answers are lost."""
        self.suspends_next_write = False
        self.history: deque[dict[str, Any]] = deque(maxlen=KEPT_VERSIONS)
        """Older versions of the status, for a backup that is restored."""
        self.asked: Callable[[], None] = lambda: None
        """Is called when the status is to be written: an operator may be stopped before that takes effect."""
        self.removed: Callable[[], None] = lambda: None
        """Is called when an operator has deleted the job."""
        self._wrote, self._changed = wrote, changed
        self._text = ""
        self.view: dict[str, Any] = {}
        """The object, not to be changed."""

    def read(self) -> dict[str, Any]:
        """Return a copy of the object."""
        raw: dict[str, Any] = json.loads(self._text)
        return raw

    def create(self, raw: dict[str, Any]) -> None:
        raw["metadata"] |= {"resourceVersion": "1", "generation": 1, "uid": JOB_UID}
        self._replace(raw)

    def delete(self, *, applied_again_as: str | None = None) -> None:
        """Delete the job. `applied_again_as`: the UID of another one that has its name and spec."""
        self.is_deleted = applied_again_as is None
        raw = self.read()
        if applied_again_as is not None:
            raw["metadata"]["uid"] = applied_again_as
            raw.pop("status", None)
        self._bump(raw)

    async def get(self, key: Key) -> dict[str, Any] | None:  # noqa: ARG002 (it holds one job)
        """See JobApi."""
        self._reach()
        return None if self.is_deleted else self.view

    async def put_status(self, raw: Mapping[str, Any], status: Mapping[str, Any]) -> dict[str, Any]:
        """See JobApi."""
        self.asked()
        hook, self.before_write = self.before_write, None
        if hook:
            hook(dict(status))
        if self.suspends_next_write:
            self.suspends_next_write = False
            await Suspension()
        self._reach()
        if self.is_deleted:
            raise NotFoundError("The job is gone.")
        if self.view["metadata"]["resourceVersion"] != raw["metadata"]["resourceVersion"]:
            raise ConflictError("The job changed since it was read.")
        self.history.append(self.view.get("status", {}))
        self.replace_status(dict(status))
        self.num_writes += 1
        self._wrote(self.view["status"])
        if self.loses_answers:
            self.is_down, self.loses_answers = True, False
            raise UnavailableError("The API server did not answer.")
        return self.view

    async def remove(self, job: Job) -> None:
        """See JobApi.delete."""
        self._reach()
        if job.resource_version != self.view["metadata"]["resourceVersion"]:
            raise ConflictError("The job has changed.")
        if self.is_deleted:
            raise NotFoundError("The job is gone.")
        self.delete()
        self.removed()

    def _reach(self) -> None:
        if self.is_down:
            raise UnavailableError("The API server cannot be reached.")

    def replace_status(self, status: dict[str, Any]) -> None:
        """Make `status` the job's whole status, whatever it was."""
        raw = self.read()
        raw["status"] = status
        self._bump(raw)

    def change_spec(self, change: Callable[[dict[str, Any]], None]) -> Job:
        """Change the spec as a user would; what the API server refuses is a SpecError and changes nothing."""
        raw = self.read()
        change(raw["spec"])
        raw["metadata"]["generation"] += 1
        job = parse_stored(raw)
        if job.refusal is not None and job.status.start_time is not None:
            raise job.refusal
        check_change(parse_stored(self.read()), job)
        self._bump(raw)
        return job

    def _bump(self, raw: dict[str, Any]) -> None:
        raw["metadata"]["resourceVersion"] = str(int(raw["metadata"]["resourceVersion"]) + 1)
        self._replace(raw)

    def _replace(self, raw: dict[str, Any]) -> None:
        self._text = json.dumps(raw)
        self.view = json.loads(self._text)
        self._changed(self.view, self.is_deleted)


class Api:
    """The job's object as one operator asks for it."""

    def __init__(self, store: Store) -> None:
        self.get, self.put_status, self.delete = store.get, store.put_status, store.remove


@dataclass
class Node:
    name: str
    is_up: bool = True
    """It has power."""
    is_ready: bool = True
    """What the API says of it."""
    is_cordoned: bool = False
    """No pod is scheduled to it."""
    has_notice: bool = False
    """It has a taint that announces its end."""
    refuses: bool = False
    """Its kubelet refuses each pod that comes: a device plugin is broken, or the node is full of what nobody accounted for."""
    has_images: bool = True
    """The registry answers it."""

    @property
    def is_open(self) -> bool:
        return self.is_up and self.is_ready and not self.is_cordoned


@dataclass
class Refusals:
    """Pods of one slot in a row that their kubelets have refused."""

    count: int
    at_s: float
    num_operators: int
    """How many operators there had been: the row is in the memory of the newest."""


class Pods:
    """The Workers port in memory. New pods run at once unless `pending` names a slot. Without `nodes` each slot has a node of
    its own that is always there."""

    uid_type: type[str] = str

    def __init__(self, world: World, num_nodes: int = 0) -> None:
        self._world = world
        self.by_uid: dict[str, Pod] = {}
        self.of_roles: dict[str, Pod] = {}
        """By UID."""
        self._never: set[str] = set()
        """UIDs of pods of roles whose restartPolicy is Never."""
        self.roles_linger = False
        """Pods of roles that are deleted stay until somebody takes them out of `of_roles`."""
        self.stale: tuple[Pod, ...] | None = None
        """What operators see in place of the pods there are: their watch lags behind."""
        self.pending: set[int] = set()
        self.deleted: list[str] = []
        self.refused: dict[int, Refusals] = {}
        """By slot."""
        self.num_refused: Counter[tuple[int, int]] = Counter()
        """By slot and number of operators there had been: pods that were refused, in a row or not."""
        self.on_create: Callable[[int], None] = lambda _: None
        """Is called with the slot of each worker's pod that is made."""
        self.nodes = {f"node-{i}": Node(f"node-{i}") for i in range(num_nodes)}
        self.per_node: int | None = None
        """For so many workers' pods a node has room; None: for all."""
        self._avoided: dict[str, tuple[str, ...]] = {}
        self._uids = itertools.count(1)

    def list(self, key: Key, job_uid: str) -> tuple[Pod, ...]:  # noqa: ARG002
        pods = self.by_uid.values() if self.stale is None else self.stale
        return tuple(sorted((p for p in pods if p.job_uid == job_uid and not p.role), key=lambda p: p.id))

    def roles(self, key: Key, job_uid: str) -> tuple[Pod, ...]:  # noqa: ARG002
        return tuple(p for p in self.of_roles.values() if p.job_uid == job_uid)

    def pod(self, namespace: str, name: str) -> Pod | None:
        return next((p for p in self.by_uid.values() if (p.namespace, p.name) == (namespace, name)), None)

    def on_change(self, callback: Callable[[Key], None]) -> None: ...

    async def prepare(self, job: Job) -> None:  # noqa: ARG002
        self._reach()

    async def validate(self, job: Job) -> None:  # noqa: ARG002
        self._reach()

    async def create_role(self, job: Job, role: str, index: int, attempt: int) -> bool:
        """A role's pod runs as soon as it has a node."""
        self._reach()
        name = role_pod_name(job.name, role, index, attempt)
        assert not self._world.has_ended, f"{name} is made after the job has ended"
        if any(p.name == name for p in self.of_roles.values()):
            return False
        uid = self.uid_type(f"pod{next(self._uids)}")
        self.of_roles[uid] = Pod(
            job.namespace, name, uid, job.name, job.uid, index, attempt, role=role, spec_digest=role_digest(job, role)
        )
        if job.role_template(role)["spec"].get("restartPolicy") == "Never":
            self._never.add(uid)
        self._schedule_role(uid)
        self._world.dirty()
        return True

    def _schedule_role(self, uid: str) -> None:
        pod = self.of_roles[uid]
        if pod.node or pod.terminating:
            return
        count = Counter(p.node for p in self.of_roles.values())
        free = sorted((n.name for n in self.nodes.values() if n.is_open), key=lambda name: (count[name], name))
        if self.nodes and not free:
            self.of_roles[uid] = replace(pod, unschedulable="No node.", unscheduled_reason="Unschedulable")
            return
        self.of_roles[uid] = replace(
            pod,
            phase="Running",
            node=free[0] if free else "node-0",
            running_since_s=self._world.now_s,
            unschedulable="",
            unscheduled_reason="",
        )

    def roles_on(self, name: str) -> tuple[Pod, ...]:
        return tuple(p for p in self.of_roles.values() if p.node == name)

    def restart_roles(self, name: str) -> None:
        """A node has power again: its containers have ended, and nobody saw how. They start again, unless they never do."""
        for pod in self.roles_on(name):
            if pod.terminating:
                self.of_roles.pop(pod.uid)
            elif pod.phase == "Running":
                ended = replace(pod, last_exit_code=UNSEEN_CODE, last_exit_reason="Unknown")
                if pod.uid in self._never:
                    self.of_roles[pod.uid] = replace(ended, phase="Failed", running_since_s=None)
                else:
                    restarts, since_s = pod.container_restarts + 1, self._world.now_s
                    self.of_roles[pod.uid] = replace(ended, container_restarts=restarts, running_since_s=since_s)

    def shut_down_roles(self, name: str) -> None:
        """A node is shut down gracefully: its kubelet ends its pods with SIGTERM and says so."""
        for pod in self.roles_on(name):
            if pod.phase == "Running" and not pod.terminating:
                self.of_roles[pod.uid] = replace(
                    pod,
                    phase="Failed",
                    status_reason="Terminated",
                    disruption="TerminationByKubelet",
                    last_exit_code=128 + 15,
                    running_since_s=None,
                )

    def end_role(self, name: str, phase: str = "Failed", **changes: Any) -> None:
        """The pod of a role ends."""
        uid = next(uid for uid, p in self.of_roles.items() if p.name == name)
        self.of_roles[uid] = replace(self.of_roles[uid], phase=phase, running_since_s=None, **changes)
        self._world.dirty()

    async def create(self, job: Job, slot: int, attempt: int, avoid_nodes: tuple[str, ...]) -> bool:
        self._reach()
        name = worker_pod_name(job.name, slot, attempt)
        finished = self._world.finished
        needed = not self._world.has_ended and (finished is None or slot in {member.slot for member in finished.open})
        assert needed, f"{name} is made, and no script has to run there any more"
        if self.pod(job.namespace, name) is not None:
            return False
        self.on_create(slot)
        uid = self.uid_type(f"pod{next(self._uids)}")
        self._avoided[uid] = avoid_nodes
        node = "" if self.nodes else f"node-{slot}"
        self.by_uid[uid] = Pod(
            job.namespace, name, uid, job.name, job.uid, slot, attempt,
            ip=f"10.0.0.{slot}", node=node, spec_digest=worker_digest(job),
        )  # fmt: skip
        self._world.dirty()
        if node and slot not in self.pending:
            self._world.run_pod(uid)
        elif not node:
            self.schedule(uid)
        return True

    async def delete(self, pod: Pod) -> None:
        self._reach()
        if pod.role:
            if self.roles_linger or not self.has_power(pod):
                self.of_roles[pod.uid] = replace(pod, terminating=True)
            else:
                self.of_roles.pop(pod.uid, None)
            self._world.dirty()
            return
        released = pod.uid in self._world.status.get("released", ())
        ended = self._world.phase == "Suspending" or self._world.finished is not None or self._world.has_ended
        assert released or pod.phase in ("Pending", "Failed") or ended, (
            f"{pod.name} was deleted before its release was written"
        )
        self.deleted.append(pod.uid)
        self._world.terminate(pod.uid)

    def schedule(self, uid: str) -> None:
        """Give a pod a node with the fewest pods, if there is one; else it waits."""
        pod = self.by_uid.get(uid)
        if pod is None or pod.node:
            return
        count = {name: sum(p.node == name and p.alive for p in self.by_uid.values()) for name in self.nodes}
        free = [n.name for n in self.nodes.values() if n.is_open and n.name not in self._avoided[uid]]
        free = [name for name in free if self.per_node is None or count[name] < self.per_node]
        if not free:
            self.by_uid[uid] = replace(pod, unschedulable="0 nodes are available.", unscheduled_reason="Unschedulable")
            return
        node = min(free, key=lambda name: (count[name], name))
        self.by_uid[uid] = replace(pod, node=node, unschedulable="", unscheduled_reason="")
        self._world.after(self._world.pace.some(self._world.pace.container_s), lambda: self._world.run_pod(uid))

    def starts(self, pod: Pod, num_pulls: int) -> bool:
        """Whether a kubelet starts the containers of a pod that has just come. It may refuse the pod, or wait for an image."""
        node, world = self.nodes.get(pod.node), self._world
        if node is not None and node.refuses:
            self.by_uid[pod.uid] = replace(pod, phase="Failed", status_reason=REFUSED)
            row = self.refused.get(pod.slot)
            count = 1 + (row.count if row is not None and row.num_operators == world.num_operators else 0)
            self.refused[pod.slot] = Refusals(count, world.now_s, world.num_operators)
            self.num_refused[pod.slot, world.num_operators] += 1
            world.dirty()
            return False
        if node is not None and not node.has_images:
            self.by_uid[pod.uid] = replace(pod, waiting_reason="ErrImagePull" if num_pulls == 0 else "ImagePullBackOff")
            again_s = 1.0 if num_pulls == 0 else min(PULL_FIRST_S * 2.0 ** (num_pulls - 1), PULL_LAST_S)
            world.after(again_s, lambda: world.run_pod(pod.uid, num_pulls + 1))
            world.dirty()
            return False
        self.refused.pop(pod.slot, None)
        return True

    def schedule_all(self) -> None:
        for uid in list(self.by_uid):
            self.schedule(uid)
        for uid in self.of_roles:
            self._schedule_role(uid)

    def has_power(self, pod: Pod) -> bool:
        node = self.nodes.get(pod.node)
        return node is None or node.is_up

    def on_node(self, name: str) -> tuple[Pod, ...]:
        return tuple(p for p in self.by_uid.values() if p.node == name)

    def _reach(self) -> None:
        if self._world.store.is_down:
            raise UnavailableError("The API server cannot be reached.")
