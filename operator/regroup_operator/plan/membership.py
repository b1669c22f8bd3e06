"""Decide the next generation: announce one, wait, or keep the one there is.

Pure: (newest generation, workers, bounds, clock) -> a Decision with its reason. The rules are protocol.md's; PERSIST,
FENCE and the rest of the writing order are controller.py's. Forced generations name only members with an open stream;
planned ones only ready workers (rule FORCED, PLANNED).
"""

from __future__ import annotations

from collections.abc import Iterable

from regroup.protocol.document import FORCED, PLANNED
from regroup_operator.model.members import MemberId
from regroup_operator.model.records import Settings
from regroup_operator.model.worker import Announce, Bounds, Current, Decision, Keep, Standing, Wait, Worker

_GONE = (Standing.LOST, Standing.DIED)


def next_generation(
    *,
    current: Current | None,
    workers: tuple[Worker, ...],
    bounds: Bounds,
    refused: frozenset[str] | None,
    now_s: float,
    settings: Settings,
) -> Decision:
    """Return what to do about membership now.

    `refused` is set when members of the newest generation found no witness of an older one: the names (UIDs of
    members, of the lost, of the sealed) that its document was made of. Such a set is not announced again.
    """
    if current is None:
        return _first(workers, bounds, now_s, settings)
    members = tuple(w for w in workers if w.is_member)
    trouble = _trouble(current, members, now_s, settings)
    if isinstance(trouble, Wait):
        return trouble
    if trouble is not None:
        return _forced(current, workers, members, bounds, trouble, refused, now_s)
    silent = [w.lost_at_s for w in members if w.lost_at_s is not None]
    if any(w.standing == Standing.FINISHED for w in members):
        return Keep(min(silent, default=None))  # a finished rank ignores planned generations (rule CUTALL)
    if not current.adopted:
        deadline = _deadline(current, settings)
        return Keep(min([*silent, *([deadline] if deadline is not None else [])], default=None))
    return _planned(members, workers, bounds, silent, now_s, settings)


# --- the first one -------------------------------------------------------------------------------------------------


def _first(workers: tuple[Worker, ...], bounds: Bounds, now_s: float, settings: Settings) -> Decision:
    ready = sorted((w for w in workers if w.available and not w.draining), key=lambda w: w.id)
    if len(ready) >= bounds.replicas:
        chosen = tuple(ready[: bounds.replicas])
        return Announce(
            FORCED, chosen, "Started", f"All {len(chosen)} workers are ready.", cause="Started", detected_at_s=now_s
        )
    counts = f"{_count(ready, 'worker')} ready, {bounds.replicas} wanted"
    if not bounds.elastic or len(ready) < bounds.minimum:
        return Wait("TooFewReady", f"{counts}, at least {bounds.minimum} needed.")
    since = sorted(w.since_s for w in ready)[bounds.minimum - 1]
    if now_s >= since + settings.first_wait_s:
        return Announce(
            FORCED,
            tuple(ready),
            "StartedSmaller",
            f"{counts}; started after waiting {settings.first_wait_s:.0f} s.",
            cause="Started",
            detected_at_s=since,
        )
    return Wait(
        "WaitingForMore",
        f"{counts}; starting with these in {since + settings.first_wait_s - now_s:.0f} s.",
        since + settings.first_wait_s,
    )


# --- a broken group ------------------------------------------------------------------------------------------------


def _trouble(current: Current, members: tuple[Worker, ...], now_s: float, settings: Settings) -> Worker | Wait | None:
    """Return the worker that broke the group, a Wait while that is unclear, or None for a group that stands."""
    culprits = [w for w in members if w.standing in _GONE]
    if culprits:
        return min(culprits, key=lambda w: w.since_s)
    broken = [w for w in members if w.standing == Standing.BROKEN]
    if broken:
        first = min(broken, key=lambda w: w.since_s)
        others = [w for w in members if w.standing not in (Standing.BROKEN, Standing.SILENT)]
        if others and now_s < first.since_s + settings.settle_s:
            return Wait(
                "Settling",
                f"{_count(broken, 'member')} lost the group; looking for the cause.",
                first.since_s + settings.settle_s,
            )
        return first
    if current.adopted:
        return None
    if not current.known:
        deaf = [
            w for w in members if w.connected and w.session is not None and w.session.condition.heard < current.number
        ]
        if deaf:
            return deaf[0]
    deadline = _deadline(current, settings)
    late = [w for w in members if w.standing in (Standing.PENDING, Standing.SILENT)]
    if late and deadline is not None and now_s >= deadline:
        return late[0]
    return None


