"""Find the processes, containers and pods that have failed since the last plan. Pure; restarts.py judges what follows.

Each failure counts once. The memory has the counts of each pod, and changes only after the status that carries them has been
written. (The controller forgets a plan that lost its race.) The operator before has counted what happened to pods before this
operator's first look. Agents report exits of processes again, and the status says which of them were seen (status.restarts.exits,
adr/0067).

A node that stops or restarts takes its containers with it, which is no failure of the job. The runtime has then not seen how they
ended (`Pod.end_unseen`), or the node has booted since they were started. A container that restarts for that counts nothing.

In tier Script, and before the tier is known, the loss of a rank fails the collectives of its peers. Their processes exit, too. So
no exit counts in a generation that lost a member with its pod, or whose member is asked to leave. Deletions, drains and lost nodes
are no failures of the job. In tier Script only the first exit of each other generation counts.

Evictions and preemptions are no failures unless a rule of spec.recovery.onExit matches them (on_exit.py). With such rules the
status says how many ends of each pod have been judged. A new operator then also sees the ends that no operator saw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from regroup.protocol.state import Phase
from regroup.protocol.wire import CANNOT_RUN
from regroup_operator.api.members import MemberId
from regroup_operator.api.status import POD_CAUSES, SeenExits
from regroup_operator.model.plan import Clock, Counted, Failure, JobMemory, ScriptMemory
from regroup_operator.model.pod_row import PodRow
from regroup_operator.model.records import PREEMPTED, UNSEEN_CODE, AgentSession, Observation, Pod, ProcessExit
from regroup_operator.model.worker import Current

BY_KUBELET = "TerminationByKubelet"
"""Pod.disruption of a pod that its kubelet evicts, for example because the node's memory is short."""
NODE_SHUTDOWN = ("Terminated", "NodeShutdown", "Shutdown")
"""Pod.status_reason of a pod whose node is shut down, by the release of its kubelet."""
NO_ROWS: Mapping[int, PodRow] = MappingProxyType({})
NO_EXITS = SeenExits()
MAX_LEFT = 32
"""Number of generations that are remembered because they lost a pod. It is more than the rounds of a crash, since exits of peers
may be reported late."""


@dataclass(frozen=True)
class Seen:
    """`failures`: what is new and counts against maxRestarts. `disrupted`: new evictions and preemptions, with their pods."""

    failures: tuple[Failure, ...]
    counted: Mapping[str, Counted]
    """Maps pod UIDs to the ends that have been counted by now."""
    nodes: FailedNodes
    script: ScriptMemory
    disrupted: tuple[tuple[Pod, Failure], ...] = ()
    ended: tuple[Pod, ...] = ()
    """Pods that have ended, or whose trainer container has, although nobody has asked them to leave, and that count for no
    maxRestarts (pod_ends.py)."""


@dataclass(frozen=True)
class FailedNodes:
    """Nodes on which the pods of a slot have failed, by slot."""

    last: Mapping[int, str]
    """The node on which its pod failed last."""
    bad: Mapping[int, tuple[str, float]]
    """The node on which its pods failed twice in a row, and when they last did (monotonic)."""


@dataclass(frozen=True)
class KnownExits:
    """Exits of processes that were seen before, and generations whose exits do not count."""

    seen: SeenExits = NO_EXITS
    """status.restarts.exits."""
    undecided: int = 0
    """The newest generation, while it is open whether the script refuses its size: its exits are looked at later. 0: it is not."""
    spared: Collection[int] = ()
    """Generations whose size the script refused: their exits count nothing (refused_size.py)."""


def exits_status(
    known: KnownExits, obs: Observation, script_failed: int, tier: str | None, *, counted: bool
) -> SeenExits | None:
    """Return status.restarts.exits, None where it stays as it was: no exit is new, and nothing else is `counted`. Pods that are
    gone are left out when something is written, and so are exits of the generation that is undecided."""
    newest, before = dict[str, int](), known.seen.newest
    for pod in obs.pods:
        session = obs.sessions.get(pod.uid)
        exits = session.exits[: len(session.exits) - _num_held(session, known.undecided)] if session is not None else ()
        if not exits and not before:
            continue  # of 5000 pods the keys alone take milliseconds
        key = exit_key(pod)
        # After a new connection an agent reports its exits again, and not all of them may have arrived yet.
        if number := max([before.get(key, 0), *(e.number for e in exits)]):
            newest[key] = number
    if not counted and all(before.get(key, 0) >= number for key, number in newest.items()):
        return None
    return SeenExits(newest=newest, generation=script_failed if tier == "Script" else None)


