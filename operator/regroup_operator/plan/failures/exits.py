"""See which processes, containers and pods have failed since the last plan. Pure; what follows is judged in restarts.py.

Everything is counted once: what was counted is remembered by pod UID, and only after the status that carries the count
has been written (the controller forgets a plan that lost its race). What happened to pods before this operator's first look was
counted by the one before. Exits of processes are reported again by their agents, and the status says which of them were seen
(status.restarts.exits, adr/0067).

A node that stops or restarts takes its containers with it, which is no failure of the job: the runtime has not seen how they
ended (`Pod.end_unseen`), or the node has booted since they were started. So a container that restarts for that counts nothing.

In tier Script, and before the tier is known, the loss of a rank fails the collectives of its peers, and their processes exit, too.
So no exit counts in a generation that lost a member with its pod, or of which a member is asked to leave: deletions, drains and
lost nodes are no failures of the job. In tier Script only the first exit of each other generation counts.

Evictions and preemptions are no failures unless a rule of spec.recovery.onExit matches them (on_exit.py). With such rules the
status says how many ends of each pod have been judged, so that a new operator also sees the ends that no operator saw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from regroup.protocol.state import Phase
from regroup.protocol.wire import CANNOT_RUN
from regroup_operator.api.members import MemberId
from regroup_operator.api.status import POD_CAUSES
from regroup_operator.model.plan import Clock, EarlyFailure, Failure, Memory
from regroup_operator.model.records import PREEMPTED, UNSEEN_CODE, Observation, Pod, ProcessExit, Session
from regroup_operator.model.worker import Current

BY_KUBELET = "TerminationByKubelet"
"""Pod.disruption of a pod that its kubelet evicts, for example because the node's memory is short."""
NODE_SHUTDOWN = ("Terminated", "NodeShutdown", "Shutdown")
"""Pod.status_reason of a pod whose node is shut down, by the release of its kubelet."""
LOOKED = "-"
"""In Memory.seen_pods: this operator has looked at the job before."""
MAX_LEFT = 32
"""How many of the generations that lost a pod are remembered: more than the rounds of a crash, since exits of peers may be told
late."""


@dataclass(frozen=True)
class Seen:
    """`failures`: what is new and counts against maxRestarts. `disrupted`: new evictions and preemptions, with their pods."""

    failures: tuple[Failure, ...]
    memory: Memory
    disrupted: tuple[tuple[Pod, Failure], ...] = ()
    ended: tuple[Pod, ...] = ()
    """Pods that have ended, or whose trainer container has, although nobody has asked them to leave, and that count for no
    maxRestarts (pod_ends.py)."""


@dataclass(frozen=True)
class SeenExits:
    """What status.restarts says of exits of processes."""

    newest: Mapping[str, int] = field(default_factory=dict)
    """By pod (`exit_key`): the number of the newest exit."""
    generation: int = 0
    """Tier Script: the newest generation of which an exit has been counted."""
    unnumbered: bool = False
    """An operator that knew no numbers has counted exits of this job."""


def read_exits(restarts: Mapping[str, Any] | None) -> SeenExits:
    """Return what status.restarts says of exits."""
    restarts = restarts or {}
    said = restarts.get("exits")
    if said is None:
        return SeenExits(unnumbered=restarts.get("processes", 0) > 0)
    return SeenExits(said.get("newest") or {}, said.get("generation") or 0, bool(said.get("unnumbered")))


def exits_status(
    known: SeenExits, obs: Observation, memory: Memory, tier: str | None, *, counted: bool
) -> dict[str, Any] | None:
    """Return status.restarts.exits, None where it stays as it was: no exit is new, and nothing else is `counted`. Pods that are
    gone are left out when something is written."""
    newest = {}
    for pod in obs.pods:
        session = obs.sessions.get(pod.uid)
        exits = session.exits if session is not None else ()
        if not exits and not known.newest:
            continue  # of 5000 pods the keys alone take milliseconds
        key = exit_key(pod)
        # After a new connection an agent reports its exits again, and not all of them may have arrived yet.
        if number := max([known.newest.get(key, 0), *(e.number for e in exits)]):
            newest[key] = number
    if not counted and all(known.newest.get(key, 0) >= number for key, number in newest.items()):
        return None
    said: dict[str, Any] = {"newest": newest}
    if tier == "Script":
        said["generation"] = memory.script_failed
    return said | {"unnumbered": True} if known.unnumbered else said


