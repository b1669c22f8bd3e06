"""Decide which worker pods to create, to release and to delete. Pure.

Every slot of the job has one pod that can serve; spares have slots, too. A pod is replaced in these cases:

- It is gone or failed.
- It is asked to leave.
- Its node is not ready and its agent is silent.
- Its agent has exited and does not come back.
- The spec has changed since it was made, and there is no generation yet.

A pod is asked to leave if it is being deleted or its agent got SIGTERM. It also is if a notice says that one of both will come
(Pod.notice). A kubelet that evicts a pod, or shuts its node down, deletes nothing. If the notice is taken back, the pod serves
again.

A pod leaves by rule RELEASE: only after all members of the newest generation have adopted, and only once status.released has its
UID. No delete is ever forced.

Once the job has ended its workers end by themselves, and their pods stay for their logs. A pod that would not end is deleted:
nothing of the job shall go on, or hold a GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from regroup.protocol.state import Phase
from regroup_operator.api.members import MemberId
from regroup_operator.model.plan import CreateWorker, earliest
from regroup_operator.model.records import Pod
from regroup_operator.model.worker import Standing, Worker

ENDS_WITHIN_S = 335.0
"""An agent that was told to stop has ended by then, whatever its processes do (_regroup_agent/ending.py). They get SIGTERM 300 s
after Suspended, and SIGKILL 5 s later. The agent exits without them another 30 s later."""
LOGS_S = 3600.0
"""Seconds for which the pod that a failure's message names is kept for its log, although another container of it runs on. Its GPUs
are kept with it. The other pods of the job are not kept, and none is with cleanPodPolicy Running or All."""
SLOW_STOP_S = 60.0
"""A pod that has not ended so long after its agent was told to stop is named in the status."""


@dataclass(frozen=True)
class WorkerChanges:
    """`release`: pods to write into status.released, then stop and delete. `delete`: released ones that are still there, and
    those that would outlive the job. `due_s`: when the next of these is due; None: only an event helps."""

    create: tuple[CreateWorker, ...] = ()
    release: tuple[Pod, ...] = ()
    delete: tuple[Pod, ...] = ()
    due_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The pods of a job's workers, and what says for how long each of them is needed."""

    workers: Sequence[Worker]
    released: frozenset[str]
    named: Collection[MemberId]
    """All members that the status still names: their attempt numbers are not used again."""
    counted: Collection[MemberId] = ()
    """The newest pods that failed, were evicted or were given back (early.py, failures/on_exit.py, capacity.py), and may be gone:
    nor are their numbers."""
    bad_nodes: Mapping[int, tuple[str, ...]]
    """Nodes on which the pods of a slot failed, by slot."""
    held: Mapping[int, float] = field(default_factory=dict)
    """Time until which no pod of a slot is made, by slot (early.py, capacity.py)."""
    now_s: float
    hello_timeout_s: float
    term_began_s: float = float("-inf")
    """The time since which agents can have called this operator. Silence before it proves nothing."""
    blip_s: float = 0.0
    """A pod that starts keeps its slot for so long while its node is not ready."""

    @cached_property
    def pods(self) -> list[tuple[Worker, Pod]]:
        """The workers that have a pod."""
        return [(w, w.pod) for w in self.workers if w.pod is not None]

    @cached_property
    def leaving(self) -> tuple[Pod, ...]:
        """Released pods that are still there."""
        return tuple(pod for _, pod in self.pods if pod.uid in self.released and not pod.terminating)

    def create(self, slots: Iterable[int]) -> tuple[CreateWorker, ...]:
        """Return a new pod for each of these slots, unless it is held back."""
        attempts = next_attempts((*(w.id for w, _ in self.pods), *self.named, *self.counted))
        free = (slot for slot in slots if self.held.get(slot, self.now_s) <= self.now_s)
        return tuple(CreateWorker(slot, attempts.get(slot, 0), self.bad_nodes.get(slot, ())) for slot in free)

    def delete(self, ends: Iterable[tuple[Pod, float | None]]) -> tuple[Pod, ...]:
        """Return the released pods, and those of `ends` whose time is over."""
        given_up = (pod for pod, at_s in ends if at_s is not None and at_s <= self.now_s)
        return tuple(dict.fromkeys((*self.leaving, *given_up)))

    def given_up_s(self, worker: Worker, pod: Pod) -> float | None:
        """Return when a pod of an ended job is deleted if it is still there; None: its agent has not been told to stop.

        The kubelet needs a moment from the agent's exit to the pod's end. A pod whose sidecar runs on never comes to it. Nor does
        one whose container crashes again before its agent could call. An agent that has not called a new operator yet is on its
        way, or has exited already and its pod is about to succeed.

        The API may know less of a pod than its agent says. On a busy node a pod is Pending for seconds after its processes have
        started.
        """
        session = worker.session
        if session is None:
            if not pod.node:
                return float("-inf")
            return max(pod.running_since_s or float("-inf"), self.term_began_s) + self.hello_timeout_s
        if session.connected:
            # One that is frozen keeps its stream open, and never exits.
            told_s = session.told_stop_at_s
            return None if told_s is None else told_s + ENDS_WITHIN_S + self.hello_timeout_s
        closed_s = session.condition_at_s if session.closed_at_s is None else session.closed_at_s
        return max(closed_s, pod.running_since_s or closed_s) + self.hello_timeout_s

    def exited_s(self, worker: Worker) -> float | None:
        """Return when an agent that has said that it exits counts as gone, if no other agent has followed.

        Its container cannot end then, because a process in it hangs in the kernel. Otherwise the kubelet starts the container again
        at once.
        """
        session = worker.session
        return session.condition_at_s + self.hello_timeout_s if session is not None and said_stopped(worker) else None

    def serves(self, worker: Worker, pod: Pod) -> bool:
        """Return whether a pod holds its slot."""
        exited_s = self.exited_s(worker)
        if not pod.alive or worker.draining or (exited_s is not None and exited_s <= self.now_s):
            return False
        if pod.node_ready or worker.connected:
            return True
        until_s = self.unready_until_s(worker, pod)
        return until_s is not None and until_s > self.now_s

    def unready_until_s(self, worker: Worker, pod: Pod) -> float | None:
        """Return until when a pod without an agent holds its slot on a node that is not ready. None: it does not hold it, or the
        node is ready.

        A pod that starts may have its image half pulled, and another pod would have to pull it, too. A kubelet that has just
        started says for a moment that its node is not ready, and then starts the containers again.
        """
        if pod.node_unready_since_s is None:
            return None
        if worker.session is None and not worker.is_member:
            return pod.node_unready_since_s + self.blip_s
        return pod.node_unready_since_s + self.hello_timeout_s if pod.node_starts else None


