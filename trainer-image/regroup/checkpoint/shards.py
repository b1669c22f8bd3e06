"""Tensors of which a process holds a part (torch's DTensor): the part for whoever copies bytes, the whole for torch.

Two processes of one inner index hold the same part, so what travels between them is that part as plain bytes, with what it is a
part of. torch.distributed.tensor is not imported for a model that has none.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from regroup.checkpoint.tree import Part
from regroup.errors import StateError
from regroup.layout import PIPELINE

SHARD, STRIDED, REPLICATE = "S", "SS", "R"
mesh: Any = None
"""The DeviceMesh of this process's model group (`regroup.mesh`); None: it has none."""


def is_pipelined() -> bool:
    """Return whether other processes of the model group have other layers of the model."""
    names = () if mesh is None else mesh.mesh_dim_names
    return PIPELINE in names and mesh.size(names.index(PIPELINE)) > 1


def is_split(value: Any) -> bool:
    """Return whether a value is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor: the tensor itself, or the local one of a DTensor, of one memory."""
    if not is_split(tensor):
        return tensor
    local: Any = tensor._local_tensor  # type: ignore[attr-defined]
    return local.wait() if hasattr(local, "wait") else local  # type: ignore[no-any-return]


def part_of(tensor: Any, name: str) -> Part:
    """Return what a DTensor is. Raises StateError, by name, for one that cannot be saved."""
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
    return Part(local_of(tensor), tuple(dims), tuple(placements), tuple(tensor.shape))


def whole(part: Part) -> torch.Tensor:
    """Return the DTensor that a part is of, around the part's own memory. No communication. Raises StateError.

    A copy of a state is in host memory, whatever device the mesh is of, and its DTensors stay there. They are for whoever reads or
    writes bytes; nothing is computed with them.
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
    """Return the DTensor of this shape and these strides whose local tensor is `local`. `over`: its DeviceMesh. No communication.

    Not by `DTensor.from_local`, which copies what is not on the mesh's kind of device: a checkpoint would be read into a copy on
    the GPU, and be written from one.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = DTensorSpec(over, tuple(placements), tensor_meta=TensorMeta(shape, tuple(stride), local.dtype))
    made: Any = DTensor
    return made(local.detach(), spec, requires_grad=False)  # type: ignore[no-any-return]


def apart(value: Any, name: str = "") -> Any:
    """Return a tree with a Part in place of each DTensor. Raises StateError that names one that cannot be saved."""
    if mesh is None:
        return value
    if is_split(value):
        return part_of(value, name)
    if isinstance(value, dict):
        return {key: apart(one, f"{name}.{key}" if name else str(key)) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(apart(one, f"{name}.{i}") for i, one in enumerate(value))
    return value


def joined(value: Any) -> Any:
    """Return a tree with each Part in it made whole."""
    if isinstance(value, Part):
        return whole(value)
    if isinstance(value, dict):
        return {key: joined(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(joined(one) for one in value)
    return value


def empty_like(whole_: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a DTensor without values in host memory, split as another one is. No communication."""
    part = part_of(whole_, "tensor")
    local = torch.empty(part.local.shape, dtype=dtype)
    return whole(Part(local, part.dims, part.placements, part.shape))


def with_values(whole_: Any, saved: Any) -> torch.Tensor:
    """Return a DTensor with the values and type of `saved`, split and placed as another one made of it. No communication."""
    part = part_of(whole_, "tensor")
    local = torch.empty_like(part.local, dtype=saved.dtype).copy_(local_of(saved))
    return whole(Part(local, part.dims, part.placements, part.shape))


def writes(value: Any) -> bool:
    """Return whether this process is the one of its model group that writes a tensor to disk: others have the same. A Part is
    written by each process that holds another piece of it."""
    if mesh is None:
        return True
    split = {PIPELINE: True}  # another process of a pipeline has other layers
    if isinstance(value, Part):
        split |= {dim: kind != REPLICATE for dim, (kind, _, _) in zip(value.dims, value.placements)}
    at = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate()))
    return all(split.get(dim) or place == 0 for dim, place in at.items())


def parts_in(value: Any, name: str = "") -> dict[str, Part]:
    """Return the parts of a tree by the dotted path that DCP gives them."""
    if isinstance(value, Part):
        return {name: value}
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return {}
    return {key: part for k, one in items for key, part in parts_in(one, f"{name}.{k}" if name else str(k)).items()}
