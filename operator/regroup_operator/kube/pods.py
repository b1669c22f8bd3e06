"""Worker pods and nodes as the operator remembers them: slim records, found by name and by job.

`slim_pod` and `slim_node` are pure. `PodStore` joins the two informers (a pod's `node_ready` follows its node) and
reports the jobs whose pods changed. A query never asks the API server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from regroup.protocol.text import shorten
from regroup_operator.api import GROUP, KIND
from regroup_operator.api.names import (
    ANNOTATION_SPEC_DIGEST,
    ANNOTATION_TRAINER,
    LABEL_JOB_NAME,
    TRAINER_CONTAINER,
    parse_role_pod_name,
    parse_worker_pod_name,
)
from regroup_operator.kube.client import NODES, PODS, ApiError, Client
from regroup_operator.kube.informer import Informer
from regroup_operator.model.records import Key, Pod

log = logging.getLogger(__name__)

MESSAGE_LENGTH = 500
"""Longest text that is kept of the kubelet's message about a pod that has failed."""
RETRY_S = 2.0
FORBIDDEN_S = 60.0
"""Time until the operator asks again whether it may read nodes."""
_NORMAL_WAITS = frozenset({"ContainerCreating", "PodInitializing"})


@dataclass(frozen=True)
class Taint:
    """A taint of a node, or a toleration with a key. An empty effect tolerates every effect, and `value` None every value."""

    key: str
    value: str | None
    effect: str

    def tolerates(self, taint: Taint) -> bool:
        """Return whether this toleration tolerates a taint."""
        return self.key == taint.key and self.value in (None, taint.value) and self.effect in ("", taint.effect)


@dataclass(frozen=True)
class Node:
    """A node, slim."""

    name: str
    ready: bool
    boot_id: str = ""
    unready_since_s: float | None = None
    """Time at which the node was first seen not to be ready, monotonic."""
    starts: bool = False
    """True if its kubelet itself reports that it is not ready. For a silent kubelet the control plane writes Unknown."""
    taints: tuple[Taint, ...] = ()
    """Taints that announce the end of the node."""


def slim_node(item: Mapping[str, Any], previous: Node | None, now_s: float, drain: Collection[str] = ()) -> Node:
    """Return the node's name, boot ID, condition Ready, and its taints with keys in `drain`. `now_s` is the monotonic clock."""
    status = item.get("status") or {}
    said = next((c["status"] for c in status.get("conditions") or () if c["type"] == "Ready"), "Unknown")
    ready = said == "True"
    since_s = None
    if not ready:
        since_s = now_s if previous is None or previous.unready_since_s is None else previous.unready_since_s
    taints = ((item.get("spec") or {}).get("taints")) or ()
    return Node(
        item["metadata"]["name"],
        ready,
        (status.get("nodeInfo") or {}).get("bootID", ""),
        since_s,
        said == "False",
        tuple(Taint(t["key"], t.get("value") or "", t["effect"]) for t in taints if t["key"] in drain),
    )