def _deadline(current: Current, settings: Settings) -> float | None:
    if current.announced_at_s is None:
        return None
    return current.announced_at_s + (settings.planned_timeout_s if current.kind == PLANNED else settings.form_timeout_s)


def _forced(
    current: Current,
    workers: tuple[Worker, ...],
    members: tuple[Worker, ...],
    bounds: Bounds,
    culprit: Worker,
    refused: frozenset[str] | None,
    now_s: float,
) -> Decision:
    late = culprit.standing in (Standing.PENDING, Standing.SILENT)
    overdue = (
        {w.id for w in members if w.standing in (Standing.PENDING, Standing.SILENT)}
        if late and current.known
        else set()
    )
    able = [w for w in workers if w.available and w.id not in overdue]
    # Rule WITNESS: a set that refused is tried again with everybody who may hold the state, those leaving included.
    chosen = _choose(
        able if refused else [w for w in able if not w.draining], bounds.replicas, keep_all=refused is not None
    )
    chosen = _without_cut_links(current, chosen)
    where = f"worker {_name(culprit)}"
    if refused is not None and refused == names_of(workers, chosen):
        return Wait(
            "NoWitness",
            "The workers that can be reached do not hold the newest state; training waits for those that do. "
            "Delete the pods of workers that will never come back, and the job rolls back to what is left.",
        )
    missing = bounds.replicas - len(chosen)
    if len(chosen) < bounds.minimum:
        return Wait(
            "TooFewMembers",
            f"{_count(chosen, 'worker')} ready, {bounds.minimum} needed: {where} {_verb(culprit)}; the others keep their state.",
        )
    if (
        missing > 0
        and bounds.rejoin_s > 0
        and culprit.standing == Standing.DIED
        and now_s < culprit.since_s + bounds.rejoin_s
    ):
        return Wait("Rejoining", f"Waiting for {where} to restart in place.", culprit.since_s + bounds.rejoin_s)
    pause = _pause_s(current)
    if current.announced_at_s is not None and now_s < current.announced_at_s + pause:
        return Wait(
            "BackingOff",
            f"{current.attempts} generations in a row did not form; trying again.",
            current.announced_at_s + pause,
        )
    return Announce(
        FORCED,
        chosen,
        "MemberLost" if not late else "GenerationOverdue",
        f"{where} {_verb(culprit)}; {_count(chosen, 'worker')} go on.",
        cause=culprit.why or ("Overdue" if late else ""),
        culprit=_name(culprit),
        detected_at_s=culprit.since_s,
    )


def names_of(workers: Iterable[Worker], chosen: Iterable[Worker]) -> frozenset[str]:
    """Return what rule WITNESS's verdict on a set depends on: its members, who is lost, and what was sealed."""
    names = {f"member:{w.pod.uid}" for w in chosen if w.pod}
    names |= {f"lost:{w.id}" for w in workers if w.pod is None}
    names |= {
        f"seal:{w.pod.uid}:{w.session.seal.left_up_to}" for w in workers if w.pod and w.session and w.session.seal
    }
    return frozenset(names)


def _pause_s(current: Current) -> float:
    """Return how long after an unadopted generation the next may come: two at once, then 0.2, 0.4 .. 5 s."""
    return 0.0 if current.attempts <= 2 else min(5.0, 0.1 * 2 ** (current.attempts - 2))


def _choose(able: list[Worker], replicas: int, *, keep_all: bool) -> tuple[Worker, ...]:
    """Return at most `replicas` workers, one for each slot: members of the newest generation first, low slots first."""
    ordered = sorted(able, key=lambda w: (not w.is_member, w.id.slot, -w.id.attempt))
    slots: dict[int, Worker] = {}
    for worker in ordered:
        slots.setdefault(worker.id.slot, worker)
    chosen = list(slots.values()) if keep_all else list(slots.values())[:replicas]
    return tuple(sorted(chosen, key=lambda w: w.id))


