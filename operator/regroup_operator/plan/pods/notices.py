"""Tell which workers are asked to leave by a notice, and when that is over; and which nodes their replacements avoid. Pure.

A notice is a pod's condition DisruptionTarget, or a taint that announces the end of its node (settings.drain_taints). What
follows from it is what follows from every other way of asking (Worker.draining). docs/design/adr/0059-notices-are-drains.md
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from regroup_operator.model.ports import EventNote
from regroup_operator.model.records import Pod
from regroup_operator.model.worker import Worker


@dataclass(frozen=True)
class Notices:
    """`noticed`: UIDs, for the memory. `notes`: what is new."""

    noticed: frozenset[str]
    notes: tuple[EventNote, ...] = ()


def judge_notices(workers: Iterable[Worker], noticed: Collection[str], released: frozenset[str]) -> Notices:
    """Return who is asked to leave by a notice, with an event for each change. `noticed`: as it was left by the plan before;
    `released`: UIDs of pods that leave anyway."""
    notes: list[EventNote] = []
    now: set[str] = set()
    for worker in workers:
        pod = worker.pod
        if pod is None or pod.uid in released:
            continue
        if pod.notice:
            now.add(pod.uid)
        if pod.notice and pod.uid not in noticed:
            notes.append(EventNote("Normal", "WorkerLeaving", f"Worker {worker.id} is asked to leave: {pod.notice}."))
        elif pod.uid in noticed and not worker.draining and pod.alive:
            notes.append(EventNote("Normal", "WorkerStays", f"Worker {worker.id} is not asked to leave any more."))
    return Notices(frozenset(now), tuple(notes))


def with_tainted(
    bad_nodes: Mapping[int, tuple[str, ...]], pods: Iterable[Pod], slots: int
) -> Mapping[int, tuple[str, ...]]:
    """Return by slot the nodes that its next pod avoids: those that it avoids anyway, and those whose end is announced."""
    tainted = sorted({pod.node for pod in pods if pod.drain_taint})
    if not tainted:
        return bad_nodes
    return {slot: tuple(dict.fromkeys((*bad_nodes.get(slot, ()), *tainted))) for slot in range(slots)}
