"""A script with a long end: after its loop it waits for the test, may fail once, and rank 0 saves the model.

Environment: STEPS, TRACE (directory). The end of a rank waits for the file `go-RANK` in TRACE. If there is a file
`raise-RANK`, the rank removes it and raises, as a client of a bucket does. The script writes `end` and `returned` to a
trace of its own.
"""

import hashlib
import json
import os
import time
from pathlib import Path

import torch

import regroup

DIRECTORY = Path(os.environ["TRACE"])
TRACE = os.open(DIRECTORY / f"{os.environ['HOSTNAME']}-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def trace(event: str, **what: object) -> None:
    line = {"event": event, "t": time.time(), "pod": os.environ["HOSTNAME"], "pid": os.getpid(), **what}
    os.write(TRACE, json.dumps(line).encode() + b"\n")


torch.manual_seed(7)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
x = torch.rand(400, 8, generator=torch.Generator().manual_seed(1))
y = x.sum(1, keepdim=True).expand(-1, 4)
with regroup.session(model=model, optimizer=optimizer, data=(x, y), global_batch=16, microbatch=4) as job:
    for step in job.steps(int(os.environ["STEPS"])):
        with step:
            for batch in step.microbatches():
                step.backward(sum=((model(batch.x) - batch.y) ** 2).sum(), weight=len(batch.y))
            step.commit(after=[lambda: trace("commit", step=step.index, generation=job.generation, rank=job.rank)])
    parameters = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    place = {"rank": job.rank, "world_size": job.world_size, "generation": job.generation}
    trace("end", parameters=parameters, **place)
    while not (DIRECTORY / f"go-{job.rank}").exists():
        time.sleep(0.05)
    bad = DIRECTORY / f"raise-{job.rank}"
    if bad.exists():
        bad.unlink()
        raise RuntimeError("could not save the model to the bucket")
    if job.rank == 0:
        aside = DIRECTORY / "model.pt.new"
        torch.save(model.state_dict(), aside)
        aside.rename(DIRECTORY / "model.pt")
    trace("returned", **place)
