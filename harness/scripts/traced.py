"""A small model with a trace: every process writes its commits, by its own clock, to a file of its own on the volume.

It imports torch and regroup only, which an agent preloads. So the tests do not wait for imports when a process starts
again.

Environment:

- STEPS, REDUCTION, GLOBAL_BATCH;
- TRACE: directory. While it has a file `start-SLOT` or `enter-SLOT`, a worker's processes wait before they begin, or
  before their first generation;
- STEP_SECONDS: extra time of a step, so that a run lasts; a file `pace` in TRACE replaces it;
- EATS_AT: step at which rank 1 uses all memory of its container, once in the job's life.
"""

import hashlib
import json
import os
import time

started = time.time()

import torch

import regroup

TRACE = os.open(
    f"{os.environ['TRACE']}/{os.environ['HOSTNAME']}-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND
)
PACE, EATEN = f"{os.environ['TRACE']}/pace", f"{os.environ['TRACE']}/eaten"


def trace(event: str, **what: object) -> None:
    line = {"event": event, "t": time.time(), "pod": os.environ["HOSTNAME"], "pid": os.getpid(), **what}
    os.write(TRACE, json.dumps(line).encode() + b"\n")


def hold(what: str) -> None:
    while os.path.exists(f"{os.environ['TRACE']}/{what}-{os.environ['HOSTNAME'].split('-')[-2]}"):
        time.sleep(0.02)


def pace_s() -> float:
    try:
        with open(PACE) as file:
            return float(file.read())
    except FileNotFoundError:
        return float(os.environ.get("STEP_SECONDS", "0.02"))


def eat() -> None:
    """Use all memory of the container, once in the job's life."""
    try:
        os.close(os.open(EATEN, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    held = []
    while True:
        held.append(bytearray(1 << 24))


hold("start")
torch.manual_seed(7)
if os.environ.get("REDUCTION") == "exact":
    torch.use_deterministic_algorithms(True)
generator = torch.Generator().manual_seed(1)
x = torch.rand(1500, 64, generator=generator)
y = (x @ torch.randn(64, 10, generator=generator)).argmax(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
trace("built", started=started)

batch_size = int(os.environ.get("GLOBAL_BATCH", "80"))
with regroup.session(
    model=model,
    optimizer=optimizer,
    data=(x, y),
    global_batch=batch_size,
    microbatch=8,
    reduction=os.environ.get("REDUCTION", "fast"),
) as job:
    hold("enter")
    for step in job.steps(int(os.environ.get("STEPS", "500"))):
        if job.rank == 1 and step.index == int(os.environ.get("EATS_AT", "-1")):
            eat()
        with step:
            time.sleep(pace_s())
            for batch in step.microbatches():
                loss = torch.nn.functional.cross_entropy(model(batch.x), batch.y, reduction="sum")
                step.backward(sum=loss, weight=len(batch.y))
            step.commit(after=[lambda: trace("commit", step=step.index, generation=job.generation, rank=job.rank)])
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    trace("done", generation=job.generation, world_size=job.world_size, parameters=digest)
