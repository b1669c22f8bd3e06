"""A model's gradients in flat buckets: each parameter's `.grad` is a view into one, so a bucket is summed without a copy.

Owns the hooks at the parameters and who got a gradient in this step. Sums nothing over ranks: a strategy does. Never wraps the
model.
"""

import zlib
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from regroup.errors import UsageError

BUCKET_BYTES = 25 << 20


class Bucket:
    """One flat buffer and the parameters whose gradients are views of it. `indices`: their places in `Gradients.parameters`;
    `number`: the bucket's own among all."""

    def __init__(self, number: int, parameters: list[torch.nn.Parameter], indices: list[int]) -> None:
        self.number, self.parameters, self.indices = number, parameters, indices
        self.renew()

    def renew(self) -> None:
        """Take new memory: something may still write into the old."""
        first = self.parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in self.parameters), dtype=first.dtype, device=first.device)
        self.views, offset = [], 0
        for parameter in self.parameters:
            self.views.append(self.flat[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()

    def clear(self) -> None:
        self.flat.zero_()
        self.attach()

    def attach(self) -> None:
        """Each parameter's gradient is its view."""
        for parameter, view in zip(self.parameters, self.views):
            parameter.grad = view


class Gradients:
    """All gradients of one model. `on_gradient(bucket, index)` is called from autograd when a parameter's is complete."""

    def __init__(self, model: torch.nn.Module, on_gradient: Callable[[Bucket, int], None] | None = None) -> None:
        """Raises UsageError for a model without anything to train."""
        self._named = [(name, parameter, parameter.requires_grad) for name, parameter in model.named_parameters()]
        self.parameters = [parameter for _, parameter, trained in self._named if trained]
        self.buckets = buckets_of(self.parameters, BUCKET_BYTES)
        if not self.buckets:
            raise UsageError("The model has no parameter that requires a gradient, so there is nothing to train.")
        self._used = bytearray(len(self.parameters))
        self._handles = [
            cast(Any, parameter).register_post_accumulate_grad_hook(self._hook(bucket, index, on_gradient))
            for bucket in self.buckets
            for parameter, index in zip(bucket.parameters, bucket.indices)
        ]

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def begin(self) -> None:
        """Zero the gradients. Raises UsageError where a parameter was frozen or unfrozen since the session began."""
        for name, parameter, trained in self._named:
            if parameter.requires_grad != trained:
                raise UsageError(
                    f"requires_grad of parameter {name} is {parameter.requires_grad}, and was {trained} in regroup.session(). "
                    "Set requires_grad before calling regroup.session(); it cannot change afterwards."
                )
        self._used = bytearray(len(self.parameters))
        for bucket in self.buckets:
            bucket.clear()

    @property
    def used(self) -> bytes:
        """One byte for each of `parameters`: 1 where it got a gradient in this step, on this rank."""
        return bytes(self._used)

    def check_kept(self, buckets: Iterable[Bucket]) -> None:
        """Raise UsageError where a gradient of this step was thrown away: the sum would be too small."""
        for bucket in buckets:
            for index, parameter in zip(bucket.indices, bucket.parameters):
                if parameter.grad is None and self._used[index]:
                    raise UsageError(
                        "Gradients of this step were discarded between two microbatches, for example by zero_grad(). Remove "
                        "the call: the session zeroes the gradients when a step begins."
                    )

    def collect(self, bucket: Bucket) -> None:
        """Bring gradients back that the script replaced (`zero_grad(set_to_none=True)`, a new tensor)."""
        for index, parameter, view in zip(bucket.indices, bucket.parameters, bucket.views):
            if parameter.grad is None:
                view.zero_()
            elif (gradient := dense(parameter.grad)).data_ptr() != view.data_ptr():
                view.copy_(gradient)
                self._used[index] = 1
            parameter.grad = view

    def mark_used(self, index: int) -> None:
        """A parameter got a gradient that autograd does not know of."""
        self._used[index] = 1

    def scale(self, weight: float, used: bytes) -> None:
        """Divide all by `weight`. A parameter that is not `used`, on any rank, has no gradient: the optimizer leaves it alone."""
        # It is 1 where samples are counted and the batch is a power of two: the prescale has done it.
        if weight != 1.0:
            for bucket in self.buckets:
                bucket.flat.div_(weight)
        if 0 in used:
            for parameter, was_used in zip(self.parameters, used):
                if not was_used:
                    parameter.grad = None

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the norm over all parameters to `max_norm`; return what it was."""
        return torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)

    def _hook(self, bucket: Bucket, index: int, on_gradient: Callable[[Bucket, int], None] | None) -> Any:
        def accumulated(_parameter: torch.Tensor) -> None:
            self._used[index] = 1
            if on_gradient is not None:
                on_gradient(bucket, index)

        return accumulated


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a bucket holds it: an embedding's may be sparse."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def hash_of(used: bytes) -> int:
    """Return a hash of the set of unused parameters; 0: there is none."""
    return zlib.crc32(used) | 1 << 32 if 0 in used else 0


def buckets_of(parameters: Iterable[torch.nn.Parameter], limit_bytes: int) -> list[Bucket]:
    """Return buckets in the order in which backward is likely to fill them: last parameters first."""
    buckets: list[Bucket] = []
    pending: dict[tuple[torch.dtype, torch.device], list[tuple[int, torch.nn.Parameter]]] = {}
    size: dict[tuple[torch.dtype, torch.device], int] = {}

    def full(key: tuple[torch.dtype, torch.device]) -> None:
        indices, members = zip(*pending.pop(key))
        buckets.append(Bucket(len(buckets), list(members), list(indices)))

    for index, parameter in reversed(list(enumerate(parameters))):
        key = (parameter.dtype, parameter.device)
        bytes_ = parameter.numel() * parameter.element_size()
        if key in pending and size[key] + bytes_ > limit_bytes:
            full(key)
        pending.setdefault(key, []).append((index, parameter))
        size[key] = bytes_ if len(pending[key]) == 1 else size[key] + bytes_
    for key in list(pending):
        full(key)
    return buckets
