"""A job whose records come in order and end. Writes what it read for each step, and what it committed, to TEST_IDS.

TEST_LENGTH     records in the stream
TEST_PACE       seconds that a step takes until the file TEST_GO is there
TEST_REDUCTION  fast or exact
TEST_WIDTH      outputs of the model (default 2)
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import regroup

length = int(os.environ["TEST_LENGTH"])


def open_at(position: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Record n is n, with a vector made of it."""
    note("open", position=position)
    for number in range(position, length):
        yield number, torch.full((4,), number / length)


def note(event: str, **values: Any) -> None:
    with Path(os.environ["TEST_IDS"]).open("a") as file:
        file.write(json.dumps({"event": event, "generation": job.generation, "rank": job.rank, **values}) + "\n")


torch.manual_seed(1)
model = torch.nn.Linear(4, int(os.environ.get("TEST_WIDTH", "2")))
with regroup.session(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
    data=regroup.stream(open_at),
    global_batch=24,
    microbatch=2,
    reduction=os.environ.get("TEST_REDUCTION", "fast"),
) as job:
    for step in job.steps(10_000):
        with step:
            if not Path(os.environ["TEST_GO"]).exists():
                time.sleep(float(os.environ["TEST_PACE"]))
            for numbers, x in step.microbatches():
                note("read", step=step.index, records=numbers.tolist())
                step.backward(mean=model(x).square().mean(), weight=len(x))
            step.commit()
            note("commit", step=step.index)
parameters = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())).hexdigest()
print(json.dumps({"parameters": parameters, "outcome": job.outcome, "step": job.step}), flush=True)
