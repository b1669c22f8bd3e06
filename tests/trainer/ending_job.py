"""A small training script that does something wrong after its loop. What it does is read from TEST_* variables.

TEST_OUT    directory: each rank notes there how often it has come to the end, and the main one saves its model
TEST_FAILS  R:N:HOW  rank R fails the first N times: HOW is raise, or an exit code, or the name of a signal
TEST_BREAK  N  break out of the loop after N steps
TEST_SKIPS  1  return 0 before the session where rank 0 has come to its end before

Before it fails it changes its model, as a script may do that averages or quantises what it has trained.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

import regroup

STEPS = 6
torch.manual_seed(3)
x = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
y = torch.randint(4, (256,), generator=torch.Generator().manual_seed(2))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
out = Path(os.environ["TEST_OUT"])
if os.environ.get("TEST_SKIPS") and (out / "rank-0").exists():
    sys.exit(0)


def digest() -> float:
    """Return what differs where any bit of the parameters, the buffers or the optimizer's state does, or so."""
    tensors = [*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]
    return sum(float((t.double() * (1 + 0.1 * i)).sum()) for i, t in enumerate(tensors))


with regroup.session(model=model, optimizer=optimizer, data=(x, y), global_batch=32, microbatch=4) as job:
    for step in job.steps(STEPS):
        with step:
            for batch in step.microbatches():
                loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
                step.backward(sum=loss, weight=len(batch[1]))
            step.commit()
        if step.committed and job.step == int(os.environ.get("TEST_BREAK", STEPS)):
            break

note = out / f"rank-{job.rank}"
with note.open("a") as lines:
    seen = {"step": job.step, "world_size": job.world_size, "generation": job.generation, "digest": digest()}
    lines.write(json.dumps(seen) + "\n")
num = len(note.read_text().splitlines())
rank, times, how = os.environ["TEST_FAILS"].split(":")
if job.rank == int(rank) and num <= int(times):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if how == "raise":
        raise RuntimeError("could not save the model to the bucket")
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
    sys.exit(int(how))
if job.is_main:
    torch.save({"digest": digest(), "model": model.state_dict()}, out / "model.pt")
