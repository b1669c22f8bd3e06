"""Give back worker pods for which no node has room, and try again later. Pure.

The setting is `spec.elasticPolicy.pendingTimeoutSeconds`. A pod that stays pending keeps its place in the scheduler's queue and
makes an autoscaler of nodes try again and again. The job runs smaller without it. Once a pod that was given back finds a node, all
others are tried again at once.

A job with fewer placed workers than it needs, by whole groups, gives nothing back. It waits for its start, and
runPolicy.startDeadlineSeconds bounds that.

If a group is several workers, the pods of the groups that the job needs are made before all others (`put_off`). The scheduler knows
nothing of groups. It could give what room there is to workers of one position, which wait for those of the others for ever.
docs/design/adr/0055-size-of-an-elastic-job.md
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from regroup.protocol.text import shorten
from regroup_operator.api.spec import ElasticPolicy
from regroup_operator.model.plan import Clock, earliest
from regroup_operator.model.pod_row import TRIED_AGAIN, PodRow
from regroup_operator.model.ports import EventNote
from regroup_operator.model.records import Pod
from regroup_operator.plan.failures.on_exit import UNSCHEDULABLE


@dataclass(frozen=True)
class Capacity:
    """`given_back`: UIDs of the pods to delete. `unplaced`, `rows`: what the memory keeps. `held`: by slot, until when no pod is
    made. `words`: what is said of them; empty: nothing is held."""

    unplaced: Mapping[str, float]
    rows: Mapping[int, PodRow]
    given_back: frozenset[str] = frozenset()
    held: Mapping[int, float] | None = None
    words: str = ""
    notes: tuple[EventNote, ...] = ()
    due_s: float | None = None


@dataclass(frozen=True)
class Demand:
    """The workers of a job. `per_group` of them are a group, and each has a position of its own in it."""

    slots: int
    """Number of workers that the job is to have."""
    minimum: int
    """Number of workers that it needs."""
    per_group: int = 1


def judge_capacity(
    *,
    policy: ElasticPolicy | None,
    pods: Iterable[Pod],
    released: Collection[str],
    demand: Demand,
    unplaced: Mapping[str, float],
    rows: Mapping[int, PodRow],
    clock: Clock,
) -> Capacity:
    """Return the pods that are given back now.

    `unplaced` and `rows` are as the plan before has left them.
    """
    if policy is None or policy.pending_timeout_seconds is None:
        return Capacity({}, {})
    usable = [p for p in pods if p.usable and p.uid not in released]
    waiting = [p for p in usable if not p.node and p.unscheduled_reason == UNSCHEDULABLE]
    since_s = {p.uid: unplaced.get(p.uid, clock.now_s) for p in waiting}
    placed = {p.slot for p in usable if p.node}
    # The pod before one that was given back may still be there, and leave: that it has a node says nothing.
    has_room = any(p.node and p.slot in rows and p.attempt > rows[p.slot].attempt for p in usable)
    newest = {p.slot: p.attempt for p in sorted(usable, key=lambda p: p.attempt)}
    rows = {
        slot: row
        for slot, row in rows.items()
        if not has_room
        and slot < demand.slots
        # Its slot is served again by the pod of before, or nothing is wanted of it: the next time is a first time.
        and (not row.is_over(clock.now_s - row.pause_s(TRIED_AGAIN)) or newest.get(slot, -1) > row.attempt)
    }
    of_position = Counter(slot % demand.per_group for slot in placed)
    num_groups = min(of_position[position] for position in range(demand.per_group))
    if num_groups * demand.per_group < demand.minimum:
        # What is missing for the start, or to go on, is tried at once. How often it was given back is not forgotten.
        return Capacity(since_s, rows, held={})
    timeout_s = float(policy.pending_timeout_seconds)
    overdue = [p for p in waiting if clock.now_s >= since_s[p.uid] + timeout_s]
    notes = []
    for pod in overdue:
        rows[pod.slot] = row = PodRow.after(rows.get(pod.slot), pod.attempt, clock.now_s)
        why = f" ({pod.unschedulable})" if pod.unschedulable else ""
        notes.append(
            EventNote(
                "Warning",
                "PodGivenBack",
                shorten(f"Pod {pod.name} has been unschedulable for {timeout_s:.0f} s{why}", 800)
                + f"; it is deleted and tried again in {row.pause_s(TRIED_AGAIN):.0f} s.",
            )
        )
    dues_s = [since_s[p.uid] + timeout_s for p in waiting]
    return _held(
        since_s, rows, clock, frozenset(p.uid for p in overdue), tuple(notes), earliest(dues_s, after_s=clock.now_s)
    )


def put_off(
    pods: Iterable[Pod], released: Collection[str], held: Collection[int], *, slots: int, per_group: int, minimum: int
) -> frozenset[int]:
    """Return the slots of which no pod is made until `minimum` workers in whole groups have a node.

    They are the slots of a position beyond as many as that takes. `pods` has no pods that cannot be reached. No pod is made for the
    slots in `held` now, but others of their position may get one.
    """
    if per_group == 1:
        return frozenset()
    usable = [p for p in pods if p.usable and p.uid not in released and p.slot < slots]
    placed = Counter(slot % per_group for slot in {p.slot for p in usable if p.node})
    if min(placed[position] for position in range(per_group)) * per_group >= minimum:
        return frozenset()
    there = {p.slot for p in usable}
    out: set[int] = set()
    for position in range(per_group):
        of_position = range(position, slots, per_group)
        missing = [slot for slot in of_position if slot not in there and slot not in held]
        out.update(missing[max(0, minimum // per_group - len(there.intersection(of_position))) :])
    return frozenset(out)


def _held(
    since_s: Mapping[str, float],
    rows: Mapping[int, PodRow],
    clock: Clock,
    given_back: frozenset[str] = frozenset(),
    notes: tuple[EventNote, ...] = (),
    due_s: float | None = None,
) -> Capacity:
    until_s = {slot: row.held_until_s(TRIED_AGAIN) for slot, row in rows.items()}
    held = {slot: at_s for slot, at_s in until_s.items() if at_s > clock.now_s}
    words = ""
    if held:
        what = "worker was" if len(held) == 1 else "workers were"
        words = f"{len(held)} {what} unschedulable for too long; the next try is at {clock.stamp(min(held.values()))}"
    return Capacity(since_s, rows, given_back, held, words, notes, due_s)
