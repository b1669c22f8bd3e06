"""Choose the workers that should train in place of a healthy group, for resizes and drains. Pure.

decision.py decides whether it is time for a change, and forced.py what becomes of a broken group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Sized

from regroup.protocol.document import PLANNED
from regroup.protocol.state import Phase
from regroup_operator.api.members import MemberId
from regroup_operator.model.worker import DRAINED, RESIZED, Announce, Bounds, Current, Standing, Worker
from regroup_operator.plan.facts.groups import by_position, fitted, put_together, unbroken


def overtaking(current: Current, members: tuple[Worker, ...], bounds: Bounds, now_s: float) -> Announce | None:
    """Return the planned generation that takes the place of the newest one, which is planned, too; None: nothing is gained by it.

    It is made if a member of the newest one is asked to leave, and no training member has entered that one yet. The training
    members leave their group once, for the newer generation. They do not wait for joiners that have not arrived, because the grace
    period of the leaving member may be shorter than two changes.
    """
    if (
        current.kind != PLANNED
        or not current.has_document
        or not bounds.session
        or not any(w.draining for w in members)
    ):
        return None
    trains_in = {w.session.condition.generation for w in members if w.session is not None and _has_not_left(w)}
    if len(trains_in) != 1:
        return None
    before = {uid for older in current.older if older.number in trains_in for uid in older.pod_uids}
    training = tuple(w for w in members if w.pod is not None and w.uid in before)
    if not all(map(_has_not_left, training)):
        return None
    trains = {w.id for w in training}
    joining = [w for w in members if w.id not in trains and w.available and not w.draining]
    kept = {w.id for w in target_of(training, joining, bounds, current.members)}
    leaving = [w for w in members if w.draining and w.id not in kept]
    target = target_of(training, [w for w in joining if _has_arrived(w)], bounds, current.members)
    if not leaving or len(target) < bounds.minimum:
        return None  # who leaves is needed until another worker has its state
    return change((*training, *(w for w in leaving if w.id not in trains)), target, now_s)


def _has_not_left(worker: Worker) -> bool:
    """Return whether a member of a planned generation still trains in the one before."""
    session = worker.session
    return worker.standing == Standing.PENDING and session is not None and session.condition.phase == Phase.TRAINING


def _has_arrived(worker: Worker) -> bool:
    return worker.standing == Standing.FORMING and not worker.is_on_its_way


def change(members: tuple[Worker, ...], target: tuple[Worker, ...], now_s: float) -> Announce:
    """Return the planned generation of `target`; `members`: those who are in it, or leave."""
    ids = {w.id for w in members}
    new = [w for w in target if w.id not in ids]
    leaving = len(members) - (len(target) - len(new))
    joins = f"{count(new, 'worker')} {verb_of(new, 'join')}" if new else ""
    leaves = f"{count(range(leaving), 'worker')} {verb_of(range(leaving), 'leave')}" if leaving else ""
    what = ", ".join(filter(None, [joins, leaves]))
    drained = [w for w in members if w.draining]
    whys = sorted({w.notice for w in drained if w.notice})
    why = f" ({'; '.join(whys[:3])})" if whys else ""
    reason = DRAINED if drained else RESIZED
    return Announce(
        PLANNED,
        target,
        reason,
        f"{what}{why}: {count(target, 'worker')} {verb_of(target, 'train')}.",
        cause=reason,
        culprit=",".join(str(w.id) for w in drained),
        detected_at_s=max([w.since_s for w in new], default=now_s),
    )


def target_of(
    members: tuple[Worker, ...], joiners: Sequence[Worker], bounds: Bounds, before: Sequence[MemberId]
) -> tuple[Worker, ...]:
    """Return who should train: at most `replicas` in whole groups, one for each slot, of no position without a member (it holds
    the state). `before`: the members of the newest generation, group after group.

    Their number is one that the job may train with, unless a session's state is handed over: all members of a position leave.
    """
    size = bounds.per_group
    staying = [w for w in members if not w.draining]
    whole = unbroken([*staying, *joiners], before, size)
    pairs = zip(by_position(members, size), by_position(joiners, size), strict=True)
    ranked: Sequence[Sequence[Worker]] = [_best(there, coming, bounds, whole) for there, coming in pairs]
    if not bounds.session or all(by_position(staying, size)):
        ranked = fitted(ranked, bounds)
    return put_together(ranked, before, size)


def _best(
    members: Sequence[Worker], joiners: Iterable[Worker], bounds: Bounds, whole: Collection[MemberId]
) -> tuple[Worker, ...]:
    """Return the workers of one position that should train, best first.

    Members of slots below `bounds.slots` come first, then workers that join such a slot, then members of higher slots while they
    are needed. Within each, workers whose group is whole come first. A spare that has become a member stays one. Members with a
    notice come last: they train until another worker takes their place.
    """
    noticed = sorted(
        (w for w in members if w.draining and not w.is_ending), key=lambda w: (w.id.slot >= bounds.slots, w.id)
    )
    staying = sorted((w for w in members if not w.draining), key=lambda w: w.id not in whole)
    joining = sorted(
        (w for w in joiners if w.id.slot < bounds.slots),
        key=lambda w: (w.id not in whole, w.id.slot, -w.id.attempt),
    )
    if not staying:
        return _hand_over(members, joining, bounds)
    low = [w for w in staying if w.id.slot < bounds.slots]
    high = [w for w in staying if w.id.slot >= bounds.slots]
    holders, others = (low, high) if low else (high[:1], high[1:])
    return one_per_slot([*holders, *joining, *others, *noticed])[: bounds.groups]


def _hand_over(members: Sequence[Worker], joining: list[Worker], bounds: Bounds) -> tuple[Worker, ...]:
    """Return the workers of a position that should train if all its members are leaving, best first.

    Those that come are first. As many members as are needed stay beside them, at least one, until the others have its state.
    Members that only have a notice keep all places that no worker takes. If that leaves no place for those that come, one of them
    is in for one generation all the same (rule HANDOVER).
    """
    coming = {w.id.slot for w in joining}
    keepers = sorted(members, key=lambda w: (not w.connected, w.id.slot >= bounds.slots, w.id.slot in coming, w.id))
    needed = max(1, bounds.min_groups - len(coming))
    keepers, others = keepers[:needed], keepers[needed:]
    target = one_per_slot([*keepers, *joining, *(w for w in others if not w.is_ending)])[: bounds.groups]
    joins = {w.id for w in joining}
    if bounds.session and joins and not any(w.id in joins for w in target):
        target = (keepers[0], joining[0])
    return target


def comes_late(worker: Worker, current: Current, now_s: float) -> bool:
    """Return whether a worker that is no member would hold up a generation: it failed the last one, or is still in it.

    A worker may be in a generation that the status does not know, if the status was restored from a backup. It leaves that one for
    a newer one, and for nothing else.
    """
    return now_s < worker.barred_until_s or not can_leave(worker, current)


def can_leave(worker: Worker, current: Current) -> bool:
    """Return whether a worker's processes are in no group, or in one that they leave for a forced generation."""
    condition = worker.session.condition if worker.session is not None else None
    if condition is None or not condition.session or worker.is_waiting:
        return True
    return worker.is_in_group and condition.generation > current.number


def one_per_slot(workers: Iterable[Worker]) -> tuple[Worker, ...]:
    """Return the workers without those whose slot an earlier one has."""
    slots: dict[int, Worker] = {}
    for worker in workers:
        slots.setdefault(worker.id.slot, worker)
    return tuple(slots.values())


# --- words ---------------------------------------------------------------------------------------------------------


def count(items: Iterable[object], noun: str) -> str:
    number = len(list(items))
    return f"{number} {noun}" + ("" if number == 1 else "s")


def verb_of(subject: Sized, verb: str) -> str:
    """Return the verb in the number of its subject."""
    return verb if len(subject) != 1 else f"{verb}es" if verb.endswith("o") else f"{verb}s"
