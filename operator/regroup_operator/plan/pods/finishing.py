"""Decide which worker pods to create, to release and to delete once all steps are committed (rule END). Pure.

Only members whose script has not returned 0 need a pod. A pod that is asked to leave keeps its member's place until it has ended: a
second one would run the same script beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from regroup_operator.api.members import MemberId
from regroup_operator.model.plan import earliest
from regroup_operator.model.records import Pod
from regroup_operator.model.worker import Worker
from regroup_operator.plan.facts.finished import Finished
from regroup_operator.plan.lifecycle.finished import places_of
from regroup_operator.plan.pods.wanted import CreateWorker, WorkerChanges, given_up_s, next_attempts, said_stopped


def plan_finishing(
    *,
    workers: Sequence[Worker],
    finished: Finished,
    leaves: Collection[MemberId],
    released: frozenset[str],
    named: Iterable[MemberId],
    counted: Iterable[MemberId],
    bad_nodes: Mapping[int, tuple[str, ...]],
    held: Mapping[int, float],
    now_s: float,
    hello_timeout_s: float,
    term_began_s: float,
) -> WorkerChanges:
    """Return the changes. The arguments are those of `plan_workers`. Workers that are no members (spares, workers that were about
    to join) are released. `leaves`: those that need not stay, because their scripts have returned 0. Their pods stay for their
    logs, unless they do not end. A pod whose agent has exited without its container, because a process hangs in the kernel, is
    deleted."""
    pods = [(w, w.pod) for w in workers if w.pod is not None]
    places = places_of(finished, workers)
    attempts = next_attempts((*(w.id for w, _ in pods), *named, *counted))
    slots = [member.slot for member in finished.open if member not in places]
    waits = {slot: held[slot] for slot in slots if held.get(slot, now_s) > now_s}
    create = tuple(
        CreateWorker(slot, attempts.get(slot, 0), bad_nodes.get(slot, ()))
        for slot in dict.fromkeys(slots)
        if slot not in waits
    )
    members = frozenset(finished.members)
    release = tuple(pod for w, pod in pods if pod.alive and w.id not in members and pod.uid not in released)
    leaving = tuple(pod for _, pod in pods if pod.uid in released and not pod.terminating)
    ends = [
        (pod, given_up_s(w, pod, hello_timeout_s, term_began_s))
        for w, pod in pods
        if pod.usable and (w.id in leaves or _is_told(w) or said_stopped(w))
    ]
    given_up: tuple[Pod, ...] = tuple(pod for pod, at_s in ends if at_s is not None and at_s <= now_s)
    dues = (*waits.values(), *(at_s for _, at_s in ends))
    return WorkerChanges(create, release, tuple(dict.fromkeys((*leaving, *given_up))), earliest(dues, after_s=now_s))


def _is_told(worker: Worker) -> bool:
    return worker.session is not None and worker.session.told_stop_at_s is not None
