"""A model's gradients in flat buckets: each parameter's `.grad` is a view into one, so a bucket is summed without a copy.

Owns the hooks at the parameters and who got a gradient in this step. Sums nothing over ranks: a strategy does. Never wraps the
model.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from regroup.checkpoint.shards import around, is_split, local_of
from regroup.errors import UsageError

from .fsdp import Uses
from .placement import Place

BUCKET_BYTES = 25 << 20


class Bucket:
    """One flat buffer and the parameters whose gradients are views of it. `indices`: their places in `Gradients.parameters`;
    `number`: the bucket's own among all; `place`: that of each of its parameters. Of what is split, this process's part."""

    def __init__(
        self, number: int, parameters: list[torch.nn.Parameter], indices: list[int], place: Place | None = None
    ) -> None:
        """`place`: None, the model is in one piece."""
        self.number, self.parameters, self.indices = number, parameters, indices
        self.place = place or Place()
        self._num_flags = len(parameters) if place is not None else 0
        self.renew()

    def renew(self) -> None:
        """Take new memory: something may still write into the old."""
        local = [local_of(parameter.detach()) for parameter in self.parameters]
        first = local[0]
        numel = sum(one.numel() for one in local)
        self.flat = torch.zeros(numel + self._num_flags, dtype=first.dtype, device=first.device)
        self.values, self.flags = self.flat[:numel], self.flat[numel:]
        """`flags`: in a model group, by parameter, on how many ranks it got a gradient. They are summed with the gradients, because
        there who has reduced a step must have all that its apply needs (rule REDUCED)."""
        self.views: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []
        """The gradients that are attached: views, or DTensors around them."""
        offset = 0
        for parameter, one in zip(self.parameters, local):
            # An optimizer may go through the memory of parameter and gradient side by side, as fused ones do.
            view = torch.as_strided(self.values, one.size(), one.stride(), offset)
            self.views.append(view)
            self._gradients.append(_like(parameter, view))
            offset += one.numel()

    def clear(self) -> None:
        self.flat.zero_()
        self.attach()

    def attach(self) -> None:
        """Each parameter's gradient is its view."""
        for parameter, gradient in zip(self.parameters, self._gradients):
            parameter.grad = gradient

    def has_its_own(self, i: int) -> bool:
        """Return whether the gradient of its parameter number `i` is still its view."""
        return self.parameters[i].grad is self._gradients[i]

    def attach_one(self, i: int) -> None:
        """Make its view the gradient of its parameter number `i`."""
        self.parameters[i].grad = self._gradients[i]


