"""A script whose model is on a GPU that all ranks share, as far as the library can see: it computes on the CPU.

TEST_ODD  1: each rank has a GPU of its own, and its parameters lie in memory in an order of its own
"""

import os

import torch

import regroup
from regroup import accelerator

odd = os.environ.get("TEST_ODD") == "1"
worker = os.environ["REGROUP_POD_NAME"] if odd else ""
accelerator.identity = lambda here: f"machine/GPU-5c1a{worker}"  # noqa: ARG005
model = torch.nn.Conv2d(3, 8, 3)
if odd and "-1-" in worker:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(64, 3, 6, 6)
with regroup.session(model=model, optimizer=optimizer, data=data, global_batch=64, microbatch=8) as job:
    for step in job.steps(3):
        with step:
            for batch in step.microbatches():
                step.backward(sum=model(batch).pow(2).sum(), weight=len(batch))
            step.commit()
