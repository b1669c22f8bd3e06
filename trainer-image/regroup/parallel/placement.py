"""The place of a parameter in a model group. It says among which ranks its gradient is summed and where its norm counts. Pure."""

from typing import NamedTuple

import torch

from regroup.checkpoint.shards import is_split
from regroup.errors import UsageError
from regroup.layout import CONTEXT, DATA_DIMS, PIPELINE, Layout


class Place(NamedTuple):
    """The place of one parameter. The default, without a model group, is summed among all ranks."""

    along: frozenset[str] = frozenset()
    """Dimensions of the mesh along which the gradient has to be summed, beside the sum over model groups. Ranks along them have
    other samples or other tokens, and torch has not summed it there."""
    counts: bool = True
    """This rank's part counts in the norm; else another rank of its group has the same."""
    is_repeated: bool = False
    """Every rank of the group holds all of it."""
    split: frozenset[str] = frozenset()
    """Dimensions along which it is split. Buckets are made by place, and `counts` differs between ranks: with this, ranks that sum
    together have the same buckets."""


def place_of(name: str, parameter: torch.Tensor, layout: Layout, inner: int) -> Place:
    """Return a parameter's place at an inner index. Raises UsageError where it is split in a way that no sum here fits."""
    if layout.size == 1:
        return Place()
    own: dict[str, bool] = {}
    """For each dimension of its mesh, True if it is split along it."""
    if is_split(parameter):
        dims = parameter.device_mesh.mesh_dim_names or ()  # type: ignore[attr-defined]
        for dim, placement in zip(dims, parameter.placements):  # type: ignore[attr-defined]
            own[dim] = not placement.is_replicate()  # FSDP2 over tensor parallel has a placement that is no Shard
        if not dims or not set(dims) <= dict(layout.dims).keys():
            raise UsageError(
                f"Parameter {name} is split over a mesh that is no part of regroup.mesh({layout}). Build the model with that mesh."
            )
        if own.keys() & layout.summed_dims - set(DATA_DIMS):
            raise UsageError(
                f"Parameter {name} is a DTensor over a mesh with the dimension {CONTEXT}, whose ranks have parts of a sequence and "
                "equal parameters. Leave it out of the mesh that the parameter is split over, or leave the parameter whole."
            )
    if PIPELINE in dict(layout.dims):
        own[PIPELINE] = dict(layout.dims)[PIPELINE] > 1  # a layer is in one stage
    at = layout.coordinates(inner)
    return Place(
        along=frozenset(layout.summed_dims - own.keys()),
        counts=all(at[dim] == 0 for dim, _ in layout.dims if not own.get(dim)),
        is_repeated=not any(own.values()),
        split=frozenset(dim for dim, is_split_along in own.items() if is_split_along),
    )