def plan_workers(
    roster: Roster,
    *,
    slots: int,
    settled: bool,
    on_trial: bool = False,
    abandoned: frozenset[str] = frozenset(),
    given_back: frozenset[str] = frozenset(),
    unmade: Collection[int] = (),
    unsure: Collection[str] = (),
) -> WorkerChanges:
    """Return the changes to the pods of a job that trains.

    `settled` says that every member of the newest generation has adopted it, so that no other worker is needed any more. A
    generation that is about to be written is not settled. `on_trial` says that workers keep their pods nevertheless, because the
    script may refuse the smaller size. One that drains is let go, since it must leave. `abandoned` has the UIDs of pods that the
    job no longer waits for (lateness.py). They serve no slot, and stay until rule RELEASE lets them go. `given_back` has the UIDs
    of pods that never had a node and leave at once. No pod is made for the slots in `unmade` now. `unsure` has the UIDs of pods
    that may not get into the next generation although they are ready. A pod that can take the place of such a pod stays.
    """
    gone = roster.released | abandoned | given_back
    serving: dict[int, Worker] = {}
    for worker, pod in sorted(roster.pods, key=lambda entry: _progress(*entry)):
        if pod.uid not in gone and roster.serves(worker, pod):
            serving.setdefault(worker.id.slot, worker)

    def is_needed(worker: Worker, pod: Pod) -> bool:
        """Return whether the pod of a worker that is no member stays."""
        at = serving.get(worker.id.slot, worker)
        if worker.id.slot < slots and not worker.draining and at.id == worker.id and pod.uid not in given_back:
            return True
        is_sure = at.available and at.standing != Standing.FORMING and at.uid not in unsure
        instead = at if worker.id.slot in serving and is_sure else None
        is_free = settled and (worker.draining or not on_trial)
        may_go = is_free or pod.uid in given_back or _never_took_part(worker, abandoned, roster.named, instead)
        return not may_go

    release = tuple(
        pod
        for w, pod in roster.pods
        if not w.is_member and pod.uid not in roster.released and pod.alive and not is_needed(w, pod)
    )
    dues = [due_s for w, pod in roster.pods for due_s in (roster.exited_s(w), roster.unready_until_s(w, pod))]
    dues += [until_s for slot, until_s in roster.held.items() if slot < slots]
    create = roster.create(slot for slot in range(slots) if slot not in serving and slot not in unmade)
    return WorkerChanges(create, release, roster.leaving, earliest(dues, after_s=roster.now_s))


