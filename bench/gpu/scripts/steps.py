"""Short steps of a perceptron on this process's device, for ever: what `bench.gpu` kills and scales."""

from __future__ import annotations

import os

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
model = torch.nn.Sequential(
    torch.nn.Linear(64, width),
    torch.nn.ReLU(),
    torch.nn.Linear(width, width),
    torch.nn.ReLU(),
    torch.nn.Linear(width, width),
    torch.nn.ReLU(),
    torch.nn.Linear(width, 10),
).to(device)
if "BENCH_SHARDS" in os.environ:  # a model group of so many ranks holds the model together
    from torch.distributed.fsdp import fully_shard

    mesh = regroup.mesh(shard=int(os.environ["BENCH_SHARDS"]))["shard"]
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with regroup.session(model=model, optimizer=optimizer, data=data, global_batch=64, microbatch=4) as job:
    for step in job.steps(10**9):
        with step:
            for batch in step.microbatches():
                x, y = batch.x.to(device, non_blocking=True), batch.y.to(device, non_blocking=True)
                step.backward(mean=torch.nn.functional.cross_entropy(model(x), y), weight=len(y))
            step.commit()
            log.committed(rank=job.rank, step=step.index + 1, epoch=job.generation, world=job.world_size)
