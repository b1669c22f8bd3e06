"""The commit of a step: everything is reduced, checked and applied on every rank, or nothing is on this one.

Owns the rows of a step and what follows from them (rules CUTALL, QUOTA, ACK). The order is reduce, gather rows, verify, apply:
all that communicates comes before the last rows, so from then on nothing but this process's own end can come between. Ranks
may end up one commit apart when one dies in between; adoption brings them together.
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from regroup.bits import float_of
from regroup.data import DataError, Key, Quotas, SamplePlan
from regroup.errors import (
    BackendError,
    DataEnded,
    DivergedError,
    GroupBroken,
    SampleError,
    UsageError,
)
from regroup.generation.edges import Edges
from regroup.generation.groups import Groups
from regroup.generation.membership import Membership, leaves_broken
from regroup.generation.rows import Rows
from regroup.parallel.host import bits_of, to_host
from regroup.parallel.noise import NoiseScale, OwnNorm
from regroup.parallel.pipeline import Pipeline, Work, run
from regroup.parallel.strategy import Share, Strategy
from regroup.protocol.state import StatePair
from regroup.state.memory import Memory
from regroup.state.optimizers import learning_rates, parts_of, step
from regroup.state.rates import ScaledRates
from regroup.state.training import CommitRecord, TrainingState

from .header import WIDTH, Header, Row
from .hooks import Hooks, refuse_collectives
from .kept import Kept, Shelf
from .laps import DEVICE, FORWARD, Laps

_MAX_ROUNDS = 4
"""Of rows in one commit. A strategy has all that it needs after two; more would be a defect of ours."""


@dataclass(frozen=True)
class Extras:
    """What only some sessions ask of their commits."""

    wants_checkpoint: Callable[[], bool] = lambda: False
    """It is time for a checkpoint; asked where a model group writes it."""
    rates: ScaledRates | None = None
    """Multiplies the learning rates while a step is applied."""
    uneven: bool = False
    """Shares follow how long ranks take for theirs."""
    noise: NoiseScale | None = None
    """Is told of each applied step."""


class Committer:
    """Begins and commits the steps of one job. `num_committed` counts those of the current generation."""

    def __init__(
        self,
        membership: Membership,
        strategy: Strategy,
        state: TrainingState,
        plan: SamplePlan,
        memory: Memory,
        on_commit: Callable[[CommitRecord, Header, bool], None],
        extras: Extras = Extras(),
    ) -> None:
        """`on_commit(record, header, empty)` is what `announce` calls. `empty`: this rank's share was."""
        self.num_committed = 0
        self.total = 0
        """Number of steps that the script asks for."""
        self.membership, self.strategy, self.plan = membership, strategy, plan
        self._state, self._memory = state, memory
        self._on_commit, self._wants_checkpoint = on_commit, extras.wants_checkpoint
        self._rates, self._noise = extras.rates, extras.noise
        self._hooks = Hooks(state)
        self._shelf = Shelf()
        self.laps = Laps()
        self.prescale = 2.0 ** -round(math.log2(plan.global_batch))
        """What each gradient is multiplied by while it is summed: a power of two, so no bit is lost, that keeps the sum at
        about the size of a mean, where weights count samples. The same on all ranks for the job's life."""
        self.quotas = Quotas(plan, uneven=extras.uneven)
        self.data_ended = False
        """The step that was tried last lacks samples, on some rank: all ranks know it."""
        self._is_open = False
        self._announced: tuple[CommitRecord, Header, bool] | None = None

    @property
    def in_step(self) -> bool:
        """True inside the block of a step that is not committed yet."""
        return self._is_open

    @property
    def step(self) -> int:
        """Number of committed steps."""
        return self._state.step

    @property
    def deals(self) -> tuple[int, ...]:
        """Microbatches of each process in the next step, in the order of ranks; empty before the first generation."""
        return tuple(len(share) for share in self.quotas.shares)

    def next_index(self, *, ended: bool) -> int | None:
        """Return the number of the step that comes next; None: there is none. `ended`: the script, or another rank's, has left its
        loop. Raises GenerationChanged where the group ends meanwhile."""
        return None if ended or self._state.step >= self.total else self._state.step

    def begin_generation(self) -> None:
        """Other ranks, from here on."""
        self.num_committed = 0
        if not self.membership.kept_own_state:
            self.strategy.forget()
        self.laps.begin_generation()
        self.quotas.begin_generation(self.membership.world_size)
        self.strategy.begin_generation(self.membership.groups)

    def begin(self) -> None:
        """A step's block is entered."""
        self._is_open = True
        self.laps.begin()
        self.strategy.begin_step()

    def end(self) -> None:
        """The step's block is left, one way or another."""
        self._is_open = False

    def share(self) -> range:
        """Return the virtual workers of this rank."""
        return self.quotas.shares[self.membership.rank]

    @property
    def applied(self) -> tuple[()]:
        """See regroup.step.Transaction: there is no server."""
        return ()

    def key(self, index: int, v: int) -> Key:
        """See regroup.step.Transaction."""
        return Key(index, v)

    def check(self) -> None:
        """Raise GenerationChanged once the groups must be left."""
        self.membership.check()

    def stream(self, v: int) -> int:
        """See regroup.step.Transaction."""
        return v + self.plan.num_virtual * self.plan.layout.sequence_part(self.membership.rank)

    def skip(self, v: int) -> None:
        """Virtual worker `v` adds nothing. Raises UsageError where other ranks would wait for its backward."""
        if self.plan.layout.summed_dims:
            raise UsageError(
                f"step.backward() was called with mean= and weight=0, and the ranks of regroup.mesh({self.plan.layout}) make their "
                "backward passes together: a mean over nothing has none. Pass a sum: step.backward(sum=loss, weight=n)."
            )
        self.strategy.skip(v)

    def added(self, v: int, weight: float | torch.Tensor) -> None:
        """`backward` or `skip` of virtual worker `v` is over."""
        self.strategy.added(v, weight * self.prescale)

    def interrupted(self, error: BaseException, *, committed: bool) -> bool:
        """Return whether `error` ended the block because of a membership change; then the same step comes again.

        Whatever the error is, the state is that of the last commit afterwards.
        """
        is_explained = isinstance(error, DataEnded) or self.membership.explains(error)
        if not committed:
            # Where the device is what has failed, the script's own error must be seen.
            with contextlib.nullcontext() if is_explained else contextlib.suppress(RuntimeError):
                self._undo()
        return is_explained

    def _undo(self) -> None:
        """The state is that of the last commit again; where that fails it is none."""
        try:
            self.strategy.undo()
        except BaseException:
            self._state.begin_change()
            raise
        if not self.strategy.guarantees.whole_gradient:
            self._memory.committed()  # its parameters have been changed since, and changed back

    def backward(self, v: int, loss: torch.Tensor, factor: float, *, last: bool) -> None:
        """Add the gradients of virtual worker `v`: of `loss` times `factor`. `last`: of this rank's in this step.

        Raises GenerationChanged or BackendError.
        """
        if loss.dtype in (torch.float16, torch.bfloat16):
            loss = loss.float()  # the factor must not be rounded
        if self._state.scaler is not None:
            loss = self._state.scaler.scale(loss)
        with leaves_broken(self.membership):
            self.strategy.backward(v, loss, torch.full_like(loss, factor * self.prescale), last=last)

    def run(self, work: Work) -> None:
        """Run this rank's microbatches through the stages of a pipeline. Raises GenerationChanged or BackendError."""
        model, groups = self._state.model, self.membership.groups
        assert isinstance(model, Pipeline)
        assert groups is not None
        with leaves_broken(self.membership):
            run(model, work, Edges(groups), self.strategy.run_backward, self.prescale)

    def commit(
        self,
        share: Share,
        before: Sequence[Callable[[], Any]],
        after: Sequence[Callable[[], Any]],
        max_norm: float | None,
    ) -> CommitRecord:
        """Commit on this rank; `announce` comes next. Raises GenerationChanged or BackendError: nothing was applied."""
        self.laps.lap(FORWARD)
        self.check()
        self._hooks.check((*before, *after))
        if max_norm is not None and not self.strategy.guarantees.whole_gradient:
            raise UsageError(
                f"max_norm of step.commit() is {max_norm!r}, and no gradient is left to clip there: this strategy steps the "
                "optimizer before the commit. Pass max_norm to the strategy, for example LocalSGD(inner_steps=8, max_norm=1.0)."
            )
        with leaves_broken(self.membership):
            header = self._reduce_and_gather(share, lambda: self._keep(before, after, max_norm))
            loss_sum, weight = self.strategy.totals() or (header.loss_sum, header.weight)
        share.loss = loss_sum / weight
        pair = StatePair(self.membership.generation, share.index + 1)
        self.laps.met(self.membership.rank, [row.busy_ns for row in header.rows])
        record = self._apply(pair, share.loss, weight, before, after, max_norm, header.rows)
        self.laps.committed()
        self.quotas.committed([row.work_ns for row in header.rows])
        self.num_committed += 1
        self._is_open = False
        self._announced = record, header, not share.weights
        return record

    def kept(self) -> tuple[tuple[int, StatePair], ...]:
        """See regroup.generation.membership.Keeper."""
        return self._shelf.names(self._state.pair)

    def roll_forward(self, wanted: StatePair, record: CommitRecord) -> bool:
        """See regroup.generation.membership.Keeper."""
        kept = self._shelf.find(self._state.pair, wanted)
        if kept is None:
            return False
        self.strategy.put_back(kept.reduced, None if record.norm is None else float(record.norm))
        self._apply(wanted, record.loss, record.weight, kept.before, kept.after, kept.max_norm)
        return True

    def _keep(
        self, before: Sequence[Callable[[], Any]], after: Sequence[Callable[[], Any]], max_norm: float | None
    ) -> None:
        """The rows did not come, and every reduction of this rank is complete: somebody else may have applied the step."""
        base = self._state.pair
        if base is not None:
            self._shelf.add(Kept(self.membership.generation, base, self.strategy.take(), before, after, max_norm))

    def noise_scale(self) -> float | None:
        """Return the noise scale after the last commit; None: it is not measured, or not known yet. Waits for the device."""
        return self._noise.now() if self._noise is not None else None

    def announce(self) -> None:
        """The step knows that it is committed: tell the rest of the session."""
        assert self._announced is not None
        self._on_commit(*self._announced)

    def _reduce_and_gather(self, share: Share, keep: Callable[[], None]) -> Header:
        """Return the last rows: every rank has them, or this one raises and nothing was applied. `keep` is called where this
        rank's reductions are complete, and the rows do not come (rule KEEP)."""
        strategy = self.strategy
        strategy.launch(share)
        header = self._first_rows(share, keep)
        if header.any_ended:
            self._end_of_data(share)
        for _ in range(_MAX_ROUNDS):
            self._verify(share, header)
            if not strategy.settle(header.words):
                return header
            header = self._rows(share, keep)
        raise AssertionError(f"step {share.index}: the ranks' words never settle: {header.words}")

    def _end_of_data(self, share: Share) -> None:
        """The step cannot be whole. The same on all ranks."""
        if share.index == 0:
            raise DataError(
                f"data ended in step 0: the stream has fewer samples than a step needs ({self.plan.batch}). Lower global_batch, or "
                "pass more data."
            )
        self.data_ended = True
        raise DataEnded(f"the data ended in step {share.index}")

    def _first_rows(self, share: Share, keep: Callable[[], None]) -> Header:
        strategy = self.strategy
        if self.plan.layout.size > 1:
            strategy.wait()  # rule REDUCED: a row says that this rank's reductions are complete
            return self._rows(share, keep)
        parcel = strategy.parcel()
        header, parcels = gather(self.membership.groups, self._row(share), strategy.wait, parcel)
        if parcels is not None:
            strategy.unpack(parcels)
        return header

    def _rows(self, share: Share, keep: Callable[[], None]) -> Header:
        row, m = self._row(share), self.plan.layout.size
        # Before anything is kept: an abort may have left anything in what was reduced. Nobody has this row yet.
        self.membership.check()
        try:
            return exchange(self.membership.groups, row, m)
        except (GroupBroken, BackendError):
            if m > 1:
                keep()
            raise

    def _row(self, share: Share) -> Row:
        # The one place where the host waits for backward: what the row needs of the device comes together.
        own = share.ask()
        unread = self._noise.ask() if self._noise is not None else []
        values = to_host([*own, *unread, *self.strategy.ask()])
        if self._noise is not None:
            self._noise.tell(values[len(own) : len(own) + len(unread)])
        if own:
            share.tell(values[: len(own)])
            self.laps.lap(DEVICE)
        layout, rank = self.plan.layout, self.membership.rank
        adds_loss = layout.size == 1 or layout.adds_loss(rank)
        return Row(
            step=share.index,
            loss_sum=sum(share.loss_sums.values()) if adds_loss else 0.0,
            weight=sum(share.weights.values()) if adds_loss else 0.0,
            knows_newer=self.membership.knows_newer(),
            sample_hash=share.sample_hash if layout.size == 1 or layout.speaks(rank) else 0,
            snapshotted=self._memory.step,
            wants_snapshot=self._memory.due(time.monotonic()),
            wants_checkpoint=self.plan.layout.size > 1 and self.membership.rank == 0 and self._wants_checkpoint(),
            total=self.total,
            ended=share.ended,
            busy_ns=self.laps.busy_ns(),
            work_ns=self.laps.work_ns(),
            word=self.strategy.word(values[len(own) + len(unread) :]),
        )

    def _verify(self, share: Share, header: Header) -> None:
        """Raise rather than commit what is not this step, everywhere (rule QUOTA). The same on all ranks."""
        problem = header.disagreement()
        if problem is not None:
            raise DivergedError(problem)
        if header.sample_hash != self.plan.expected_hash(share.index):
            raise SampleError(
                f"Step {share.index} was not committed: the ranks did not use its {self.plan.batch} samples. "
                "Call step.backward() once for every batch of step.microbatches()."
            )
        if not header.weight > 0:
            raise UsageError(f"Step {share.index} has a total weight of {header.weight:g}; it must be greater than 0.")

    def _apply(
        self,
        pair: StatePair,
        loss: float,
        weight: float,
        before: Sequence[Callable[[], Any]],
        after: Sequence[Callable[[], Any]],
        max_norm: float | None,
        rows: Sequence[Row] = (),
    ) -> CommitRecord:
        """Everything that changes the state, which is called `pair` then. `rows`: of the step, where this rank has them.

        An exception in here leaves it without a name: nobody copies it."""
        state, scaler, prescale = self._state, self._state.scaler, self.prescale
        optimizers = parts_of(state.optimizer if self.strategy.outer is None else self.strategy.outer)
        norm: torch.Tensor | None = None
        skipped = False
        state.begin_change()
        with refuse_collectives(self.membership.groups, watch=self.num_committed == 0):
            if self._noise is not None:
                parts = [OwnNorm(row.weight, row.word.own_norm_squared) for row in rows]
                self._noise.add(parts, self.strategy.norm_squared(), prescale)
            self.strategy.scale(weight * prescale)
            if scaler is not None:
                skipped = _unscale(scaler, optimizers)
            if max_norm is not None:
                norm = self.strategy.clip(max_norm)
            for hook in before:
                hook()
            if self._rates is not None:
                self._rates.multiply(pair.step - 1)
            rates = learning_rates(state.optimizer)
            for optimizer in optimizers:
                # Not by scaler.step(), which would ask the device for each optimizer what `skipped` says.
                if scaler is None or (not skipped and _has_gradient(optimizer)):
                    step(optimizer)
            if scaler is not None and any(map(_has_gradient, optimizers)):
                scaler.update()
            if self._rates is not None:
                self._rates.restore()
            for hook in after:
                hook()
        record = CommitRecord(pair, loss, weight, norm, rates, skipped)
        self._state.committed(record, self.membership.generation)
        self._shelf.clear()
        return record


