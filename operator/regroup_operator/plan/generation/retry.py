"""Decide whether the next generation may be tried yet: after one that refused to train, and after several in a row that failed.

Pure. A set that refused because nobody in it has the newest state is not tried again before something has changed (rule WORDS).
Everything else may pass by itself, and is tried again after a pause (rule RETRY).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from regroup_operator.model.waits import UntilEvent
from regroup_operator.model.worker import Current, Refusal, Wait, Worker

RETRY_S = (1.0, 30.0)
"""Pause before a checkpoint that could not be read is tried again: the first, doubled each time up to the second."""


def wait_after_refusal(
    refusal: Refusal, current: Current, workers: tuple[Worker, ...], chosen: tuple[Worker, ...], now_s: float
) -> Wait | None:
    """Return the wait before the members that were `chosen` try again what was refused; None: they may."""
    is_same = refusal.names == names_of(current, workers, chosen)
    if is_same and not refusal.unreadable:
        return Wait(
            "NoWitness",
            "The workers that can be reached do not have the newest state; training waits for those that have it. "
            "If they are gone for good, delete their pods: the job then rolls back to the newest state that is left.",
            min((at_s for w in workers if (at_s := w.silent_until_s) and at_s < inf), default=UntilEvent.HOLDER),
        )
    until_s = current.announced_at_s + _retry_s(current, is_same=is_same or refusal.have_all_tried)
    if refusal.unreadable and now_s < until_s:
        return Wait("CheckpointUnreadable", "The required checkpoint cannot be read; trying again.", until_s)
    return None


def wait_after_failures(current: Current, without_commit: int, why: str, lacks: str, now_s: float) -> Wait | None:
    """Return the pause after generations in a row that did not form or, `without_commit` of them, committed no step; None: it is
    over. `why`: what broke the newest one; `lacks`: a sentence on what keeps the same set from forming, empty: nothing known."""
    pause = _pause_s(max(current.attempts, without_commit))
    if now_s >= current.announced_at_s + pause:
        return None
    failed = (
        f"{current.attempts} generations in a row did not form"
        if current.attempts >= without_commit
        else f"{without_commit} generations in a row committed no step"
    )
    message = f"{failed}, the last one because {why}; trying again."
    return Wait("BackingOff", " ".join(filter(None, [message, lacks])), current.announced_at_s + pause)


def names_of(current: Current | None, workers: Iterable[Worker], chosen: Iterable[Worker]) -> frozenset[str]:
    """Return what the verdict on a set depends on (rule WORDS): exactly the inputs of `adoption.decide` and of what its
    document leaves out. As long as nothing of it changes, the same set refuses again."""
    chosen, workers = tuple(chosen), tuple(workers)
    inside = {w.id for w in chosen}
    older = [] if current is None else [(o.number, set(o.pod_uids)) for o in current.older]
    if current is not None:
        older.append((current.number, {w.uid for w in workers if w.is_member}))
    names: set[str] = set()
    for worker in workers:
        session, pod = worker.session, worker.pod
        seal = session.seal if session else None
        role = "member" if worker.id in inside else "seal" if seal else "silent" if worker.silent_until_s else ""
        if pod is None or not role:
            continue
        held = (seal.state, seal.state_adopted, seal.adopted, seal.is_backup) if seal else None
        left_up_to = seal.left_up_to if seal else 0
        not_left = [number for number, uids in older if pod.uid in uids and left_up_to < number]
        names.add(f"{role}:{pod.uid}:{held}:{not_left}:{session.condition.adopted if session else 0}")
    if current is not None:
        alive = {w.uid for w in workers if w.pod is not None and w.pod.alive}
        dead = [w.uid for w in workers if w.is_member]
        dead += [uid for generation in current.older for uid in generation.pod_uids]
        names |= {f"lost:{uid}" for uid in dead if uid not in alive}
    return frozenset(names)


def _retry_s(current: Current, *, is_same: bool) -> float:
    """Return the pause after a generation that could not read its checkpoint (rule RETRY). `is_same` says that all workers in the
    next one have tried already."""
    first_s, last_s = RETRY_S
    return min(last_s, first_s * 2 ** min(10, max(0, current.attempts - 1))) if is_same else _pause_s(current.attempts)


def _pause_s(in_a_row: int) -> float:
    """Return how long after a generation that did not train the next may come: two at once, then 0.2, 0.4 .. 5 s."""
    return 0.0 if in_a_row <= 2 else min(5.0, 0.1 * 2 ** min(10, in_a_row - 2))
