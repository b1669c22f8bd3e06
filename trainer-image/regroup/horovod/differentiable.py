"""Horovod's operations that return the result at once, and through which gradients flow.

The backward of allgather and broadcast averages the gradients of the ranks, as Horovod does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from regroup.horovod import operations as ops
from regroup.horovod import world
from regroup.horovod.compression import Compression, Compressor
from regroup.horovod.operations import Average, Sum
from regroup.horovod.process_sets import ProcessSet, global_process_set

Tensors = Sequence[torch.Tensor]
Shapes = Sequence[torch.Size]


class _Collective(torch.autograd.Function):
    """Calls `forward_of(tensors)`, and in backward `backward_of(gradients, shapes of the inputs)`."""

    @staticmethod
    def forward(
        ctx: Any, forward_of: Callable[[Tensors], Any], backward_of: Callable[[Tensors, Shapes], Any], *tensors: Any
    ) -> Any:
        ctx.backward_of, ctx.shapes = backward_of, [tensor.shape for tensor in tensors]
        result = forward_of(tensors)
        if torch.is_tensor(result):
            return result
        ctx.mark_non_differentiable(*[each for each in result if not each.dtype.is_floating_point])
        return tuple(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None, None, *ctx.backward_of([each.contiguous() for each in gradients], ctx.shapes))


def _apply(
    forward_of: Callable[[Tensors], Any], backward_of: Callable[[Tensors, Shapes], Any], *tensors: torch.Tensor
) -> Any:
    return cast("Any", _Collective.apply)(forward_of, backward_of, *tensors)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the tensor reduced over all ranks: their average, unless `op` says otherwise."""
    op = ops.reduction(op, average)

    def forward(tensors: Tensors) -> Any:
        handle = ops.allreduce_async(tensors[0], None, name, op, prescale_factor, postscale_factor, process_set)
        return ops.synchronize(handle)

    def backward(gradients: Tensors, _shapes: Shapes) -> Any:
        return [
            allreduce(gradients[0], None, None, Compression.none, op, prescale_factor, postscale_factor, process_set)
        ]

    compressed, context = compression.compress(tensor)
    return compression.decompress(_apply(forward, backward, compressed), context)


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return each tensor reduced over all ranks, as one request."""
    op = ops.reduction(op, average)

    def forward(inputs: Tensors) -> Any:
        handle = ops.grouped_allreduce_async(inputs, None, name, op, prescale_factor, postscale_factor, process_set)
        return ops.synchronize(handle)

    def backward(gradients: Tensors, _shapes: Shapes) -> Any:
        return grouped_allreduce(
            gradients, None, None, Compression.none, op, prescale_factor, postscale_factor, process_set
        )

    compressed = [compression.compress(tensor) for tensor in tensors]
    results = _apply(forward, backward, *[tensor for tensor, _ in compressed])
    return [compression.decompress(result, context) for result, (_, context) in zip(results, compressed)]


def _rows_of_gradients(process_set: ProcessSet) -> Callable[[Tensors, Shapes], Any]:
    """Return the backward of allgather: the average of the ranks' gradients, of which each takes its own rows."""

    def backward(gradients: Tensors, shapes: Shapes) -> Any:
        own = torch.tensor([[shape[0] if shape else 1 for shape in shapes]])
        rows = ops.synchronize(ops.allgather_async(own, process_set=process_set))
        index, parts = process_set.rank() or 0, []
        averaged = grouped_allreduce(gradients, op=Average, process_set=process_set)
        for position, (gradient, shape) in enumerate(zip(averaged, shapes)):
            begin, count = int(rows[:index, position].sum()), int(rows[index, position])
            parts.append(gradient[begin : begin + count].reshape(shape))
        return parts

    return backward


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated in the first dimension, which may differ between the ranks."""

    def forward(tensors: Tensors) -> Any:
        return ops.synchronize(ops.allgather_async(tensors[0], name, process_set))

    return cast("torch.Tensor", _apply(forward, _rows_of_gradients(process_set), tensor))


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return what `allgather` returns for each of the tensors, as one request."""

    def forward(inputs: Tensors) -> Any:
        return ops.synchronize(ops.grouped_allgather_async(inputs, name, process_set))

    return list(_apply(forward, _rows_of_gradients(process_set), *tensors))


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensor of the root."""

    def forward(tensors: Tensors) -> Any:
        return ops.synchronize(ops.broadcast_async(tensors[0], root_rank, name, process_set))

    def backward(gradients: Tensors, _shapes: Shapes) -> Any:
        averaged = allreduce(gradients[0], op=Average, process_set=process_set)
        return [averaged if world.rank() == root_rank else averaged * 0]

    return cast("torch.Tensor", _apply(forward, backward, tensor))


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the rows that all ranks have sent to this one; with `splits` a pair, whose second part counts them by rank."""
    received: list[torch.Tensor] = []

    def forward(tensors: Tensors) -> Any:
        handle = ops.alltoall_async(tensors[0], splits, name, process_set)
        result = ops.synchronize(handle)
        received.append(handle.result[1])
        return result

    def backward(gradients: Tensors, shapes: Shapes) -> Any:
        rows, _ = alltoall(gradients[0], received[0], process_set=process_set)
        rest = shapes[0][0] - rows.shape[0]  # rows that were sent to no one
        return [torch.cat([rows, rows.new_zeros((rest, *rows.shape[1:]))]) if rest else rows]

    return _apply(forward, backward, tensor)


def _gathered(op: int, factor: float, process_set: ProcessSet) -> Callable[[Tensors, Shapes], Any]:
    """Return the backward of reducescatter: the gradients of all rows, scaled as the forward has scaled the rows."""
    factor *= (process_set.size() or 1) if op == Sum else 1

    def backward(gradients: Tensors, _shapes: Shapes) -> Any:
        return grouped_allgather([each * factor for each in gradients], process_set=process_set)

    return backward


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the tensor reduced over all ranks."""

    def forward(tensors: Tensors) -> Any:
        handle = ops.reducescatter_async(tensors[0], name, op, process_set, prescale_factor, postscale_factor)
        return ops.synchronize(handle)

    compressed, context = compression.compress(tensor)
    backward = _gathered(op, prescale_factor * postscale_factor, process_set)
    return compression.decompress(_apply(forward, backward, compressed), context)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return what `reducescatter` returns for each of the tensors, as one request."""

    def forward(inputs: Tensors) -> Any:
        handle = ops.grouped_reducescatter_async(inputs, name, op, process_set, prescale_factor, postscale_factor)
        return ops.synchronize(handle)

    compressed = [compression.compress(tensor) for tensor in tensors]
    backward = _gathered(op, prescale_factor * postscale_factor, process_set)
    results = _apply(forward, backward, *[tensor for tensor, _ in compressed])
    return [compression.decompress(result, context) for result, (_, context) in zip(results, compressed)]


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce the tensor over all ranks, in place, and return it."""
    handle = ops.allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    return cast("list[torch.Tensor]", [ops.synchronize(handle)])[0]


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors over all ranks, in place, and return them."""
    handle = ops.grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return list(ops.synchronize(handle))


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite the tensor with that of the root, and return it."""
    return cast("torch.Tensor", ops.synchronize(ops.broadcast_async_(tensor, root_rank, name, process_set)))
