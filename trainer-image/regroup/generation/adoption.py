"""Whose state does a generation continue from? Rules STATE, WITNESS, SEAL, LOST, BEST and BACKUP as one pure function.

Every rank calls `decide` with the same document and the same gathered arrivals, so every rank decides the same. No I/O, no
clock, no tensors. The traces H2, H3, H4, H5, H8 and MAD in docs/design/protocol.md are its table tests
(tests/unit/generation/test_adoption.py); the bytes move in `transfer`.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, TypeVar

from regroup.protocol.document import Document, MemberSeal, OlderGeneration
from regroup.protocol.state import StatePair

T = TypeVar("T")


@dataclass(frozen=True)
class Block:
    """Where in the script a block of the user's own collectives is (`collective`)."""

    place: int
    """Number of committed steps; BEFORE_LOOP: the script's loop has not begun."""
    number: int
    """Which one since the last commit, counted from 1."""
    name: str
    complete: bool = False
    """This process has reached the block's end, and only waits for the others to."""


BEFORE_LOOP = -1


@dataclass(frozen=True)
class Arrival:
    """What one rank brings to a generation."""

    state: StatePair | None
    """The valid state it holds; None: it holds none, or what it holds is torn."""
    state_adopted: int
    """Generation in which that state was adopted; 0 without one."""
    agent_adopted: int
    """Highest generation that its worker's processes ever adopted, from the agent's file."""
    block: Block | None = None
    """It is inside this block of the user's own collectives. No part of the decision: it says who repeats the block."""
    ended: bool = False
    """Its script has left its loop: the job ends here, at whatever step it was. No part of the decision either."""
    from_snapshot: bool = False
    """The state lies in the worker's memory snapshot, and this process would load it."""
    is_backup: bool = False
    """... and newer steps may have been committed since it was taken (rule BACKUP)."""
    torn: bool = False
    """A copy of a state was cut off in this process's tensors: not even a job that begins anew may begin with them."""
    group_size: int = 1
    """Ranks of a model group, as its script splits the model. What follows is said only where there are several."""
    pending: tuple[tuple[int, StatePair], ...] = ()
    """(generation, base): gradients that were reduced there, and would make the next step of that state (rule KEEP)."""
    record: list[Any] | None = None
    """What the commit that made its state came to (`CommitRecord.to_json`; rule ROWS)."""
    seed: int = 0
    """Torch's, when its script had built the model."""
    snapshots: tuple[StatePair, ...] = ()
    """States of which its worker's memory has the part of its inner index (rule BACKUP)."""
    strides: int = 0
    """Hash of how its parameters lie in memory: gradients are summed as they lie."""
    gpu: str = ""
    """The GPU that it computes on (`accelerator.identity`); empty: none, or one that it may share."""

    def to_json(self) -> list[Any]:
        """Return the form in which it is gathered: the values of the fields, in their order."""
        values = [getattr(self, field.name) for field in fields(self)]
        return [astuple(value) if isinstance(value, Block) else value for value in values]

    @classmethod
    def from_json(cls, data: list[Any]) -> "Arrival":
        values = dict(zip((field.name for field in fields(cls)), data, strict=True))
        for name, kind in (("state", StatePair), ("block", Block)):
            values[name] = None if values[name] is None else kind(*values[name])
        values["pending"] = tuple((generation, StatePair(*base)) for generation, base in values["pending"])
        values["snapshots"] = tuple(StatePair(*pair) for pair in values["snapshots"])
        return cls(**values)


@dataclass(frozen=True)
class Copy:
    """Continue from `source`, the lowest rank that holds `state`; the ranks that hold another state, or none, or only a snapshot,
    receive. (Snapshots of one name may differ, where ranks had diverged.)"""

    source: int
    state: StatePair
    rolled_back: bool


@dataclass(frozen=True)
class Fallback:
    """No survivor has to be followed: take the newest of `best` (a rank's state, if any), the durable checkpoint, nothing."""

    best: Copy | None
    rolled_back: bool


@dataclass(frozen=True)
class Refuse:
    """The newest state may be held by somebody who is not here: do not train, say so, keep what you have, wait."""

    reason: str


Decision = Copy | Fallback | Refuse


