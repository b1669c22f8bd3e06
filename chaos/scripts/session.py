"""The script of a Session job under chaos: a small model in `exact`, every commit traced.

In plain `python` it is the reference. Environment: CHAOS_TRACE, CHAOS_STEPS (tracing.py).
"""

import hashlib
import os
import sys
import time

started = time.time()

import torch
from tracing import pause, trace

import regroup

torch.manual_seed(7)
torch.use_deterministic_algorithms(True)
generator = torch.Generator().manual_seed(0)
x, y = torch.rand(997, 32, generator=generator), torch.randint(0, 10, (997,), generator=generator)
model = torch.nn.Sequential(torch.nn.Linear(32, 24), torch.nn.ReLU(), torch.nn.Linear(24, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
trace("built", started=started)

with regroup.session(
    model=model, optimizer=optimizer, data=(x, y), global_batch=40, microbatch=4, reduction="exact"
) as job:
    for step in job.steps(int(os.environ["CHAOS_STEPS"])):
        with step:
            pause(step.index)
            for batch in step.microbatches():
                loss = torch.nn.functional.cross_entropy(model(batch.x), batch.y, reduction="sum")
                step.backward(sum=loss, weight=len(batch.y))
            step.commit(after=[lambda: trace("commit", step=step.index, generation=job.generation, rank=job.rank)])
        if step.committed and job.is_main:
            print(f"step {step.index}  loss {step.loss:.4f}  generation {job.generation}  ranks {job.world_size}")
            print(f"step {step.index} to the agent's pipe", file=sys.stderr)
# A process that is killed here, or before, runs again: the job has Succeeded once the script has returned 0 in every worker.
trace(
    "done",
    generation=job.generation,
    world_size=job.world_size,
    parameters=hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest(),
    samples=job.plan.digest(job.step),
)