def exit_key(pod: Pod) -> str:
    """Return how status.restarts.exits names a pod: its worker and the end of its UID. Names are given again once a pod is gone and
    no generation names it, and 5000 whole UIDs would be too much for a status."""
    return f"{pod.id}/{pod.uid[-4:]}"


def see_failures(
    obs: Observation,
    memory: JobMemory,
    clock: Clock,
    *,
    tier: str | None = None,
    current: Current | None = None,
    ends: Mapping[str, int] | None = None,
    released: Collection[str] = (),
    known_exits: KnownExits = KnownExits(),
) -> Seen:
    """Return the new failures, and what has been counted by now.

    `memory` is what the plan before has left, `tier` is status.tier, and `current` is the newest generation (None: there was none).
    `ends` says how many ends of each pod were judged before this operator's first look (None: all of them). `released` has the UIDs
    of pods that are not needed any more. `known_exits` has the exits that were seen before, and those that do not count.
    """
    look = _Look(memory, clock, released, ends, known_exits.undecided)
    new: list[Failure] = []
    exited: list[Failure] = []
    ended: list[Pod] = []
    for pod in obs.pods:
        session = obs.sessions.get(pod.uid)
        if session is not None:
            fresh = _fresh(session, look.counted(pod).exits, look.undecided)
            exited += [failure_of(pod, e, clock) for e in fresh if _is_new(e, pod, known_exits)]
        leaves = _is_asked_to_leave(pod, session)
        for failures, is_over in (
            look.container_failures(pod, leaves=leaves),
            look.init_failures(pod, leaves=leaves),
            look.pod_failures(pod, leaves=leaves),
        ):
            new += failures
            if is_over and _ended_by_itself(pod, session, released):
                ended.append(pod)
    # What can never run is the consequence of no other end, and its agent tells of it once: it starts nothing any more.
    new += [failure for failure in exited if failure.reason == CANNOT_RUN]
    disrupted = tuple(
        (pod, _of_pod(pod, clock, None, reason=pod.disrupted, detail=pod.disruption or pod.status_reason))
        for pod in obs.pods
        if look.is_newly_disrupted(pod)
    )
    script = replace(memory.script, failed=max(memory.script.failed, known_exits.seen.generation or 0))
    counted, script = _counted([e for e in exited if e.reason != CANNOT_RUN], script, obs, tier, current)
    return Seen(
        failures=(*new, *counted),
        counted={pod.uid: look.count(pod, obs.sessions.get(pod.uid)) for pod in obs.pods},
        nodes=look.failed_nodes(obs.pods),
        script=script,
        disrupted=disrupted,
        ended=tuple(ended),
    )


_Ends = tuple[Sequence[Failure], bool]
"""Failures that count against maxRestarts, and whether there was an end that does not count there."""


