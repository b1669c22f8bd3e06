"""A session whose `state` holds something that cannot be saved."""

import threading

import torch

import regroup

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = (torch.zeros(64, 4), torch.zeros(64, 2))
with regroup.session(
    model=model, optimizer=optimizer, data=data, global_batch=40, microbatch=8, state={"lock": threading.Lock()}
) as job:
    for step in job.steps(10):
        with step:
            for batch in step.microbatches():
                step.backward(sum=model(batch.x).sum(), weight=len(batch.y))
            step.commit()
