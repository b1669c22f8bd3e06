"""Regroup's script in `bench.recovery` and `bench.goodput`: `regroup run --workers 4 bench/recovery_script.py`."""

from __future__ import annotations

import torch

import regroup
from bench.commits import CommitLog
from bench.tiny import GLOBAL_BATCH, STEPS, Work, build, digits_like

log = CommitLog()
log.imported()
work = Work()
model, optimizer = build()

with regroup.session(
    model=model, optimizer=optimizer, data=digits_like(), global_batch=GLOBAL_BATCH, microbatch=8
) as job:
    for step in job.steps(STEPS):
        with step:
            work.step()
            for batch in step.microbatches():
                work.samples(len(batch.y))
                loss_sum = torch.nn.functional.cross_entropy(model(batch.x), batch.y, reduction="sum")
                step.backward(sum=loss_sum, weight=len(batch.y))
            step.commit()
            log.committed(rank=job.rank, step=step.index + 1, epoch=job.generation, world=job.world_size)
