"""A small training script whose ranks all raise in the same step, for the tests of memory snapshots.

TEST_RAISE  G:N  raise in step N of generation G, in the middle of its forward passes, once all ranks are there: one that came
            later would hear of the others' end first, and go on in the next generation
TEST_PACE   seconds that a step takes until the file TEST_GO is there
TEST_LAYER  batchnorm: the model has such a layer, and ranks sum with "fast"
TEST_TRACE  a file to which each rank appends {generation, step, rank} for each commit

Its last line is the hash of parameters, buffers and the optimizer's state.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch

import regroup

torch.manual_seed(3)
x = torch.randn(960, 16, generator=torch.Generator().manual_seed(1))
y = (x @ torch.randn(16, 4, generator=torch.Generator().manual_seed(2))).argmax(1)
with_buffers = os.environ.get("TEST_LAYER") == "batchnorm"
layers = [torch.nn.BatchNorm1d(64)] if with_buffers else []
model = torch.nn.Sequential(
    torch.nn.Linear(16, 64), *layers, torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(64, 4)
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.8)
trace = Path(os.environ["TEST_TRACE"])


def meet(rank: int, world_size: int) -> None:
    """Return once all ranks have called it."""
    trace.with_suffix(f".{rank}").touch()
    ends_s = time.monotonic() + 60
    while not all(trace.with_suffix(f".{other}").exists() for other in range(world_size)):
        assert time.monotonic() < ends_s, "not all ranks came"
        time.sleep(0.001)


with regroup.session(
    model=model, optimizer=optimizer, data=(x, y), global_batch=48, microbatch=4, state={"schedule": schedule},
    reduction="fast" if with_buffers else "exact",
) as job:  # fmt: skip
    for step in job.steps(int(os.environ.get("TEST_STEPS", "80"))):
        with step:
            if not Path(os.environ.get("TEST_GO", "/")).exists():
                time.sleep(float(os.environ.get("TEST_PACE", "0")))
            for batch in step.microbatches():
                loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
                step.backward(sum=loss, weight=len(batch[1]))
                if os.environ.get("TEST_RAISE") == f"{job.generation}:{step.index}":
                    meet(job.rank, job.world_size)
                    raise OSError("the file server does not answer")
            step.commit(after=[schedule.step], max_norm=1.0)
        if step.committed:
            with trace.open("a") as lines:
                lines.write(json.dumps({"generation": job.generation, "step": step.index, "rank": job.rank}) + "\n")
tensors = [*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]
# In one piece: several processes write to one place, and print writes its end apart.
sys.stdout.write(f"hash {hashlib.sha256(b''.join(t.numpy().tobytes() for t in tensors)).hexdigest()}\n")
sys.stdout.flush()
