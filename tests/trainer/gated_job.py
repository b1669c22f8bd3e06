"""A session whose processes the test holds: at their start while the file start-SLOT is in TEST_HOLD, and between their
attaching and their first generation while enter-SLOT is."""

import os
import re
import time
from pathlib import Path

import torch

import regroup

NAMED = re.search(r"-worker-(\d+)-", os.environ["REGROUP_POD_NAME"])
assert NAMED
SLOT = NAMED[1]


def hold(what: str) -> None:
    while Path(os.environ["TEST_HOLD"], f"{what}-{SLOT}").exists():
        time.sleep(0.01)


hold("start")
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.zeros(100, 4), torch.zeros(100, dtype=torch.long)
with regroup.session(model=model, optimizer=optimizer, data=data, global_batch=8, microbatch=1) as job:
    hold("enter")
    for step in job.steps(1_000_000):
        with step:
            for batch in step.microbatches():
                step.backward(sum=torch.nn.functional.cross_entropy(model(batch.x), batch.y, reduction="sum"), weight=1)
            time.sleep(0.02)
            step.commit()
