"""The model, data, optimizer and split of `bench.strategies`, by the name of a strategy. Both sides train with them."""

from __future__ import annotations

import functools
from typing import Any

import torch

from bench import gpt

MICROBATCH = 6
"""Samples in one forward where steps are timed. A step has one forward for each rank."""
FEW = 8
"""Samples in a step where recovery is timed. Each is a microbatch."""
INNER_STEPS = 4
"""Optimizer steps in one step of a strategy that makes several."""
POWER_RANK = 2
EXPERTS = 4
"""Experts in each block. Each token uses one, so that a step computes as much as without experts."""


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and the tokens after them: [512, LENGTH] each."""
    tokens = torch.randint(gpt.VOCABULARY, (512, gpt.LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def build(key: str = "") -> torch.nn.Module:
    """Return the model that the strategy `key` trains, equal in every process. For `pipeline` it is a row of modules."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*gpt.row()) if key == "pipeline" else gpt.GPT()


def split(model: Any, mesh: Any) -> None:
    """Split the model over the dimensions of the mesh.

    `tensor` splits only the perceptrons, since query, key and value are one matrix. `context` and `expert` need a
    session. A pipeline is not cut here: `regroup.pipeline` or torch's own classes do that.
    """
    names = mesh.mesh_dim_names
    if "context" in names:
        import regroup

        for block in model.blocks:
            block.attend = functools.partial(regroup.attention, mesh=mesh["context"], causal=True)
    if "expert" in names:
        import regroup

        for block in model.blocks:
            block.mlp = regroup.MixtureOfExperts(gpt.WIDTH, 4 * gpt.WIDTH, EXPERTS, mesh["expert"])
    if "tensor" in names:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()})
    if "shard" in names:
        from torch.distributed.fsdp import fully_shard

        among = mesh["replicate", "shard"] if "replicate" in names else mesh["shard"]
        for block in model.blocks:
            fully_shard(block, mesh=among)
        fully_shard(model, mesh=among)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, *positions: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over tokens. `positions` go to the model."""
    return mean_of(model(x, *positions), y)


def mean_of(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over tokens for a model's output."""
    return torch.nn.functional.cross_entropy(output.flatten(0, -2), y.flatten())
