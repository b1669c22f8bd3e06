"""The decision whose state a generation continues from. Rules STATE, WITNESS, SEAL, LOST, COPIES, BEST and BACKUP, pure.

Every rank calls `decide` with the same document and the same gathered arrivals, so every rank decides the same. `look_back` and
`held_elsewhere` are also the base of the decision for split models (`parts`). The traces H2, H3, H4, H5, H8 and MAD in
docs/design/protocol.md are the table tests (tests/unit/generation/test_adoption.py). The bytes move in `transfer`.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, NamedTuple

from regroup.protocol.document import Document, MemberSeal, OlderGeneration
from regroup.protocol.state import StatePair


@dataclass(frozen=True)
class Block:
    """The place of a block of the user's own collectives in the script (`collective`)."""

    place: int
    """Number of committed steps; BEFORE_LOOP: the script's loop has not begun."""
    number: int
    """Number of the block since the last commit, counted from 1."""
    name: str
    complete: bool = False
    """This process has reached the block's end, and only waits for the others to."""


BEFORE_LOOP = -1


@dataclass(frozen=True)
class Arrival:
    """The things that one rank brings to a generation."""

    state: StatePair | None
    """The valid state that the rank holds; None: it holds none, or a torn one."""
    state_adopted: int
    """Generation in which that state was adopted; 0 without one."""
    agent_adopted: int
    """Highest generation that its worker's processes ever adopted, from the agent's file."""
    block: Block | None = None
    """The rank is inside this block of the user's own collectives. Only `collective` reads it."""
    ended: bool = False
    """The rank's script has left its loop: the job ends here, at whatever step it was. The decision does not read it."""
    from_snapshot: bool = False
    """The state lies in the worker's memory snapshot, and this process would load it."""
    is_backup: bool = False
    """The state lies in a snapshot, and newer steps may have been committed since it was taken (rule BACKUP)."""
    torn: bool = False
    """A copy of a state was cut off in this process's tensors: not even a job that begins anew may begin with them."""
    group_size: int = 1
    """Ranks of a model group, as the rank's script splits the model. The next fields are for groups of several ranks."""
    pending: tuple[tuple[int, StatePair], ...] = ()
    """(generation, base): gradients that were reduced there, and would make the next step of that state (rule KEEP)."""
    record: list[Any] | None = None
    """Outcome of the commit that made the rank's state (`CommitRecord.to_json`; rule ROWS)."""
    seed: int = 0
    """Torch's seed when the rank's script had built the model."""
    snapshots: tuple[StatePair, ...] = ()
    """States of which the worker's memory has the part of this inner index (rule BACKUP)."""
    strides: int = 0
    """Hash of the strides of the rank's parameters: gradients are summed as they lie in memory."""
    gpu: str = ""
    """The GPU that the rank computes on (`accelerator.identity`); empty: none, or one that it may share."""

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
    """Continue from `source`, the lowest rank that holds `state`.

    The ranks that hold another state, or none, or only a snapshot, receive a copy. (Snapshots of one name differ if ranks had
    diverged.)
    """

    source: int
    state: StatePair
    rolled_back: bool


@dataclass(frozen=True)
class Fallback:
    """No survivor has to be followed. Continue from the newer of a rank's state (`best`) and the checkpoint, else from nothing."""

    best: Copy | None
    rolled_back: bool


@dataclass(frozen=True)
class Refuse:
    """A worker that is not here may hold the newest state. Do not train, give the reason, keep the state, and wait."""

    reason: str


Decision = Copy | Fallback | Refuse


def decide(document: Document, arrivals: Sequence[Arrival]) -> Decision:
    """Return the state that the generation continues from. `arrivals` is by rank, one for each of `document.world_size`."""
    best = _best(arrivals)
    known = None if best is None else best.state
    past = look_back(document, arrivals, known)
    if isinstance(past, Refuse):
        return past
    if past.is_here:
        assert best is not None  # a witness is here, or `best` was compared with a seal
        return Copy(best.source, best.state, past.rolled_back)
    refusal = held_elsewhere(document, lambda _, state: known is None or state > known)
    if refusal is not None:
        return refusal
    return Fallback(None if best is None else Copy(best.source, best.state, past.rolled_back), past.rolled_back)


class Index(NamedTuple):
    """An inner index of a model group, for which `look_back` is asked (rule INNER)."""

    number: int
    ranks: Collection[int]
    """Ranks of the index that may be witnesses."""
    holders: Callable[[OlderGeneration], Iterable[str]]
    """Returns the pod UIDs of the members of a generation that may hold the part of the index."""


class Past(NamedTuple):
    """The answer of `look_back`."""

    is_here: bool
    """The newest state that must be followed is here. False: no older generation has to be followed."""
    rolled_back: bool
    """A generation that may have stepped is passed over: its state is certainly lost."""


