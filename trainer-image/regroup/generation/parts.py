"""The decision whose parts a generation of model groups continues from. Rules INNER, KEEP, EXACT and those of `adoption`, pure.

Where m ranks hold one copy of the model, a state is whole when each inner index of it has a holder here. Every rank calls `decide`
with the same document and arrivals, so every rank decides the same. The traces M1 to M8 in docs/design/protocol.md say what
happens otherwise; the table is tests/unit/generation/test_parts.py. `adoption` decides for a generation without a mesh.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from regroup.protocol.document import Document, MemberSeal, OlderGeneration
from regroup.protocol.state import StatePair

from .adoption import Arrival, Index, Refuse, held_elsewhere, look_back


@dataclass(frozen=True)
class CopyParts:
    """Continue from `state`.

    A rank that holds it keeps it. A rank that has kept the gradients that lead to it applies them. The others copy the part of
    their inner index.
    """

    state: StatePair
    sources: tuple[int, ...]
    """The rank that serves copies, for each inner index."""
    record: list[Any] | None
    """Outcome of the commit of `state`, from a rank that has made it (rule ROWS)."""


@dataclass(frozen=True)
class RestoreParts:
    """Continue from `state`: each inner index has a memory snapshot of it here, or holds it. The sources load theirs, and others
    copy the part of their inner index."""

    state: StatePair
    sources: tuple[int, ...]
    """The rank that serves copies, for each inner index."""


@dataclass(frozen=True)
class FallbackParts:
    """No state is whole in the processes, and no absent worker can make one whole.

    Continue from the newer of `best` and the durable checkpoint, else from nothing.
    """

    rolled_back: bool
    best: RestoreParts | None = None


Decision = CopyParts | RestoreParts | FallbackParts | Refuse


def decide(document: Document, arrivals: Sequence[Arrival], size: int) -> Decision:
    """Return what the generation continues from. `arrivals` is by rank; `size`: ranks of a model group.

    It is the newest state that a rank here has applied and that is whole here, or a newer one, whole in memory snapshots.
    Each newer state must be certainly gone: for some inner index all workers that may hold it are lost.
    """
    if {arrival.group_size for arrival in arrivals} != {size}:
        return Refuse(
            "The workers split the model differently. Run one script, with one regroup.mesh(), in all workers."
        )
    below: StatePair | None = None
    best = _newest_snapshots(arrivals, size)
    applied = sorted({arrival.state for arrival in arrivals if arrival.state is not None}, reverse=True)
    for wanted in (*applied, None):
        is_followed = True
        for number in range(size):
            past = look_back(document, arrivals, None, _index(document, arrivals, number, below, size))
            if isinstance(past, Refuse):
                return past
            is_followed = is_followed and past.is_here
        sources = None if wanted is None else _sources(arrivals, size, wanted)
        is_newer = partial(_may_lead_to, wanted, is_whole=sources is not None)
        refusal = held_elsewhere(document, is_newer, asks_silent=sources is None or not is_followed)
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
    """Return, for each inner index, the rank whose part a job begins with if there is nothing to continue from.

    It is the lowest rank of the index whose tensors are as the script made them. None: for some index there is none.
    """
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
    """Return, for each inner index, the lowest rank that holds the state or can roll forward to it. None: it is not whole."""
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


def _index(document: Document, arrivals: Sequence[Arrival], number: int, below: StatePair | None, size: int) -> Index:
    """Return an inner index, for `look_back`. `below` is a state that is certainly gone: a rank that holds it is no witness for an
    older one."""
    ranks = range(number, len(arrivals), size)
    states = {rank: arrivals[rank].state for rank in ranks}
    return Index(
        number,
        {rank for rank, state in states.items() if state is not None and (below is None or state < below)},
        lambda older: (uid for uid in older.pod_uids if number in _indexes_of(older, uid, document, size)),
    )


def _indexes_of(older: OlderGeneration, uid: str, document: Document, size: int) -> frozenset[int]:
    """Return the inner indexes that the processes of a worker have; all of them if its position is not known."""
    processes = document.members[0].processes
    if older.positions is None:
        return frozenset(range(size))
    first = older.position(uid) * processes
    return frozenset(place % size for place in range(first, first + processes))


def _may_lead_to(wanted: StatePair | None, seal: MemberSeal, held: StatePair, *, is_whole: bool) -> bool:
    """Return whether a sealed state may be newer than `wanted`, or a part of it where that is not whole here.

    The part of a state may be the state before and gradients that lead to it. The snapshot of a worker that is no member decides
    nothing (rule BACKUP).
    """
    if seal.is_backup:
        return False
    return wanted is None or held > wanted or (not is_whole and held.step >= wanted.step - 1)
