"""Decide the next generation: announce one, wait, or keep the one there is.

Pure: (newest generation, workers, bounds, clock) -> a Decision with its reason. The rules are protocol.md's; PERSIST,
FENCE and the rest of the writing order are controller.py's. Forced generations name only members with an open stream;
planned ones only ready workers (rule FORCED, PLANNED).
"""

from __future__ import annotations

from collections.abc import Iterable

from regroup.protocol.document import FORCED, PLANNED
from regroup.protocol.state import Phase
from regroup_operator.model.members import MemberId, gone_name
from regroup_operator.model.records import Settings
from regroup_operator.model.worker import Announce, Bounds, Current, Decision, Keep, Standing, Wait, Worker
from regroup_operator.plan.culprit import name_culprit

_GONE = (Standing.LOST, Standing.DIED)
RECONNECT_S = 5.0
"""After the operator's start a broken group waits this long for members that have not called yet: they are most likely on
their way, and a generation without them would cost them their place."""
CUT_LINK_S = 60.0
"""A worker that was dropped because of a broken link does not join again for this long."""


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
        unknown = [w for w in members if w.standing == Standing.SILENT and w.session is None]
        until_s = min((w.since_s + RECONNECT_S for w in unknown), default=now_s)
        if now_s < until_s:
            return Wait(
                "Reconnecting",
                f"The operator has just started; {_count(unknown, 'member')} have not called yet.",
                until_s,
            )
        return _forced(current, workers, members, bounds, trouble, refused, now_s)
    silent = [w.lost_at_s for w in members if w.lost_at_s is not None]
    if any(w.standing == Standing.FINISHED for w in members):
        return Keep(min(silent, default=None))  # a finished rank ignores planned generations (rule CUTALL)
    if not current.adopted:
        deadline = _deadline(current, settings)
        return Keep(min([*silent, *([deadline] if deadline > now_s else [])], default=None))
    return _planned(current, members, workers, bounds, silent, now_s, settings)


# --- the first one -------------------------------------------------------------------------------------------------


def _first(workers: tuple[Worker, ...], bounds: Bounds, now_s: float, settings: Settings) -> Decision:
    ready = list(_one_per_slot(sorted((w for w in workers if w.available and not w.draining), key=lambda w: w.id)))
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
        f"{counts}; starting with these if no more come within {settings.first_wait_s:.0f} s.",
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
    if now_s >= _deadline(current, settings):
        return next((w for w in members if w.standing in (Standing.PENDING, Standing.SILENT)), None)
    return None


def _overdue(current: Current, worker: Worker) -> bool:
    """Return whether a member that is late did not answer. Who has heard of a planned generation and still trains in the
    one before waits for the others (rule CUTALL)."""
    if worker.standing == Standing.SILENT:
        return True
    if worker.standing != Standing.PENDING:
        return False
    condition = worker.session.condition if worker.session else None
    trains = condition is not None and condition.phase == Phase.TRAINING and condition.heard >= current.number
    return not (current.kind == PLANNED and trains)


def _deadline(current: Current, settings: Settings) -> float:
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
    overdue = {w.id for w in members if _overdue(current, w)} if late and current.known else set()
    able = [w for w in workers if w.available and w.id not in overdue]
    # Rule WITNESS: a set that refused is tried again with those who may hold the state first, those leaving included.
    chosen = _choose(
        able if refused is not None else [w for w in able if not w.draining],
        bounds.replicas,
        holders_first=refused is not None,
    )
    chosen = _without_cut_links(current, chosen, bounds.minimum)
    named = name_culprit(current, members, culprit)
    if refused is not None and refused == names_of(current, workers, chosen):
        return Wait(
            "NoWitness",
            "The workers that can be reached do not hold the newest state; training waits for those that do. "
            "Delete the pods of workers that will never come back, and the job rolls back to what is left.",
        )
    missing = bounds.replicas - len(chosen)
    if len(chosen) < bounds.minimum:
        return Wait(
            "TooFewMembers",
            f"{_count(chosen, 'worker')} ready, {bounds.minimum} needed: {named.text}; the others keep their state.",
        )
    if (
        missing > 0
        and bounds.rejoin_s > 0
        and culprit.standing == Standing.DIED
        and now_s < culprit.since_s + bounds.rejoin_s
    ):
        return Wait(
            "Rejoining", f"Waiting for worker {culprit.id} to restart in place.", culprit.since_s + bounds.rejoin_s
        )
    pause = _pause_s(current)
    if now_s < current.announced_at_s + pause:
        return Wait(
            "BackingOff",
            f"{current.attempts} generations in a row did not form; trying again.",
            current.announced_at_s + pause,
        )
    return Announce(
        FORCED,
        chosen,
        "MemberLost" if not late else "GenerationOverdue",
        f"{named.text}; {_count(chosen, 'worker')} {_verb_of(chosen, 'go')} on.",
        cause=named.cause or ("Overdue" if late else ""),
        culprit=named.id,
        detected_at_s=culprit.since_s,
        detect_s=None if culprit.last_seen_s is None else culprit.since_s - culprit.last_seen_s,
    )


