"""Count pods that end although nobody deletes them, and fail a job that gets no further because of them. Pure.

Every pod of a job may end again and again. The cause may be a deadline that a webhook adds, a sidecar that ends the agent, or a
node that runs out of memory. A kubelet may also refuse each pod before it runs, because a device plugin fails, or because the
template names a node that is full. Such an end need not be a failure of the trainer, and counts for no maxRestarts. Without a count
of its own, the job would begin at the same step for ever.

A *round* is over once more slots have lost a pod than the job can do without. If several workers hold a copy of the model together,
slots of one position in their groups count (plan/facts/groups.py). ROUNDS rounds fail the job, unless it gets further. The measure
is the lowest step at which a generation began in the round. A step that was committed between two rounds and lost with the pods is
no progress. Tier Script tells of no steps. There only ends within recovery.windowSeconds count, or within LEAST_WINDOW_S if that is
longer.

Deletions, evictions through the API, preemptions, and nodes that are lost or shut down are not counted. The platform has no room
then, or is being repaired (docs/design/adr/0072-pods-that-end-again.md).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from regroup_operator.model.plan import PodEnds, Verdict
from regroup_operator.model.records import Pod

ROUNDS = 8
"""Rounds that fail the job. They take six minutes with pods that live for 45 s. Pods that are evicted or fail before they run are
held back ever longer (pods/early.py). The rounds then take a quarter of an hour for evicted pods, and ten minutes for the others.
"""
LEAST_WINDOW_S = 3600.0
"""The shortest window in which ends count. In a shorter one, pods that are held back would never make up ROUNDS rounds."""
POD_ENDS = "PodsEndAgain"
"""Reason of condition Failed."""


def note_pod_ends(
    stored: PodEnds | None,
    ended: Sequence[Pod],
    *,
    slots: int,
    minimum: int,
    reached: tuple[int, int] | None,
    now: float,
    window_s: float | None,
    per_group: int = 1,
) -> PodEnds | None:
    """Return what is known once these pods have ended, too; None: nothing counts. The job has `slots` and needs `minimum` of them.
    `reached`: how far it is, greater is further; None: that is not known now. `window_s`: how long an end counts, None: until the
    job gets further. `per_group`: workers that hold one copy of the model together; one of each position, slot mod `per_group`."""
    if stored is None and not ended:
        return None
    times = {} if stored is None else {slot: at for slot, at in stored.by_slot.items() if slot < slots}
    for pod in ended:
        if pod.slot < slots:
            times[pod.slot] = (*times.get(pod.slot, ()), now)[-ROUNDS:]
    if window_s is not None:
        times = {slot: tuple(t for t in at if t > now - window_s) for slot, at in times.items()}
    times = {slot: at for slot, at in times.items() if at}
    if not times:
        return None
    before = stored or PodEnds({}, "")
    last, last_pod = (_words(ended[-1]), ended[-1].name) if ended else (before.last, before.last_pod)
    low = min((mark for mark in (before.low, reached) if mark is not None), default=None)
    rounds = _rounds(times, max(0, slots - minimum) // per_group, per_group)
    if rounds <= before.rounds:
        return PodEnds(times, last, last_pod, rounds, before.base, low)
    if rounds > before.rounds + len(ended):
        # The spec has changed: the job needs slots that it could do without when their pods ended.
        return PodEnds({}, last, last_pod, base=low)
    if before.base is not None and low is not None and low > before.base:
        return PodEnds({}, last, last_pod, base=low)
    return PodEnds(times, last, last_pod, rounds, low if before.base is None else before.base)


def without_slots(stored: PodEnds | None, slots: Collection[int]) -> PodEnds | None:
    """Return what is known without the ends in these slots."""
    if stored is None or not slots:
        return stored
    return replace(stored, by_slot={slot: at for slot, at in stored.by_slot.items() if slot not in slots})


def _rounds(times: Mapping[int, Sequence[float]], spare: int, per_group: int) -> int:
    """Return how often more than `spare` slots of one position in a group have lost a pod: then too few groups are whole."""
    counts: list[list[int]] = [[] for _ in range(per_group)]
    for slot, at in times.items():
        counts[slot % per_group].append(len(at))
    return max(sorted(some, reverse=True)[spare] if spare < len(some) else 0 for some in counts)


def pod_ends_failure(ends: PodEnds | None, *, window_s: float | None) -> Verdict | None:
    """Return why the job has to fail, None if it has not to. `window_s`: as before."""
    if ends is None or ends.rounds < ROUNDS:
        return None
    num_slots = sum(len(at) >= ROUNDS for at in ends.by_slot.values())
    what = f"The pods of {num_slots} worker{'' if num_slots == 1 else 's'} have ended {ROUNDS} times each"
    how_far = "and the job got no further in between" if window_s is None else f"within {window_s:.0f} s"
    return Verdict(
        POD_ENDS,
        f"{what}, {how_far}. {ends.last} Find out what ends the pods, for example a deadline that a webhook adds, a sidecar, or "
        "the memory or the device plugin of the nodes; then submit the job again.",
        pod=ends.last_pod,
    )


def _words(pod: Pod) -> str:
    said = ": ".join(filter(None, (pod.status_reason, pod.status_message.strip().rstrip("."))))
    if not said and pod.never_ran:
        said = "the kubelet gives no reason"
    elif not said:
        said = "an unknown exit code" if pod.last_exit_code is None else f"exit code {pod.last_exit_code}"
    how = f"failed before it ran: {said}" if pod.never_ran else f"ended with {said}"
    return f"The last one is worker {pod.id} (pod {pod.name}), which {how}."