def look_back(
    document: Document, arrivals: Sequence[Arrival], best: StatePair | None, index: Index | None = None
) -> Past | Refuse:
    """Return whether the state of an older generation must be followed (rules WITNESS, SEAL, LOST, COPIES and BACKUP).

    Walks `document.older`, newest first, to the first generation whose state is certainly here. A generation is passed over if it
    certainly never stepped, or if its state is certainly lost. `best` is the newest state here; a sealed one may be newer.

    In a model group the walk is for the parts of one `index`. It needs no `best`, because no seal proves that a part is there.
    """
    here = ranks_by_pod(document)
    rolled_back = False
    may_copy: set[str] = set()
    """Members of generations that never stepped. They may have copied the state of an older one (rule COPIES)."""
    for older in sorted(document.older, key=lambda older: -older.number):
        number, members = older.number, frozenset(older.pod_uids)
        present = [rank for uid in older.pod_uids for rank in here.get(uid, ())]
        witnesses = [rank for rank in present if index is None or rank in index.ranks]
        if any(_is_witness(arrivals[rank], number) for rank in witnesses):
            return Past(True, rolled_back)
        # A member that is here speaks for itself; and a seal promises nothing about generations above `left_up_to`.
        seals = [seal for seal in document.seals if seal.pod_uid in members and seal.pod_uid not in here]
        seals = [seal for seal in seals if seal.left_up_to >= number]
        known = {*document.lost, *here}
        if index is None:
            held = [(seal.state, seal.pod_uid) for seal in seals if seal.state and seal.state_adopted >= number]
            newer = max((one for one in held if best is None or one[0] > best), default=None)
            if newer is not None:
                return _held_by(*newer, document)
            if any(_is_witness(seal, number) for seal in seals):
                return Past(True, rolled_back)
            known.update(seal.pod_uid for seal in seals)
        else:  # a seal speaks for its worker, and not for an index: only that it holds nothing is certain
            known.update(seal.pod_uid for seal in seals if seal.state is None or seal.is_backup)
        missing = (members if index is None else set(index.holders(older))) - known
        agents = [arrivals[rank].agent_adopted for rank in present] + [seal.adopted for seal in seals]
        if any(adopted < number for adopted in agents):  # one member never adopted it, so it never committed a step
            may_copy |= missing
            continue
        if missing or may_copy:
            sealed = [(seal.state, seal.pod_uid) for seal in seals if seal.state and seal.pod_uid in missing]
            if sealed:
                return _held_by(*max(sealed), document)
            return _may_be_held_by(missing | may_copy, number, index)
        rolled_back = True
    return Past(False, rolled_back)


def held_elsewhere(
    document: Document, is_newer: Callable[[MemberSeal, StatePair], bool], *, asks_silent: bool = True
) -> Refuse | None:
    """Return a refusal if a connected worker that is no member has sealed a state that `is_newer` (rule BEST); None: none has.

    `asks_silent`: a worker that has not said which state it has is waited for, too.
    """
    here = ranks_by_pod(document)
    held = [(seal.state, seal) for seal in document.seals if seal.state is not None and seal.pod_uid not in here]
    newest = max(((state, seal.pod_uid) for state, seal in held if is_newer(seal, state)), default=None)
    if newest is not None:
        return _held_by(*newest, document)
    silent = [uid for uid in document.silent if uid not in here] if asks_silent else []
    if silent:
        return Refuse(
            f"Workers with pod UIDs {', '.join(silent)} have not reported yet which state they have; waiting for their reports."
        )
    return None


def ranks_by_pod(document: Document) -> dict[str, range]:
    """Return the ranks of each member's processes, by the UID of its pod."""
    ranks, first = {}, 0
    for member in document.members:
        ranks[member.pod_uid] = range(first, first + member.processes)
        first += member.processes
    return ranks


def beginner(arrivals: Sequence[Arrival], reader: int) -> int | None:
    """Return the rank whose state a job begins with if there is none to continue from. Pure; the same on all ranks.

    It is the reader, or else the lowest rank whose tensors are as the script made them. None: no rank's tensors are.
    """
    whole = [rank for rank, arrival in enumerate(arrivals) if not arrival.torn]
    return reader if reader in whole else min(whole, default=None)


def _is_witness(told: Arrival | MemberSeal, generation: int) -> bool:
    """Return whether a rank or worker holds all that it has committed since it adopted `generation` or a later one."""
    return told.state is not None and told.state_adopted >= generation and not told.is_backup


def _held_by(state: StatePair, holder: str, document: Document) -> Refuse:
    return Refuse(
        f"A state that may be newer, generation {state.generation} step {state.step}, is held by the worker with pod UID {holder}, "
        f"which is not a member of generation {document.number}; waiting for it."
    )


def _may_be_held_by(missing: Collection[str], generation: int, index: Index | None) -> Refuse:
    part = "" if index is None else f"the part of inner index {index.number} of "
    return Refuse(
        f"Workers may have {part}the state of generation {generation} and cannot be reached (pod UIDs "
        f"{', '.join(sorted(missing))}); waiting for them, or for their pods to be deleted."
    )


def shared_gpu(arrivals: Sequence[Arrival]) -> tuple[int, int] | None:
    """Return the first two ranks that compute on one GPU, which NCCL refuses; None: each has its own."""
    first: dict[str, int] = {}
    for rank, arrival in enumerate(arrivals):
        if arrival.gpu and first.setdefault(arrival.gpu, rank) != rank:
            return first[arrival.gpu], rank
    return None


def odd_strides(arrivals: Sequence[Arrival], size: int) -> tuple[int, int] | None:
    """Return two ranks of one inner index whose parameters lie in memory in different orders; None: there are none.

    The first one is the lowest rank of the index. `size`: ranks of a model group.
    """
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
