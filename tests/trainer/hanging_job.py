"""A session that hangs where TEST_HANG says: PLACE:SLOT[,SLOT]:STEP, several separated by spaces, each once for each slot (what
has happened is a file in TEST_ONCE).

Places: stopped (by SIGSTOP), python (a loop that never ends), loader (sleeps in the data), eval (in a block of collectives),
collective (one rank of the block calls one collective less), pause (longer than its max_s), native (holds the interpreter's
lock). No hangs: slow (one step of ten times the others'), declared (a pause of TEST_PAUSE_S, within its max_s). Its last line
is the hash of its parameters.
"""

import hashlib
import os
import re
import signal
import time
from pathlib import Path

import torch

import regroup

HANGS = [text.split(":") for text in os.environ.get("TEST_HANG", "").split()]
NAMED = re.search(r"-worker-(\d+)-", os.environ.get("REGROUP_POD_NAME", ""))
SLOT = NAMED[1] if NAMED else ""


def hangs(place: str, step: int) -> bool:
    if not any((place, str(step)) == (p, n) and SLOT in slots.split(",") for p, slots, n in HANGS):
        return False
    try:
        (Path(os.environ["TEST_ONCE"]) / f"{place}-{step}-{SLOT}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if hangs("loader", job.step):
            time.sleep(10**6)
        return torch.full((4,), index / 1000), torch.tensor(index % 2)


def evaluate(step: int) -> None:
    for attempt in job.collective("eval"):
        with attempt as team:
            if hangs("eval", step):
                time.sleep(10**6)
            if not hangs("collective", step):
                team.all_reduce(torch.ones(1))
            team.all_reduce(torch.ones(1))


torch.manual_seed(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with regroup.session(
    model=model, optimizer=optimizer, data=Samples(), global_batch=8, microbatch=1, reduction="exact"
) as job:
    for step in job.steps(int(os.environ.get("TEST_STEPS", "100"))):
        with step:
            for x, y in step.microbatches():
                step.backward(sum=torch.nn.functional.cross_entropy(model(x), y, reduction="sum"), weight=1)
            if hangs("stopped", step.index):
                os.kill(os.getpid(), signal.SIGSTOP)
            while hangs("python", step.index):
                while True:
                    pass
            if hangs("native", step.index):
                re.match(r"(a+)+$", "a" * 60 + "b")  # for ever, and it keeps the lock
            time.sleep(1.0 if hangs("slow", step.index) else 0.02)
            step.commit()
        if step.committed and step.index % 10 == 0:
            evaluate(step.index)
        if hangs("pause", step.index):
            with job.pause("eval", max_s=2):
                time.sleep(10**6)
        if hangs("declared", step.index):
            with job.pause("eval", max_s=60):
                time.sleep(float(os.environ["TEST_PAUSE_S"]))
print("parameters", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
