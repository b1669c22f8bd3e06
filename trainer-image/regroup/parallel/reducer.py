"""Gradients of the user's own parameters, summed over ranks: flat buckets, overlapped with backward. Never wraps the model.

Owns the gradient buffers: each parameter's `.grad` is a view into its bucket, so a bucket is reduced without a copy.
`Reducer` is mode `fast`; `ExactReducer` sums per virtual worker along a fixed tree (`regroup.data.ExactSum`) and is bitwise
equal at any world size. Does not divide by anything that it did not sum itself, and steps no optimizer.
"""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch

from regroup.data import ExactSum, GroupExchange, SamplePlan
from regroup.errors import UsageError
from regroup.generation.groups import Groups, Pending
from regroup.transaction.header import Header

BUCKET_BYTES = 25 << 20


class Bucket:
    """One flat buffer and the parameters whose gradients are views of it."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.flat = torch.zeros(
            sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device
        )
        self.views = []
        offset = 0
        for parameter in parameters:
            self.views.append(self.flat[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()
        self.waiting = 0

    def clear(self) -> None:
        self.flat.zero_()
        for parameter, view in zip(self.parameters, self.views):
            parameter.grad = view
        self.waiting = len(self.parameters)

    def collect(self) -> None:
        """Bring gradients back that user code replaced (`zero_grad(set_to_none=True)`, a new tensor)."""
        for parameter, view in zip(self.parameters, self.views):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
            parameter.grad = view


def buckets_of(parameters: Iterable[torch.nn.Parameter], limit_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Return buckets in the order in which backward is likely to fill them: last parameters first."""
    buckets: list[Bucket] = []
    pending: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    size: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in reversed([p for p in parameters if p.requires_grad]):
        key = (parameter.dtype, parameter.device)
        bytes_ = parameter.numel() * parameter.element_size()
        if key in pending and size[key] + bytes_ > limit_bytes:
            buckets.append(Bucket(pending.pop(key)))
        pending.setdefault(key, []).append(parameter)
        size[key] = bytes_ if len(pending[key]) == 1 else size[key] + bytes_
    buckets += [Bucket(group) for group in pending.values()]
    return buckets


def check_optimizer(optimizer: Any, model: torch.nn.Module) -> None:
    """Raise UsageError for a parameter that the optimizer steps and the model does not own: it would be no part of the
    state, and its gradient of no reduction."""
    owned = {id(parameter) for parameter in model.parameters()}
    for i, group in enumerate(getattr(optimizer, "param_groups", ())):
        for j, parameter in enumerate(group["params"]):
            if id(parameter) not in owned:
                raise UsageError(
                    f"optimizer.param_groups[{i}]['params'][{j}], of shape {list(parameter.shape)}, is not a parameter of "
                    "the model. Put everything that is trained into one module, and pass that as model."
                )