class Gradients:
    """All gradients of one model. `on_gradient(bucket, index)` is called from autograd when a parameter's is complete."""

    def __init__(
        self,
        model: torch.nn.Module,
        on_gradient: Callable[[Bucket, int], None] | None = None,
        places: Mapping[str, Place] | None = None,
    ) -> None:
        """`places`: of the parameters, by name, in a model group. Raises UsageError for a model without anything to train."""
        self._named = [
            (name, parameter, parameter.requires_grad, parameter.stride())
            for name, parameter in model.named_parameters()
        ]
        for name, parameter, trained, _ in self._named:
            if trained and not is_dense(local_of(parameter.detach())):
                raise UsageError(
                    f"Parameter {name} has strides {list(parameter.stride())} for shape {list(parameter.shape)}, which leave "
                    "gaps in its memory or use parts of it twice, so its gradient cannot lie in a bucket. Make it contiguous."
                )
        self.parameters = [parameter for _, parameter, trained, _ in self._named if trained]
        in_order = None if places is None else [places[name] for name, _, trained, _ in self._named if trained]
        self.buckets = buckets_of(self.parameters, BUCKET_BYTES, in_order)
        if not self.buckets:
            raise UsageError("The model has no parameter that requires a gradient, so there is nothing to train.")
        self._used = bytearray(len(self.parameters))
        self._uses = Uses(model, self._used_here)
        at = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._places = {id(one): at[id(one)] for one in self._uses.parameters if id(one) in at}
        """Places of the parameters whose gradient comes as the sum of a model group. The key is the parameter's id."""
        self._summed = frozenset(self._places.values())
        self._handles = [
            cast(Any, parameter).register_post_accumulate_grad_hook(self._hook(bucket, index, on_gradient))
            for bucket in self.buckets
            for parameter, index in zip(bucket.parameters, bucket.indices)
        ]

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._uses.close()

    def begin(self) -> None:
        """Zero the gradients. Raises UsageError where a parameter was frozen, unfrozen or laid out anew since the session began."""
        for name, parameter, trained, strides in self._named:
            if parameter.requires_grad != trained:
                raise UsageError(
                    f"requires_grad of parameter {name} is {parameter.requires_grad}, and was {trained} in regroup.session(). "
                    "Set requires_grad before calling regroup.session(); it cannot change afterwards."
                )
            if trained and parameter.stride() != strides:
                raise UsageError(
                    f"Parameter {name} has strides {list(parameter.stride())}, and had {list(strides)} in regroup.session(). Call "
                    "model.to(memory_format=...) before regroup.session(); gradients lie as parameters did then."
                )
        self._used = bytearray(len(self.parameters))
        for bucket in self.buckets:
            bucket.clear()

    def watch(self) -> None:
        """Watch what the backward that begins now uses."""
        self._uses.watch()

    @property
    def used(self) -> bytes:
        """One byte for each of `parameters`: 1 where it got a gradient in this step, on this rank."""
        return bytes(self._used)

    def used_anywhere(self) -> bytes:
        """Return `used`, of all ranks, once the buckets are summed: in a model group."""
        found = bytearray(len(self.parameters))
        for bucket in self.buckets:
            for index, flag in zip(bucket.indices, bucket.flags.tolist()):
                found[index] = flag != 0
        return bytes(found)

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
        for i, (index, parameter, view) in enumerate(zip(bucket.indices, bucket.parameters, bucket.views)):
            if bucket.has_its_own(i):
                continue
            if parameter.grad is None:
                view.zero_()
            elif (gradient := dense(parameter.grad)).data_ptr() != view.data_ptr():
                view.copy_(gradient)
                if index not in self._summed:
                    self._used[index] = 1
            bucket.attach_one(i)
        if bucket.flags.numel():
            bucket.flags.copy_(torch.tensor([self._used[index] for index in bucket.indices], dtype=bucket.flags.dtype))

    def mark_used(self, index: int) -> None:
        """Note that a parameter got a gradient that autograd does not know of."""
        self._used[index] = 1

    def mark_parameters(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Parameters got a gradient that autograd does not know of."""
        wanted = {id(one) for one in parameters}
        for index, parameter in enumerate(self.parameters if wanted else ()):
            if id(parameter) in wanted:
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

    def multiply(self, factor: float) -> None:
        """Multiply all by `factor`."""
        for bucket in self.buckets:
            bucket.flat.mul_(factor)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the norm over all parameters to `max_norm`; return what it was."""
        return torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)

    def _used_here(self, split: torch.Tensor) -> None:
        self._used[self._places[id(split)]] = 1

    def _hook(self, bucket: Bucket, index: int, on_gradient: Callable[[Bucket, int], None] | None) -> Any:
        def accumulated(_parameter: torch.Tensor) -> None:
            if index not in self._summed:
                self._used[index] = 1
            if on_gradient is not None:
                on_gradient(bucket, index)

        return accumulated


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a bucket holds it: an embedding's may be sparse; of what is split, this process's part."""
    gradient = local_of(gradient)
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill its memory without gaps, each once, in whatever order of its dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.size()) if n != 1):
        if stride != expected and tensor.numel():
            return False
        expected *= size
    return True


def _like(parameter: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Return a gradient for a parameter, in the memory of `view`: a DTensor where the parameter is one."""
    if not is_split(parameter):
        return view
    split: Any = parameter
    return around(view, split.device_mesh, split.placements, split.shape, split.stride())


def hash_of(used: bytes) -> int:
    """Return a hash of the set of unused parameters; 0: there is none."""
    return zlib.crc32(used) | 1 << 32 if 0 in used else 0


def buckets_of(
    parameters: Sequence[torch.nn.Parameter], limit_bytes: int, places: Sequence[Place] | None = None
) -> list[Bucket]:
    """Return buckets in the order in which backward is likely to fill them: last parameters first. Those of one bucket are of
    one type, device and place."""
    Key = tuple[torch.dtype, torch.device, Place | None]
    buckets: list[Bucket] = []
    pending: dict[Key, list[tuple[int, torch.nn.Parameter]]] = {}
    size: dict[Key, int] = {}

    def full(key: Key) -> None:
        indices, members = zip(*pending.pop(key))
        buckets.append(Bucket(len(buckets), list(members), list(indices), key[2]))

    for index, parameter in reversed(list(enumerate(parameters))):
        key = (parameter.dtype, parameter.device, None if places is None else places[index])
        bytes_ = local_of(parameter.detach()).numel() * parameter.element_size()
        if key in pending and size[key] + bytes_ > limit_bytes:
            full(key)
        pending.setdefault(key, []).append((index, parameter))
        size[key] = bytes_ if len(pending[key]) == 1 else size[key] + bytes_
    for key in list(pending):
        full(key)
    return buckets
