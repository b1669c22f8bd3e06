"""Decide which worker pods to create, to release and to delete once all steps are committed (rule END). Pure.

Only members whose script has not returned 0 need a pod. A pod that is asked to leave keeps its member's place until it has ended: a
second one would run the same script beside it.
"""

from __future__ import annotations

from collections.abc import Collection

from regroup_operator.api.members import MemberId
from regroup_operator.model.plan import earliest
from regroup_operator.model.worker import Worker
from regroup_operator.plan.facts.finished import Finished
from regroup_operator.plan.lifecycle.finished import places_of
from regroup_operator.plan.pods.wanted import Roster, WorkerChanges, said_stopped


def plan_finishing(roster: Roster, finished: Finished, leaves: Collection[MemberId]) -> WorkerChanges:
    """Return the changes. Workers that are no members (spares, workers that were about to join) are released. `leaves`: those that
    need not stay, because their scripts have returned 0. Their pods stay for their logs, unless they do not end. A pod whose agent
    has exited without its container, because a process hangs in the kernel, is deleted."""
    places = places_of(finished, roster.workers)
    slots = dict.fromkeys(member.slot for member in finished.open if member not in places)
    members = frozenset(finished.members)
    release = tuple(
        pod for w, pod in roster.pods if pod.alive and w.id not in members and pod.uid not in roster.released
    )
    ends = [
        (pod, roster.given_up_s(w, pod))
        for w, pod in roster.pods
        if pod.usable and (w.id in leaves or _is_told(w) or said_stopped(w))
    ]
    dues = (*(roster.held.get(slot) for slot in slots), *(at_s for _, at_s in ends))
    return WorkerChanges(roster.create(slots), release, roster.delete(ends), earliest(dues, after_s=roster.now_s))


def _is_told(worker: Worker) -> bool:
    return worker.session is not None and worker.session.told_stop_at_s is not None