def plan_ended(roster: Roster, read_until_s: Mapping[str, float]) -> WorkerChanges:
    """Return the changes to the pods of a job that is complete, has failed or is suspended.

    Nothing is created or released, and pods that do not end by themselves are deleted. `read_until_s` says by UID until when a pod
    is kept for its log once its agent has stopped.
    """
    usable = [(w, pod) for w, pod in roster.pods if pod.usable]
    ends = [(pod, _kept_until_s(w, roster.given_up_s(w, pod), read_until_s)) for w, pod in usable]
    told = [w.session.told_stop_at_s for w, _ in usable if w.session is not None]
    dues = [*(at_s for _, at_s in ends), *(at_s + SLOW_STOP_S for at_s in told if at_s is not None)]
    return WorkerChanges(delete=roster.delete(ends), due_s=earliest(dues, after_s=roster.now_s))


def next_attempts(used: Iterable[MemberId]) -> dict[int, int]:
    """Return by slot the number of the next pod: one above the highest that was used."""
    attempts: dict[int, int] = {}
    for slot, attempt in used:
        attempts[slot] = max(attempts.get(slot, 0), attempt + 1)
    return attempts


def _never_took_part(
    worker: Worker, abandoned: frozenset[str], named: Collection[MemberId], instead: Worker | None
) -> bool:
    """Return whether a worker that the job does not wait for can hold no state and witness nothing.

    Such a worker never adopted a generation, and none names it. Rule RELEASE keeps it for nobody. While a job stands still the next
    pod of its slot would not be the last. If another worker has its slot (`instead`), it may hold the room that the job stands
    still for.
    """
    pod, session = worker.pod, worker.session
    if pod is None or worker.id in named:
        return False
    never_entered = session is not None and session.condition.entered == session.condition.adopted == 0
    if instead is not None and instead.id != worker.id:
        has_begun = session is not None or bool(pod.node)
        if not has_begun or (worker.available and never_entered):
            return True
    return pod.uid in abandoned and not worker.available and never_entered


def _kept_until_s(worker: Worker, given_up: float | None, read_until_s: Mapping[str, float]) -> float | None:
    """Return `given_up`, or the later time until which the pod is kept for its log: nothing of the job goes on in it."""
    pod, session = worker.pod, worker.session
    if given_up is None or pod is None:
        return given_up
    has_stopped = pod.last_exit_code == 0 and pod.running_since_s is None  # an operator that began later knows no more
    if session is not None:
        has_stopped = session.condition.phase == Phase.STOPPED
    return max(given_up, read_until_s.get(pod.uid, given_up)) if has_stopped else given_up


def said_stopped(worker: Worker) -> bool:
    """Return whether the agent has said that it exits although nobody has told it to stop."""
    session = worker.session
    return session is not None and session.condition.phase == Phase.STOPPED and not session.told_stop


def _progress(worker: Worker, pod: Pod) -> tuple[Any, ...]:
    """Order the pods of a slot: the one that is furthest on its way comes first."""
    return not worker.is_member, not worker.connected, not pod.node_ready, pod.running_since_s is None, worker.id
