"""Raises on one rank before the first step, each time."""

import torch

import regroup

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = (torch.zeros(64, 2), torch.zeros(64))
with regroup.session(model=model, optimizer=optimizer, data=data, global_batch=8, microbatch=4) as job:
    for step in job.steps(100):
        if job.rank == 1:
            raise ValueError("shard 1 is empty")
        with step:
            for batch in step.microbatches():
                step.backward(sum=model(batch.x).sum(), weight=len(batch.y))
            step.commit()
