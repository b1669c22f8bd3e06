"""The hash of a model's parameters, by which two runs are compared. It is the same however the model is split."""

import hashlib
import logging
from typing import Any

import torch

import regroup
from regroup import model_group
from regroup.checkpoint.shards import is_split
from regroup.parallel.pipeline import Pipeline


def digest_of(model: torch.nn.Module, team: Any = None) -> str | None:
    """Return the SHA-256 of the bytes of all parameters, in the whole model's order.

    A split model needs all processes of its model group in `team`, a block of `job.collective()`. Returns None if they are not
    there. Raises GenerationChanged if the group changes meanwhile.
    """
    # torch warns that a tensor which is split twice is gathered in two parts.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    digest = hashlib.sha256()
    if not isinstance(model, Pipeline) or not model.is_split:
        for parameter in model.parameters():
            digest.update(_bytes_of(parameter).numpy().tobytes())
        return digest.hexdigest()
    here = {name: _bytes_of(parameter) for name, parameter in model.named_parameters()}
    order = model.parameter_order
    says = _says_for_all(team.rank)
    sizes = torch.tensor([len(here[name]) if says and name in here else 0 for name in order])
    team.all_reduce(sizes)
    if not all(sizes):  # the other processes of the group are not in the block
        return None
    for name, size in zip(order, sizes.tolist(), strict=True):
        # One process has the bytes, the others add zeros. The memory is that of one parameter.
        held = here[name].clone() if says and name in here else torch.zeros(size, dtype=torch.uint8)
        team.all_reduce(held)
        digest.update(held.numpy().tobytes())
    return digest.hexdigest()


def digest_together(model: torch.nn.Module, job: regroup.Job) -> str | None:
    """Return `digest_of` a split model. All processes must call it between two steps.

    Returns None if a process of this model group has died meanwhile.
    """
    digest = None
    for attempt in job.collective("hash"):
        digest = None  # on a GPU an attempt that was cut off may have hashed garbage
        with attempt as team:
            digest = digest_of(model, team)
    return digest


def _bytes_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter's bytes in host memory. All processes of the group must call it for a split parameter."""
    whole = parameter.full_tensor() if is_split(parameter) else parameter  # type: ignore[attr-defined]
    return whole.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _says_for_all(rank: int) -> bool:
    """Return whether a process speaks for those with the same layers. It is the first of them in the first model group."""
    layout = model_group.layout()
    places = layout.coordinates(rank % layout.size)
    return rank < layout.size and all(at == 0 for name, at in places.items() if name != "pipeline")