def exit_key(pod: Pod) -> str:
    """Return how status.restarts.exits names a pod: its worker and the end of its UID. Names are given again once a pod is gone and
    no generation names it, and 5000 whole UIDs would be too much for a status."""
    return f"{pod.id}/{pod.uid[-4:]}"


def see_failures(
    obs: Observation,
    memory: Memory,
    clock: Clock,
    *,
    tier: str | None = None,
    current: Current | None = None,
    ends: Mapping[str, int] | None = None,
    released: Collection[str] = (),
    known_exits: SeenExits = SeenExits(),
) -> Seen:
    """Return the new failures, and the memory in which they are counted. `tier` is status.tier, `current` the newest
    generation, None before the first; `ends` the ends of each pod that were judged before this operator's first look, None: all
    of them; `released` the UIDs of pods that are not needed any more; `known_exits` what the status says of exits."""
    memory = replace(memory, script_failed=max(memory.script_failed, known_exits.generation))
    looked = LOOKED in memory.seen_pods
    exits, restarts = dict(memory.num_exits), dict(memory.container_restarts)
    boot_ids, bad_nodes, failed_on = dict(memory.boot_ids), dict(memory.bad_nodes), dict(memory.failed_on)
    new: list[Failure] = []
    exited: list[tuple[int, Failure]] = []
    disrupted: list[tuple[Pod, Failure]] = []
    ended: list[Pod] = []
    init_failures: dict[str, int] = {}
    for pod in obs.pods:
        session = obs.sessions.get(pod.uid)
        leaves = (
            pod.terminating
            or pod.disrupted != ""
            or pod.notice != ""
            or (session is not None and session.draining is not None)
        )
        if session is not None:
            fresh = _fresh(session, exits.get(pod.uid, 0))
            exited += [(e.generation, _exit(pod, e, clock)) for e in fresh if _is_new(e, pod, known_exits, obs)]
            exits[pod.uid] = session.num_exits
        missed = not looked and ends is not None and pod.num_ends > ends.get(pod.name, 0)
        known = restarts.get(pod.uid, 0 if looked else pod.container_restarts)
        if missed and not leaves and pod.phase != "Failed" and _failed_alone(pod):
            new.append(_failure(pod, clock))  # of several only the last is known
        if pod.disrupted and pod.uid not in memory.disrupted and (looked or missed) and pod.uid not in released:
            disrupted.append((pod, _disruption(pod, clock)))
        boot_ids[pod.uid] = started_in = boot_ids.get(pod.uid) or pod.boot_id
        booted = pod.boot_id not in ("", started_in)
        if pod.container_restarts > known:
            boot_ids[pod.uid] = pod.boot_id
            if pod.last_exit_code != 0 and not (leaves or pod.end_unseen or booted):
                new += [_failure(pod, clock)] * (pod.container_restarts - known)
            elif not booted and _ended_by_itself(pod, session, released):
                ended.append(pod)
        if pod.init_failures:
            of_init = memory.init_failures.get(pod.uid, 0 if looked else pod.init_failures)
            if pod.init_failed and not (leaves or booted or pod.init_exit_code == UNSEEN_CODE):
                new += [_init_failure(pod, clock)] * (pod.init_failures - of_init)
            init_failures[pod.uid] = pod.init_failures
        restarts[pod.uid] = pod.container_restarts
        is_over = looked and not pod.alive and pod.uid not in memory.seen_pods
        is_counted = pod.phase == "Failed" and _has_error_code(pod) and not leaves
        if is_over and not is_counted and _ended_by_itself(pod, session, released):
            ended.append(pod)
        if pod.phase != "Failed" or pod.uid in memory.seen_pods or not pod.node:
            continue
        if (looked or missed) and _has_error_code(pod) and not leaves:
            new.append(_failure(pod, clock))  # ended by itself: what ends a pod from outside does it by a signal
        if failed_on.get(pod.slot) == pod.node:
            bad_nodes[pod.slot] = (pod.node, clock.now_s)  # the last node only: a slot must not run out of nodes
        failed_on[pod.slot] = pod.node
    # What can never run is the consequence of no other end, and its agent tells of it once: it starts nothing any more.
    new += [failure for _, failure in exited if failure.reason == CANNOT_RUN]
    exited = [e for e in exited if e[1].reason != CANNOT_RUN]
    if tier != "Session":  # it is not known at first
        if left := _left(obs, current):
            memory = replace(memory, script_left=tuple(sorted(left.union(memory.script_left))[-MAX_LEFT:]))
        exited = [e for e in exited if e[0] not in memory.script_left]
    if tier == "Script":
        memory, exited = _one_of_each(exited, memory)
    new += [failure for _, failure in exited]
    there = {pod.uid for pod in obs.pods}
    over = {pod.uid for pod in obs.pods if not pod.alive}
    memory = replace(
        memory,
        num_exits={uid: count for uid, count in exits.items() if uid in there},
        container_restarts={uid: count for uid, count in restarts.items() if uid in there},
        init_failures=init_failures,
        boot_ids={uid: boot_id for uid, boot_id in boot_ids.items() if uid in there},
        bad_nodes=bad_nodes,
        failed_on=failed_on,
        seen_pods=frozenset(over | (memory.seen_pods & there) | {LOOKED}),
        disrupted=frozenset(pod.uid for pod in obs.pods if pod.disrupted),
    )
    return Seen(tuple(new), memory, tuple(disrupted), tuple(ended))


