"""A small convolutional model that is trained by a fused optimizer. Its last line is JSON: losses by step, and strides.

TEST_FORMAT  channels_last or contiguous_format: how the model lies in memory on this worker
"""

import json
import os

import torch

import regroup

torch.manual_seed(0)
x = torch.randn(64, 3, 6, 6, generator=torch.Generator().manual_seed(1))
y = (x.flatten(1).sum(1) > 0).long()
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 16, 2)
)
model.to(memory_format=getattr(torch, os.environ["TEST_FORMAT"]))  # type: ignore[call-overload]
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
losses = []
with regroup.session(model=model, optimizer=optimizer, data=(x, y), global_batch=64, microbatch=16) as job:
    for step in job.steps(40):
        with step:
            for batch in step.microbatches():
                loss = torch.nn.functional.cross_entropy(model(batch.x), batch.y, reduction="sum")
                step.backward(sum=loss, weight=len(batch.y))
            step.commit()
        if step.committed:
            losses.append(step.loss)
print(json.dumps({"losses": losses, "strides": list(next(model.parameters()).stride())}))
