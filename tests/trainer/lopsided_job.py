"""A job whose rank 1 needs 50 ms more than the others to fetch each batch."""

import time
from typing import Any

import torch

import regroup


class Source:
    """Samples that are slow to fetch on one rank."""

    def __len__(self) -> int:
        return 64

    def fetch(self, ids: torch.Tensor) -> Any:
        if job.rank == 1:
            time.sleep(0.05)
        return torch.ones(len(ids), 4)


model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with regroup.session(model=model, optimizer=optimizer, data=Source(), global_batch=4, microbatch=2) as job:
    for step in job.steps(100_000):
        with step:
            for batch in step.microbatches():
                step.backward(mean=model(batch).square().mean(), weight=len(batch))
            step.commit()