@dataclass(frozen=True)
class _Look:
    """One look at the pods of a job. `memory` has what earlier looks have counted, so that each end counts once."""

    memory: JobMemory
    clock: Clock
    released: Collection[str]
    ends: Mapping[str, int] | None
    undecided: int = 0

    @property
    def has_looked(self) -> bool:
        """False: this operator looks at the job for the first time, and what is there was counted by the operator before."""
        return self.memory.has_looked

    def counted(self, pod: Pod) -> Counted:
        """Return what earlier looks have counted of a pod. What was there before the first look counts as counted."""
        worker = self.memory.workers.get(pod.uid)
        if worker is not None and worker.counted is not None:
            return worker.counted
        return Counted() if self.has_looked else Counted(0, pod.container_restarts, pod.init_failures)

    def count(self, pod: Pod, session: AgentSession | None) -> Counted:
        """Return what this look has counted, too."""
        before = self.counted(pod)
        return Counted(
            exits=before.exits if session is None else session.num_exits - _num_held(session, self.undecided),
            container_restarts=pod.container_restarts,
            init_failures=pod.init_failures,
            boot_id=pod.boot_id
            if pod.container_restarts > before.container_restarts
            else before.boot_id or pod.boot_id,
            has_ended=before.has_ended or not pod.alive,
            is_disrupted=pod.disrupted != "",
        )

    def failed_nodes(self, pods: Iterable[Pod]) -> FailedNodes:
        """Return the node of each pod that has failed since the last look, with those of before.

        A node on which two pods of a slot failed in a row is avoided. Only the last such node of a slot is, because a slot must not
        run out of nodes.
        """
        last, bad = self.memory.of_slots(lambda s: s.failed_on), self.memory.of_slots(lambda s: s.bad_node)
        for pod in pods:
            if pod.phase == "Failed" and pod.node and not self.counted(pod).has_ended:
                if last.get(pod.slot) == pod.node:
                    bad[pod.slot] = (pod.node, self.clock.now_s)
                last[pod.slot] = pod.node
        return FailedNodes(last, bad)

    def container_failures(self, pod: Pod, *, leaves: bool) -> _Ends:
        """Judge the ends of the trainer container in a pod that goes on. Of several ends that no operator saw, only the last
        is known."""
        if self._is_missed(pod) and not leaves and pod.phase != "Failed" and _failed_alone(pod):
            return (_failure(pod, self.clock),), False
        restarts = pod.container_restarts - self.counted(pod).container_restarts
        if restarts <= 0:
            return (), False
        booted = self._has_booted(pod)
        if pod.last_exit_code == 0 or leaves or pod.end_unseen or booted:
            return (), not booted
        return [_failure(pod, self.clock)] * restarts, False

    def init_failures(self, pod: Pod, *, leaves: bool) -> _Ends:
        """Judge the ends of a pod's init containers."""
        if not pod.init_failed or leaves or pod.init_exit_code == UNSEEN_CODE or self._has_booted(pod):
            return (), False
        failure = _of_pod(pod, self.clock, pod.init_exit_code, init=pod.init_failed)
        return [failure] * (pod.init_failures - self.counted(pod).init_failures), False

    def pod_failures(self, pod: Pod, *, leaves: bool) -> _Ends:
        """Judge the end of a pod."""
        if pod.alive or self.counted(pod).has_ended:
            return (), False
        if pod.phase != "Failed" or not _has_error_code(pod) or leaves:
            return (), self.has_looked
        # It ended by itself: what ends a pod from outside does it by a signal.
        return ((_failure(pod, self.clock),) if pod.node and (self.has_looked or self._is_missed(pod)) else ()), False

    def is_newly_disrupted(self, pod: Pod) -> bool:
        """Return whether the eviction or preemption of a pod that is still needed has not been seen before."""
        is_new = pod.disrupted != "" and not self.counted(pod).is_disrupted and pod.uid not in self.released
        return is_new and (self.has_looked or self._is_missed(pod))

    def _has_booted(self, pod: Pod) -> bool:
        return pod.boot_id not in ("", self.counted(pod).boot_id or pod.boot_id)

    def _is_missed(self, pod: Pod) -> bool:
        """Return whether a pod has ended before this operator's first look, and no operator has judged that end."""
        return not self.has_looked and self.ends is not None and pod.num_ends > self.ends.get(pod.name, 0)


def _is_asked_to_leave(pod: Pod, session: AgentSession | None) -> bool:
    """Return whether a pod is asked to leave: how it ends is then no failure of the job."""
    is_drained = session is not None and session.draining is not None
    return pod.terminating or pod.disrupted != "" or pod.notice != "" or is_drained


def _ended_by_itself(pod: Pod, session: AgentSession | None, released: Collection[str]) -> bool:
    """Return whether a pod ended by itself.

    It did not if it was deleted, evicted or preempted through the API, told to stop by the operator, or if its node ended.
    """
    if pod.terminating or pod.uid in released or pod.end_unseen or not pod.node_ready:
        return False
    if pod.disruption not in ("", BY_KUBELET) or pod.disrupted == PREEMPTED or pod.status_reason in NODE_SHUTDOWN:
        return False
    return session is None or not (session.told_stop or session.condition.phase == Phase.DONE)