def _has_gradient(optimizer: Any) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def _unscale(scaler: Any, optimizers: Sequence[Any]) -> bool:
    """Unscale the gradients of all optimizers; return whether any overflowed: then none of them is stepped."""
    if not scaler.is_enabled():
        return False
    optimizers = [optimizer for optimizer in optimizers if _has_gradient(optimizer)]
    if not optimizers:
        return False
    parameters = (parameter for group in optimizers[0].param_groups for parameter in group["params"])
    device = next(parameter.device for parameter in parameters if parameter.grad is not None)
    scaler.scale(torch.zeros((), device=device))  # a rank without a share has not used it yet
    for optimizer in optimizers:
        scaler._per_optimizer_states.pop(id(optimizer), None)  # of a commit that failed here and is done again
        scaler.unscale_(optimizer)
    found = [one for optimizer in optimizers for one in scaler._found_inf_per_device(optimizer).values()]
    skipped = any(float_of(bits) > 0 for bits in to_host([bits_of(one) for one in found]))
    for one in found:
        one.fill_(float(skipped))
    return skipped


def exchange(groups: Groups | None, row: Row, group_size: int = 1) -> Header:
    """Gather one row of every rank; all ranks call it. `group_size`: see Header. Raises what `Groups.failed` says."""
    return replace(gather(groups, row)[0], group_size=group_size)


def gather(
    groups: Groups | None,
    row: Row,
    meanwhile: Callable[[], None] | None = None,
    parcel: torch.Tensor | None = None,
) -> tuple[Header, torch.Tensor | None]:
    """Gather one row of every rank, and with it a parcel of bytes, where ranks have one, of one length: [ranks, bytes].

    `meanwhile` is waited for before the rows are. Raises what `Groups.failed` says."""
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
