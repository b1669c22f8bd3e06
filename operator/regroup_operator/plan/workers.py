"""Decide which worker pods to create, to release and to delete.

Pure. Every slot below spec.replicas has one pod that can serve; a pod is replaced when it is gone or failed, or when its
node is not ready and its agent silent; before the first generation also when the spec has changed since it was made. A
pod leaves by rule RELEASE: only after all members of the newest generation have adopted, and only once its UID stands in
status.released. Never a forced delete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from regroup_operator.model.members import MemberId
from regroup_operator.model.records import Pod
from regroup_operator.model.worker import Worker


@dataclass(frozen=True)
class CreateWorker:
    """Make the pod of a slot; its nodes exclude `avoid_nodes`."""

    slot: int
    attempt: int
    avoid_nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class WorkerChanges:
    """`release`: pods to write into status.released, then stop and delete. `delete`: released ones that are still there."""

    create: tuple[CreateWorker, ...] = ()
    release: tuple[Pod, ...] = ()
    delete: tuple[Pod, ...] = ()


def outdated(pods: Iterable[Pod], spec_digest: str) -> list[str]:
    """Return the UIDs of pods that were made from another spec than the one with this digest (`api.worker_digest`).

    Asked only while there is no generation: nobody needs these pods, and none of them may get into the first one. Later
    the spec that pods are made from is immutable.
    """
    return [pod.uid for pod in pods if pod.alive and pod.spec_digest not in ("", spec_digest)]


def plan_workers(
    *,
    workers: Iterable[Worker],
    replicas: int,
    released: frozenset[str],
    named: Iterable[MemberId],
    bad_nodes: Mapping[int, tuple[str, ...]],
    settled: bool,
    ended: bool,
) -> WorkerChanges:
    """Return the changes to the job's pods.

    `named` are all members that the status still names: their attempt numbers are not used again. `bad_nodes` are the
    nodes on which a slot's pods failed. `settled`: every member of the newest generation has adopted it (a generation that
    is about to be written is not), so that nobody else is needed any more. `ended`: the job is complete or failed, nothing
    is created or released; pods that never started would otherwise wait for ever.
    """
    pods = [w for w in workers if w.pod is not None]
    leaving = tuple(w.pod for w in pods if w.pod and w.pod.uid in released and not w.pod.terminating)
    if ended:
        waiting = tuple(w.pod for w in pods if w.pod and w.pod.phase == "Pending" and not w.pod.terminating)
        return WorkerChanges(delete=tuple(dict.fromkeys((*leaving, *waiting))))
    attempts: dict[int, int] = {}
    for slot, attempt in [*(w.id for w in pods), *named]:
        attempts[slot] = max(attempts.get(slot, -1), attempt)
    serving: dict[int, Worker] = {}
    for worker in sorted(pods, key=lambda w: (not w.is_member, not w.connected, -w.id.attempt)):
        if _serves(worker, released):
            serving.setdefault(worker.id.slot, worker)
    create = tuple(
        CreateWorker(slot, attempts.get(slot, -1) + 1, bad_nodes.get(slot, ()))
        for slot in range(replicas)
        if slot not in serving
    )
    release = tuple(
        w.pod
        for w in pods
        if w.pod is not None
        and settled
        and not w.is_member
        and w.pod.uid not in released
        and w.pod.alive
        and (w.id.slot >= replicas or w.pod.terminating or serving.get(w.id.slot, w).id != w.id)
    )
    return WorkerChanges(create, release, leaving)


def _serves(worker: Worker, released: frozenset[str]) -> bool:
    pod = worker.pod
    return pod is not None and pod.usable and pod.uid not in released and (pod.node_ready or worker.connected)
