"""The rows that ranks gather in each step, one row of int64 for each rank, and the conclusions from them. Pure.

Rows are gathered and not summed. Every rank computes sums, minima and comparisons itself, in rank order and in exact integers. So
all ranks come to the same result from one small collective. Floats travel as their bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from regroup.bits import float_bits, float_of, signed, unsigned
from regroup.parallel.equal import NO_HASHES, Hashes
from regroup.parallel.strategy import NO_WORD, Word

WIDTH = 16
_NO_SNAPSHOTS = -2


class Row(NamedTuple):
    """One rank's part in the step it is about to commit."""

    step: int
    loss_sum: float
    weight: float
    knows_newer: bool
    """It has heard of a newer, planned generation (rule CUTALL)."""
    sample_hash: int
    """Sum of its samples' hashes modulo 2^64 (rule QUOTA)."""
    snapshotted: int | None = None
    """Newest step that its worker has in its memory snapshot, -1: none yet; None: it takes none (rule ACK)."""
    total: int = 0
    """Number of steps that its script asks for."""
    hashes: Hashes = NO_HASHES
    """Hashes of its state, which has to be equal on all ranks."""
    word: Word = NO_WORD
    """The word of its strategy."""
    wants_snapshot: bool = False
    """It is time for a memory snapshot, after this step."""
    wants_checkpoint: bool = False
    """It is time for a checkpoint, after this step: in a model group several processes write it, and the first one says when."""
    ended: bool = False
    """Its data ended before its share of the step was whole."""
    busy_ns: int = 0
    """Nanoseconds in which it did not wait for others (`Laps.busy_ns`)."""
    work_ns: int = 0
    """Nanoseconds of its work on its share of the step."""

    def pack(self) -> list[int]:
        """Return WIDTH signed 64-bit integers."""
        word, hashes = self.word, self.hashes
        flags = (
            self.knows_newer
            | word.changed << 1
            | word.late << 2
            | self.wants_snapshot << 3
            | self.wants_checkpoint << 4
            | self.ended << 5
        )
        return [
            self.step,
            float_bits(self.loss_sum),
            float_bits(self.weight),
            signed(self.sample_hash),
            _NO_SNAPSHOTS if self.snapshotted is None else self.snapshotted,
            signed(hashes.parameters),
            flags,
            self.total,
            signed(hashes.settings),
            signed(word.unused),
            signed(hashes.repeated),
            float_bits(word.norm_squared),
            self.busy_ns,
            self.work_ns,
            float_bits(word.own_norm_squared),
            word.order,
        ]

    @classmethod
    def unpack(cls, values: Sequence[int]) -> "Row":
        flags = values[6]
        return cls(
            step=values[0],
            loss_sum=float_of(values[1]),
            weight=float_of(values[2]),
            sample_hash=unsigned(values[3]),
            snapshotted=None if values[4] == _NO_SNAPSHOTS else values[4],
            wants_snapshot=bool(flags & 8),
            wants_checkpoint=bool(flags & 16),
            ended=bool(flags & 32),
            total=values[7],
            busy_ns=values[12],
            work_ns=values[13],
            knows_newer=bool(flags & 1),
            hashes=Hashes(parameters=unsigned(values[5]), settings=unsigned(values[8]), repeated=unsigned(values[10])),
            word=Word(
                unused=unsigned(values[9]),
                changed=bool(flags & 2),
                late=bool(flags & 4),
                norm_squared=float_of(values[11]),
                own_norm_squared=float_of(values[14]),
                order=values[15],
            ),
        )


