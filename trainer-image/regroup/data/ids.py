"""Sample ids as a pure function of (seed, step, virtual worker), their hash sum, and the digest of the committed samples.

Owns the arithmetic of design section 6, "Batch and data". Sample j of virtual worker v in step s is:

    perm(seed, epoch)[(s*B + v*b + j) mod N]

Every sample comes once an epoch, at any sequence of world sizes. If B follows the number of ranks, s*B is replaced by the number
of samples before step s (`Piece`). `sources` reads the samples, and `regroup.transaction` decides whether a step commits
(rule QUOTA).

The permutation is a Feistel network over Z_a x Z_b with a*b just above N, and cycle walking for the rest. Any element takes
constant time, and nothing is stored. (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from regroup.layout import WHOLE, Layout

from .errors import DataError
from .mix import MASK, Words, mix, mix_words, word

_ROUNDS = 6

_AHEAD = 8192
"""Number of samples whose ids are computed at once. It spreads the cost of a numpy call over many small steps."""
_KEPT = 8
"""Number of blocks that are kept. Worker processes ask for steps ahead of the one that is checked."""
_ROWS_KEPT = 2
"""Number of steps whose block is remembered. The step in progress asks for its own several times."""
_SHARES_KEPT = 1024
"""Number of shares that are remembered."""
_CHUNK = 1 << 20
"""Longest array while a digest is computed from scratch. It bounds the memory to some tens of MB."""
_ANCHORS = 4
"""Number of digests that are remembered."""
UNKNOWN = (1 << 62) - 1
"""Number of samples of a stream, which nobody knows. It is more than a job will ever use."""


def permute(positions: Words, epochs: Words, seed: int, num_samples: int) -> Words:
    """Return perm(seed, epoch)[position] for each element: a bijection on [0, num_samples) for each (seed, epoch).

    `positions` and `epochs` are uint64 of one shape, positions below `num_samples`.
    """
    a = math.isqrt(num_samples - 1) + 1 if num_samples > 1 else 1
    b = -(-num_samples // a)
    keys = mix_words(epochs ^ word(mix(seed, 1)))
    out = _feistel(positions, keys, a, b)
    walking = np.flatnonzero(out >= word(num_samples))
    while walking.size:  # at most about one in sqrt(num_samples) is here
        out[walking] = _feistel(out[walking], keys[walking], a, b)
        walking = walking[out[walking] >= word(num_samples)]
    return out


def _feistel(values: Words, keys: Words, a: int, b: int) -> Words:
    """Return a bijection of [0, a*b) on itself, for each key."""
    left, right = np.divmod(values, word(b))
    for turn in range(0, _ROUNDS, 2):
        left = _turn(left, mix_words(right + keys + word(turn << 40)), a)
        right = _turn(right, mix_words(left + keys + word(turn + 1 << 40)), b)
    joined: Words = left * word(b) + right
    return joined


def _turn(half: Words, hashed: Words, size: int) -> Words:
    """Return (half + hashed, scaled down to [0, size)) mod size. It multiplies, since a division is slow."""
    moved = half + ((hashed >> word(32)) * word(size) >> word(32))
    turned: Words = np.where(moved >= word(size), moved - word(size), moved)
    return turned


def share_of(num_virtual: int, rank: int, world_size: int) -> range:
    """Return the virtual workers of a rank. Shares are contiguous, in rank order, and their sizes differ by at most one.

    If there are more ranks than virtual workers, some have none; rank 0 always has one. With 2, 4, 8 .. ranks a share is exactly
    one node of the summation tree (`tree`).
    """
    return range(-(-rank * num_virtual // world_size), -(-(rank + 1) * num_virtual // world_size))


def shares_of(num_virtual: int, world_size: int) -> tuple[range, ...]:
    """Return the share of every rank, in rank order. Together they are exactly range(num_virtual)."""
    return tuple(share_of(num_virtual, rank, world_size) for rank in range(world_size))


class _Block(NamedTuple):
    """The ids of some steps, which are computed at once."""

    ids: torch.Tensor
    """[steps * V, microbatch], int64: V rows for each step."""
    hashes: list[list[int]]
    """Hash sums of the microbatches: hashes[step][virtual worker]."""


class Piece(NamedTuple):
    """Steps of one batch size: from `step` on a step has `batch` samples, and all steps before it had `position` samples."""

    step: int
    position: int
    batch: int


@dataclass(frozen=True)
class SamplePlan:
    """The sample ids of every step. Equal fields give equal answers on every rank, for the job's life.

    Only `change_batch` and `load_state_dict` change answers, and only for steps that are not committed. Positions are used in
    turn, so the number of samples so far is all that a plan needs of the past.

    Step s, from 0, uses `ids(s, v)`. After it commits, s + 1 steps are committed. `samples` and `digest` take this number of
    committed steps, which is also the step of a StatePair. Raises DataError for values that fit no plan.
    """

    seed: int
    num_samples: int
    global_batch: int
    microbatch: int
    max_world_size: int = 1
    """Largest number of ranks of the job (REGROUP_MAX_WORLD_SIZE), each of which must have work. Used for that check only.
    The generation of a hand-over may have more ranks (rule HANDOVER); some shares are empty then."""
    layout: Layout = WHOLE
    """Split of the model over a model group. Its ranks that compute different samples get equally many microbatches, since each
    forward of one is a forward of all."""
    in_order: bool = False
    """The samples are a stream's: they come in the order of their numbers, without end. `num_samples` is UNKNOWN then."""
    shuffles: bool = True
    """Each epoch has an order of its own. False: each epoch has the order of the samples' numbers."""
    own_steps: ClassVar[bool] = False
    """A script deals its samples itself, and a step is what it commits (elastic Horovod)."""
    _blocks: dict[int, "_Block"] = field(default_factory=dict, init=False, repr=False, compare=False)
    _rows: dict[int, tuple["_Block", int]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Block of a step and the step's place in it."""
    _shares: dict[tuple[int, int], range] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Shares that were asked for, by rank and number of ranks."""
    _sums: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Digests by number of samples."""
    _pieces: list[Piece] = field(default_factory=list, init=False, repr=False, compare=False)
    """The piece of the next steps; empty before the batch has changed."""
    _epoch_sum: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("num_samples", "global_batch", "microbatch", "max_world_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                hint = "The data is empty." if name == "num_samples" else "Pass a whole number of at least 1."
                raise DataError(f"{name} is {value!r}; it must be a whole number of at least 1. {hint}")
        if self.num_samples >= 1 << 62:
            raise DataError(f"num_samples ({self.num_samples}) is 2**62 or more. Pass the true number of samples.")
        if self.global_batch % self.microbatch:
            fit = max(self.microbatch, round(self.global_batch / self.microbatch) * self.microbatch)
            raise DataError(
                f"global_batch ({self.global_batch}) is not a multiple of microbatch ({self.microbatch}). "
                f"Pass global_batch={fit}, or a microbatch that divides it."
            )
        num_data = self.layout.num_data
        if self.num_virtual % num_data:
            raise DataError(
                f"global_batch / microbatch ({self.global_batch} / {self.microbatch} = {self.num_virtual}) is not a multiple of "
                f"{num_data}, the ranks of a model group that compute different samples ({self.layout}): each of them has to get "
                f"equally many microbatches. Pass global_batch={self.microbatch * num_data * -(-self.num_virtual // num_data)}."
            )
        if self.num_virtual // num_data < self.max_world_size // self.layout.size:
            raise DataError(
                f"global_batch / microbatch ({self.global_batch} / {self.microbatch} = {self.num_virtual}) is less than "
                f"the largest number of ranks ({self.max_world_size}), so some would have nothing to do. "
                f"Raise global_batch, or lower microbatch or maxReplicas."
            )

    @property
    def num_virtual(self) -> int:
        """Number of virtual workers, V, which is the number of microbatches in a step."""
        return self.batch // self.microbatch

    @property
    def piece(self) -> Piece:
        """The piece of the next steps."""
        return self._pieces[0] if self._pieces else Piece(0, 0, self.global_batch)

    @property
    def batch(self) -> int:
        """Number of samples in each of the next steps. It is `global_batch` unless `change_batch` was called."""
        return self.piece.batch

    @property
    def step_samples(self) -> int:
        """Number of samples that a session commits at a time."""
        return self.batch

    def change_batch(self, step: int, batch: int) -> None:
        """Set the batch, a multiple of `microbatch`, of the steps from `step` on, which are not committed.

        All ranks must call this for the same step, the first of a generation. A second call for the same step replaces the first.
        """
        if batch % self.microbatch:
            raise ValueError(f"batch {batch} is not a multiple of microbatch {self.microbatch}")
        self._begin(Piece(step, self._position(step), batch))

    def state_dict(self) -> dict[str, int]:
        """Return the piece of the next steps. It is a part of the state of a job whose batch changes."""
        return self.piece._asdict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue with the piece of another plan with the same fields."""
        self._begin(Piece(**state))

    def _begin(self, piece: Piece) -> None:
        if piece != self.piece:
            self._pieces[:] = [piece]
            self._blocks.clear()
            self._rows.clear()
            self._shares.clear()

    def share(self, rank: int, world_size: int) -> range:
        """Return the virtual workers of a rank.

        A model group has a share (`share_of`), which is cut evenly among its ranks that compute different samples.
        """
        known = self._shares.get((rank, world_size))
        if known is not None:
            return known
        group, inner = divmod(rank, self.layout.size)
        num_data = self.layout.num_data
        of_group = share_of(self.num_virtual // num_data, group, world_size // self.layout.size)
        first = of_group.start * num_data + self.layout.data_index(inner) * len(of_group)
        share = range(first, first + len(of_group))
        while len(self._shares) >= _SHARES_KEPT:
            self._shares.clear()
        self._shares[rank, world_size] = share
        return share

    def shares(self, world_size: int) -> tuple[range, ...]:
        """Return the share of every rank of a generation."""
        return tuple(self.share(rank, world_size) for rank in range(world_size))

    def ids(self, step: int, v: int) -> torch.Tensor:
        """Return the sample ids of one microbatch: [microbatch], int64. The caller may keep the tensor and must not write to it."""
        block, row = self._block(step)
        return block.ids.select(0, row * self.num_virtual + v)

    def hash_of(self, step: int, v: int) -> int:
        """Return the sum of a 64-bit hash of each id of a microbatch, mod 2**64.

        It does not depend on the order of the ids, but on how often each occurs.
        """
        block, row = self._block(step)
        return block.hashes[row][v]

    def expected_hash(self, step: int) -> int:
        """Return the sum of `hash_of` over all microbatches of a step, with which a commit is compared (rule QUOTA)."""
        block, row = self._block(step)
        return sum(block.hashes[row]) & MASK

    def samples(self, step: int) -> int:
        """Return the number of samples that the first `step` steps have used."""
        return self._position(step)

    def _position(self, step: int) -> int:
        """Return the position of a step's first sample in the endless sequence of epochs."""
        piece = self.piece
        if step < piece.step:
            raise ValueError(f"step {step} is before step {piece.step}, with which the batch changed")
        return piece.position + (step - piece.step) * piece.batch

    def digest(self, step: int, known: tuple[int, str] | None = None) -> str:
        """Return the digest of the samples of the first `step` steps: 16 hex digits, which depend on their number only.

        It is the sum of the hashes of all ids. So the digest of the next step costs one step, and whole epochs cost one epoch.
        A first digest costs a pass over the ids, about 0.3 s per million samples. A rank that joins saves that with `known`,
        the (step, digest) that came with the state it adopted.
        """
        if known is not None:
            self._sums.setdefault(self.samples(known[0]), int(known[1], 16))
        end = self.samples(step)
        if end not in self._sums:
            start = max((position for position in self._sums if position <= end), default=0)
            if end - start <= self.num_samples:
                first, total = start, self._sums.get(start, 0)
            else:  # from scratch: the common sum of whole epochs, then the part of the last one
                epochs = end // self.num_samples
                first, total = epochs * self.num_samples, epochs * self._whole_epoch() if epochs else 0
            piece = self.piece
            steps, rest = divmod(first - piece.position, piece.batch)
            if 0 <= end - first <= _AHEAD and rest == 0 and steps >= 0:
                total += sum(self.expected_hash(s) for s in range(piece.step + steps, step))
            else:
                for lo in range(first, end, _CHUNK):
                    total += self._hash_sum(self._at(lo, min(_CHUNK, end - lo)))
            self._sums[end] = total & MASK
        digest = self._sums[end]
        for old in sorted(self._sums)[:-_ANCHORS]:
            del self._sums[old]
        return f"{digest:016x}"

    def _block(self, step: int) -> tuple["_Block", int]:
        """Return the block with the ids of a step, and the step's place in it."""
        found = self._rows.get(step)
        if found is not None:
            return found
        piece = self.piece
        if step < piece.step:
            raise ValueError(f"step {step} is before step {piece.step}, the first of this batch")
        num_steps = max(1, _AHEAD // piece.batch)
        first = step - (step - piece.step) % num_steps
        block = self._blocks.get(first)
        if block is None:
            while len(self._blocks) >= _KEPT:
                del self._blocks[min(self._blocks)]
            ids = self._at(self._position(first), num_steps * piece.batch)
            hashes = np.add.reduce(self._hashes(ids).reshape(num_steps, self.num_virtual, -1), axis=2, dtype=np.uint64)
            table = torch.from_numpy(ids.view(np.int64)).view(num_steps * self.num_virtual, self.microbatch)
            block = self._blocks[first] = _Block(table, hashes.tolist())
        while len(self._rows) >= _ROWS_KEPT:
            del self._rows[next(iter(self._rows))]
        self._rows[step] = block, step - first
        return block, step - first

    def _at(self, first: int, count: int) -> Words:
        """Return the ids at `count` positions of the endless sequence of epochs: [count], uint64."""
        if first + count >= 1 << 63:
            raise DataError(
                f"position {first + count} of the sample sequence is past 2**63. Lower the number of steps."
            )
        positions: Words = word(first) + np.arange(count, dtype=np.uint64)
        if self.in_order:
            return positions
        epochs, offsets = np.divmod(positions, word(self.num_samples))
        if not self.shuffles:
            return offsets
        return permute(offsets, epochs, self.seed, self.num_samples)

    def _hashes(self, ids: Words) -> Words:
        # The seed is the key, so that two jobs over the same data do not have the same sums.
        return mix_words(mix_words(ids ^ word(mix(self.seed, 2))))

    def _hash_sum(self, ids: Words) -> int:
        return int(np.add.reduce(self._hashes(ids), dtype=np.uint64))

    def _whole_epoch(self) -> int:
        if not self._epoch_sum:
            total = 0
            for lo in range(0, self.num_samples, _CHUNK):
                total += self._hash_sum(np.arange(lo, min(lo + _CHUNK, self.num_samples), dtype=np.uint64))
            self._epoch_sum.append(total & MASK)
        return self._epoch_sum[0]


def check_shares(shares: Sequence[range]) -> int:
    """Return V, the number of virtual workers in the shares. Raises DataError unless they are contiguous, in rank order from 0."""
    stop = 0
    for rank, share in enumerate(shares):
        if share.start != stop or share.stop < share.start or share.step != 1:
            raise DataError(
                f"share {share} of rank {rank} does not begin at {stop}. Pass contiguous shares in rank order."
            )
        stop = share.stop
    if stop == 0:
        raise DataError("the shares hold no virtual worker. Pass at least one.")
    return stop