def _has_error_code(pod: Pod) -> bool:
    return 0 < (pod.last_exit_code or 0) < 128


def _failed_alone(pod: Pod) -> bool:
    """Return whether the trainer container's last end, which no operator saw, was not caused by its node. A node that shuts down
    ends it by a signal, so that a signal proves nothing."""
    return _has_error_code(pod) or pod.last_exit_reason == "OOMKilled"


def avoided_nodes(nodes: FailedNodes, now_s: float, window_s: float) -> dict[int, tuple[str, ...]]:
    """Return by slot the nodes that its next pod should not run on.

    A node is avoided for `window_s` after a pod's last failure there, as long as failures count. Otherwise a repaired node would
    never be used again.
    """
    return {slot: (node,) for slot, (node, at_s) in nodes.bad.items() if now_s < at_s + window_s}


def count_created(
    create: Iterable[MemberId],
    pods: Iterable[Pod],
    *,
    counted: frozenset[MemberId] = frozenset(),
    disrupted: Mapping[int, PodRow] = NO_ROWS,
    released: Collection[str] = (),
    members: Iterable[MemberId] = (),
    leaving: Collection[str] = (),
) -> tuple[Counter[str], frozenset[MemberId]]:
    """Return how many of the pods to create replace a lost one and were not counted yet, by the cause of the loss. Also return the
    pods that were asked for and are not seen yet.

    The informer sees a new pod late, so that it is asked for again meanwhile. `counted` has the pods that were asked for before.

    A slot that was scaled away and comes back is no replacement, whatever the number of its pod. Its pods are `released` or gone,
    and no member of the newest generation has it. A pod that hands over is no loss either: it is there and asked to leave
    (`leaving`, by UID). Evictions and preemptions count nowhere, as drains do not (`disrupted` has their rows). Whether such a
    worker could hand over in its grace period is chance.
    """
    create, pods = tuple(create), tuple(pods)
    seen = {pod.id for pod in pods}
    taken = {pod.slot for pod in pods if pod.uid not in released} | {member.slot for member in members}
    taken -= {pod.slot for pod in pods if pod.uid in leaving}
    lost = [m for m in create if m.attempt > 0 and m.slot in taken and m not in counted]
    last: dict[int, Pod] = {}
    for pod in sorted(pods, key=lambda pod: pod.attempt) if lost else ():
        if pod.uid not in released:
            last[pod.slot] = pod
    causes = [_loss(m, last.get(m.slot), disrupted.get(m.slot)) for m in lost]
    replaced = Counter(cause for cause in causes if cause in POD_CAUSES)
    waiting = (member for member in counted if member not in seen)
    return replaced, frozenset({*create, *waiting})


def _loss(new: MemberId, last: Pod | None, row: PodRow | None) -> str:
    """Return what became of the pod before a new one, its slot's `last`: EVICTED, PREEMPTED, or one of api.status.POD_CAUSES.
    `row`: of its pods that were evicted or preempted, which the API may have no more."""
    if row is not None and row.reason and row.attempt == new.attempt - 1:
        return row.reason
    if last is None:
        return "Deleted"
    if last.disrupted:
        return last.disrupted
    if last.phase == "Failed":
        return "PodFailed"
    if not last.node_ready:
        return "NodeNotReady"
    return "Deleted" if last.terminating else "Unresponsive"


def _is_new(ended: ProcessExit, pod: Pod, known: KnownExits) -> bool:
    """Return whether an exit counts, and no operator before this one has counted it."""
    return ended.generation not in known.spared and ended.number > known.seen.newest.get(exit_key(pod), 0)


def _fresh(session: AgentSession, counted: int, undecided: int = 0) -> Sequence[ProcessExit]:
    """Return the exits that this operator has not looked at yet, up to those that are looked at later."""
    fresh = session.exits[-(session.num_exits - counted) :] if session.num_exits > counted else ()
    return fresh[: len(fresh) - _num_held(session, undecided)]