def controller_of(item: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the ownerReference that controls the object if it is a DistributedTrainingJob, else None."""
    for owner in item["metadata"].get("ownerReferences") or ():
        if owner.get("controller"):
            ours = owner.get("kind") == KIND and str(owner.get("apiVersion", "")).startswith(f"{GROUP}/")
            return owner if ours else None
    return None


@dataclass(frozen=True)
class Place:
    """The reasons why the taints of a pod's node may not concern the pod. It is kept beside the pod's record."""

    node: str
    tolerations: tuple[Taint, ...]
    before: frozenset[str] = frozenset()
    """Keys of taints that its node had before the pod. The pod was placed there all the same, and so would be the next one."""

    def concerned(self, taints: Sequence[Taint]) -> str:
        """Return the key of the first of these taints that asks the pod to leave, or ""."""
        keys = (
            t.key for t in taints if t.key not in self.before and not any(own.tolerates(t) for own in self.tolerations)
        )
        return next(keys, "")


def tolerations_of(item: Mapping[str, Any], drain: Collection[str]) -> tuple[Taint, ...]:
    """Return the pod's tolerations of keys in `drain`.

    A toleration without a key tolerates everything. It is left out: GPU pods often have it to be placed at all, not to
    stay.
    """
    given = (item.get("spec") or {}).get("tolerations") or ()
    return tuple(
        Taint(t["key"], None if t.get("operator") == "Exists" else t.get("value") or "", t.get("effect") or "")
        for t in given
        if t.get("key") in drain
    )


def slim_pod(item: Mapping[str, Any], previous: Pod | None, now_s: float) -> Pod | None:
    """Return the record of a worker's or a role's pod. None: no DistributedTrainingJob controls the pod, or it has another name.

    `now_s` is the monotonic clock. It dates the first sight of the running trainer container, which `previous` keeps. A
    role's pod is described by one container: the first that has failed, else one that does not run, else the first. An
    init container may describe it before others have begun.
    """
    metadata = item["metadata"]
    owner = controller_of(item)
    place = _place_of(metadata["name"])
    if owner is None or place is None or place[0] != owner["name"]:
        return None
    _, role, slot, attempt = place
    status = item.get("status") or {}
    containers = status.get("containerStatuses") or []
    trainer: Mapping[str, Any] = next((c for c in containers if c["name"] == _trainer_name(metadata)), {})
    if role:
        first = [] if any(map(_has_begun, containers)) else status.get("initContainerStatuses") or []
        trainer = min([*(c for c in first if _stands(c) == 0), *containers], key=_stands, default={})
    restarts = trainer.get("restartCount", 0)
    ended = (trainer.get("state") or {}).get("terminated") or (trainer.get("lastState") or {}).get("terminated") or {}
    init = {} if role else _failed_init(item)
    waiting = _abnormal_wait([*(status.get("initContainerStatuses") or []), *containers])
    running_since_s = None
    if "running" in (trainer.get("state") or {}):
        running_since_s = now_s
        if previous is not None and previous.uid == metadata["uid"] and previous.container_restarts == restarts:
            running_since_s = now_s if previous.running_since_s is None else previous.running_since_s
    return Pod(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        job=owner["name"],
        job_uid=owner["uid"],
        slot=slot,
        attempt=attempt,
        role=role,
        phase=status.get("phase") or "Pending",
        ip=status.get("podIP") or "",
        node=(item.get("spec") or {}).get("nodeName") or "",
        node_ready=True if previous is None else previous.node_ready,
        node_unready_since_s=None if previous is None else previous.node_unready_since_s,
        boot_id="" if previous is None else previous.boot_id,
        terminating="deletionTimestamp" in metadata,
        running_since_s=running_since_s,
        container_restarts=restarts,
        last_exit_code=ended.get("exitCode"),
        last_exit_reason=ended.get("reason", ""),
        init_failed=init.get("name", ""),
        init_failures=0 if role else _init_failures(item, failed=bool(init)),
        init_exit_code=_last_end(init).get("exitCode"),
        init_message=shorten(last_line(_last_end(init).get("message") or ""), MESSAGE_LENGTH),
        unset_since_s=_unset_since_s(item, previous, now_s),
        memory_limit=_memory_limit(item),
        waiting_reason=waiting.get("reason", ""),
        waiting_message=waiting.get("message", ""),
        unschedulable=_unschedulable(status),
        unscheduled_reason=_reason_of(status, "PodScheduled", "False"),
        status_reason=status.get("reason") or "",
        status_message=shorten(status.get("message") or "", MESSAGE_LENGTH) if status.get("phase") == "Failed" else "",
        disruption=_disruption_of(status),
        spec_digest=(metadata.get("annotations") or {}).get(ANNOTATION_SPEC_DIGEST, ""),
    )


def _place_of(name: str) -> tuple[str, str, int, int] | None:
    """Return (job name, role, slot or index, attempt) of a pod's name. The role of a worker is empty."""
    worker = parse_worker_pod_name(name)
    return parse_role_pod_name(name) if worker is None else (worker[0], "", worker[1], worker[2])


def _memory_limit(item: Mapping[str, Any]) -> str:
    containers = (item.get("spec") or {}).get("containers") or []
    trainer: Mapping[str, Any] = next((c for c in containers if c["name"] == _trainer_name(item["metadata"])), {})
    return str(((trainer.get("resources") or {}).get("limits") or {}).get("memory", ""))


def _trainer_name(metadata: Mapping[str, Any]) -> str:
    return str((metadata.get("annotations") or {}).get(ANNOTATION_TRAINER, TRAINER_CONTAINER))


def _has_begun(container: Mapping[str, Any]) -> bool:
    return not (container.get("state") or {}).keys() <= {"waiting"}


def _stands(container: Mapping[str, Any]) -> int:
    """Return the order in which containers describe their pod: 0 for one that has failed."""
    state = container.get("state") or {}
    if "running" in state:
        return 2
    return 1 if (state.get("terminated") or {}).get("exitCode", 0) == 0 else 0


def _abnormal_wait(statuses: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    for container in statuses:
        waiting: Mapping[str, Any] = (container.get("state") or {}).get("waiting") or {}
        if waiting and waiting.get("reason") not in _NORMAL_WAITS:
            return waiting
    return {}


def _init_statuses(item: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the statuses of the init containers that run before the others. Native sidecars run beside them."""
    sidecars = {
        c["name"] for c in (item.get("spec") or {}).get("initContainers") or () if c.get("restartPolicy") == "Always"
    }
    for container in (item.get("status") or {}).get("initContainerStatuses") or ():
        if container["name"] not in sidecars:
            yield container


def _failed_init(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the status of the init container that holds the pod up because it failed last, else an empty one."""
    for container in _init_statuses(item):
        if ((container.get("state") or {}).get("terminated") or {}).get("exitCode") == 0:
            continue
        return container if _last_end(container).get("exitCode") else {}  # those after it have not begun
    return {}


def last_line(text: str) -> str:
    """Return the last line with something in it. A line of pip with an error comes first, because notices may follow it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return "".join(letter for letter in (errors or lines or [""])[-1] if letter.isprintable())


def _init_failures(item: Mapping[str, Any], *, failed: bool) -> int:
    """Return Pod.init_failures. A restart counts the failure before it, so only a container that does not run adds one."""
    statuses = tuple(_init_statuses(item))
    rests = failed and not any("running" in (c.get("state") or {}) for c in statuses)
    return sum(int(c.get("restartCount", 0)) for c in statuses) + rests


def _last_end(container: Mapping[str, Any]) -> Mapping[str, Any]:
    state = container.get("state") or {}
    return state.get("terminated") or (container.get("lastState") or {}).get("terminated") or {}


def _unset_since_s(item: Mapping[str, Any], previous: Pod | None, now_s: float) -> float | None:
    """Return Pod.unset_since_s. Since 1.29 a kubelet that has set up a pod reports PodReadyToStartContainers=True."""
    said = {c["type"]: c["status"] for c in (item.get("status") or {}).get("conditions") or ()}
    if (item.get("status") or {}).get("phase", "Pending") != "Pending" or said.get(
        "PodReadyToStartContainers"
    ) != "False":
        return None
    same = previous is not None and previous.uid == item["metadata"]["uid"]
    known_s = previous.unset_since_s if same and previous is not None else None
    return now_s if known_s is None else known_s


def _unschedulable(status: Mapping[str, Any]) -> str:
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message") or condition.get("reason") or "Unschedulable")
    return ""


def _reason_of(status: Mapping[str, Any], kind: str, said: str) -> str:
    """Return the reason of a pod's condition if its status is `said`, else ""."""
    for condition in status.get("conditions") or ():
        if condition["type"] == kind and condition["status"] == said:
            return str(condition.get("reason") or "")
    return ""


def _disruption_of(status: Mapping[str, Any]) -> str:
    """Return the reason of condition DisruptionTarget=True, "Unknown" if it has none, or "" without the condition."""
    found = (c for c in status.get("conditions") or () if c["type"] == "DisruptionTarget" and c["status"] == "True")
    return next((str(c.get("reason") or "Unknown") for c in found), "")


GONE_S = 5.0
"""Time for which the agent of a pod that has vanished from the API is still heard.

A pod that was deleted by force has processes for two seconds. If its agent were turned away, it would not hear that the
others go on without it. They would then train on with it until the kubelet ends it.
"""


class Agents:
    """The pods whose agents may call: those of a PodStore, and for GONE_S those that have vanished. A PodLookup.

    It is for the authenticator only. Decisions see the pods that exist.
    """

    def __init__(self, pods: PodStore) -> None:
        self._pods = pods

    def pod(self, namespace: str, name: str) -> Pod | None:
        return self._pods.pod(namespace, name) or self._pods.gone(namespace, name)


class PodStore:
    """The pods of all jobs, of workers and of roles. Implements model.ports.PodLookup; `run()` keeps it current until cancelled."""

    def __init__(
        self,
        client: Client,
        namespaces: Sequence[str] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        drain_taints: Sequence[str] = (),
    ) -> None:
        """Copy some namespaces; none means all. `drain_taints` are keys of taints that announce the end of a node."""
        self._clock = clock
        self._drain = frozenset(drain_taints)
        self._places: dict[tuple[str, str], tuple[str, Place]] = {}
        """Name of a worker's pod that has a node -> its UID, and its relation to the node's taints."""
        self._pods: dict[tuple[str, str], Pod] = {}
        self._by_job: dict[tuple[str, str], dict[str, Pod]] = {}
        self._callbacks: list[Callable[[Key], None]] = []
        self._gone: dict[tuple[str, str], tuple[Pod, float]] = {}
        """Name of a pod that has vanished within GONE_S -> its record, and when."""
        self._client = client
        self.informers = [
            Informer[Pod](
                client, PODS, self._slim, self._pod_changed, namespace=namespace, label_selector=LABEL_JOB_NAME
            )
            for namespace in (namespaces or (None,))
        ]
        self.nodes = Informer[Node](
            client, NODES, lambda item, old: slim_node(item, old, clock(), self._drain), self._node_changed
        )

    async def run(self) -> None:
        """Run the informers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for informer in self.informers:
                tasks.create_task(informer.run())
            tasks.create_task(self._run_nodes())

    async def synced(self) -> None:
        """Return once all pods of the API are known, and all nodes if they may be read."""
        for informer in self.informers:
            await informer.synced.wait()
        await self.nodes.synced.wait()

    def pod(self, namespace: str, name: str) -> Pod | None:
        """Return a worker pod by name, or None. A role's pod has no agent, so its token is no agent's."""
        pod = self._pods.get((namespace, name))
        return None if pod is None or pod.role else pod

    def should_call(self, pod: Pod) -> bool:
        """Return whether the agent of a pod should be able to call: the pod runs, on a node that is ready."""
        now = self._pods.get((pod.namespace, pod.name))
        if now is None or now.uid != pod.uid or now.terminating:
            return False
        return now.phase == "Running" and now.running_since_s is not None and now.node_ready

    def list(self, key: Key, job_uid: str) -> tuple[Pod, ...]:
        """Return the worker pods that the job with this UID controls, by slot and attempt."""
        pods = self._by_job.get((key[0], job_uid), {}).values()
        return tuple(sorted((pod for pod in pods if not pod.role), key=lambda pod: (pod.slot, pod.attempt)))

    def roles(self, key: Key, job_uid: str) -> tuple[Pod, ...]:
        """Return the pods of roles that the job with this UID controls, by role, index and attempt."""
        pods = self._by_job.get((key[0], job_uid), {}).values()
        return tuple(sorted((pod for pod in pods if pod.role), key=lambda pod: (pod.role, pod.slot, pod.attempt)))

    def made(self, item: Mapping[str, Any]) -> None:
        """Add a pod from the API server's answer to its creation.

        The watch may show it seconds later. A plan that does not know it would have it created again.
        """
        namespace = item["metadata"]["namespace"]
        for informer in self.informers:
            if informer.namespace in (None, namespace) and informer.synced.is_set():
                informer.copy.made(item)

    def uids(self) -> frozenset[str]:
        """Return the UIDs of all worker pods."""
        return frozenset(pod.uid for pod in self._pods.values() if not pod.role)

    def on_change(self, callback: Callable[[Key], None]) -> None:
        """Have `callback(key of the job)` called whenever a pod of the job appears, changes or vanishes."""
        self._callbacks.append(callback)

    async def _run_nodes(self) -> None:
        """Run the nodes' informer once they may be read.

        The right to read them may be given later, or be missing for a moment while roles are written anew. Pods that
        are known by then are updated with their nodes.
        """
        while True:
            try:
                await self._client.list(NODES, limit=1)
                break
            except ApiError as error:
                if error.status != 403:
                    log.warning("Nodes could not be read: %s", error)
                elif not self.nodes.synced.is_set():
                    # Installed without the chart's ClusterRole: a lost node then shows as a lost stream only.
                    log.warning("Nodes may not be read, so that every node counts as ready: %s", error)
                    self.nodes.synced.set()
            await asyncio.sleep(FORBIDDEN_S if self.nodes.synced.is_set() else RETRY_S)
        if self.nodes.synced.is_set():
            log.info("Nodes may be read now.")
        await self.nodes.run()

    def _slim(self, item: Mapping[str, Any], previous: Pod | None) -> Pod | None:
        pod = slim_pod(item, previous, self._clock())
        if pod is None:
            return None
        if not pod.role and self._drain:
            self._note_place(item, pod, previous)
        return self._with_node(pod)

    def _note_place(self, item: Mapping[str, Any], pod: Pod, previous: Pod | None) -> None:
        """Remember the tolerations of a pod, and the taints that its node had when it was placed there."""
        uid, known = self._places.get((pod.namespace, pod.name), ("", None))
        if not pod.node or (uid == pod.uid and known is not None):
            return
        node = self.nodes.items.get(("", pod.node))
        # For a pod from before this operator's first look, it is not known whether the pod or the taint came first.
        was_seen = previous is not None and previous.uid == pod.uid
        before = frozenset(t.key for t in node.taints) if was_seen and node is not None else frozenset[str]()
        self._places[pod.namespace, pod.name] = pod.uid, Place(pod.node, tolerations_of(item, self._drain), before)

    def _drain_taint(self, node: Node | None, pod: Pod) -> str:
        uid, place = self._places.get((pod.namespace, pod.name), ("", None))
        if node is None or place is None or uid != pod.uid:
            return ""
        still = place.before & {t.key for t in node.taints}
        if still != place.before:  # a taint that went and comes again is a new notice
            place = replace(place, before=still)
            self._places[pod.namespace, pod.name] = uid, place
        return place.concerned(node.taints)

    def _with_node(self, pod: Pod) -> Pod:
        """Return the record with the fields of its node.

        An unknown node counts as ready until the nodes are listed. A vanished node does not.
        """
        node = self.nodes.items.get(("", pod.node))
        ready = node.ready if node is not None else not pod.node or not self.nodes.num_lists
        boot_id = node.boot_id if node is not None else pod.boot_id
        since_s = self._unready_since_s(node, pod, ready)
        starts = node is not None and node.starts
        return replace(
            pod,
            node_ready=ready,
            node_unready_since_s=since_s,
            node_starts=starts,
            boot_id=boot_id,
            drain_taint=self._drain_taint(node, pod),
        )

    def _unready_since_s(self, node: Node | None, pod: Pod, ready: bool) -> float | None:
        """Return the time since which a pod's node is not ready. If the node has vanished, it is that of the pod's own record."""
        if ready:
            return None
        known_s = node.unready_since_s if node is not None else pod.node_unready_since_s
        return self._clock() if known_s is None else known_s

    def _pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        if old is not None:
            self._pods.pop((old.namespace, old.name), None)
            of_job = self._by_job.get((old.namespace, old.job_uid), {})
            of_job.pop(old.name, None)
            if not of_job:
                self._by_job.pop((old.namespace, old.job_uid), None)
            if new is None and not old.role:
                self._remember(old)
                self._places.pop((old.namespace, old.name), None)
        if new is not None:
            self._pods[new.namespace, new.name] = new
            self._by_job.setdefault((new.namespace, new.job_uid), {})[new.name] = new
        for pod in {(p.namespace, p.job) for p in (old, new) if p is not None}:
            for callback in self._callbacks:
                callback(pod)

    def gone(self, namespace: str, name: str) -> Pod | None:
        """Return the pod that had this name, if it has vanished from the API within GONE_S."""
        pod, at_s = self._gone.get((namespace, name), (None, 0.0))
        return pod if self._clock() <= at_s + GONE_S else None

    def _remember(self, pod: Pod) -> None:
        now_s = self._clock()
        self._gone = {name: gone for name, gone in self._gone.items() if now_s <= gone[1] + GONE_S}
        self._gone[pod.namespace, pod.name] = pod, now_s

    def _node_changed(self, old: Node | None, new: Node | None) -> None:
        node = new or old
        assert node is not None
        for informer in self.informers:
            for name, pod in list(informer.items.items()):
                if pod.node == node.name:
                    ready = new is not None and new.ready
                    since_s = self._unready_since_s(new, pod, ready)
                    starts = new is not None and new.starts
                    changed = replace(
                        pod,
                        node_ready=ready,
                        node_unready_since_s=since_s,
                        node_starts=starts,
                        boot_id=node.boot_id,
                        drain_taint=self._drain_taint(new, pod),
                    )
                    if changed != pod:
                        informer.items[name] = changed
                        self._pod_changed(pod, changed)
