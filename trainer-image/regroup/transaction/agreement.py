"""The rows of a step: each rank sends one, and all ranks decide by them whether the step may be applied (rules QUOTA and KEEP).

A row says how far its rank is and what it has (`header.Row`). The strategy adds a word to it, and calls for rows as often as its
reductions need them. Every rank checks the rows in the same way, so either all ranks go on or all raise.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from regroup.data import DataError, SamplePlan
from regroup.errors import BackendError, DataEnded, DivergedError, GroupBroken, SampleError, UsageError
from regroup.generation.groups import Groups
from regroup.generation.membership import Membership
from regroup.generation.rows import Rows
from regroup.parallel.equal import NO_HASHES, Equal
from regroup.parallel.host import Scalar, read_together
from regroup.parallel.noise import NoiseScale
from regroup.parallel.strategy import Agreed, Share, Word
from regroup.state.memory import Memory

from .header import WIDTH, Header, Row
from .laps import Laps


class Agreement:
    """Sends and checks the rows of one job. It is what `Strategy.reduce` calls for rows (`parallel.strategy.Agree`)."""

    def __init__(
        self,
        membership: Membership,
        plan: SamplePlan,
        memory: Memory,
        equal: Equal,
        laps: Laps,
        noise: NoiseScale | None,
        wants_checkpoint: Callable[[], bool],
    ) -> None:
        """`wants_checkpoint` returns whether it is time for a checkpoint. It is asked where a model group writes it."""
        self.data_ended = False
        """The step that was tried last lacks samples, on some rank: all ranks know it."""
        self.header: Header
        """The rows that came last."""
        self._membership, self._plan, self._memory = membership, plan, memory
        self._equal, self._laps, self._noise = equal, laps, noise
        self._wants_checkpoint = wants_checkpoint

    def begin(self, share: Share, total: int, keep: Callable[[], None]) -> None:
        """Begin the rows of a step, of `total` that the script asks for. `keep` is called if rows do not come although this rank's
        reductions are complete. Another rank of the model group may have them, and apply the step (rule KEEP)."""
        self._share, self._total, self._keep, self._has_computed = share, total, keep, False

    def __call__(
        self,
        asked: Sequence[Sequence[Scalar]],
        word: Callable[..., Word],
        meanwhile: Callable[[], None] | None = None,
        parcel: torch.Tensor | None = None,
    ) -> Agreed:
        """Send this rank's row and return what all ranks say. Raises GroupBroken, and the errors of a step that must not be
        committed: the same on all ranks."""
        row, m = self._row(asked, word), self._plan.layout.size
        # Before anything is kept: an abort may have left anything in what was reduced. Nobody has this row yet.
        self._membership.check()
        try:
            header, parcels = gather(self._membership.groups, row, lambda: self._wait(meanwhile), parcel)
        except (GroupBroken, BackendError):
            if m > 1:
                self._keep()
            raise
        self.header = header = replace(header, group_size=m)
        self._verify(header)
        return Agreed(header.words, header.loss_sum, header.weight, parcels)

    def _row(self, asked: Sequence[Sequence[Scalar]], word: Callable[..., Word]) -> Row:
        # The host waits here for what the row needs of the device, once for all of it. If rows leave before the device has ended
        # backward, the row needs nothing of the device.
        share, groups = self._share, self._membership.groups
        self._equal.check()
        losses = share.ask()
        noise = [] if self._noise is None else self._noise.ask()
        states = self._equal.ask(share.index) if groups is not None and groups.world_size > 1 else []
        values = read_together(losses, noise, *states, *asked)
        state_values, asked_values = values[2 : 2 + len(states)], values[2 + len(states) :]
        if self._noise is not None:
            self._noise.tell(values[1])
        if losses:
            share.tell(values[0])
        if not self._equal.is_late:
            self._computed()
        layout, rank = self._plan.layout, self._membership.rank
        adds_loss = layout.size == 1 or layout.adds_loss(rank)
        return Row(
            step=share.index,
            loss_sum=sum(share.loss_sums.values()) if adds_loss else 0.0,
            weight=sum(share.weights.values()) if adds_loss else 0.0,
            knows_newer=self._membership.knows_newer(),
            sample_hash=share.sample_hash if layout.size == 1 or layout.speaks(rank) else 0,
            snapshotted=self._memory.step,
            wants_snapshot=self._memory.due(time.monotonic()),
            wants_checkpoint=layout.size > 1 and rank == 0 and self._wants_checkpoint(),
            total=self._total,
            ended=share.ended,
            busy_ns=self._laps.busy_ns,
            work_ns=self._laps.work_ns(),
            hashes=self._equal.hashes(*state_values) if states else NO_HASHES,
            word=word(*asked_values),
        )

    def _wait(self, meanwhile: Callable[[], None] | None) -> None:
        self._equal.wait()
        self._computed()
        if meanwhile is not None:
            meanwhile()

    def _computed(self) -> None:
        if not self._has_computed:  # rows may come again in a step
            self._has_computed = True
            self._laps.computed()

    def _verify(self, header: Header) -> None:
        """Raise rather than commit a step that is not whole, or not the same everywhere (rule QUOTA)."""
        share, plan = self._share, self._plan
        if header.any_ended:
            if share.index == 0:
                raise DataError(
                    f"data ended in step 0: the stream has fewer samples than a step needs ({plan.batch}). Lower global_batch, or "
                    "pass more data."
                )
            self.data_ended = True
            raise DataEnded(f"the data ended in step {share.index}")
        problem = header.disagreement()
        if problem is not None:
            raise DivergedError(problem)
        if header.sample_hash != plan.expected_hash(share.index):
            raise SampleError(
                f"Step {share.index} was not committed: the ranks did not use its {plan.batch} samples. "
                "Call step.backward() once for every batch of step.microbatches()."
            )
        if not header.weight > 0:
            raise UsageError(f"Step {share.index} has a total weight of {header.weight:g}; it must be greater than 0.")


def exchange(groups: Groups | None, row: Row) -> Header:
    """Gather one row of every rank; all ranks call it. Raises what `Groups.failed` says."""
    return gather(groups, row)[0]


def gather(
    groups: Groups | None,
    row: Row,
    meanwhile: Callable[[], None] | None = None,
    parcel: torch.Tensor | None = None,
) -> tuple[Header, torch.Tensor | None]:
    """Gather one row of every rank, and with it a parcel of bytes, where ranks have one, of one length: [ranks, bytes].

    `meanwhile` is waited for before the rows are. Raises what `Groups.failed` says.
    """
    if groups is None or groups.world_size == 1:
        if meanwhile is not None:
            meanwhile()
        if groups is not None:
            groups.check()
        return Header((row,)), None
    mine = torch.tensor(row.pack(), dtype=torch.int64).view(torch.uint8)
    if parcel is not None:
        mine = torch.cat([mine, parcel])
    coming = Rows(groups, mine)
    if meanwhile is not None:
        meanwhile()
    all_ = coming.wait()
    size = WIDTH * 8
    rows = all_[:, :size].clone().view(torch.int64)
    header = Header(tuple(Row.unpack(values) for values in rows.tolist()))
    return header, all_[:, size:] if parcel is not None else None