def decide(document: Document, arrivals: Sequence[Arrival]) -> Decision:
    """Return what the generation continues from. `arrivals` is by rank, one for each of `document.world_size`.

    Walks `document.older`, newest first, until a generation is found whose state is certainly here, or certainly gone.
    """
    by_pod = group_by_pod(document, arrivals)
    best = _best(arrivals)
    rolled_back = False
    may_copy: list[str] = []
    """Members of generations that never stepped: they may have copied the state of an older one (rule COPIES)."""
    for older in newest_first(document):
        number = older.number
        present = [arrival for uid in older.pod_uids for arrival in by_pod.get(uid, ())]
        if any(_is_witness(a, number) for a in present):
            break
        # A member that is here speaks for itself; and a seal promises nothing about generations above `left_up_to`.
        seals = [
            seal
            for seal in document.seals
            if seal.pod_uid in older.pod_uids and seal.pod_uid not in by_pod and seal.left_up_to >= number
        ]
        held = [(seal.state, seal.pod_uid) for seal in seals if seal.state is not None and seal.state_adopted >= number]
        newer = max((one for one in held if best is None or one[0] > best.state), default=None)
        if newer is not None:
            return _held_by(*newer, document)
        if any(_is_witness(seal, number) for seal in seals):
            break
        gone = set(document.lost) | {uid for uid in older.pod_uids if uid in by_pod} | {seal.pod_uid for seal in seals}
        missing = [uid for uid in older.pod_uids if uid not in gone]
        if never_stepped(number, present, seals):
            may_copy += missing
            continue
        missing = sorted({*missing, *may_copy})
        if missing:
            return Refuse(
                f"Workers may have the state of generation {number} and cannot be reached (pod UIDs {', '.join(missing)}); "
                "waiting for them, or for their pods to be deleted."
            )
        rolled_back = True
    else:
        refusal = _better_elsewhere(document, by_pod.keys(), best)
        if refusal is not None:
            return refusal
        fallback = None if best is None else Copy(best.source, best.state, rolled_back)
        return Fallback(fallback, rolled_back)
    assert best is not None  # somebody present holds a state, or `best` was compared with a seal
    return Copy(best.source, best.state, rolled_back)


def group_by_pod(document: Document, arrivals: Sequence[T]) -> dict[str, list[T]]:
    """Return what each worker's processes bring, by its pod's UID. `arrivals` is by rank."""
    by_pod: dict[str, list[T]] = {}
    for rank, arrival in enumerate(arrivals):
        by_pod.setdefault(document.member_of_rank(rank).pod_uid, []).append(arrival)
    return by_pod


def newest_first(document: Document) -> list[OlderGeneration]:
    """Return the older generations in the order in which their states are looked for."""
    return sorted(document.older, key=lambda generation: -generation.number)


def never_stepped(number: int, present: Iterable[Arrival], seals: Iterable[MemberSeal]) -> bool:
    """Rule COPIES: return whether a member never adopted the generation, which then never committed a step. Its other members may
    have copied the state of an older one."""
    return any(one.agent_adopted < number for one in present) or any(seal.adopted < number for seal in seals)


def beginner(arrivals: Sequence[Arrival], reader: int) -> int | None:
    """Return the rank whose state a job begins with where there is none to continue from: the reader, or the lowest whose tensors
    are as the script made them. None: no rank's are. Pure; the same on all ranks."""
    whole = [rank for rank, arrival in enumerate(arrivals) if not arrival.torn]
    return reader if reader in whole else min(whole, default=None)


def _better_elsewhere(document: Document, present: Collection[str], best: Copy | None) -> Refuse | None:
    """Rule BEST: no older generation has to be followed, so the newest state of *all* workers is, whoever holds it.

    Whoever was a member of an older generation and is not a member now may hold more than anybody here, and be well.
    """
    absent = [(seal.state, seal.pod_uid) for seal in document.seals if seal.state and seal.pod_uid not in present]
    newest = max(absent, default=None)
    if newest is not None and (best is None or newest[0] > best.state):
        return _held_by(*newest, document)
    silent = [uid for uid in document.silent if uid not in present]
    if silent:
        return Refuse(
            f"Workers with pod UIDs {', '.join(silent)} have not reported yet which state they have; waiting for their reports."
        )
    return None


def _is_witness(told: Arrival | MemberSeal, generation: int) -> bool:
    """Return whether it holds all that it has committed since it adopted `generation` or a later one."""
    return told.state is not None and told.state_adopted >= generation and not told.is_backup


def _held_by(state: StatePair, holder: str, document: Document) -> Refuse:
    return Refuse(
        f"The newest state that is known, generation {state.generation} step {state.step}, is held by the worker "
        f"with pod UID {holder}, which is not a member of generation {document.number}; waiting for it."
    )


def shared_gpu(arrivals: Sequence[Arrival]) -> tuple[int, int] | None:
    """Return the first two ranks that compute on one GPU, which NCCL refuses; None: each has its own."""
    first: dict[str, int] = {}
    for rank, arrival in enumerate(arrivals):
        if arrival.gpu and first.setdefault(arrival.gpu, rank) != rank:
            return first[arrival.gpu], rank
    return None


def odd_strides(arrivals: Sequence[Arrival], size: int) -> tuple[int, int] | None:
    """Return two ranks of one inner index whose parameters lie in memory in different orders, the first one and the first odd one;
    None: there are none. `size`: ranks of a model group."""
    for rank, arrival in enumerate(arrivals):
        if arrival.strides != arrivals[rank % size].strides:
            return rank % size, rank
    return None


def _best(arrivals: Sequence[Arrival]) -> Copy | None:
    # Of one state a living process's copy comes before what would have to be read.
    states = [(a.state, not a.from_snapshot, -rank) for rank, a in enumerate(arrivals) if a.state is not None]
    if not states:
        return None
    state, _, negative_rank = max(states)
    return Copy(-negative_rank, state, rolled_back=False)
