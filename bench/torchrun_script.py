"""torchrun's script in `bench.recovery` and `bench.goodput`: the same model under DDP, with a checkpoint after every step.

After a failure torchrun starts every process again, and a process loses all that is not on disk. So a script can do no
more than write a checkpoint after every step.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.commits import CommitLog
from bench.tiny import GLOBAL_BATCH, STEPS, Work, build, digits_like

log = CommitLog()
log.imported()
work = Work()
checkpoint = Path(os.environ["BENCH_CHECKPOINT"])
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
model, optimizer = build()
first = 0
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
parallel = DistributedDataParallel(model)
x, y = digits_like()
share = GLOBAL_BATCH // world_size

for step in range(first, STEPS):
    work.step()
    work.samples(share)
    begin = step * GLOBAL_BATCH + rank * share
    ids = torch.arange(begin, begin + share) % len(x)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(parallel(x[ids]), y[ids]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    log.committed(rank=rank, step=step + 1, epoch=restarts, world=world_size)
    if rank == 0:
        aside = checkpoint.with_suffix(".tmp")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, aside)
        aside.replace(checkpoint)