class Reducer:
    """Plain all-reduce. Once a step: `begin`, `arm` before the last backward, `launch`, `wait`, then `scale`."""

    def __init__(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """named: the model's parameters, by name."""
        self._named = [(name, parameter, parameter.requires_grad) for name, parameter in named]
        self.buckets = buckets_of([parameter for _, parameter, _ in self._named])
        if not self.buckets:
            raise UsageError("The model has no parameter that requires a gradient, so there is nothing to train.")
        self._groups: Groups | None = None
        self._works: list[Pending] = []
        self._launched = 0
        self._handles = []
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                self._handles.append(cast(Any, parameter).register_post_accumulate_grad_hook(self._hook(bucket)))

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def begin(self) -> None:
        """Zero the gradients and forget what an interrupted step began. Raises UsageError."""
        for name, parameter, trained in self._named:
            if parameter.requires_grad != trained:
                raise UsageError(
                    f"requires_grad of parameter {name} is {parameter.requires_grad}, and was {trained} in regroup.session(). "
                    "Freeze and unfreeze before it: which gradients are summed over ranks is settled there."
                )
        self._groups, self._works, self._launched = None, [], 0
        for bucket in self.buckets:
            bucket.clear()

    def arm(self, groups: Groups | None) -> None:
        """The next backward is the step's last on this rank: reduce each bucket as soon as it is full."""
        self._groups = groups if groups is not None and groups.world_size > 1 else None
        for bucket in self.buckets:
            bucket.waiting = len(bucket.parameters)

    def after_backward(self, v: int) -> None:
        """A microbatch's gradients are complete; nothing to do in this mode."""

    def begin_generation(self, groups: Groups | None) -> None:
        """Groups changed; nothing to prepare in this mode."""

    def launch(self, groups: Groups | None) -> None:
        """Start what backward did not reach. Raises what `Groups.failed` says."""
        if groups is None or groups.world_size == 1:
            for bucket in self.buckets:
                bucket.collect()
            return
        self._groups = groups
        for bucket in self.buckets[self._launched :]:
            self._launch(bucket)

    def wait(self, groups: Groups | None) -> None:
        """Wait until every bucket holds the sum over ranks. Raises what `Groups.failed` says."""
        if groups is not None:
            groups.wait(self._works)
        self._groups, self._works = None, []

    def totals(
        self, header: Header, _losses: Mapping[int, float], _weights: Mapping[int, float], _groups: Groups | None
    ) -> tuple[float, float]:
        """Return the step's (loss sum, weight) over all ranks."""
        return header.loss_sum, header.weight

    def scale(self, weight: float) -> None:
        """Divide the summed gradients by the step's weight, in place."""
        for bucket in self.buckets:
            bucket.flat.div_(weight)

    def _hook(self, bucket: Bucket) -> Any:
        def full(_parameter: torch.Tensor) -> None:
            bucket.waiting -= 1
            if self._groups is None:
                return
            # In bucket order on every rank, whatever order autograd takes: collectives must match.
            while self._launched < len(self.buckets) and self.buckets[self._launched].waiting <= 0:
                self._launch(self.buckets[self._launched])

        return full

    def _launch(self, bucket: Bucket) -> None:
        assert self._groups is not None
        bucket.collect()
        self._works.append(self._groups.launch("allreduce", [bucket.flat]))
        self._launched += 1


class ExactReducer(Reducer):
    """Sums every virtual worker's gradients along the tree over virtual workers: the same bits at any world size."""

    def __init__(self, named: Iterable[tuple[str, torch.nn.Parameter]], plan: SamplePlan) -> None:
        super().__init__(named)
        self._plan = plan
        self._generation = -1
        self._sums: list[ExactSum] = []
        self._scalars = ExactSum(plan.shares(1), 0)

    def begin_generation(self, groups: Groups | None) -> None:
        rank, world_size, generation = (
            (groups.rank, groups.world_size, groups.generation) if groups is not None else (0, 1, 0)
        )
        if generation != self._generation:
            shares = self._plan.shares(world_size)
            self._sums = [ExactSum(shares, rank) for _ in self.buckets]
            self._scalars = ExactSum(shares, rank)
            self._generation = generation

    def begin(self) -> None:
        super().begin()
        for total in (*self._sums, self._scalars):
            total.reset()

    def arm(self, groups: Groups | None) -> None:
        """Nothing overlaps in this mode."""

    def after_backward(self, v: int) -> None:
        """Add one virtual worker's gradients to the tree and begin the next ones at zero."""
        for bucket, total in zip(self.buckets, self._sums):
            bucket.collect()
            total.add(v, bucket.flat)
            bucket.flat.zero_()

    def launch(self, groups: Groups | None) -> None:
        """Nothing overlaps in this mode."""

    def wait(self, groups: Groups | None) -> None:
        exchange = _exchange(groups)
        for bucket, total in zip(self.buckets, self._sums):
            # A rank with an empty share had no backward, which brings gradients back that the script has thrown away.
            # Without one the optimizer would leave the parameter as it is.
            bucket.collect()
            total.reduce(exchange, out=bucket.flat)

    def totals(
        self, _header: Header, losses: Mapping[int, float], weights: Mapping[int, float], groups: Groups | None
    ) -> tuple[float, float]:
        """The sums of float weights depend on the order too, so they go along the tree as well."""
        for v in sorted(losses):
            self._scalars.add(v, torch.tensor([losses[v], weights[v]], dtype=torch.float64))
        loss_sum, weight = self._scalars.reduce(_exchange(groups), torch.zeros(2, dtype=torch.float64)).tolist()
        return loss_sum, weight


def _exchange(groups: Groups | None) -> GroupExchange:
    """Return the exchange among the generation's ranks; errors are what `Groups.failed` says."""

    def run(method: str, *arguments: Any) -> None:
        assert groups is not None  # a world of one exchanges nothing
        groups.wait([groups.launch(method, *arguments)])

    return GroupExchange(run)


def parameter_hash(parameters: Iterable[torch.Tensor]) -> int:
    """Return an odd 63-bit hash of the parameters' bits: equal bits, equal hash, on any device. Never 0."""
    total = 0
    for i, parameter in enumerate(parameters):
        data = parameter.detach().reshape(-1).contiguous().view(torch.uint8)
        words = data[: data.numel() // 4 * 4].view(torch.int32)
        total += (2 * i + 3) * (int(words.sum(dtype=torch.int64)) + int(data[words.numel() * 4 :].sum()))
    return (total << 1 | 1) & ((1 << 63) - 1)
