"""Decide which worker pods to create, to release and to delete.

Pure. Every slot of the job (spares have slots, too) has one pod that can serve. A pod is replaced when it is gone or failed, when
it is asked to leave, when its node is not ready and its agent silent, or when its agent has exited and does not come back; before
the first generation also when the spec has changed since it was made. Asked to leave is a pod that is being deleted, one whose
agent got SIGTERM (a kubelet that evicts a pod, or shuts its node down, deletes nothing), and one of which a notice says that one
of both will come (Pod.notice): if the notice is taken back, it serves again. A pod leaves by rule RELEASE: only after
all members of the newest generation have adopted, and only once its UID stands in status.released. Never a forced delete.

Once the job has ended its workers end by themselves, and their pods stay for their logs. A pod that would not end is
deleted: nothing of the job shall go on, or hold a GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from regroup.protocol.state import Phase
from regroup_operator.api.members import MemberId
from regroup_operator.model.plan import earliest
from regroup_operator.model.records import Pod
from regroup_operator.model.worker import Standing, Worker

ENDS_WITHIN_S = 335.0
"""An agent that was told to stop has ended by then, whatever its processes do (_regroup_agent/ending.py): 300 s after Suspended
they get SIGTERM, 5 s later SIGKILL, and 30 s later it exits without them."""
LOGS_S = 3600.0
"""After a failure the pod that the message names is kept for so long although another container of it runs on: its log says why.
Its GPUs are kept with it. The other pods of the job are not, and none with cleanPodPolicy Running or All."""
SLOW_STOP_S = 60.0
"""A pod that has not ended so long after its agent was told to stop is named in the status."""


@dataclass(frozen=True)
class CreateWorker:
    """Make the pod of a slot, preferably not on `avoid_nodes`."""

    slot: int
    attempt: int
    avoid_nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class WorkerChanges:
    """`release`: pods to write into status.released, then stop and delete. `delete`: released ones that are still there, and
    those that would outlive the job. `look_again_s`: when the next of these is due; None: only an event helps."""

    create: tuple[CreateWorker, ...] = ()
    release: tuple[Pod, ...] = ()
    delete: tuple[Pod, ...] = ()
    look_again_s: float | None = None


def plan_workers(
    *,
    workers: Iterable[Worker],
    slots: int,
    released: frozenset[str],
    named: Iterable[MemberId],
    counted: Iterable[MemberId] = (),
    bad_nodes: Mapping[int, tuple[str, ...]],
    abandoned: frozenset[str] = frozenset(),
    settled: bool,
    ended: bool,
    now_s: float,
    hello_timeout_s: float,
    term_began_s: float = float("-inf"),
    blip_s: float = 0.0,
    held: Mapping[int, float] | None = None,
    put_off: frozenset[int] = frozenset(),
    unsure: Collection[str] = (),
    given_back: frozenset[str] = frozenset(),
    idle: Collection[int] = (),
    read_until_s: Mapping[str, float] | None = None,
) -> WorkerChanges:
    """Return the changes to the job's pods.

    `named` are all members that the status still names: their attempt numbers are not used again. `counted`: nor are those of the
    newest pods that failed, were evicted or were given back (early.py, failures/on_exit.py, capacity.py), which may be gone.
    `bad_nodes` are the nodes on which a slot's pods failed. `abandoned` are UIDs of pods that are not waited for any more
    (lateness.py): they serve no slot, and stay until rule RELEASE lets them go. `settled`: every member of the newest generation
    has adopted it (a generation that is about to be written is not), so that nobody else is needed any more. `ended`: the job is
    complete or failed, nothing is created or released; what does not end by itself within `hello_timeout_s` of its agent's last
    word is deleted. `term_began_s`: since when agents can have called this operator; silence before that proves nothing.
    `blip_s`: a pod that starts keeps its slot for so long while its node is not ready. `held`: by slot, until when no pod is made
    (early.py, capacity.py). `put_off`: slots of which no pod is made before others have a node. `given_back`: UIDs of pods that
    never had a node and leave at once. `unsure`: UIDs of pods that may not get into the next generation although they are ready:
    one that can take the place of such a pod stays. `idle`: slots in which no script runs any more (Script tier). They need no pod
    unless another one fails. `read_until_s`: by UID, until when the pod of an ended job is kept for its log once its agent has
    stopped.
    """
    pods = [w for w in workers if w.pod is not None]
    leaving = tuple(w.pod for w in pods if w.pod and w.pod.uid in released and not w.pod.terminating)
    if ended:
        remaining = [
            (w.pod, _kept_until_s(w, given_up_s(w, w.pod, hello_timeout_s, term_began_s), read_until_s or {}))
            for w in pods
            if w.pod and w.pod.usable
        ]
        given_up = (pod for pod, at_s in remaining if at_s is not None and at_s <= now_s)
        told = [w.session.told_stop_at_s for w in pods if w.pod and w.pod.usable and w.session]
        dues = [*(at_s for _, at_s in remaining), *(None if at_s is None else at_s + SLOW_STOP_S for at_s in told)]
        later = [at_s for at_s in dues if at_s is not None and at_s > now_s]
        return WorkerChanges(delete=tuple(dict.fromkeys((*leaving, *given_up))), look_again_s=min(later, default=None))
    named = tuple(named)
    attempts = next_attempts((*(w.id for w in pods), *named, *counted))
    serving: dict[int, Worker] = {}
    for worker in sorted(pods, key=_progress):
        gone = worker.pod is None or worker.pod.uid in released | abandoned | given_back
        if (
            not gone
            and _serves(worker, now_s, blip_s, hello_timeout_s)
            and not _has_exited(worker, now_s, hello_timeout_s)
        ):
            serving.setdefault(worker.id.slot, worker)
    held = {slot: until_s for slot, until_s in (held or {}).items() if until_s > now_s and slot < slots}
    create = tuple(
        CreateWorker(slot, attempts.get(slot, 0), bad_nodes.get(slot, ()))
        for slot in range(slots)
        if slot not in serving and slot not in held and slot not in put_off and slot not in idle
    )
    sure = {
        slot: w for slot, w in serving.items() if w.available and w.standing != Standing.FORMING and not _in(w, unsure)
    }
    release = tuple(
        w.pod
        for w in pods
        if w.pod is not None
        and (settled or w.pod.uid in given_back or _never_took_part(w, abandoned, named, sure.get(w.id.slot)))
        and not w.is_member
        and w.pod.uid not in released
        and w.pod.alive
        and (w.id.slot >= slots or w.draining or w.pod.uid in given_back or serving.get(w.id.slot, w).id != w.id)
    )
    dues = [w.session.condition_at_s + hello_timeout_s for w in pods if w.session and said_stopped(w)]
    dues += [due_s for w in pods if (due_s := _unready_until_s(w, blip_s, hello_timeout_s)) is not None]
    return WorkerChanges(create, release, leaving, earliest((*dues, *held.values()), after_s=now_s))


def next_attempts(used: Iterable[MemberId]) -> dict[int, int]:
    """Return by slot the number of the next pod: one above the highest that was used."""
    attempts: dict[int, int] = {}
    for slot, attempt in used:
        attempts[slot] = max(attempts.get(slot, 0), attempt + 1)
    return attempts


def _never_took_part(
    worker: Worker, abandoned: frozenset[str], named: Collection[MemberId], instead: Worker | None
) -> bool:
    """Return whether a worker that is not waited for can hold no state and witness nothing: it never adopted a generation and is
    named in none. Rule RELEASE keeps it for nobody. While a job stands still the next one of its slot would not be the last; and
    where another one has its slot (`instead`), it may hold the room that the job stands still for."""
    pod, session = worker.pod, worker.session
    if pod is None or worker.id in named:
        return False
    never_entered = session is not None and session.condition.entered == session.condition.adopted == 0
    if instead is not None and instead.id != worker.id:
        has_begun = session is not None or bool(pod.node)
        if not has_begun or (worker.available and never_entered):
            return True
    return pod.uid in abandoned and not worker.available and never_entered


def given_up_s(worker: Worker, pod: Pod, hello_timeout_s: float, term_began_s: float) -> float | None:
    """Return when a pod of an ended job is deleted if it is still there; None: its agent has not been told to stop.

    The kubelet needs a moment from the agent's exit to the pod's end. A pod whose sidecar runs on never comes to it, nor
    one whose container crashes again before its agent could call. An agent that has not called a new operator yet is on its way,
    or has exited already and its pod is about to succeed. What the API says of a pod may be older than what its agent says: on a
    busy node it is Pending for seconds after its processes have started.
    """
    session = worker.session
    if session is None:
        if not pod.node:
            return float("-inf")
        return max(pod.running_since_s or float("-inf"), term_began_s) + hello_timeout_s
    if session.connected:
        # One that is frozen keeps its stream open, and never exits.
        told_s = session.told_stop_at_s
        return None if told_s is None else told_s + ENDS_WITHIN_S + hello_timeout_s
    closed_s = session.condition_at_s if session.closed_at_s is None else session.closed_at_s
    return max(closed_s, pod.running_since_s or closed_s) + hello_timeout_s


def _kept_until_s(worker: Worker, given_up: float | None, read_until_s: Mapping[str, float]) -> float | None:
    """Return `given_up`, or the later time until which the pod is kept for its log: nothing of the job goes on in it."""
    pod, session = worker.pod, worker.session
    if given_up is None or pod is None:
        return given_up
    has_stopped = pod.last_exit_code == 0 and pod.running_since_s is None  # an operator that began later knows no more
    if session is not None:
        has_stopped = session.condition.phase == Phase.STOPPED
    return max(given_up, read_until_s.get(pod.uid, given_up)) if has_stopped else given_up


def _in(worker: Worker, uids: Collection[str]) -> bool:
    return worker.pod is not None and worker.pod.uid in uids


def said_stopped(worker: Worker) -> bool:
    """Return whether the agent has said that it exits although nobody has told it to stop."""
    session = worker.session
    return session is not None and session.condition.phase == Phase.STOPPED and not session.told_stop


def _has_exited(worker: Worker, now_s: float, hello_timeout_s: float) -> bool:
    """Return whether the agent has exited by itself and no other has called since: its container cannot end, because a
    process in it hangs in the kernel. Otherwise the kubelet starts the container again at once."""
    session = worker.session
    return said_stopped(worker) and session is not None and now_s >= session.condition_at_s + hello_timeout_s


def _serves(worker: Worker, now_s: float, blip_s: float, hello_timeout_s: float) -> bool:
    """Return whether a pod holds its slot."""
    pod = worker.pod
    if pod is None or not pod.alive or worker.draining:
        return False
    if pod.node_ready or worker.connected:
        return True
    until_s = _unready_until_s(worker, blip_s, hello_timeout_s)
    return until_s is not None and until_s > now_s


def _unready_until_s(worker: Worker, blip_s: float, hello_timeout_s: float) -> float | None:
    """Return how long a pod without an agent holds its slot on a node that is not ready; None: not at all, or it is ready.

    A pod that starts may have its image half pulled, and another pod would have to pull it, too. A kubelet that has just
    started says for a moment that its node is not ready, and then starts the containers again.
    """
    pod = worker.pod
    if pod is None or pod.node_unready_since_s is None:
        return None
    if worker.session is None and not worker.is_member:
        return pod.node_unready_since_s + blip_s
    return pod.node_unready_since_s + hello_timeout_s if pod.node_starts else None


def _progress(worker: Worker) -> tuple[Any, ...]:
    """Order the pods of a slot: the one that is furthest on its way comes first."""
    pod = worker.pod
    assert pod is not None
    return not worker.is_member, not worker.connected, not pod.node_ready, pod.running_since_s is None, worker.id
