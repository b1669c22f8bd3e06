"""The commit of a step: everything is reduced, checked and applied on every rank, or nothing is on this one.

A commit has three phases:

- reduce (`_reduce`): the strategy sums gradients over the ranks;
- agree (`Agreement`): ranks gather rows and check them, as often as the strategy needs it, beside or after its sums;
- apply (`_apply`): hooks and optimizer change the state.

All that communicates comes before the last rows, so only the end of this process can come between rows and apply. If a rank dies
there, ranks end up one commit apart, and adoption brings them together.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

import torch

from regroup.bits import float_of
from regroup.data import Key, Quotas, SamplePlan
from regroup.errors import DataEnded, UsageError
from regroup.generation.edges import Edges
from regroup.generation.membership import Membership, leaves_broken
from regroup.parallel.ddp import DataParallel
from regroup.parallel.host import Scalar, bits_of, to_host
from regroup.parallel.noise import NoiseScale, OwnNorm
from regroup.parallel.pipeline import Pipeline, Work, run
from regroup.parallel.strategy import Reduced, Share, Strategy
from regroup.protocol.state import StatePair
from regroup.state.memory import Memory
from regroup.state.optimizers import learning_rates, parts_of, step
from regroup.state.rates import ScaledRates
from regroup.state.training import CommitRecord, TrainingState

from .agreement import Agreement
from .header import Header, Row
from .hooks import Arguments, Hooks, refuse_collectives
from .kept import Kept, Shelf
from .laps import DEVICE, FORWARD, Laps


@dataclass(frozen=True)
class Extras:
    """Settings of a commit that few sessions use."""

    wants_checkpoint: Callable[[], bool] = lambda: False
    """Returns whether it is time for a checkpoint; asked where a model group writes it."""
    rates: ScaledRates | None = None
    """Multiplies the learning rates while a step is applied."""
    uneven: bool = False
    """The size of a rank's share follows the time that the rank takes for it."""
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
        """`announce` calls `on_commit(record, header, empty)`. `empty` says that this rank's share was empty."""
        self.num_committed = 0
        self.total = 0
        """Number of steps that the script asks for."""
        self.membership, self.strategy, self.plan = membership, strategy, plan
        self._state, self._memory = state, memory
        self._on_commit = on_commit
        self._rates, self._noise = extras.rates, extras.noise
        self._hooks = Hooks(state)
        self._shelf = Shelf()
        self.laps = Laps()
        self._agreement = Agreement(
            membership, plan, memory, strategy.equal, self.laps, extras.noise, extras.wants_checkpoint
        )
        self.prescale = 2.0 ** -round(math.log2(plan.global_batch))
        """Factor of each gradient in the backward, before any sum. It is a power of two, so no bit is lost. If the script's
        weights count samples, the sum is about as large as a mean. All ranks have the same factor for the job's life. The weight
        that `Strategy.scale` divides by includes it."""
        self.quotas = Quotas(plan, uneven=extras.uneven)
        self._is_open = False
        self._announced: tuple[CommitRecord, Header, bool] | None = None

    @property
    def data_ended(self) -> bool:
        """True if the step that was tried last lacks samples, on some rank: all ranks know it."""
        return self._agreement.data_ended

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
        """Begin to commit with the ranks of a new generation."""
        self.num_committed = 0
        self.laps.begin_generation()
        self.quotas.begin_generation(self.membership.world_size)
        self.strategy.begin_generation(self.membership.groups, replaced=not self.membership.kept_own_state)

    def begin(self) -> None:
        """Enter the block of a step."""
        self._is_open = True
        self.laps.begin()
        self.strategy.begin_step()

    def end(self) -> None:
        """Leave the block of a step, one way or another."""
        self._is_open = False

    def share(self) -> range:
        """Return the virtual workers of this rank."""
        return self.quotas.shares[self.membership.rank]

    @property
    def applied(self) -> tuple[()]:
        """Return nothing: there is no parameter server."""
        return ()

    def key(self, index: int, v: int) -> Key:
        """Return the key of the microbatch that virtual worker `v` computes in a step."""
        return Key(index, v)

    def check(self) -> None:
        """Raise GenerationChanged once the groups must be left."""
        self.membership.check()

    def stream(self, v: int) -> int:
        """Return the number of the random stream of a virtual worker. Each part of a sequence has one of its own."""
        return v + self.plan.num_virtual * self.plan.layout.sequence_part(self.membership.rank)

    def skip(self, v: int) -> None:  # noqa: ARG002
        """Leave out a mean over nothing. Raises UsageError where other ranks would wait for its backward."""
        if self.plan.layout.summed_dims:
            raise UsageError(
                f"step.backward() was called with mean= and weight=0, and the ranks of regroup.mesh({self.plan.layout}) make their "
                "backward passes together: a mean over nothing has none. Pass a sum: step.backward(sum=loss, weight=n)."
            )

    def added(self, v: int, weight: float | torch.Tensor) -> None:
        """Note that `backward` or `skip` of virtual worker `v` is over."""
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
        """Put the state back to the last commit. If that fails, the state has no name."""
        try:
            self.strategy.undo()
        except BaseException:
            self._state.begin_change()
            raise
        if not self.strategy.guarantees.whole_gradient:
            self._memory.committed()  # its parameters have been changed since, and changed back

    def backward(self, v: int, loss: torch.Tensor, factor: float, *, last: bool) -> None:  # noqa: ARG002
        """Add the gradients of `loss` times `factor`, of virtual worker `v`. `last`: no other one of this rank follows in the step.

        Raises GenerationChanged or BackendError.
        """
        if loss.dtype in (torch.float16, torch.bfloat16):
            loss = loss.float()  # the factor must not be rounded
        if self._state.scaler is not None:
            loss = self._state.scaler.scale(loss)
        with leaves_broken(self.membership):
            self.strategy.backward(loss, torch.full_like(loss, factor * self.prescale), last=last)

    def run(self, work: Work) -> None:
        """Run this rank's microbatches through the stages of a pipeline. Raises GenerationChanged or BackendError."""
        model, groups = self._state.model, self.membership.groups
        assert isinstance(model, Pipeline)
        assert groups is not None
        with leaves_broken(self.membership):
            run(model, work, Edges(groups), self._in_group.run_backward, self.prescale)

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
        arguments = Arguments(before, after, max_norm)
        self._check(arguments)
        self._catch_up()
        reduced = self._reduce(share, arguments)
        share.loss = reduced.loss
        header = self._agreement.header
        self.laps.met(self.membership.rank, [row.busy_ns for row in header.rows])
        pair = StatePair(self.membership.generation, share.index + 1)
        record = self._apply(pair, reduced.loss, reduced.weight, arguments, header.rows, reduced.norm_squared)
        self.laps.committed()
        self.quotas.committed([row.work_ns for row in header.rows])
        self.num_committed += 1
        self._is_open = False
        self._announced = record, header, not share.weights
        return record

    def kept(self) -> tuple[tuple[int, StatePair], ...]:
        """Return (generation, base) of each step whose gradients were kept and fit the state that is held."""
        return self._shelf.names(self._state.pair)

    def roll_forward(self, wanted: StatePair, record: CommitRecord) -> bool:
        """Apply kept gradients that make the wanted state. Returns False if none do. `record` is another rank's, of that commit."""
        kept = self._shelf.find(self._state.pair, wanted)
        if kept is None:
            return False
        self._in_group.put_back(kept.reduced, None if record.norm is None else float(record.norm))
        self._apply(wanted, record.loss, record.weight, kept.arguments)
        return True

    def noise_scale(self) -> float | None:
        """Return the noise scale after the last commit; None: it is not measured, or not known yet. Waits for the device."""
        return self._noise.now() if self._noise is not None else None

    def announce(self) -> None:
        """Tell the rest of the session of the commit. Called once the step itself knows of it."""
        assert self._announced is not None
        self._on_commit(*self._announced)

    # --- before the phases -------------------------------------------------------------------------------------------

    def _check(self, arguments: Arguments) -> None:
        """Raise UsageError for arguments of `step.commit()` that this session cannot follow."""
        self._hooks.check((*arguments.before, *arguments.after))
        if arguments.max_norm is not None and not self.strategy.guarantees.whole_gradient:
            raise UsageError(
                f"max_norm of step.commit() is {arguments.max_norm!r}, and no gradient is left to clip there: this strategy steps "
                "the optimizer before the commit. Pass max_norm to the strategy, for example LocalSGD(inner_steps=8, max_norm=1.0)."
            )

    def _catch_up(self) -> None:
        """Read the loss of the step before. So the host is at most one step ahead of the device."""
        if self._state.record is not None:
            float(self._state.record.loss)
        self.laps.lap(DEVICE)

    # --- reduce ------------------------------------------------------------------------------------------------------

    def _reduce(self, share: Share, arguments: Arguments) -> Reduced:
        """Return what all ranks have agreed on. Raises GenerationChanged or BackendError, and errors that all ranks raise alike."""
        self._agreement.begin(share, self.total, lambda: self._keep(arguments))
        with leaves_broken(self.membership):
            return self.strategy.reduce(share, self._agreement)

    def _keep(self, arguments: Arguments) -> None:
        """Keep the gradients of a step whose rows did not come: another rank of the model group may have applied it."""
        base = self._state.pair
        if base is not None:
            self._shelf.add(Kept(self.membership.generation, base, self._in_group.take(), arguments))

    @property
    def _in_group(self) -> DataParallel:
        """The strategy of a model group. No other one works with `regroup.mesh()`."""
        assert isinstance(self.strategy, DataParallel)
        return self.strategy

    # --- apply -------------------------------------------------------------------------------------------------------

    def _apply(
        self,
        pair: StatePair,
        loss: SupportsFloat,
        weight: float,
        arguments: Arguments,
        rows: Sequence[Row] = (),
        norm_squared: Scalar | None = None,
    ) -> CommitRecord:
        """Change the state, which is called `pair` then. `rows` are those of the step, if this rank has them.

        An exception in here leaves the state without a name: nobody copies it.
        """
        state, scaler = self._state, self._state.scaler
        optimizers = parts_of(state.optimizer if self.strategy.outer is None else self.strategy.outer)
        norm: torch.Tensor | None = None
        skipped = False
        state.begin_change()
        with refuse_collectives(self.membership.groups, watch=self.num_committed == 0):
            if self._noise is not None:
                parts = [OwnNorm(row.weight, row.word.own_norm_squared) for row in rows]
                self._noise.add(parts, norm_squared, self.prescale)
            self.strategy.scale(weight * self.prescale)
            if scaler is not None:
                skipped = _unscale(scaler, optimizers)
            if arguments.max_norm is not None:
                norm = self.strategy.clip(arguments.max_norm)
            for hook in arguments.before:
                hook()
            rates = self._step(optimizers, pair.step - 1, skipped=skipped)
            for hook in arguments.after:
                hook()
        record = CommitRecord(pair, loss, weight, norm, rates, skipped)
        state.committed(record, self.membership.generation)
        self._shelf.clear()
        return record

    def _step(self, optimizers: Sequence[Any], index: int, *, skipped: bool) -> tuple[Any, ...]:
        """Step the optimizers and update the scaler. Returns the learning rates of the script's optimizer, as they were applied."""
        scaler = self._state.scaler
        if self._rates is not None:
            self._rates.multiply(index)
        rates = learning_rates(self._state.optimizer)
        for optimizer in optimizers:
            # Not by scaler.step(), which would ask the device for each optimizer what `skipped` says.
            if scaler is None or (not skipped and _has_gradient(optimizer)):
                step(optimizer)
        if scaler is not None and any(map(_has_gradient, optimizers)):
            scaler.update()
        if self._rates is not None:
            self._rates.restore()
        return rates


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