def _ended_by_itself(pod: Pod, session: Session | None, released: Collection[str]) -> bool:
    """Return whether the end of a pod that has ended was nobody's wish: neither a deletion, an eviction or preemption through the
    API, the operator's `stop`, nor the end of its node."""
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


def avoided_nodes(memory: Memory, now_s: float, window_s: float) -> dict[int, tuple[str, ...]]:
    """Return by slot the nodes that its next pod should not run on. A node is avoided for `window_s` (as long as failures
    count) after a pod's last failure there, or a repaired one would never be used again."""
    return {slot: (node,) for slot, (node, at_s) in memory.bad_nodes.items() if now_s < at_s + window_s}


def count_created(
    create: Iterable[MemberId],
    pods: Iterable[Pod],
    memory: Memory,
    *,
    released: Collection[str] = (),
    members: Iterable[MemberId] = (),
    leaving: Collection[str] = (),
) -> tuple[Counter[str], Memory]:
    """Return of the pods to create how many replace one that was lost, by what became of that, and were not counted yet. The
    informer sees a new pod late, so that it is asked for again meanwhile.

    A slot that was scaled away (its pods are `released` or gone, no member of the newest generation has it) and comes back
    is no replacement, whatever the number of its pod. Nor is one whose pod hands over: it is there and asked to leave (`leaving`,
    by UID). An eviction or preemption counts nowhere, as a drain does not: whether its worker could hand over in its grace is
    chance.
    """
    create, pods = tuple(create), tuple(pods)
    seen = {pod.id for pod in pods}
    taken = {pod.slot for pod in pods if pod.uid not in released} | {member.slot for member in members}
    taken -= {pod.slot for pod in pods if pod.uid in leaving}
    lost = [m for m in create if m.attempt > 0 and m.slot in taken and m not in memory.created]
    last: dict[int, Pod] = {}
    for pod in sorted(pods, key=lambda pod: pod.attempt) if lost else ():
        if pod.uid not in released:
            last[pod.slot] = pod
    causes = [_loss(m, last.get(m.slot), memory.disrupted_pods.get(m.slot)) for m in lost]
    replaced = Counter(cause for cause in causes if cause in POD_CAUSES)
    waiting = (member for member in memory.created if member not in seen)
    return replaced, replace(memory, created=frozenset({*create, *waiting}))


