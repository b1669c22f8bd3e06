"""Whose parts does a generation of model groups continue from? Rules WITNESS, INNER, KEEP, EXACT, COPIES, BEST and BACKUP, pure.

Where m ranks hold one copy of the model, a state is whole when each inner index of it has a holder here. Every rank calls `decide`
with the same document and arrivals, so every rank decides the same. The traces M1 to M8 in docs/design/protocol.md say what
happens otherwise; the table is tests/unit/generation/test_parts.py. What a generation without a mesh does is in `adoption`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regroup.protocol.document import Document, OlderGeneration
from regroup.protocol.state import StatePair

from .adoption import Arrival, Refuse, group_by_pod, never_stepped, newest_first


@dataclass(frozen=True)
class CopyParts:
    """Continue from `state`: who holds it keeps it, who has kept the gradients that lead to it applies them, the others copy the
    part of their inner index."""

    state: StatePair
    sources: tuple[int, ...]
    """By inner index: the rank that serves copies."""
    record: list[Any] | None
    """What the commit of `state` came to, from a rank that has made it (rule ROWS)."""


@dataclass(frozen=True)
class RestoreParts:
    """Continue from `state`: each inner index has a memory snapshot of it here, or holds it. The sources load theirs, and others
    copy the part of their inner index."""

    state: StatePair
    sources: tuple[int, ...]
    """By inner index."""


@dataclass(frozen=True)
class FallbackParts:
    """No state is whole in the processes, and nobody who is not here can make one so: the newer of `best` and the durable
    checkpoint, else nothing."""

    rolled_back: bool
    best: RestoreParts | None = None


Decision = CopyParts | RestoreParts | FallbackParts | Refuse
ByPod = Mapping[str, Sequence[tuple[int, Arrival]]]
"""Arrivals of each worker that is here, with their inner indexes."""


def decide(document: Document, arrivals: Sequence[Arrival], size: int) -> Decision:
    """Return what the generation continues from. `arrivals` is by rank; `size`: ranks of a model group.

    The newest state that somebody here has applied and that is whole here, or a newer one that is whole in memory snapshots. Each
    one that is newer must be certainly gone: for some inner index everybody that may hold it is lost.
    """
    if {arrival.group_size for arrival in arrivals} != {size}:
        return Refuse(
            "The workers split the model differently. Run one script, with one regroup.mesh(), in all workers."
        )
    by_pod = group_by_pod(document, [(rank % size, arrival) for rank, arrival in enumerate(arrivals)])
    below: StatePair | None = None
    best = _newest_snapshots(arrivals, size)
    applied = sorted({arrival.state for arrival in arrivals if arrival.state is not None}, reverse=True)
    for wanted in (*applied, None):
        for index in range(size):
            missing = _may_hold_newer(document, by_pod, index, below, size)
            if missing:
                return _wait_for(missing, index)
        sources = _sources(arrivals, size, wanted) if wanted is not None else None
        refusal = _better_elsewhere(document, by_pod, wanted, is_whole=sources is not None)
        if refusal is not None:
            return refusal
        if wanted is not None and sources is not None:
            if best is not None and best.state > wanted:
                return best
            return CopyParts(wanted, sources, next(a.record for a in arrivals if a.state == wanted))
        below = wanted
    return FallbackParts(any(arrival.agent_adopted > 0 for arrival in arrivals) or bool(document.lineage), best)


def rolls(arrival: Arrival, wanted: StatePair) -> bool:
    """Return whether a rank makes `wanted` of what it holds, with gradients that it has kept (rules KEEP and EXACT)."""
    return arrival.state is not None and any(
        base == arrival.state and (generation, base.step + 1) == tuple(wanted) for generation, base in arrival.pending
    )


def beginners(arrivals: Sequence[Arrival], size: int) -> tuple[int, ...] | None:
    """Return by inner index the rank whose part a job begins with where there is nothing to continue from: the lowest whose
    tensors are as the script made them. None: for some index there is none."""
    found = [
        next((r for r in range(index, len(arrivals), size) if arrivals[r].state is None and not arrivals[r].torn), None)
        for index in range(size)
    ]
    return None if None in found else tuple(rank for rank in found if rank is not None)


def odd_seed(arrivals: Sequence[Arrival], first: Sequence[int]) -> int | None:
    """Return a rank of `first` (`beginners`) that has built its model from another seed than the first of them; None: none has.

    Each keeps its part of its own model, and parts of different models make one that no seed gives.
    """
    return next((rank for rank in first if arrivals[rank].seed != arrivals[first[0]].seed), None)


def _sources(arrivals: Sequence[Arrival], size: int, wanted: StatePair | None) -> tuple[int, ...] | None:
    """Return by inner index the lowest rank that holds the state, or else that can roll forward to it. None: it is not whole."""
    assert wanted is not None
    found = []
    for index in range(size):
        ranks = range(index, len(arrivals), size)
        holders = [rank for rank in ranks if arrivals[rank].state == wanted]
        holders += [rank for rank in ranks if rolls(arrivals[rank], wanted)]
        if not holders:
            return None
        found.append(holders[0])
    return tuple(found)


def _newest_snapshots(arrivals: Sequence[Arrival], size: int) -> RestoreParts | None:
    """Return the newest state of which each inner index has a snapshot here, or holds it; None: there is none."""
    for wanted in sorted({pair for arrival in arrivals for pair in arrival.snapshots}, reverse=True):
        found = []
        for index in range(size):
            ranks = range(index, len(arrivals), size)
            held = [rank for rank in ranks if arrivals[rank].state == wanted]
            found.append(next(iter(held + [rank for rank in ranks if wanted in arrivals[rank].snapshots]), None))
        if None not in found:
            return RestoreParts(wanted, tuple(rank for rank in found if rank is not None))
    return None


def _may_hold_newer(document: Document, by_pod: ByPod, index: int, below: StatePair | None, size: int) -> Sequence[str]:
    """Rules WITNESS and INNER: return the workers that are not here and may hold the part of `index` of a newer state than those
    here do. `below` a state that is certainly gone: who holds that one knows of no older one."""
    may_copy: list[str] = []
    for older in newest_first(document):
        number = older.number
        present = [one for uid in older.pod_uids for one in by_pod.get(uid, ())]
        if any(
            at == index
            and arrival.state is not None
            and (below is None or arrival.state < below)
            and arrival.state_adopted >= number
            for at, arrival in present
        ):
            return ()
        asked = [uid for uid in older.pod_uids if index in _indexes_of(older, uid, document, size)]
        seals = [seal for seal in document.seals if seal.pod_uid in older.pod_uids and seal.left_up_to >= number]
        if never_stepped(number, (arrival for _, arrival in present), seals):
            may_copy += asked
            continue
        empty = {seal.pod_uid for seal in seals if seal.state is None or seal.is_backup}
        missing = {uid for uid in (*asked, *may_copy) if uid not in by_pod and uid not in document.lost}
        if missing - empty:
            return sorted(missing - empty)
    return ()


def _indexes_of(older: OlderGeneration, uid: str, document: Document, size: int) -> frozenset[int]:
    """Return the inner indexes that the processes of a worker have; all of them where its position is not known."""
    processes = document.members[0].processes
    if older.positions is None:
        return frozenset(range(size))
    first = older.position(uid) * processes
    return frozenset(place % size for place in range(first, first + processes))


def _better_elsewhere(document: Document, by_pod: ByPod, wanted: StatePair | None, *, is_whole: bool) -> Refuse | None:
    """Rule BEST: refuse where a connected worker that is no member holds a newer state than `wanted`; where that is not whole here,
    also one that may hold a part of it, or has not said yet what it holds."""
    silent = [] if is_whole else [uid for uid in document.silent if uid not in by_pod]
    held = [
        (seal.state, seal.pod_uid)
        for seal in document.seals
        if seal.state is not None and not seal.is_backup and seal.pod_uid not in by_pod
    ]
    if wanted is not None:
        # The part of a state may be the state before and gradients that lead to it.
        held = [one for one in held if one[0] > wanted or (not is_whole and one[0].step >= wanted.step - 1)]
    if not silent and not held:
        return None
    who = silent[0] if silent else max(held)[1]
    return Refuse(
        f"The worker with pod UID {who} may hold a part of a newer state, and is not a member of generation {document.number}; "
        "waiting for it."
    )


def _wait_for(missing: Sequence[str], index: int) -> Refuse:
    return Refuse(
        f"Workers may hold the part of inner index {index} of a newer state and cannot be reached (pod UIDs {', '.join(missing)}); "
        "waiting for them, or for their pods to be deleted."
    )
