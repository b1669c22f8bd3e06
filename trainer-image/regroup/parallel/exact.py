"""Data parallel with the same bits at any number of ranks: each virtual worker's gradients are summed along a fixed tree.

`regroup.data.ExactSum` is the tree. Nothing overlaps with backward, and buffers that depend on the share are refused.
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
from .ddp import Equal, gathered_any
from .gradients import Gradients, hash_of
from .host import Scalar
from .strategy import Guarantees, Share, Word


class Exact:
    """See `Strategy`: reduction="exact"."""

    guarantees = Guarantees(same_bits_at_any_size=True, survivor_has_all=True)
    outer = None

    def __init__(self, model: torch.nn.Module, optimizer: Any, plan: SamplePlan) -> None:
        """Turns deterministic algorithms on. Raises UsageError for a model without anything to train."""
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
        torch.use_deterministic_algorithms(True)
        self._gradients = Gradients(model)
        self._buffers = Buffers(model)
        self._equal = Equal(model, optimizer, self._buffers)
        self._plan = plan
        self._groups: Groups | None = None
        """None where there is nobody else."""
        self._sums: list[ExactSum] = []
        """By bucket."""
        self._scalars = ExactSum(plan.shares(1), 0)
        """Of (loss, weight). Their sums as floats depend on the order, too."""
        self._totals = (0.0, 0.0)
        self._share = Share(0)
        self._agreed: bytes | None = None
        """Parameters that got a gradient on any rank, once that is known for this step."""

    def begin_generation(self, groups: Groups | None) -> None:
        """See Strategy."""
        self._groups = groups if groups is not None and groups.world_size > 1 else None
        rank, world_size = (groups.rank, groups.world_size) if groups is not None else (0, 1)
        shares = self._plan.shares(world_size)
        self._sums = [ExactSum(shares, rank) for _ in self._gradients.buckets]
        self._scalars = ExactSum(shares, rank)

    def forget(self) -> None:
        """See Strategy: there is nothing that only one rank has."""

    def begin_step(self) -> None:
        """See Strategy."""
        self._agreed = None
        self._gradients.begin()
        self._buffers.keep()
        for total in (*self._sums, self._scalars):
            total.reset()

    def backward(self, v: int, loss: torch.Tensor, gradient: torch.Tensor, *, last: bool) -> None:  # noqa: ARG002
        """See Strategy: add one virtual worker's gradients to the tree and begin the next ones at zero."""
        loss.backward(gradient)  # type: ignore[no-untyped-call]
        for bucket, total in zip(self._gradients.buckets, self._sums):
            self._gradients.collect(bucket)
            total.add(v, bucket.flat)
            bucket.flat.zero_()

    def skip(self, v: int) -> None:
        """See Strategy."""
        for bucket, total in zip(self._gradients.buckets, self._sums):
            bucket.flat.zero_()
            total.add(v, bucket.flat)

    def added(self, v: int, weight: float | torch.Tensor) -> None:
        """See Strategy."""

    def launch(self, share: Share) -> None:
        """See Strategy: nothing overlaps."""
        self._share = share

    def parcel(self) -> torch.Tensor | None:
        """See Strategy."""
        return None

    def unpack(self, parcels: torch.Tensor) -> None:
        """See Strategy."""
        raise AssertionError(f"{len(parcels)} parcels came, and none was sent")

    def wait(self) -> None:
        """See Strategy."""
        for bucket, total in zip(self._gradients.buckets, self._sums):
            # A rank with an empty share had no backward, which brings gradients back that the script has thrown away.
            # Without one the optimizer would leave the parameter as it is.
            self._gradients.collect(bucket)
            total.reduce(self._exchange(control=False), out=bucket.flat)
        share = self._share
        for v in sorted(share.loss_sums):
            self._scalars.add(v, torch.tensor([share.loss_sums[v], share.weights[v]], dtype=torch.float64))
        sums = self._scalars.reduce(self._exchange(control=True), torch.zeros(2, dtype=torch.float64))
        self._totals = (float(sums[0]), float(sums[1]))

    def ask(self) -> list[Scalar]:
        """See Strategy."""
        changed = self._buffers.ask()
        return changed if self._groups is None else [*changed, *self._equal.ask(self._share.index)]

    def word(self, values: Sequence[int]) -> Word:
        """See Strategy."""
        changed, equal = self._buffers.split(values)
        if self._groups is None:
            return Word(changed=any(changed))
        used = self._gradients.used if self._agreed is None else self._agreed
        return self._equal.word(equal)._replace(unused=hash_of(used), changed=any(changed))

    def settle(self, words: Sequence[Word]) -> bool:
        """See Strategy."""
        if any(word.changed for word in words):
            name = next(iter(self._buffers.changed()), "on another rank")
            raise UsageError(
                f'reduction="exact" refuses buffers that change in forward ({name}), because '
                'their value depends on the world size. Use reduction="fast", or a layer without running statistics.'
            )
        unused = {word.unused for word in words}
        if self._groups is not None and len(unused) > 1:
            self._agreed = gathered_any(self._groups, self._gradients.used)
            return True
        if self._agreed is None:
            self._agreed = self._gradients.used
        return False

    def totals(self) -> tuple[float, float] | None:
        """See Strategy."""
        return self._totals

    def norm_squared(self) -> Scalar | None:
        """See Strategy: it measures none."""
        return None

    def scale(self, weight: float) -> None:
        """See Strategy."""
        assert self._agreed is not None
        self._gradients.scale(weight, self._agreed)

    def clip(self, max_norm: float) -> torch.Tensor:
        """See Strategy."""
        return self._gradients.clip(max_norm)

    def run_backward(self, run: Any, parameters: Any = (), *, last: bool = False) -> None:
        """See Strategy: it knows no model groups."""
        raise NotImplementedError

    def take(self) -> Any:
        """See Strategy: it knows no model groups."""
        raise NotImplementedError

    def put_back(self, taken: Any, norm: float | None) -> None:
        """See Strategy: it knows no model groups."""
        raise NotImplementedError

    def undo(self) -> None:
        """See Strategy."""
        self._buffers.restore()

    def close(self) -> None:
        """See Strategy."""
        self._gradients.close()

    def _exchange(self, *, control: bool) -> GroupExchange:
        """Return the exchange among the generation's ranks: of tensors on the model's device, or of a few numbers."""

        def run(method: str, *arguments: Any) -> None:
            assert self._groups is not None  # a world of one exchanges nothing
            if control and method == "_allgather_base":
                output, mine = arguments
                output.copy_(Rows(self._groups, mine).wait().view(-1))
            else:
                self._groups.wait([self._groups.launch(method, *arguments, control=control)])

        return GroupExchange(run)