def _num_held(session: AgentSession, undecided: int) -> int:
    """Return the number of the newest exits that are looked at later: those of a generation of which it is undecided whether its
    exits count."""
    return sum(e.generation >= undecided for e in session.exits) if undecided else 0


def failure_of(pod: Pod, ended: ProcessExit, clock: Clock) -> Failure:
    """Return the end of a process as a failure."""
    return Failure(
        clock.wall_at(ended.at_s),
        str(pod.id),
        ended.exit_code,
        ended.last_line,
        ended.tail,
        ended.reason,
        ended.detail,
        pod.namespace,
        pod.name,
        generation=ended.generation,
        incarnation=ended.incarnation,
        hung=ended.hung != "",
        alone=ended.alone,
    )


def _counted(
    exited: Sequence[Failure], script: ScriptMemory, obs: Observation, tier: str | None, current: Current | None
) -> tuple[Sequence[Failure], ScriptMemory]:
    """Return the exits of processes that count, by the rules of the tier. In tier Script only the first exit of a generation
    counts."""
    if tier == "Session":
        return exited, script
    if left := _left(obs, current):
        script = replace(script, left=tuple(sorted(left.union(script.left))[-MAX_LEFT:]))
    exited = [e for e in exited if e.generation not in script.left]
    if tier is None:  # it is not known at first
        return exited, script
    first: dict[int, Failure] = {}
    for failure in sorted(exited, key=lambda e: (e.generation, e.at)):
        if failure.generation > script.failed:
            first.setdefault(failure.generation, failure)
    return tuple(first.values()), replace(script, failed=max(first, default=script.failed))


def _left(obs: Observation, current: Current | None) -> frozenset[int]:
    """Return the generations that lost a member with its pod or agent.

    The newest one is among them if a member's pod is gone, failed or leaves, or its agent stopped. So are the generations of
    workers whose streams have ended. A node without power is known to be lost only seconds after the peers have failed, when there
    may be a newer generation.
    """
    if current is None:
        return frozenset()
    there = {pod.id: pod for pod in obs.pods}
    left = {s.condition.generation for s in obs.sessions.values() if s.closed_at_s is not None}
    if not all(m in there and _stays(there[m], obs.sessions.get(there[m].uid), current) for m in current.members):
        left.add(current.number)
    return frozenset(left - {0})


def _stays(pod: Pod, session: AgentSession | None, current: Current) -> bool:
    """Return whether pod, node and agent are those that the generation began with."""
    if not pod.usable or not pod.node_ready:
        return False
    if session is None or session.closed_at_s is not None:
        return session is None  # one that has not called this operator yet: nothing is known against it
    return session.rebooted_at_s is None or session.rebooted_at_s < current.announced_at_s


def _failure(pod: Pod, clock: Clock) -> Failure:
    """Return the failure of a whole container."""
    if pod.last_exit_reason != "OOMKilled":
        return _of_pod(pod, clock, pod.last_exit_code)
    limit = f"limit {pod.memory_limit}" if pod.memory_limit else "no limit of its own"
    return _of_pod(pod, clock, pod.last_exit_code, reason="OOMKilled", detail=limit)


def _of_pod(
    pod: Pod, clock: Clock, exit_code: int | None, *, reason: str = "", detail: str = "", init: str = ""
) -> Failure:
    return Failure(
        clock.wall,
        str(pod.id),
        exit_code,
        reason=reason,
        detail=detail,
        namespace=pod.namespace,
        pod=pod.name,
        container=True,
        init=init,
    )


def excused_generations(sessions: Iterable[AgentSession], left: Iterable[int], tier: str | None) -> frozenset[int]:
    """Return the generations in which a script's processes exit for want of a peer.

    In them a member went with its pod, or a process is known to have ended by a signal. Without a tier a signal does not count,
    because it may be the script's own crash.
    """
    if tier == "Session":
        return frozenset()
    signalled = (e.generation for s in sessions for e in s.exits if e.exit_code < 0) if tier == "Script" else ()
    return frozenset((*signalled, *left))
