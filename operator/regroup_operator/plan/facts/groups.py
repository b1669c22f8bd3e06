"""Put workers into groups: the workers that hold one copy of the model together train together, or not at all.

Pure (docs/design/adr/0036-groups-of-workers.md). A worker's *position* in a group is slot mod workersPerGroup, for life: what its
processes hold fits no other position. So a group is one worker of each position, and which group a worker is in may change
with each generation. Those who have trained together stay together. Then those whose group is broken are put together, before
any worker joins that was in no group. Where a group is one worker, every worker is whole, and nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from regroup.protocol.state import Phase
from regroup_operator.api.members import MemberId
from regroup_operator.model.worker import Bounds, Current, Worker

_Part = dict[int, Worker]
"""Workers that stay together, by position."""
_MEMBERS, _HOME = 0, 1
"""Kind of a label: whom a worker stays with. It is the group that it was a member of; for others the workers of the neighbouring
slots."""
_Label = tuple[int, int]


def by_position(workers: Iterable[Worker], per_group: int) -> list[list[Worker]]:
    """Return the workers of each position, in their order."""
    out: list[list[Worker]] = [[] for _ in range(per_group)]
    for worker in workers:
        out[worker.id.slot % per_group].append(worker)
    return out


def positions_of(members: Iterable[MemberId], per_group: int) -> tuple[int, ...] | None:
    """Return the positions for a document; None where a worker is a group of its own."""
    return None if per_group == 1 else tuple(member.slot % per_group for member in members)


def whole_size(workers: Iterable[Worker], per_group: int) -> int:
    """Return how many of the workers could train, in whole groups and one for each slot."""
    return per_group * min(len({w.id.slot for w in some}) for some in by_position(workers, per_group))


def whole_since_s(workers: Iterable[Worker], groups: int, per_group: int) -> float:
    """Return since when there have been so many whole groups. There are that many, and one worker for each slot."""
    return max(sorted(w.since_s for w in some)[groups - 1] for some in by_position(workers, per_group))


def unbroken(workers: Iterable[Worker], before: Sequence[MemberId], per_group: int) -> frozenset[MemberId]:
    """Return those of the workers whose group is whole: `before` are the members of the newest generation, group after group.
    If there are more workers of one position than of another, those are left out whose group has lost somebody anyway."""
    workers = tuple(workers)
    label = _labels(before, per_group)
    parts = _parts(workers, before, per_group)
    return frozenset(w.id for w in workers if len(parts[label(w)]) == per_group)


def choose(ranked: Iterable[Worker], bounds: Bounds, before: Sequence[MemberId]) -> tuple[Worker, ...]:
    """Return as many workers in whole groups as may train, of each position the first in `ranked` (one worker for each slot)."""
    return put_together(fitted(by_position(ranked, bounds.per_group), bounds), before, bounds.per_group)


def fitted(ranked: Sequence[Sequence[Worker]], bounds: Bounds) -> list[Sequence[Worker]]:
    """Return of each position the first workers, as many as make a size that the job may train with (spec.elasticPolicy.sizes)."""
    most = bounds.fitting(bounds.per_group * min(map(len, ranked))) // bounds.per_group
    return [some[:most] for some in ranked]


def put_together(ranked: Sequence[Sequence[Worker]], before: Sequence[MemberId], per_group: int) -> tuple[Worker, ...]:
    """Return the members of a generation, group after group, inside a group by position.

    `ranked` has the workers to take for each position, best first. Each position gets as many as the scarcest one has. `before` is
    the same as in `unbroken`.

    As few members as possible change their group. The parts of former groups with the most members stay as they are, and the others
    fill their gaps. Members fill them first, because they hold a state.
    """
    most = min(map(len, ranked))
    if per_group == 1:
        return tuple(sorted(ranked[0], key=lambda w: w.id))
    chosen = [worker for some in ranked for worker in some[:most]]
    parts = _parts(chosen, before, per_group)
    order = sorted(parts, key=lambda label: (label[0], -len(parts[label]), label))
    groups = [parts[label] for label in order[:most]]
    groups += [{} for _ in range(most - len(groups))]
    placed = {w.id for group in groups for w in group.values()}
    members = frozenset(before)
    moving = sorted((w for w in chosen if w.id not in placed), key=lambda w: w.id not in members)
    for position, waiting in enumerate(by_position(moving, per_group)):
        for group in groups:
            if position not in group:
                group[position] = waiting.pop(0)
    groups.sort(key=lambda group: group[0].id)
    return tuple(group[position] for group in groups for position in range(per_group))


def spares(current: Current | None, workers: Sequence[Worker], per_group: int) -> list[Worker]:
    """Return who is ready and no member, because the other workers of a group are missing. Where some of a position are left over
    those are spares that have been in no generation."""
    if current is None or per_group == 1:
        return []
    members = [w for w in workers if w.is_member and not w.draining]
    ready = [w for w in workers if not w.is_member and w.available and not w.draining]
    slots = {w.id.slot: w for w in reversed([*members, *ready])}
    ranked = sorted(slots.values(), key=lambda w: (not w.is_member, w.id))
    chosen = {w.id for w in put_together(by_position(ranked, per_group), current.members, per_group)}
    return [w for w in ready if w.id not in chosen]


def spare_words(current: Current | None, workers: Sequence[Worker], per_group: int) -> str:
    """Return the sentence on workers that are spares; empty: there are none."""
    found = spares(current, workers, per_group)
    if not found:
        return ""
    one = len(found) == 1
    names = ", ".join(str(w.id) for w in found)
    who = f"Worker {names} is a spare" if one else f"Workers {names} are spares"
    return f"{who}: {'its' if one else 'their'} group of {per_group} workers is not whole."


def ready_words(chosen: Sequence[Worker], ready: Iterable[Worker], bounds: Bounds) -> str:
    """Return how many workers could train: of those that are `ready`, `chosen` make a size that the job may train with."""
    ready, per_group = tuple(ready), bounds.per_group
    whole = min(whole_size(ready, per_group), bounds.replicas)
    text = f"{whole} worker{'' if whole == 1 else 's'} ready"
    if per_group > 1:
        more = len({w.id.slot for w in ready}) - whole
        text += f" in whole groups of {per_group}" + (f" and {more} without one" if more > 0 else "")
    if 0 < len(chosen) < whole and bounds.fitting(whole) < whole:
        text += (
            f", of which {len(chosen)} may train (the next size of spec.elasticPolicy is {_next_size(bounds, whole)})"
        )
    return text


def loading_words(workers: Iterable[Worker]) -> str:
    """Return which workers have an agent and are not ready yet, as the end of a sentence; empty: there are none.

    An import of torch takes a minute on a busy node. Without these words nothing would tell it from a script that hangs. An idle
    agent may also read a launcher's command, and a worker that starts may wait for the restart of a process.
    """
    phases = [w.session.condition.phase for w in workers if w.session is not None and w.session.connected]
    idle, starting = phases.count(Phase.IDLE), phases.count(Phase.STARTING)
    words = []
    if idle:
        whose = "has not started its" if idle == 1 else "have not started their"
        words.append(f"{idle} {whose} processes yet (imports such as torch take time)")
    if starting:
        words.append(f"of {starting} not all processes have come to Regroup's session yet")
    return "".join(f"; {one}" for one in words)


def _next_size(bounds: Bounds, count: int) -> int:
    """Return the smallest size above `count` that the job may train with and wants; `replicas` is one."""
    return next((size for size in bounds.permitted or () if size > count), bounds.replicas)


def waiting_words(current: Current | None, workers: Iterable[Worker], bounds: Bounds) -> str:
    """Return the sentence on workers that are ready and too few for the next size of spec.elasticPolicy; empty: there are none."""
    if current is None or bounds.permitted is None or len(current.members) >= bounds.replicas:
        return ""
    ready = sum(not w.is_member and w.available and not w.draining for w in workers)
    if not ready:
        return ""
    who = "1 more worker is ready and waits" if ready == 1 else f"{ready} more workers are ready and wait"
    return f"{who}: the next size of spec.elasticPolicy is {_next_size(bounds, len(current.members))}."


def _labels(before: Sequence[MemberId], per_group: int) -> Callable[[Worker], _Label]:
    groups = {member: (_MEMBERS, index // per_group) for index, member in enumerate(before)}
    return lambda worker: groups.get(worker.id, (_HOME, worker.id.slot // per_group))


def _parts(workers: Iterable[Worker], before: Sequence[MemberId], per_group: int) -> dict[_Label, _Part]:
    """Return who stays together; of two for one position the first."""
    label = _labels(before, per_group)
    parts: dict[_Label, _Part] = {}
    for worker in workers:
        parts.setdefault(label(worker), {}).setdefault(worker.id.slot % per_group, worker)
    return parts