def _loss(new: MemberId, last: Pod | None, row: EarlyFailure | None) -> str:
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


def _is_new(ended: ProcessExit, pod: Pod, known: SeenExits, obs: Observation) -> bool:
    """Return whether no operator before this one has counted an exit."""
    if not ended.number:
        return True
    newest = known.newest.get(exit_key(pod))
    if newest is None and known.unnumbered:
        return ended.at_s >= obs.term_started_s  # what ended before was counted without a number
    return ended.number > (newest or 0)


def _fresh(session: Session, counted: int) -> tuple[ProcessExit, ...]:
    """Return the exits that this operator has not looked at yet."""
    return session.exits[-(session.num_exits - counted) :] if session.num_exits > counted else ()


def _exit(pod: Pod, ended: ProcessExit, clock: Clock) -> Failure:
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


def _one_of_each(exited: list[tuple[int, Failure]], memory: Memory) -> tuple[Memory, list[tuple[int, Failure]]]:
    """Return the first exit of each generation of which none has counted."""
    counted, kept = memory.script_failed, []
    for generation, failure in sorted(exited, key=lambda e: (e[0], e[1].at)):
        if generation > counted:
            counted = generation
            kept.append((generation, failure))
    return replace(memory, script_failed=counted), kept


def _left(obs: Observation, current: Current | None) -> frozenset[int]:
    """Return the generations that lost a member with its pod or agent: the newest one, if a member's pod is gone, failed or
    leaves, or its agent stopped; and those that workers were in whose streams have ended. A node without power is known to be
    lost only seconds after the peers have failed, when there may be a newer generation."""
    if current is None:
        return frozenset()
    there = {pod.id: pod for pod in obs.pods}
    left = {s.condition.generation for s in obs.sessions.values() if s.closed_at_s is not None}
    if not all(m in there and _stays(there[m], obs.sessions.get(there[m].uid), current) for m in current.members):
        left.add(current.number)
    return frozenset(left - {0})


def _stays(pod: Pod, session: Session | None, current: Current) -> bool:
    """Return whether pod, node and agent are those that the generation began with."""
    if not pod.usable or not pod.node_ready:
        return False
    if session is None or session.closed_at_s is not None:
        return session is None  # one that has not called this operator yet: nothing is known against it
    return session.rebooted_at_s is None or session.rebooted_at_s < current.announced_at_s


def _failure(pod: Pod, clock: Clock) -> Failure:
    """Return the failure of a whole container."""
    killed = pod.last_exit_reason == "OOMKilled"
    limit = f"limit {pod.memory_limit}" if pod.memory_limit else "no limit of its own"
    return Failure(
        clock.wall,
        str(pod.id),
        pod.last_exit_code,
        reason="OOMKilled" if killed else "",
        detail=limit if killed else "",
        namespace=pod.namespace,
        pod=pod.name,
        container=True,
    )


def _init_failure(pod: Pod, clock: Clock) -> Failure:
    """Return the failure of an init container."""
    return Failure(
        clock.wall,
        str(pod.id),
        pod.init_exit_code,
        namespace=pod.namespace,
        pod=pod.name,
        container=True,
        init=pod.init_failed,
    )


def _disruption(pod: Pod, clock: Clock) -> Failure:
    """Return the end of a whole pod from outside."""
    return Failure(
        clock.wall,
        str(pod.id),
        None,
        reason=pod.disrupted,
        detail=pod.disruption or pod.status_reason,
        namespace=pod.namespace,
        pod=pod.name,
        container=True,
    )


def excused_generations(sessions: Iterable[Session], memory: Memory, tier: str | None) -> frozenset[int]:
    """Return the generations in which a script's processes exit for want of a peer: a member went with its pod, or a process of
    theirs is known to have ended by a signal. Without a tier the latter may be the script's own crash."""
    if tier == "Session":
        return frozenset()
    signalled = (e.generation for s in sessions for e in s.exits if e.exit_code < 0) if tier == "Script" else ()
    return frozenset((*signalled, *memory.script_left))
