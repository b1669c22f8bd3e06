"""Data parallel with the same bits at any number of ranks: each virtual worker's gradients are summed along a fixed tree.

The tree is `regroup.data.ExactSum`. Nothing overlaps with backward, and buffers that depend on the share are refused.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch

from regroup.data import ExactSum, GroupExchange, SamplePlan
from regroup.errors import UsageError
from regroup.generation.groups import Groups
from regroup.generation.rows import Rows

from .buffers import Buffers
from .ddp import gathered_any
from .equal import Equal
from .gradients import Gradients, hash_of
from .strategy import Agree, Guarantees, Reduced, Share, Word, settled


class Exact:
    """The strategy of reduction="exact"."""

    guarantees = Guarantees(same_bits_at_any_size=True, survivor_has_all=True)
    outer = None

    def __init__(self, model: torch.nn.Module, optimizer: Any, plan: SamplePlan) -> None:
        """Turn deterministic algorithms on. Raises UsageError for a model without anything to train."""
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
        torch.use_deterministic_algorithms(True)
        self._gradients = Gradients(model)
        self._buffers = Buffers(model)
        self.equal = Equal(model, optimizer, self._buffers)
        self._plan = plan
        self._groups: Groups | None = None
        """None where no other rank is there."""
        self._sums: list[ExactSum] = []
        """The sums of the buckets, in their order."""
        self._scalars = ExactSum(plan.shares(1), 0)
        """The sum of (loss, weight). As floats they depend on the order, too."""
        self._totals = (0.0, 0.0)
        self._agreed: bytes | None = None
        """Parameters that got a gradient on any rank, once that is known for this step."""

    def begin_generation(self, groups: Groups | None, *, replaced: bool = False) -> None:  # noqa: ARG002
        """Deal the leaves of the trees to the ranks of a new generation. Nothing was kept for an old state."""
        self._groups = groups if groups is not None and groups.world_size > 1 else None
        rank, world_size = (groups.rank, groups.world_size) if groups is not None else (0, 1)
        shares = self._plan.shares(world_size)
        self._sums = [ExactSum(shares, rank) for _ in self._gradients.buckets]
        self._scalars = ExactSum(shares, rank)

    def begin_step(self) -> None:
        """Zero the gradients, keep the buffers' values and empty the trees."""
        self._agreed = None
        self._gradients.begin()
        self._buffers.keep()
        for total in (*self._sums, self._scalars):
            total.reset()

    def backward(self, loss: torch.Tensor, gradient: torch.Tensor, *, last: bool) -> None:  # noqa: ARG002
        """Compute the gradients of one virtual worker. `added` puts them into the trees."""
        loss.backward(gradient)  # type: ignore[no-untyped-call]

    def added(self, v: int, weight: float | torch.Tensor) -> None:  # noqa: ARG002
        """Add one virtual worker's gradients to the trees, zeros if it had no backward. The next ones begin at zero."""
        for bucket, total in zip(self._gradients.buckets, self._sums):
            self._gradients.collect(bucket)
            total.add(v, bucket.flat)
            bucket.flat.zero_()

    def reduce(self, share: Share, agree: Agree) -> Reduced:
        """Sum along the trees, beside the first rows. Nothing of it overlaps with backward."""
        agreed = agree([self._buffers.ask()], self._word, lambda: self._sum(share))
        settled(agreed, self._settle, lambda: agree([self._buffers.ask()], self._word))
        loss_sum, weight = self._totals
        return Reduced(loss_sum / weight, weight)

    def scale(self, weight: float) -> None:
        """Divide the sums by the step's weight. Parameters that no rank has used have no gradient then."""
        assert self._agreed is not None
        self._gradients.scale(weight, self._agreed)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the norm over all parameters. Returns the norm before."""
        return self._gradients.clip(max_norm)

    def undo(self) -> None:
        """Put the buffers back."""
        self._buffers.restore()

    def close(self) -> None:
        """Take the hooks off the model."""
        self._gradients.close()

    def _sum(self, share: Share) -> None:
        """Reduce the trees of all ranks. The losses are on the host by then: the row had them read."""
        exchange = _Exchange(self._groups, control=False)
        for bucket, total in zip(self._gradients.buckets, self._sums):
            # A rank with an empty share had no backward, which brings gradients back that the script has thrown away.
            # Without one the optimizer would leave the parameter as it is.
            self._gradients.collect(bucket)
            total.reduce(exchange, out=bucket.flat)
        for v in sorted(share.loss_sums):
            self._scalars.add(v, torch.tensor([share.loss_sums[v], share.weights[v]], dtype=torch.float64))
        sums = self._scalars.reduce(_ExchangeOfRows(self._groups, control=True), torch.zeros(2, dtype=torch.float64))
        self._totals = (float(sums[0]), float(sums[1]))

    def _word(self, changed: Sequence[int]) -> Word:
        if self._groups is None:
            return Word(changed=any(changed))
        used = self._gradients.used if self._agreed is None else self._agreed
        return Word(unused=hash_of(used), changed=any(changed))

    def _settle(self, words: Sequence[Word]) -> bool:
        """Agree on the parameters that any rank has used. Returns True if they had to be gathered: then rows come again."""
        if any(word.changed for word in words):
            name = next(iter(self._buffers.changed()), "on another rank")
            raise UsageError(
                f'reduction="exact" refuses buffers that change in forward ({name}), because '
                'their value depends on the world size. Use reduction="fast", or a layer without running statistics.'
            )
        if self._groups is not None and len({word.unused for word in words}) > 1:
            self._agreed = gathered_any(self._groups, self._gradients.used)
            return True
        if self._agreed is None:
            self._agreed = self._gradients.used
        return False


class _Exchange(GroupExchange):
    """The exchange among the ranks of a generation. `control`: of tensors in host memory, not on the model's device."""

    def __init__(self, groups: Groups | None, *, control: bool) -> None:
        super().__init__(self._wait_for)
        self._groups, self._control = groups, control

    def _wait_for(self, method: str, *arguments: Any) -> None:
        assert self._groups is not None  # a world of one exchanges nothing
        self._groups.wait([self._groups.launch(method, *arguments, control=self._control)])


class _ExchangeOfRows(_Exchange):
    """The exchange of a few numbers, which are gathered as rows are."""

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        assert self._groups is not None
        output.view(torch.uint8).copy_(Rows(self._groups, input.view(torch.uint8)).wait().view(-1))
