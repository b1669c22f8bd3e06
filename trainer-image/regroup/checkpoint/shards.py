"""Converts torch's DTensors, of which a process holds a part, to Parts for code that copies bytes, and back.

Processes of one inner index hold the same part. So a copy between them needs only the bytes of that part, with its place in the
whole. A model without DTensors does not import torch.distributed.tensor.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from regroup.checkpoint.tree import TensorPart, leaves, mapped
from regroup.errors import StateError
from regroup.layout import PIPELINE

SHARD, STRIDED, REPLICATE = "S", "SS", "R"
mesh: Any = None
"""DeviceMesh of this process's model group, which `regroup.mesh` sets; None: the model is whole."""


def is_pipelined() -> bool:
    """Return whether the model is a pipeline, so that other processes of the model group have other layers."""
    names = () if mesh is None else mesh.mesh_dim_names
    return PIPELINE in names and mesh.size(names.index(PIPELINE)) > 1


def is_split(value: Any) -> bool:
    """Return whether a value is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or the local tensor of a DTensor, which shares its memory."""
    if not is_split(tensor):
        return tensor
    local: Any = tensor._local_tensor  # type: ignore[attr-defined]
    return local.wait() if hasattr(local, "wait") else local  # type: ignore[no-any-return]


def part_of(tensor: Any, name: str) -> TensorPart:
    """Return this process's TensorPart of a DTensor. Raises StateError with `name` for one that cannot be saved."""
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    placements: list[tuple[str, int, int]] = []
    for one in tensor.placements:
        if isinstance(one, _StridedShard):  # FSDP2 over tensor parallel
            placements.append((STRIDED, one.dim, int(one.split_factor)))
        elif isinstance(one, Shard):
            placements.append((SHARD, one.dim, 1))
        elif isinstance(one, Replicate):
            placements.append((REPLICATE, 0, 1))
        else:
            raise StateError(f"{name} is a DTensor with placement {one}; only Shard and Replicate can be saved.")
    dims = tensor.device_mesh.mesh_dim_names
    if mesh is None or dims is None or not set(dims) <= set(mesh.mesh_dim_names):
        raise StateError(
            f"{name} is split over a mesh that is no part of regroup.mesh(). Build the model with that mesh."
        )
    return TensorPart(local_of(tensor), tuple(dims), tuple(placements), tuple(tensor.shape))


def whole(part: TensorPart) -> torch.Tensor:
    """Return the DTensor of a part, around the part's own memory, without communication. Raises StateError.

    A copied state is in host memory, whatever the mesh's device, and its DTensors stay there. They are used for reading and
    writing bytes only; nothing is computed with them.
    """
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    if mesh is None or not set(part.dims) <= set(mesh.mesh_dim_names):
        raise StateError(
            f"The state is split over {', '.join(part.dims)}, and this script's mesh has no such dimensions. Run one script in "
            "all workers."
        )
    makes: dict[str, Callable[[int, int], Any]] = {
        SHARD: lambda dim, _: Shard(dim),
        STRIDED: lambda dim, factor: _StridedShard(dim, split_factor=factor),
        REPLICATE: lambda _dim, _factor: Replicate(),
    }
    placements = [makes[kind](dim, factor) for kind, dim, factor in part.placements]
    shape = torch.Size(part.shape)
    here = mesh if part.dims == tuple(mesh.mesh_dim_names) else mesh[part.dims]
    return around(part.local, here, placements, shape, torch.empty(shape, device="meta").stride())


def around(
    local: torch.Tensor, over: Any, placements: Sequence[Any], shape: torch.Size, stride: Sequence[int]
) -> torch.Tensor:
    """Return the DTensor over the DeviceMesh `over` with the local tensor `local`, without communication.

    `DTensor.from_local` would copy a tensor in host memory to the mesh's GPU. A checkpoint would be read into that copy, and
    be written from it.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = DTensorSpec(over, tuple(placements), tensor_meta=TensorMeta(shape, tuple(stride), local.dtype))
    made: Any = DTensor
    return made(local.detach(), spec, requires_grad=False)  # type: ignore[no-any-return]


def apart(value: Any) -> Any:
    """Return a tree with a TensorPart in place of each DTensor. Raises StateError that names a DTensor that cannot be saved."""
    if mesh is None:
        return value
    return mapped(value, lambda name, one: part_of(one, name) if is_split(one) else one)


def joined(value: Any) -> Any:
    """Return a tree with a DTensor in place of each TensorPart."""
    return mapped(value, lambda _, one: whole(one) if isinstance(one, TensorPart) else one)


def empty_like(whole_: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised DTensor in host memory, split like another one, without communication."""
    part = part_of(whole_, "tensor")
    local = torch.empty(part.local.shape, dtype=dtype)
    return whole(TensorPart(local, part.dims, part.placements, part.shape))


def with_values(whole_: Any, saved: Any) -> torch.Tensor:
    """Return a DTensor with the values and dtype of `saved`, on the device and with the split of another one."""
    part = part_of(whole_, "tensor")
    local = torch.empty_like(part.local, dtype=saved.dtype).copy_(local_of(saved))
    return whole(TensorPart(local, part.dims, part.placements, part.shape))


def writes(value: Any) -> bool:
    """Return whether this process writes a tensor to disk. Of the processes that hold the same values one writes them.

    A TensorPart is written by each process with another piece of it.
    """
    if mesh is None:
        return True
    split = {PIPELINE: True}  # each process of a pipeline has layers of its own
    if isinstance(value, TensorPart):
        split |= {dim: kind != REPLICATE for dim, (kind, _, _) in zip(value.dims, value.placements)}
    at = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate()))
    return all(split.get(dim) or place == 0 for dim, place in at.items())


def parts_in(value: Any) -> dict[str, TensorPart]:
    """Return the Parts of a tree by the dotted paths that DCP gives them."""
    return {name: one for name, one in leaves(value).items() if isinstance(one, TensorPart)}
