"""What Regroup trains in `bench.recovery`: `regroup run --workers 4 bench/recovery_script.py`."""

from __future__ import annotations

import os
import time

import torch

import regroup
from bench.commits import BENCH_STEP_S, CommitLog
from bench.tiny import GLOBAL_BATCH, STEPS, build, digits_like

log = CommitLog()
log.imported()
step_s = float(os.environ.get(BENCH_STEP_S, "0"))
model, optimizer = build()

with regroup.session(
    model=model, optimizer=optimizer, data=digits_like(), global_batch=GLOBAL_BATCH, microbatch=8
) as job:
    for step in job.steps(STEPS):
        with step:
            time.sleep(step_s)
            for batch in step.microbatches():
                loss_sum = torch.nn.functional.cross_entropy(model(batch.x), batch.y, reduction="sum")
                step.backward(sum=loss_sum, weight=len(batch.y))
            step.commit()
            log.committed(rank=job.rank, step=step.index + 1, epoch=job.generation, world=job.world_size)
