"""Horovod's operations that return a handle, and `synchronize`, which waits for one. Gradients: `differentiable`.

`poll`, `synchronize`, `join` and `barrier` are here, too. Each function asks the engine, and none touches a tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from regroup.horovod import adasum, world
from regroup.horovod.collectives import ADASUM, AVERAGE, DTYPES, MAX, MIN, PRODUCT, SUM
from regroup.horovod.errors import HorovodInternalError
from regroup.horovod.handles import Handle
from regroup.horovod.negotiation import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    JOIN,
    REDUCESCATTER,
    Request,
)
from regroup.horovod.process_sets import ProcessSet, ask_in, global_process_set

Average, Sum, Adasum, Min, Max, Product = AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT


def reduction(op: int | None, average: bool | None) -> int:
    """Return the operation that `op` and the older argument `average` mean. Without both it is the average."""
    if op is not None:
        if average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        return op
    if average is not None:
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed in v1.0", DeprecationWarning, 3
        )
        return Average if average else Sum
    return Average


def _request(
    kind: str, name: str | None, tensors: Sequence[torch.Tensor], process_set: ProcessSet, **fields: Any
) -> Request:
    set_id = ask_in(process_set)
    if not tensors:
        raise ValueError(f"{kind} was given no tensor.")
    for tensor in tensors:
        if not torch.is_tensor(tensor):
            raise ValueError(f"{kind} takes tensors, and was given {type(tensor).__name__}.")
        if tensor.layout != torch.strided or str(tensor.dtype).removeprefix("torch.") not in DTYPES:
            raise ValueError(f"Tensor type {tensor.type()} is not supported.")
        if tensor.device != tensors[0].device:
            raise ValueError(
                f"The tensors of one group are on different devices: {tensors[0].device} and {tensor.device}."
            )
    return Request(
        kind,
        world.engine().name(kind, set_id, name),
        set_id,
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors),
        device="GPU" if tensors[0].is_cuda else "CPU",
        **fields,
    )


def _only(results: Sequence[torch.Tensor]) -> torch.Tensor:
    return results[0]


def _ask(
    request: Request,
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor] | None = None,
    shape_result: Callable[[Any], Any] = _only,
) -> Handle:
    return world.engine().ask(Handle(request, tuple(tensors), outputs, shape_result))


def _check_op(op: int, process_set: ProcessSet) -> None:
    if op not in (Average, Sum, Adasum, Min, Max, Product):
        raise ValueError(f"op is {op!r}. It must be hvd.Average, Sum, Adasum, Min, Max or Product.")
    if op == Adasum:
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        refused = adasum.refusal(world.size())
        if refused is not None:
            raise NotImplementedError(refused)


def _reduction(
    tensors: Sequence[torch.Tensor], op: int, name: str | None, process_set: ProcessSet, factors: tuple[float, float]
) -> Request:
    """Return the request to reduce tensors. Raises ValueError before `init` and for an operation that does not exist."""
    world.engine()
    _check_op(op, process_set)
    return _request(ALLREDUCE, name, tensors, process_set, op=op, factors=(float(factors[0]), float(factors[1])))


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduce the tensor over all ranks in the background. The tensor is not changed."""
    request = _reduction([tensor], reduction(op, average), name, process_set, (prescale_factor, postscale_factor))
    return _ask(request, [tensor])


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduce the tensor over all ranks in the background, in place."""
    request = _reduction([tensor], reduction(op, average), name, process_set, (prescale_factor, postscale_factor))
    return _ask(request, [tensor], [tensor])


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduce several tensors as one request. They start once all of them are there on all ranks."""
    request = _reduction(tensors, reduction(op, average), name, process_set, (prescale_factor, postscale_factor))
    return _ask(request, tensors, shape_result=list)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduce several tensors as one request, in place."""
    request = _reduction(tensors, reduction(op, average), name, process_set, (prescale_factor, postscale_factor))
    return _ask(request, tensors, list(tensors), list)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Reduce a sparse tensor by gathering indices and values. Return a function that waits for the result."""
    indices = allgather_async(tensor._indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def result() -> torch.Tensor:
        gathered, places = synchronize(values), synchronize(indices)
        if op == Average:
            gathered = gathered / (process_set.size() or 1)
        return torch.sparse_coo_tensor(places.t(), gathered, tensor.size(), check_invariants=False)

    return result


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Concatenate the tensors of all ranks in the background. Their first dimensions may differ."""
    return _ask(_request(ALLGATHER, name, [tensor], process_set), [tensor])


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Gather several tensors as one request."""
    return _ask(_request(ALLGATHER, name, tensors, process_set), tensors, shape_result=list)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Send the tensor of the root to all ranks in the background. `root_rank` is a rank of the world, also in a process set."""
    return _ask(_request(BROADCAST, name, [tensor], process_set, root=int(root_rank)), [tensor])


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Overwrite the tensor with that of the root, in the background."""
    return _ask(_request(BROADCAST, name, [tensor], process_set, root=int(root_rank)), [tensor], [tensor])


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Send rows to each rank, in the background. `splits` says how many; without it each gets the same number.

    The result is a tensor, and with `splits` a pair: the tensor, and how many rows each rank has sent.
    """
    ask_in(process_set)
    members = process_set.size() or 1
    if tensor.dim() == 0:
        raise ValueError("alltoall cannot deal the rows of a tensor without dimensions.")
    rows = tensor.shape[0]
    if splits is None:
        if rows % members:
            raise ValueError(
                f"splits not provided, but the first dimension ({rows}) is not a multiple of {members} ranks."
            )
        counts = [rows // members] * members
    else:
        given = splits if torch.is_tensor(splits) else torch.tensor(splits, dtype=torch.int32)
        assert isinstance(given, torch.Tensor)
        if given.dtype != torch.int32:
            raise ValueError("alltoall expects splits to be a 32-bit integer tensor.")
        counts = given.tolist()
        if len(counts) != members or any(count < 0 for count in counts):
            raise ValueError(f"splits needs one number of rows for each of {members} ranks, and was {counts}.")
        if sum(counts) > rows:
            raise ValueError(
                f"Sum of splits entries ({sum(counts)}) is greater than the first dimension of tensor ({rows})."
            )
    device = splits.device if isinstance(splits, torch.Tensor) else torch.device("cpu")

    def shape_result(result: tuple[torch.Tensor, torch.Tensor]) -> Any:
        return result[0] if splits is None else (result[0], result[1].to(device))

    request = _request(ALLTOALL, name, [tensor], process_set, splits=tuple(counts))
    return _ask(request, [tensor], shape_result=shape_result)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Reduce the tensor and deal its rows, in the background. The first ranks get one row more if there is a rest."""
    return _ask(_scatter(name, [tensor], op, process_set, (prescale_factor, postscale_factor)), [tensor])


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Reduce and deal several tensors as one request."""
    request = _scatter(name, tensors, op, process_set, (prescale_factor, postscale_factor))
    return _ask(request, tensors, shape_result=list)


def _scatter(
    name: str | None, tensors: Sequence[torch.Tensor], op: int, process_set: ProcessSet, factors: tuple[float, float]
) -> Request:
    if op not in (Average, Sum):
        raise HorovodInternalError("Reducescatter only supports Average and Sum.")
    if any(tensor.dim() == 0 for tensor in tensors):
        raise HorovodInternalError("Process-set rank zero tried to reducescatter a rank-zero tensor.")
    factors = (float(factors[0]), float(factors[1]))
    return _request(REDUCESCATTER, name, tensors, process_set, op=op, factors=factors)


def poll(handle: Handle) -> bool:
    """Return whether the operation has ended, so that `synchronize` would return at once."""
    return handle.done.is_set()


def synchronize(handle: Handle) -> Any:
    """Wait for the operation and return its result. Raises HorovodInternalError on every rank if the ranks did not match."""
    if not isinstance(handle, Handle):
        return None
    return handle.wait()


def join(device: int = -1) -> int:
    """Wait until all ranks have joined, and return the rank that joined last. Until then this rank adds zeros to allreduces.

    `device` is the index of the GPU for the zeros. Without it, that is the present device of the calling thread.
    """
    engine = world.engine()
    if torch.cuda.is_available():
        world.current().collectives.join_gpu = torch.cuda.current_device() if device < 0 else device
    result: int = engine.ask(Handle(Request(JOIN, JOIN), ())).wait()
    return result


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the set are here."""
    set_id = ask_in(process_set)
    engine = world.engine()
    engine.ask(Handle(Request(BARRIER, engine.name(BARRIER, set_id, None), set_id), ())).wait()