def names_of(current: Current | None, workers: Iterable[Worker], chosen: Iterable[Worker]) -> frozenset[str]:
    """Return what rule WITNESS's verdict on a set depends on: what its members hold, what others sealed, who is gone."""
    chosen, workers = tuple(chosen), tuple(workers)
    inside = {w.id for w in chosen}
    names: set[str] = set()
    for worker in workers:
        seal = worker.session.seal if worker.session else None
        if worker.pod is not None and (worker.id in inside or seal is not None):
            held = (seal.state, seal.state_adopted, seal.adopted) if seal else None
            names.add(f"{'member' if worker.id in inside else 'seal'}:{worker.pod.uid}:{held}")
    if current is not None:
        alive = {w.pod.uid for w in workers if w.pod is not None and w.pod.alive}
        dead = [w.pod.uid if w.pod else gone_name(w.id) for w in workers if w.is_member]
        dead += [uid for older in current.older for uid in older.pod_uids]
        names |= {f"lost:{uid}" for uid in dead if uid not in alive}
    return frozenset(names)


def _pause_s(current: Current) -> float:
    """Return how long after an unadopted generation the next may come: two at once, then 0.2, 0.4 .. 5 s."""
    return 0.0 if current.attempts <= 2 else min(5.0, 0.1 * 2 ** (current.attempts - 2))


def _choose(able: list[Worker], replicas: int, *, holders_first: bool) -> tuple[Worker, ...]:
    """Return at most `replicas` workers, one for each slot: members of the newest generation first, low slots first;
    with `holders_first` those before all that hold the newest state."""

    def order(worker: Worker) -> tuple[object, ...]:
        usual = (not worker.is_member, worker.id.slot, -worker.id.attempt)
        seal = worker.session.seal if worker.session else None
        if not holders_first or seal is None or seal.state is None:
            return (0, 0, 0, *usual)
        return (-seal.state_adopted, -seal.state.generation, -seal.state.step, *usual)

    slots = _one_per_slot(sorted(able, key=order))
    return tuple(sorted(slots[:replicas], key=lambda w: w.id))


def _one_per_slot(workers: Iterable[Worker]) -> tuple[Worker, ...]:
    """Return the workers without those whose slot an earlier one has."""
    slots: dict[int, Worker] = {}
    for worker in workers:
        slots.setdefault(worker.id.slot, worker)
    return tuple(slots.values())


def _without_cut_links(current: Current, chosen: tuple[Worker, ...], minimum: int) -> tuple[Worker, ...]:
    """Rule CLIQUE: drop members until no pair is left that could not reach each other in the newest generation. Where too
    few would be left the same set is tried again, with another store and a pause: the link may heal."""
    left = list(chosen)
    if current.attempts == 0 or {w.id for w in chosen} != set(current.members):
        return chosen
    while True:
        pairs = _cut_pairs(current, left)
        if not pairs:
            return tuple(left) if len(left) >= minimum else chosen
        count = {w.id: sum(w.id in pair for pair in pairs) for w in left}
        drop = max((w for w in left if count[w.id]), key=lambda w: (count[w.id], w.since_s, w.id))
        left.remove(drop)