def _without_cut_links(current: Current, chosen: tuple[Worker, ...]) -> tuple[Worker, ...]:
    """Rule CLIQUE: drop members until no pair is left that could not reach each other in the newest generation."""
    left = list(chosen)
    if current.attempts == 0 or {w.id for w in chosen} != set(current.members):
        return chosen
    while True:
        pairs = _cut_pairs(current, left)
        if not pairs:
            return tuple(left)
        count = {w.id: sum(w.id in pair for pair in pairs) for w in left}
        drop = max((w for w in left if count[w.id]), key=lambda w: (count[w.id], w.since_s, w.id))
        left.remove(drop)


def _cut_pairs(current: Current, workers: list[Worker]) -> list[frozenset[MemberId]]:
    by_uid = {w.pod.uid: w for w in workers if w.pod}
    pairs = []
    for worker in workers:
        session = worker.session
        if session and session.fault and session.fault_generation == current.number and session.fault.peer in by_uid:
            other = by_uid[session.fault.peer]
            if other.id != worker.id:
                pairs.append(frozenset({worker.id, other.id}))
    return pairs


# --- a healthy group -----------------------------------------------------------------------------------------------


def _planned(
    members: tuple[Worker, ...],
    workers: tuple[Worker, ...],
    bounds: Bounds,
    silent: list[float],
    now_s: float,
    settings: Settings,
) -> Decision:
    staying = [w for w in members if not w.draining]
    joiners = [w for w in workers if not w.is_member and w.available and not w.draining]
    taken = {w.id.slot for w in staying}
    joiners = [w for w in sorted(joiners, key=lambda w: w.id) if w.id.slot not in taken]
    kept = sorted(staying, key=lambda w: w.id)[: bounds.replicas]  # the highest slots are drained
    new = joiners[: max(0, bounds.replicas - len(kept))]
    target = tuple(sorted([*kept, *new], key=lambda w: w.id))
    if {w.id for w in target} == {w.id for w in members}:
        return Keep(min(silent, default=None))
    if len(target) < bounds.minimum:
        if len(kept) < len(members):
            return Wait(
                "ReplacingFirst",
                f"{_count(target, 'worker')} would be left, {bounds.minimum} needed; waiting for a replacement.",
            )
        return Keep(min(silent, default=None))
    leaving = len(members) - len(kept)
    if new and not leaving and len(target) < bounds.replicas:
        since = [w.since_s for w in new]
        due = min(max(since) + settings.join_quiet_s, min(since) + settings.join_max_s)
        if now_s < due:
            return Keep(min([*silent, due]))
    change = ", ".join(
        filter(None, [f"{_count(new, 'worker')} joins" if new else "", f"{leaving} leave" if leaving else ""])
    )
    return Announce(
        PLANNED,
        target,
        "Resized",
        f"{change}: {_count(target, 'worker')} train on.",
        cause="Resized" if not any(w.draining for w in members) else "Drained",
        culprit=",".join(_name(w) for w in members if w.draining),
        detected_at_s=max([w.since_s for w in new], default=now_s),
    )


# --- words ---------------------------------------------------------------------------------------------------------


def _name(worker: Worker) -> str:
    return f"{worker.id.slot}" if not worker.id.attempt else f"{worker.id.slot}.{worker.id.attempt}"


def _count(items: Iterable[object], noun: str) -> str:
    number = len(list(items))
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _verb(worker: Worker) -> str:
    fault = worker.session.fault if worker.session else None
    if worker.why == "ProcessExited" and fault is not None and fault.exit_code is not None:
        code = f"signal {-fault.exit_code}" if fault.exit_code < 0 else f"exit code {fault.exit_code}"
        return f"lost a process ({code})"
    return {
        "PodDeleted": "is gone with its pod",
        "PodFailed": "failed",
        "Disconnected": "cannot be reached",
        "NeverConnected": "has not called",
        "ProcessExited": "lost a process",
        "CollectiveFailed": "lost its group",
        "Stopped": "has stopped",
    }.get(worker.why, "did not enter the generation in time")
