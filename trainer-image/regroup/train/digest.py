"""The hash of a model's parameters, which is the same however the model is split: what tells two runs apart at a glance."""

import hashlib
import logging
from typing import Any

import torch

import regroup
from regroup import model_group
from regroup.checkpoint.shards import is_split
from regroup.parallel.pipeline import Pipeline


def digest_of(model: torch.nn.Module, team: Any = None) -> str | None:
    """Return SHA-256 of the bytes of all parameters, in the whole model's order.

    A split model needs all processes of its model group, in `team`, a block of `job.collective()`. None: they are not there. Raises
    GenerationChanged where the group changes meanwhile.
    """
    # Torch warns that what is split twice is gathered in two parts.
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
    if not all(sizes):  # this process is in the block without the others of its group
        return None
    for name, size in zip(order, sizes.tolist(), strict=True):
        # One process has it, the others add zeros. Memory is that of one parameter.
        held = here[name].clone() if says and name in here else torch.zeros(size, dtype=torch.uint8)
        team.all_reduce(held)
        digest.update(held.numpy().tobytes())
    return digest.hexdigest()


def digest_together(model: torch.nn.Module, job: regroup.Job) -> str | None:
    """Return `digest_of` a split model. All processes call it between two steps. None: of this process's model group one has died
    meanwhile."""
    digest = None
    for attempt in job.collective("hash"):
        digest = None  # on a GPU an attempt that was cut off may have hashed anything
        with attempt as team:
            digest = digest_of(model, team)
    return digest


def _bytes_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter's bytes, in host memory. Of a split one all processes of its group ask."""
    whole = parameter.full_tensor() if is_split(parameter) else parameter  # type: ignore[attr-defined]
    return whole.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _says_for_all(rank: int) -> bool:
    """Return whether a process speaks for those that have the same layers: in the first model group, the first one."""
    layout = model_group.layout()
    places = layout.coordinates(rank % layout.size)
    return rank < layout.size and all(at == 0 for name, at in places.items() if name != "pipeline")