@dataclass(frozen=True)
class Header:
    """All rows together. `group_size`: ranks of a model group; those of one inner index hold the same part of the model."""

    rows: tuple[Row, ...]
    group_size: int = 1

    @property
    def loss_sum(self) -> float:
        return sum(row.loss_sum for row in self.rows)

    @property
    def weight(self) -> float:
        return sum(row.weight for row in self.rows)

    @property
    def sample_hash(self) -> int:
        return unsigned(sum(row.sample_hash for row in self.rows))

    @property
    def all_know_newer(self) -> bool:
        """The count of ranks that know a newer generation equals the world size: all leave after this step."""
        return all(row.knows_newer for row in self.rows)

    @property
    def reportable_step(self) -> int:
        """The newest step that every rank is certain to have committed: the one before (rule ACK)."""
        return min(row.step for row in self.rows)

    @property
    def snapshot_step(self) -> int | None:
        """The newest step that every worker has in its memory snapshot; None: no worker takes any, or one has none yet."""
        steps = [row.snapshotted for row in self.rows if row.snapshotted is not None]
        return min(steps) if steps and min(steps) >= 0 else None

    @property
    def whole_snapshot_step(self) -> int | None:
        """The newest step of which each inner index has a memory snapshot; None: there is none, or the model is not split."""
        m = self.group_size
        steps = [-1 if row.snapshotted is None else row.snapshotted for row in self.rows]
        newest = min(max(steps[index::m]) for index in range(m))
        return newest if m > 1 and newest >= 0 else None

    @property
    def takes_snapshot(self) -> bool:
        """Every worker finds it time for a memory snapshot. All copy after this step, so that they are slowed together, and the
        slowest says how often."""
        copying = [row for row in self.rows if row.snapshotted is not None]
        return bool(copying) and all(row.wants_snapshot for row in copying)

    @property
    def takes_checkpoint(self) -> bool:
        """The first model group writes a checkpoint after this step."""
        return self.rows[0].wants_checkpoint

    @property
    def any_ended(self) -> bool:
        """The data of a rank ended: the step is committed nowhere, and the job ends."""
        return any(row.ended for row in self.rows)

    @property
    def words(self) -> tuple[Word, ...]:
        return tuple(row.word for row in self.rows)

    def disagreement(self) -> str | None:
        """Return one sentence when the ranks are not in one state, else None."""
        if len(self.rows) == 1:
            return None
        steps = {row.step for row in self.rows}
        if len(steps) > 1:
            return f"Ranks commit different steps: {', '.join(f'rank {r}: {row.step}' for r, row in enumerate(self.rows))}."
        totals = {row.total for row in self.rows}
        if len(totals) > 1:
            return (
                f"Ranks ask for different numbers of steps ({', '.join(map(str, sorted(totals)))}). "
                "Pass the same number to job.steps() in all workers."
            )
        return self._differing_hashes(self.rows[0].step)

    def _differing_hashes(self, step: int) -> str | None:
        first, m = self.rows[0].hashes, self.group_size
        odd = self._odd(lambda _, row: row.hashes.settings == first.settings)
        if odd:
            return (
                f"The optimizer's settings before step {step} (learning rates and the like) differ between rank 0 "
                f"and rank {_listed(odd)}. Pass schedulers in the `state` of regroup.session() and step them on "
                "all ranks, with step.commit(after=[scheduler.step])."
            )
        odd = self._odd(lambda _, row: row.hashes.repeated == first.repeated)
        if odd:
            return (
                f"Parameters that every rank of a model group has whole differ before step {step} between rank 0 and "
                f"rank {_listed(odd)}. Call torch.manual_seed() with one number in all processes before the model is built, and "
                "change parameters in a hook of step.commit() only."
            )
        odd = self._odd(lambda rank, row: m == 1 or row.word.order == self.rows[rank - rank % m].word.order)
        if odd:
            return (
                f"In step {step}, rank {_listed(odd)} ran other split modules than the first rank of the same model "
                "group, or ran them in another order, so it computed with the wrong parameters. Run the same modules for every "
                "microbatch: choose them by step.index, not by the data."
            )
        odd = self._odd(lambda rank, row: row.hashes.parameters == self.rows[rank % m].hashes.parameters)
        if odd:
            with_ = "0" if m == 1 else _listed(sorted({rank % m for rank in odd}))
            return (
                f"In step {step} it was found that parameters or buffers differ between rank {with_} and rank {_listed(odd)}: "
                "code outside step.commit() changed them on some ranks only. Move that change into a hook of step.commit()."
            )
        return None

    def _odd(self, fits: Callable[[int, Row], bool]) -> list[int]:
        """Return the ranks whose row does not fit."""
        return [rank for rank, row in enumerate(self.rows) if not fits(rank, row)]


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