def _cut_pairs(current: Current, workers: list[Worker]) -> list[frozenset[MemberId]]:
    """Return the pairs of workers of which one lost the other in the newest generation, while both lived on. A peer that
    lost a process is no cut link."""
    by_uid = {w.pod.uid: w for w in workers if w.pod and w.standing == Standing.BROKEN}
    pairs = []
    for worker in by_uid.values():
        fault = worker.session.fault if worker.session else None
        if worker.session and fault and worker.session.fault_generation == current.number and fault.peer in by_uid:
            other = by_uid[fault.peer]
            if other.id != worker.id:
                pairs.append(frozenset({worker.id, other.id}))
    return pairs


# --- a healthy group -----------------------------------------------------------------------------------------------


def _planned(
    current: Current,
    members: tuple[Worker, ...],
    workers: tuple[Worker, ...],
    bounds: Bounds,
    silent: list[float],
    now_s: float,
    settings: Settings,
) -> Decision:
    uids = {w.pod.uid for w in members if w.pod}
    healed = [
        (w, _cut_until_s(w, uids, current)) for w in workers if not w.is_member and w.available and not w.draining
    ]
    silent = [*silent, *(at_s for _, at_s in healed if at_s > now_s)]
    target = _target(members, [w for w, at_s in healed if at_s <= now_s], bounds.replicas)
    kept = [w for w in target if w.is_member]
    new = [w for w in target if not w.is_member]
    if {w.id for w in target} == {w.id for w in members}:
        return Keep(min(silent, default=None))
    if len(target) < bounds.minimum:
        if len(kept) < len(members):
            return Wait(
                "ReplacingFirst",
                f"{_count(target, 'worker')} would be left, {bounds.minimum} needed; waiting for a replacement.",
                min(silent, default=None),
            )
        return Keep(min(silent, default=None))
    leaving = len(members) - len(kept)
    if new and not leaving and len(target) < bounds.replicas:
        since = [w.since_s for w in new]
        due = min(max(since) + settings.join_quiet_s, min(since) + settings.join_max_s)
        if now_s < due:
            return Keep(min([*silent, due]))
    change = ", ".join(
        filter(None, [f"{_count(new, 'worker')} to join" if new else "", f"{leaving} to leave" if leaving else ""])
    )
    return Announce(
        PLANNED,
        target,
        "Resized",
        f"{change}: {_count(target, 'worker')} {_verb_of(target, 'train')} on.",
        cause="Resized" if not any(w.draining for w in members) else "Drained",
        culprit=",".join(str(w.id) for w in members if w.draining),
        detected_at_s=max([w.since_s for w in new], default=now_s),
    )


def _target(members: tuple[Worker, ...], joiners: list[Worker], replicas: int) -> tuple[Worker, ...]:
    """Return who should train: at most `replicas`, one for each slot, never without a member (it holds the state).

    Members of slots below `replicas` first, then who joins such a slot, then members of higher slots while they are
    needed. Only where all members are leaving one of them stays, until the others have its state.
    """
    staying = [w for w in members if not w.draining] or sorted(members, key=lambda w: (not w.connected, w.id))[:1]
    low = [w for w in staying if w.id.slot < replicas]
    high = [w for w in staying if w.id.slot >= replicas]
    holders, others = (low, high) if low else (high[:1], high[1:])
    joining = sorted((w for w in joiners if w.id.slot < replicas), key=lambda w: (w.id.slot, -w.id.attempt))
    slots = _one_per_slot([*holders, *joining, *others])
    return tuple(sorted(slots[:replicas], key=lambda w: w.id))


def _cut_until_s(worker: Worker, members: set[str], current: Current) -> float:
    """Return when a worker that could not form a group with one of `members` may join them again; 0 for any other."""
    session = worker.session
    if session is None or session.fault is None or session.fault_at_s is None or session.fault.peer not in members:
        return 0.0
    formed = session.condition.adopted >= session.fault_generation
    return 0.0 if formed or session.fault_generation < current.number - 1 else session.fault_at_s + CUT_LINK_S


# --- words ---------------------------------------------------------------------------------------------------------


def _count(items: Iterable[object], noun: str) -> str:
    number = len(list(items))
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _verb_of(subject: tuple[Worker, ...], verb: str) -> str:
    """Return the verb in the number of its subject."""
    return verb if len(subject) != 1 else f"{verb}es" if verb.endswith("o") else f"{verb}s"
