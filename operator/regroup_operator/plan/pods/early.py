"""Hold back the pods of a slot whose last ones failed before they ran, or were evicted soon after. Pure.

A broken device plugin refuses pods as fast as they are made. So does a node that is full of what it did not account for. The first
pod is replaced at once, on another node if there is one. Each further pod in a row comes later. If it goes on, the job fails
(failures/pod_ends.py).

Failed pods would be thousands of objects a day. Of each slot only the newest failed pod stays, for its status and its log; the
others are deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from regroup_operator.model.plan import Clock, Verdict
from regroup_operator.model.pod_row import REPLACED, PodRow
from regroup_operator.model.records import Pod

DISRUPTED = "Disrupted"
"""Reason of condition PodsReady."""


def note_early(rows: Mapping[int, PodRow], pods: Iterable[Pod], now_s: float, *, slots: int) -> dict[int, PodRow]:
    """Return by slot how many pods in a row failed before they ran. A newer pod that runs ends the row; so does the end of its slot
    (the job has `slots`), or FORGOTTEN_S without another pod."""
    by_slot: dict[int, list[Pod]] = {}
    for pod in pods:
        by_slot.setdefault(pod.slot, []).append(pod)
    out = {slot: row for slot, row in rows.items() if slot < slots and slot not in by_slot and not row.is_over(now_s)}
    for slot, of_slot in by_slot.items():
        before = rows.get(slot)
        newest = max((p.attempt for p in of_slot if p.never_ran), default=-1)
        newest_known = newest if before is None else max(newest, before.attempt)
        if any(p.running_since_s is not None and p.attempt > newest_known and p.usable for p in of_slot):
            continue
        new = [p.attempt for p in of_slot if p.never_ran and (before is None or p.attempt > before.attempt)]
        if new:
            out[slot] = PodRow.after(before, max(new), now_s, num=len(new))
        elif before is not None and (not before.is_over(now_s) or any(p.attempt > before.attempt for p in of_slot)):
            out[slot] = before
        elif before is not None and newest == before.attempt:
            out[slot] = replace(before, count=0)  # it is still there for its log, and no new failure
    return out


def held_until(rows: Mapping[int, PodRow]) -> dict[int, float]:
    """Return by slot until when no pod is made."""
    return {slot: row.held_until_s(REPLACED) for slot, row in rows.items() if row.pause_s(REPLACED)}


def early_words(rows: Mapping[int, PodRow], pods: Iterable[Pod], clock: Clock) -> Verdict | None:
    """Return what is said of the slot that failed last among those whose pods fail again and again; None: there is none. `pods`:
    all pods of the job's workers."""
    again = {slot: row for slot, row in rows.items() if row.count > 1}
    if not again:
        return None
    slot = max(again, key=lambda slot: (again[slot].at_s, slot))
    of_slot = [pod for pod in pods if pod.slot == slot]
    failed = next((pod for pod in of_slot if pod.attempt == again[slot].attempt), None)
    what, reason, message = f"A pod of worker {slot}", "", ""
    if failed is not None:
        what, reason, message = failed.name, failed.status_reason, failed.status_message
    said = ": ".join(filter(None, (f"{what} failed before it ran", reason, message.strip().rstrip("."))))
    next_s = held_until(rows)[slot]
    if next_s > clock.now_s and not any(pod.usable for pod in of_slot):
        said += f"; the next one is made at {clock.stamp(next_s)}"
    return Verdict(reason or "PodFailed", said)


def disrupted_words(rows: Mapping[int, PodRow], pods: Iterable[Pod], clock: Clock, slots: int) -> Verdict | None:
    """Return the sentence on the slot that waits longest because its pods were evicted or preempted again and again; None: no slot
    does.

    `pods` has all pods of the job's workers, and the job has `slots`.
    """
    held = {slot: at for slot, at in held_until(rows).items() if at > clock.now_s and slot < slots}
    usable = {pod.slot for pod in pods if pod.usable} if held else set()
    waiting = {slot: at for slot, at in held.items() if slot not in usable}
    if not waiting:
        return None
    slot = max(waiting, key=lambda slot: (waiting[slot], slot))
    said = (
        f"{rows[slot].count} pods of worker {slot} in a row were evicted or preempted soon after they started; "
        f"the next one is made at {clock.stamp(waiting[slot])}"
    )
    return Verdict(DISRUPTED, said)


def surplus(pods: Iterable[Pod], spoken_for: Collection[str] = ()) -> tuple[Pod, ...]:
    """Return the failed pods that are deleted: all but the newest of each slot. `spoken_for`: UIDs of those that are deleted
    anyway."""
    kept: set[int] = set()
    out: list[Pod] = []
    for pod in sorted(pods, key=lambda p: (p.slot, -p.attempt)):
        if pod.phase != "Failed" or pod.terminating or pod.uid in spoken_for:
            continue
        if pod.slot in kept:
            out.append(pod)
        kept.add(pod.slot)
    return tuple(out)
