"""Choose which members observe each other, and judge what the observers say. Pure.

A node that loses its power says nothing. Two observers on different nodes may both hear nothing of a member for SILENT_S, while it
says nothing to the operator either. That proves as much as `disconnectSeconds` of silence, and sooner (adr/0057). One observer
proves nothing: its own network may be at fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from regroup.protocol.wire import SILENT_S, Observed
from regroup_operator.model.records import AgentSession, Pod
from regroup_operator.model.worker import Worker
from regroup_operator.plan.facts.stalls import ANSWER_S

OBSERVERS = 2
"""So many members observe each one."""
MAX_OBSERVED = 16
"""A member observes no more than this, where one node has many more members than the next."""


def who_observes(members: Iterable[Worker]) -> dict[str, tuple[Observed, ...]]:
    """Return the members that each member observes, by pod UID.

    The nodes are in a ring, and the next OBSERVERS nodes observe the members of a node. So each member observes about as many as
    observe it, whatever the size of the job. No member is observed from its own node, or if its node, address or port is not known.
    """
    nodes: dict[str, list[tuple[str, Observed]]] = {}
    for worker in members:
        pod, session = worker.pod, worker.session
        if pod is not None and session is not None and pod.node and pod.ip and session.observed_port:
            observed = Observed(pod.uid, pod.ip, session.observed_port)
            nodes.setdefault(pod.node, []).append((pod.uid, observed))
    ring = list(nodes.values())
    out: dict[str, list[Observed]] = {}
    for place, here in enumerate(ring):
        for distance in range(1, min(OBSERVERS, len(ring) - 1) + 1):
            there = ring[(place + distance) % len(ring)]
            for index, (_, observed) in enumerate(here):
                observes = out.setdefault(there[index % len(there)][0], [])
                if len(observes) < MAX_OBSERVED:
                    observes.append(observed)
    return {uid: tuple(observes) for uid, observes in out.items()}


@dataclass(frozen=True)
class Silences:
    """Silences that observers have reported, by pod UID, in monotonic seconds."""

    suspected: Mapping[str, float] = field(default_factory=dict)
    """Since when an observer has heard nothing of it, the first one where there are two."""
    proven: Mapping[str, float] = field(default_factory=dict)
    """Since when two observers on different nodes have heard nothing, each for SILENT_S when it said so. Where all other members
    are on one node, the operator is the second one: since its question has not been answered."""

    def due_s(self, sessions: Mapping[str, AgentSession]) -> list[float]:
        """Return when something follows from them although nothing is heard."""
        asked = [s.unanswered_since_s for uid in self.suspected if (s := sessions.get(uid)) is not None]
        dues = [at_s + wait_s for at_s in asked if at_s is not None for wait_s in (ANSWER_S, SILENT_S)]
        return dues + [since_s + SILENT_S for since_s in self.proven.values()]


def see_silences(pods: Iterable[Pod], sessions: Mapping[str, AgentSession], members: Iterable[Pod]) -> Silences:
    """Return what the newest reports of all agents say. Only who has an open stream counts as an observer, and nobody counts
    for a worker of its own node. `members`: pods of the newest generation."""
    by_node: dict[str, dict[str, list[tuple[float, float]]]] = {}
    pods = tuple(pods)
    for pod in pods:
        session = sessions.get(pod.uid)
        if session is None or not session.connected or not pod.node:
            continue
        for one in session.unheard:
            by_node.setdefault(one.pod_uid, {}).setdefault(pod.node, []).append((one.since_s, one.age_s))
    if not by_node:
        return Silences()
    observing = {p.node for p in members if (s := sessions.get(p.uid)) and s.connected and s.observed_port and p.node}
    suspected, proven = dict[str, float](), dict[str, float]()
    for pod in pods:
        found = {node: said for node, said in by_node.get(pod.uid, {}).items() if node != pod.node}
        if not found or not pod.node:
            continue
        suspected[pod.uid] = min(since_s for said in found.values() for since_s, _ in said)
        long = [[since_s for since_s, age_s in said if age_s >= SILENT_S] for said in found.values()]
        since = sorted(min(some) for some in long if some)
        if len(since) == 1 and len(observing - {pod.node}) == 1:
            asked_s = sessions[pod.uid].unanswered_since_s if pod.uid in sessions else None
            since += [asked_s] if asked_s is not None else []
        if len(since) >= OBSERVERS:
            proven[pod.uid] = max(since[:OBSERVERS])
    return Silences(suspected, proven)


def is_lost(session: AgentSession, unheard_since_s: float, progress_s: float | None, now_s: float) -> float | None:
    """Return the begin of the silence of a lost member of `Silences.proven`; None: it may still speak.

    Its own word to the operator and progress of its group are signs of life. So the operator must have asked it, or its stream must
    be closed.
    """
    asked_s = session.unanswered_since_s
    if session.connected and (asked_s is None or now_s < asked_s + ANSWER_S):
        return None
    silent_s = max(unheard_since_s, session.heard_at_s, progress_s if progress_s is not None else unheard_since_s)
    return silent_s if now_s >= silent_s + SILENT_S else None
