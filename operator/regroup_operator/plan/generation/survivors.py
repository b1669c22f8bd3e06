"""Choose the workers that go on in place of a broken group. Pure.

First, workers that would hold a generation up are left out, but only while the others are enough. Then the best are chosen. Then
those are left out that cannot reach one of the others (rule CLIQUE, links.py). A worker that may be the only one to hold the state
is asked for to the end of its grace period (rules WITNESS, BEST).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from regroup_operator.api.members import MemberId
from regroup_operator.model.worker import Bounds, Current, Situation, Worker
from regroup_operator.plan.facts.groups import by_position, choose, unbroken, whole_size
from regroup_operator.plan.generation.links import cut_off, state_of, with_links, with_returning
from regroup_operator.plan.generation.target import can_leave, comes_late, one_per_slot


@dataclass(frozen=True)
class Survivors:
    """`chosen`: the members of the next generation; they may be too few. `able`: those of whom they were chosen. `cut`: those left
    out because of a broken link."""

    chosen: tuple[Worker, ...]
    able: tuple[Worker, ...]
    cut: frozenset[MemberId]


def choose_survivors(
    able: list[Worker], current: Current, situation: Situation, *, left_out: Collection[MemberId], with_leaving: bool
) -> Survivors:
    """Return the workers that go on, of those who are `able`.

    Workers that are overdue or have not answered are `left_out`. With `with_leaving` the workers that leave are needed once more.
    """
    bounds, refusal, now_s = situation.bounds, situation.refusal, situation.now_s
    able = _enough_without([w for w in able if w.id not in left_out], able, bounds)
    if refusal is None:
        prompt = [w for w in able if w.is_member or not comes_late(w, current, now_s)]
        able = _enough_without(prompt, able, bounds)
    else:
        able = _enough_without([w for w in able if not _is_stuck(w, now_s)], able, bounds)
    last = refusal.readers if refusal is not None else frozenset()
    chosen = choose_members(able, bounds, current, holders_first=with_leaving, last=last)
    links = with_links(situation.links, current, situation.workers)
    cut = cut_off(
        current,
        chosen,
        links,
        replaceable=_replaceable(able, chosen, bounds),
        refused=refusal is not None,
        spared=_only_holders(able, bounds),
    )
    if cut:
        out = {*cut, *left_out}
        usable = [w for w in situation.workers if w.available and w.id not in out and can_leave(w, current)]
        barred = [w for w in usable if now_s < w.barred_until_s and (with_leaving or not w.is_ending)]
        others = with_returning([w for w in able if w.id not in cut], barred, links)
        reachable = choose_members(others, bounds, current, holders_first=with_leaving, last=last)
        # Too few are left: the same set is tried again, with another store and a pause. The link may heal.
        chosen = reachable if len(reachable) >= bounds.minimum else chosen
    return Survivors(chosen, tuple(able), cut)


def choose_members(
    able: list[Worker], bounds: Bounds, current: Current, *, holders_first: bool, last: frozenset[str] = frozenset()
) -> tuple[Worker, ...]:
    """Return at most `replicas` workers in whole groups, one for each slot.

    The order is: members of the newest generation, slots that are wanted, workers whose group is whole, low slots. Workers that are
    being replaced come after them, and the pods in `last` behind all others. With `holders_first` the holders of the newest state
    come before all, a live one before a backup (rule BACKUP).
    """
    whole = unbroken(able, current.members, bounds.per_group)

    def order(worker: Worker) -> tuple[object, ...]:
        is_last = worker.uid in last
        slot, attempt = worker.id
        place = (slot >= bounds.slots, worker.id not in whole, slot, -attempt)
        usual = (is_last, worker.abandoned, not worker.is_member, *place)
        seal = worker.session.seal if worker.session else None
        if not holders_first or seal is None or seal.state is None:
            return (0, 0, 0, 0, *usual)
        return (-seal.state_adopted, seal.is_backup, -seal.state.generation, -seal.state.step, *usual)

    return choose(one_per_slot(sorted(able, key=order)), bounds, current.members)


def needs_leaving(able: list[Worker], bounds: Bounds) -> bool:
    """Return whether workers whose end has begun are needed once more.

    They are if the others are too few to go on. They also are if no other worker of a position may hold the job's state. It would
    be lost at the end of a grace period.
    """
    staying = [w for w in able if not w.is_ending]
    if not bounds.session or whole_size(staying, bounds.per_group) < bounds.minimum:
        return bounds.session
    holders = by_position((w for w in able if w.may_hold), bounds.per_group)
    return any(some and all(w.is_ending for w in some) for some in holders)


def _is_stuck(worker: Worker, now_s: float) -> bool:
    """Return whether a worker has not come out of its last group for a generation that waited for it. To ask for the state
    that it holds again brings nothing before its agent reports that it is out, or that its process was restarted."""
    return worker.is_in_group and now_s < worker.barred_until_s


def _enough_without(fitting: list[Worker], able: list[Worker], bounds: Bounds) -> list[Worker]:
    """Return those that fit if they are enough, else all."""
    return fitting if whole_size(fitting, bounds.per_group) >= bounds.minimum else able


def _replaceable(able: list[Worker], chosen: Iterable[Worker], bounds: Bounds) -> frozenset[MemberId]:
    """Return who could be dropped without a group: another worker of the same position is ready. Where a group is one worker, it
    is the same for all."""
    if bounds.per_group == 1:
        return frozenset()
    inside = {w.id.slot for w in chosen}
    spare = by_position((w for w in able if w.id.slot not in inside), bounds.per_group)
    return frozenset(w.id for w in chosen if spare[w.id.slot % bounds.per_group])


def _only_holders(able: list[Worker], bounds: Bounds) -> frozenset[MemberId]:
    """Return the workers that alone hold the newest state of their position."""
    out: set[MemberId] = set()
    for some in by_position(able, bounds.per_group):
        newest = max(map(state_of, some), default=())
        holders = [w.id for w in some if newest and state_of(w) == newest]
        out.update(holders if len(holders) == 1 else ())
    return frozenset(out)
