"""Decide the next generation: announce one, wait, or keep the one there is.

Pure: (newest generation, workers, bounds, clock) -> a Decision with its reason. The rules are protocol.md's; PERSIST,
FENCE and the rest of the writing order are controller.py's. The first generation is decided here, and when a healthy group
changes; a planned generation names only ready workers (rule PLANNED). What has broken a group is found in trouble.py, and
forced.py decides what takes its place.
"""

from __future__ import annotations

from dataclasses import replace

from regroup.protocol.document import FORCED
from regroup_operator.model.records import Settings
from regroup_operator.model.waits import UntilEvent
from regroup_operator.model.worker import (
    RESUMED,
    Announce,
    Bounds,
    Current,
    Decision,
    Keep,
    Situation,
    Standing,
    Wait,
    Worker,
)
from regroup_operator.plan.facts.groups import choose, loading_words, ready_words, unbroken, whole_since_s
from regroup_operator.plan.facts.stalls import is_unresponsive
from regroup_operator.plan.generation.forced import forced_generation, new_groups
from regroup_operator.plan.generation.target import (
    change,
    comes_late,
    count,
    one_per_slot,
    overtaking,
    target_of,
)
from regroup_operator.plan.generation.trouble import deadline_of, find_trouble

JOIN_MEMBERS = 500
"""A job with more members waits longer for workers to join together, in proportion. A generation interrupts all members, and each
of them reports four times."""


def next_generation(current: Current | None, situation: Situation) -> Decision:
    """Return what to do about membership now. `current` is the newest generation, None before the first."""
    workers, bounds, now_s, settings = situation.workers, situation.bounds, situation.now_s, situation.settings
    if current is None:
        return _first(workers, bounds, now_s, settings)
    if current.suspended:
        first = _first(tuple(w for w in workers if w.pod is not None), bounds, now_s, settings)
        return replace(first, reason=RESUMED, cause=RESUMED) if isinstance(first, Announce) else first
    members = situation.members
    deadline = deadline_of(current, members, situation.step_s, settings)
    trouble = find_trouble(current, members, deadline, now_s, settings)
    if isinstance(trouble, Wait):
        return trouble
    if trouble is not None:
        return forced_generation(trouble, current, situation)
    if situation.hang:
        return new_groups(current, situation)
    silent = [w.lost_at_s for w in members if w.lost_at_s is not None]
    if any(w.standing == Standing.FINISHED for w in members):
        # A finished rank ignores planned generations (rule CUTALL).
        return Keep(min(silent, default=UntilEvent.LAST_STEPS))
    if not current.adopted:
        newer = overtaking(current, members, bounds, now_s)
        if newer is not None:
            return newer
        dues = [*silent, *([deadline] if deadline > now_s else [])]
        return Keep(min(dues, default=UntilEvent.ADOPTED_REPORT))
    return _planned(current, situation, silent)


# --- the first one -------------------------------------------------------------------------------------------------


def _first(workers: tuple[Worker, ...], bounds: Bounds, now_s: float, settings: Settings) -> Decision:
    # Where the status was restored from a backup of before the first generation, somebody has a state already. Who has it trains,
    # even if its pod is about to end: then it hands the state over.
    able = (w for w in workers if w.available and (not w.is_ending or _adopted(w)))
    ready = list(one_per_slot(sorted(able, key=lambda w: (-_adopted(w), w.draining, w.id))))
    whole = unbroken(ready, (), bounds.per_group)
    chosen = choose(sorted(ready, key=lambda w: w.id not in whole), bounds, ())
    if len(chosen) >= bounds.replicas:
        words = "The worker is ready." if len(chosen) == 1 else f"All {len(chosen)} workers are ready."
        return Announce(FORCED, chosen, "Started", words, cause="Started", detected_at_s=now_s)
    counts = f"{ready_words(chosen, ready, bounds)}, {bounds.replicas} wanted"
    if not bounds.elastic or len(chosen) < bounds.minimum:
        needed = f"{counts}, at least {bounds.minimum} needed{loading_words(workers)}."
        return Wait("TooFewReady", needed, UntilEvent.FIRST_WORKERS)
    since = whole_since_s(ready, bounds.min_groups, bounds.per_group)
    if now_s >= since + settings.first_wait_s:
        return Announce(
            FORCED,
            chosen,
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


def _adopted(worker: Worker) -> int:
    """Return the newest generation that a worker's processes have adopted, 0: none."""
    return 0 if worker.session is None else worker.session.condition.adopted


# --- a healthy group -----------------------------------------------------------------------------------------------


def _planned(current: Current, situation: Situation, silent: list[float]) -> Decision:
    members, bounds, now_s, settings = situation.members, situation.bounds, situation.now_s, situation.settings
    joiners = [w for w in situation.workers if not w.is_member and w.available and not w.draining]
    joiners = [w for w in joiners if w.session is None or not is_unresponsive(w.session, now_s)]
    silent = [*silent, *(w.barred_until_s for w in joiners if w.barred_until_s > now_s)]
    prompt = [w for w in joiners if not comes_late(w, current, now_s)]
    target = target_of(members, prompt, bounds, current.members)
    kept = [w for w in target if w.is_member]
    new = [w for w in target if not w.is_member]
    if {w.id for w in target} == {w.id for w in members}:
        return Keep(min(silent, default=UntilEvent.CHANGE))
    if len(target) < bounds.minimum:
        if len(kept) < len(members):
            return Wait(
                "ReplacingFirst",
                f"{count(target, 'worker')} would be left, {bounds.minimum} needed; waiting for a replacement.",
                min(silent, default=UntilEvent.REPLACEMENT),
            )
        return Keep(min(silent, default=UntilEvent.CHANGE))
    if any(w.session is None for w in kept):
        # It has not called this operator yet, which has just started: a document cannot name it, and it is called lost in time.
        return Keep(min(silent, default=UntilEvent.CHANGE))
    if new and len(kept) == len(members) and situation.holds_growth:
        return Keep(min(silent, default=UntilEvent.CHANGE))
    if new and len(kept) == len(members) and len(target) < bounds.replicas:
        since, growth = [w.since_s for w in new], max(1.0, len(members) / JOIN_MEMBERS)
        due = min(max(since) + growth * settings.join_quiet_s, min(since) + growth * settings.join_max_s)
        if now_s < due:
            return Keep(min([*silent, due]))
    return change(members, target, now_s)
