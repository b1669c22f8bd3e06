"""See which processes, containers and pods have failed since the last plan. Pure; what follows is judged in restarts.py.

Everything is counted once: what was counted is remembered by pod UID, and only after the status that carries the count
has been written (the controller forgets a plan that lost its race). What happened before this operator's first look was
counted by the one before.

In tier Script a lost rank fails the collectives of its peers, whose processes then exit, too: of a generation one exit counts,
and none where a member went with its pod or leaves (deletions, drains and lost nodes are no failures of the job).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from regroup_operator.model.members import MemberId
from regroup_operator.model.plan import Clock, Failure, Memory
from regroup_operator.model.records import Observation, Pod, Session
from regroup_operator.model.worker import Current

LOOKED = "-"
"""In Memory.seen_pods: this operator has looked at the job before."""


@dataclass(frozen=True)
class Seen:
    """`failures`: what is new and counts against maxRestarts."""

    failures: tuple[Failure, ...]
    memory: Memory


def see_failures(
    obs: Observation, memory: Memory, clock: Clock, *, tier: str | None = None, current: Current | None = None
) -> Seen:
    """Return the new failures, and the memory in which they are counted. `tier` is status.tier, `current` the newest
    generation, None before the first."""
    looked = LOOKED in memory.seen_pods
    exits, restarts = dict(memory.num_exits), dict(memory.container_restarts)
    bad_nodes, failed_on = dict(memory.bad_nodes), dict(memory.failed_on)
    new: list[Failure] = []
    exited: list[tuple[int, Failure]] = []
    for pod in obs.pods:
        session = obs.sessions.get(pod.uid)
        leaves = pod.terminating or (session is not None and session.draining is not None)
        if session is not None:
            exited += _exits(pod, session, exits.get(pod.uid, 0), clock)
            exits[pod.uid] = session.num_exits
        known = restarts.get(pod.uid, 0 if looked else pod.container_restarts)
        if pod.container_restarts > known and pod.last_exit_code != 0 and not leaves:
            new += [_failure(pod, clock)] * (pod.container_restarts - known)
        restarts[pod.uid] = pod.container_restarts
        if pod.phase != "Failed" or pod.uid in memory.seen_pods or not pod.node:
            continue
        if looked and 0 < (pod.last_exit_code or 0) < 128 and not leaves:
            new.append(_failure(pod, clock))  # ended by itself: what ends a pod from outside does it by a signal
        # The last node only, and only if the job is known to run elsewhere, too: a slot must not run out of nodes.
        elsewhere = any(p.node not in ("", pod.node) and p.node_ready for p in obs.pods)
        if failed_on.get(pod.slot) == pod.node and elsewhere:
            bad_nodes[pod.slot] = (pod.node,)
        failed_on[pod.slot] = pod.node
    if tier == "Script":
        memory, exited = _one_of_each(exited, memory, left=_left(obs, current))
    new += [failure for _, failure in exited]
    there = {pod.uid for pod in obs.pods}
    failed = {pod.uid for pod in obs.pods if pod.phase == "Failed"}
    memory = replace(
        memory,
        num_exits={uid: count for uid, count in exits.items() if uid in there},
        container_restarts={uid: count for uid, count in restarts.items() if uid in there},
        bad_nodes=bad_nodes,
        failed_on=failed_on,
        seen_pods=frozenset(failed | (memory.seen_pods & there) | {LOOKED}),
    )
    return Seen(tuple(new), memory)


def count_created(create: Iterable[MemberId], pods: Iterable[Pod], memory: Memory) -> tuple[int, Memory]:
    """Return how many of the pods to create replace one and were not counted yet. The informer sees a new pod late, so
    that it is asked for again meanwhile."""
    create = tuple(create)
    seen = {pod.id for pod in pods}
    replaced = sum(member.attempt > 0 for member in create if member not in memory.created)
    waiting = (member for member in memory.created if member not in seen)
    return replaced, replace(memory, created=frozenset({*create, *waiting}))


def _exits(pod: Pod, session: Session, counted: int, clock: Clock) -> list[tuple[int, Failure]]:
    """Return the exits that were not counted yet, each with its generation."""
    if session.num_exits <= counted:
        return []
    fresh = session.exits[-(session.num_exits - counted) :]
    return [(e.generation, Failure(clock.wall_at(e.at_s), str(pod.id), e.exit_code, e.last_line)) for e in fresh]


def _one_of_each(
    exited: list[tuple[int, Failure]], memory: Memory, left: int
) -> tuple[Memory, list[tuple[int, Failure]]]:
    """Return the first exit of each generation of which none has counted. `left`: the generation that lost a pod, or 0."""
    counted, kept = memory.script_failed, []
    for generation, failure in sorted(exited, key=lambda e: (e[0], e[1].at)):
        if generation > counted and generation != left:
            counted = generation
            kept.append((generation, failure))
    return replace(memory, script_failed=counted), kept


def _left(obs: Observation, current: Current | None) -> int:
    """Return the newest generation's number if a member's pod is gone, failed or leaves; else 0."""
    if current is None:
        return 0
    there = {pod.id: pod for pod in obs.pods}
    stays = all(m in there and there[m].usable and there[m].node_ready for m in current.members)
    return 0 if stays else current.number


def _failure(pod: Pod, clock: Clock) -> Failure:
    return Failure(clock.wall, str(pod.id), pod.last_exit_code)
