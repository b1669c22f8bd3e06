"""The script of `bench.quotas`: microbatches that take a given time each, on the last rank longer.

It runs under `regroup run`. Rank 0 writes one line of JSON a step to BENCH_OUT.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

import regroup

kind = sys.argv[1]
steps, num_microbatches = map(int, sys.argv[2:4])
microbatch_s, slowdown = map(float, sys.argv[4:6])
out = Path(os.environ["BENCH_OUT"])
torch.manual_seed(0)
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with regroup.session(
    model=model,
    optimizer=optimizer,
    data=(torch.randn(1024, 8), torch.zeros(1024, dtype=torch.int64)),
    global_batch=num_microbatches,
    microbatch=1,
    strategy=regroup.strategies.DataParallel(uneven=kind == "uneven"),
) as job:
    began_s = time.perf_counter()
    for step in job.steps(steps):
        shares = job.shares
        with step:
            pace_s = microbatch_s * (slowdown if job.rank == job.world_size - 1 else 1)
            for batch in step.microbatches():
                time.sleep(pace_s)  # a forward and backward of this length, on a machine of its own
                step.backward(mean=torch.nn.functional.cross_entropy(model(batch.x), batch.y), weight=len(batch.y))
            step.commit()
        now_s = time.perf_counter()
        if step.committed and job.is_main:
            with out.open("a") as file:
                file.write(json.dumps({"ms": (now_s - began_s) * 1e3, "shares": shares}) + "\n")
        began_s = now_s
