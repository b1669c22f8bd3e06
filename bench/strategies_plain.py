"""The script of `bench.strategies` under torchrun: the same training with torch alone, where torch has the strategy.

Arguments: the strategy's key, the number of ranks, the number of steps, and steps in a block.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.strategies import CASES
from bench.strategies_meter import Meter
from bench.strategies_model import INNER_STEPS, MICROBATCH, build, data, loss_of, mean_of, optimizer_of, split

key, (ranks, total, in_block) = sys.argv[1], map(int, sys.argv[2:])
case = next(case for case in CASES if case.key == key)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
model = build(key)
runs: torch.nn.Module = model
optimizer: Any = None
pipeline: Any = None
if key == "pipeline":
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    half = len(model) // 2  # type: ignore[arg-type]
    model = torch.nn.Sequential(*list(model.children())[rank * half : (rank + 1) * half])
    pipeline = Schedule1F1B(PipelineStage(model, rank, 2, torch.device("cpu")), ranks * case.cuts, mean_of)
elif case.mesh:
    from torch.distributed.device_mesh import init_device_mesh

    copies = world_size // case.group_size
    sizes = (*((("replicate", copies),) if copies > 1 else ()), *case.mesh)
    mesh = init_device_mesh("cpu", tuple(size for _, size in sizes), mesh_dim_names=tuple(name for name, _ in sizes))
    split(model, mesh)
else:
    runs = ddp = DistributedDataParallel(model)
    if key in ("fp16", "bf16"):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        ddp.register_comm_hook(
            None, default_hooks.fp16_compress_hook if key == "fp16" else default_hooks.bf16_compress_hook
        )
    elif key == "local_sgd":
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        alone, _ = dist.new_subgroups(group_size=1)  # type: ignore[no-untyped-call]
        local = post_localSGD_hook.PostLocalSGDState(  # type: ignore[no-untyped-call]
            None, alone, start_localSGD_iter=0, post_local_gradient_allreduce=False
        )
        ddp.register_comm_hook(local, post_localSGD_hook.post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(
            optimizer_of(model), PeriodicModelAverager(period=INNER_STEPS, warmup_steps=0)
        )
optimizer = optimizer or optimizer_of(model)
x, y = data()
same = dict(case.mesh).get("tensor", 1)  # ranks that compute the same samples
data_rank, data_size, microbatches = rank // same, ranks // same, same
meter = Meter(in_block, lambda: rank == 0)


def through_pipeline(index: int) -> torch.Tensor:
    """Compute all of a step. Returns the mean of the losses where the last stage is."""
    ids = torch.arange(index * ranks * MICROBATCH, (index + 1) * ranks * MICROBATCH) % len(x)
    losses: list[torch.Tensor] = []
    if rank == 0:
        pipeline.step(x[ids])
    else:
        pipeline.step(target=y[ids], losses=losses)
    return torch.stack(losses).mean() if losses else torch.zeros(())


for index in range(total):
    meter.before(index)
    for inner in range(case.optimizer_steps):
        optimizer.zero_grad()
        if pipeline is not None:
            loss = through_pipeline(index)
        for number in range(microbatches if pipeline is None else 0):
            first = ((index * case.optimizer_steps + inner) * microbatches + number) * data_size + data_rank
            ids = torch.arange(first * MICROBATCH, (first + 1) * MICROBATCH) % len(x)
            loss = loss_of(runs, x[ids], y[ids])
            (loss / microbatches).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    loss.item()  # a loop that reports its loss waits for it, as the session does
    meter.after(index)
dist.destroy_process_group()
