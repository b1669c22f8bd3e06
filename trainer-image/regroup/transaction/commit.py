"""The commit of a step: everything is reduced, checked and applied on every rank, or nothing is on this one.

Owns the rows of a step and what follows from them (rules CUTALL, QUOTA, ACK). The order is reduce, gather rows, verify, apply:
all that communicates comes before the last rows, so from then on nothing but this process's own end can come between. Ranks
may end up one commit apart when one dies in between; adoption brings them together.
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from regroup.data import SamplePlan
from regroup.errors import DivergedError, GenerationChanged, GroupBroken, SampleError, UsageError
from regroup.generation.groups import Groups
from regroup.generation.membership import Membership
from regroup.parallel.host import bits_of, float_of, to_host
from regroup.parallel.strategy import Share, Strategy
from regroup.protocol.state import StatePair
from regroup.state.memory import Memory
from regroup.state.optimizers import parts_of
from regroup.state.rates import ScaledRates
from regroup.state.training import CommitRecord, TrainingState

from .header import WIDTH, Header, Row
from .hooks import Hooks, refuse_collectives

_MAX_ROUNDS = 4
"""Of rows in one commit. A strategy has all that it needs after two; more would be a defect of ours."""


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
        rates: ScaledRates | None = None,
    ) -> None:
        """`on_commit(record, header, empty)` is what `announce` calls. `empty`: this rank's share was. `rates`: what multiplies the
        learning rates while a step is applied."""
        self.num_committed = 0
        self.total = 0
        """Number of steps that the script asks for."""
        self.membership, self.strategy, self.plan = membership, strategy, plan
        self._state, self._memory = state, memory
        self._on_commit, self._rates = on_commit, rates
        self._hooks = Hooks(state)
        self._is_open = False
        self._announced: tuple[CommitRecord, Header, bool] | None = None

    @property
    def in_step(self) -> bool:
        """True inside the block of a step that is not committed yet."""
        return self._is_open

    def begin_generation(self) -> None:
        """Other ranks, from here on."""
        self.num_committed = 0
        if not self.membership.kept_own_state:
            self.strategy.forget()
        self.strategy.begin_generation(self.membership.groups)

    def begin(self) -> None:
        """A step's block is entered."""
        self._is_open = True
        self.strategy.begin_step()

    def end(self) -> None:
        """The step's block is left, one way or another."""
        self._is_open = False

    def share(self) -> range:
        """Return the virtual workers of this rank."""
        return self.plan.share(self.membership.rank, self.membership.world_size)

    def check(self) -> None:
        """Raise GenerationChanged once the groups must be left."""
        self.membership.check()

    def skip(self, v: int) -> None:
        """Virtual worker `v` adds nothing."""
        self.strategy.skip(v)

    def interrupted(self, error: BaseException, *, committed: bool) -> bool:
        """Return whether `error` ended the block because of a membership change; then the same step comes again.

        Whatever the error is, the state is that of the last commit afterwards.
        """
        is_explained = self.membership.explains(error)
        if not committed:
            # Where the device is what has failed, the script's own error must be seen.
            with contextlib.nullcontext() if is_explained else contextlib.suppress(RuntimeError):
                self.strategy.undo()
        return is_explained

    def backward(self, v: int, loss: torch.Tensor, factor: float, *, last: bool) -> None:
        """Add the gradients of virtual worker `v`: of `loss` times `factor`. `last`: of this rank's in this step.

        Raises GenerationChanged or BackendError.
        """
        if loss.dtype in (torch.float16, torch.bfloat16):
            loss = loss.float()  # the factor must not be rounded
        if self._state.scaler is not None:
            loss = self._state.scaler.scale(loss)
        try:
            self.strategy.backward(v, loss, torch.full_like(loss, factor * self.prescale), last=last)
        except GroupBroken as error:
            self.membership.leave(error)
            raise GenerationChanged(str(error)) from error

    @property
    def prescale(self) -> float:
        """What each gradient is multiplied by while it is summed: a power of two, so no bit is lost, that keeps the sum at
        about the size of a mean, where weights count samples. The same on all ranks for the job's life."""
        return 2.0 ** -round(math.log2(self.plan.global_batch))

    def commit(
        self,
        share: Share,
        before: Sequence[Callable[[], Any]],
        after: Sequence[Callable[[], Any]],
        max_norm: float | None,
    ) -> CommitRecord:
        """Commit on this rank; `announce` comes next. Raises GenerationChanged or BackendError: nothing was applied."""
        self.check()
        self._hooks.check((*before, *after))
        try:
            header = self._reduce_and_gather(share)
            loss_sum, weight = self.strategy.totals() or (header.loss_sum, header.weight)
        except GroupBroken as error:
            self.membership.leave(error)
            raise GenerationChanged(str(error)) from error
        share.loss = loss_sum / weight
        record = self._apply(share, weight, before, after, max_norm)
        self.num_committed += 1
        self._is_open = False
        self._announced = record, header, not share.weights
        return record

    def announce(self) -> None:
        """The step knows that it is committed: tell the rest of the session."""
        assert self._announced is not None
        self._on_commit(*self._announced)

    def _reduce_and_gather(self, share: Share) -> Header:
        """Return the last rows: every rank has them, or this one raises and nothing was applied."""
        groups, strategy = self.membership.groups, self.strategy
        strategy.launch(share)
        parcel = strategy.parcel()
        header, parcels = gather(groups, self._row(share), strategy.wait, parcel)
        if parcels is not None:
            strategy.unpack(parcels)
        for _ in range(_MAX_ROUNDS):
            self._verify(share, header)
            if not strategy.settle(header.words):
                return header
            header = exchange(groups, self._row(share))
        raise AssertionError(f"step {share.index}: the ranks' words never settle: {header.words}")

    def _row(self, share: Share) -> Row:
        # The one place where the host waits for backward: what the row needs of the device comes together.
        losses = [bits_of(loss) for _, loss, _ in share.pending]
        values = to_host([*losses, *self.strategy.ask()])
        for (v, _, factor), bits in zip(share.pending, values):
            share.loss_sums[v] = float_of(bits) * factor
        share.pending = []
        return Row(
            step=share.index,
            loss_sum=sum(share.loss_sums.values()),
            weight=sum(share.weights.values()),
            knows_newer=self.membership.knows_newer(),
            sample_hash=share.sample_hash,
            snapshotted=self._memory.step,
            wants_snapshot=self._memory.due(time.monotonic()),
            total=self.total,
            word=self.strategy.word(values[len(losses) :]),
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
        share: Share,
        weight: float,
        before: Sequence[Callable[[], Any]],
        after: Sequence[Callable[[], Any]],
        max_norm: float | None,
    ) -> CommitRecord:
        """Everything that changes the state. An exception in here leaves it without a name: nobody copies it."""
        state, scaler, prescale = self._state, self._state.scaler, self.prescale
        optimizers = parts_of(state.optimizer)
        norm: torch.Tensor | None = None
        skipped = False
        with state.changing(), refuse_collectives(self.membership.groups, watch=self.num_committed == 0):
            self.strategy.scale(weight * prescale)
            if scaler is not None:
                skipped = _unscale(scaler, optimizers)
            if max_norm is not None:
                norm = self.strategy.clip(max_norm)
            for hook in before:
                hook()
            if self._rates is not None:
                self._rates.multiply(share.index)
            rates = tuple(_value(group.get("lr")) for group in getattr(state.optimizer, "param_groups", ()))
            for optimizer in optimizers:
                # Not by scaler.step(), which would ask the device for each optimizer what `skipped` says.
                if scaler is None or (not skipped and _has_gradient(optimizer)):
                    optimizer.step()
            if scaler is not None and any(map(_has_gradient, optimizers)):
                scaler.update()
            if self._rates is not None:
                self._rates.restore()
            for hook in after:
                hook()
        generation = self.membership.generation
        pair = StatePair(generation, share.index + 1)
        record = CommitRecord(pair, share.loss, weight, norm, rates, skipped)
        self._state.committed(record, generation)
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


def _value(rate: Any) -> Any:
    """Return a learning rate as it is now: a tensor is changed in place by its scheduler."""
    return rate.clone() if isinstance(rate, torch.Tensor) else float("nan") if rate is None else rate


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
    all_ = torch.empty(groups.world_size, len(mine), dtype=torch.uint8)
    work = groups.launch("_allgather_base", all_.view(-1), mine, control=True)
    if meanwhile is not None:
        meanwhile()
    groups.wait([work])
    size = WIDTH * 8
    rows = all_[:, :size].clone().view(torch.int64)
    header = Header(tuple(Row.unpack(values) for values in rows.tolist()))
    return header, all_[:, size:] if parcel is not None else None
