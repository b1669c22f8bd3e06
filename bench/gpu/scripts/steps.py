"""Short steps of a perceptron on this process's device, without end. `bench.gpu` kills and scales this job."""

from __future__ import annotations

import os
from typing import Any

import torch

import regroup
from bench.commits import CommitLog

log = CommitLog()
log.imported()
device = regroup.device()
width = int(os.environ["BENCH_WIDTH"])
torch.manual_seed(0)
generator = torch.Generator().manual_seed(0)
data = torch.rand(2048, 64, generator=generator), torch.randint(0, 10, (2048,), generator=generator)
model: torch.nn.Module = torch.nn.Sequential(
    torch.nn.Linear(64, width),
    torch.nn.ReLU(),
    torch.nn.Linear(width, width),
    torch.nn.ReLU(),
    torch.nn.Linear(width, width),
    torch.nn.ReLU(),
    torch.nn.Linear(width, 10),
).to(device)
dimension = os.environ.get("BENCH_MESH", "")  # over which two ranks hold the model together
mesh = regroup.mesh(device=device, **{dimension: 2}) if dimension else None
if mesh is not None and dimension == "shard":
    from torch.distributed.fsdp import fully_shard

    for layer in model.children():
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
if dimension == "pipeline":
    model = regroup.pipeline(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    """Return the summed loss of a microbatch and its weight, as `step.run` takes them."""
    targets = batch.y.to(device, non_blocking=True)
    return torch.nn.functional.cross_entropy(output, targets, reduction="sum"), len(targets)


with regroup.session(model=model, optimizer=optimizer, data=data, global_batch=64, microbatch=4) as job:
    for step in job.steps(10**9):
        with step:
            step.run(loss, inputs=lambda batch: batch.x.to(device, non_blocking=True))
            step.commit()
            log.committed(rank=job.rank, step=step.index + 1, epoch=job.generation, world=job.world_size)
