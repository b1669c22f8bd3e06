"""Steps of a GPT under `regroup run` with one tier of state, TIER (`snapshot` or `checkpoint`), and its hash around each step.

Lines of JSON in BENCH_OUT, a file for each process: `session` before the session begins, `before` each step, and `step` after
it. The tier copies as often as the job asks for, however long a copy takes: what one costs is the question here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import regroup
from regroup.train.tasks import language_model

tier = sys.argv[1]
device = regroup.device()
is_gpt2 = os.environ["BENCH_MODEL"] == "gpt2"
LENGTH, GLOBAL_BATCH, MICROBATCH = (1024, 48, 16) if is_gpt2 else (32, 8, 4)
"""Sizes with which a step on an H100 takes longer than a copy of the state."""
torch.manual_seed(0)
shape = language_model.GPT2 if is_gpt2 else language_model.TINY
model = language_model.GPT(replace(shape, length=LENGTH)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
tokens = torch.randint(0, 256, (512, LENGTH + 1), generator=torch.Generator().manual_seed(0))
out = Path(os.environ["BENCH_OUT"], f"{os.getpid()}.jsonl")
copies = 0


def note(event: str, **fields: Any) -> None:
    line = {"t": time.time(), "pid": os.getpid(), "event": event, "copies": copies, **fields}
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")


def tensors() -> list[torch.Tensor]:
    of_optimizer = [t for held in optimizer.state.values() for t in held.values() if isinstance(t, torch.Tensor)]
    return [*model.parameters(), *of_optimizer]


def hashed() -> dict[str, int]:
    """Return a sum over all bits of model and optimizer, each tensor with another factor, and the size of the state."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for i, tensor in enumerate(tensors()):
        total += tensor.detach().reshape(-1).view(torch.int32).sum(dtype=torch.int64).to(device) * (2 * i + 1)
    return {"hash": int(total.item()), "bytes": sum(tensor.nbytes for tensor in tensors())}


def counted(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        global copies
        copies += 1
        return call(*arguments, **named)

    return run


note("session")
with regroup.session(
    model=model,
    optimizer=optimizer,
    data=(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
    global_batch=GLOBAL_BATCH,
    microbatch=MICROBATCH,
) as job:
    session: Any = job
    if tier == "snapshot":
        session._memory.take = counted(session._memory.take)
    else:
        session._durable.checkpointer.save = counted(session._durable.checkpointer.save)
    for step in job.steps(10**9):
        note("before", step=step.index, **hashed())
        began_s = time.perf_counter()
        with step:
            for batch in step.microbatches():
                x, y = batch.x.to(device, non_blocking=True), batch.y.to(device, non_blocking=True)
                with torch.autocast(device.type, torch.bfloat16):
                    loss = cross_entropy(model(x).flatten(0, -2), y.flatten())
                step.backward(mean=loss, weight=y.numel())
            step.commit()
        if step.committed:
            if device.type == "cuda":
                torch.cuda.synchronize()
            note("step", step=step.index + 1, ms=1e3 * (time.perf_counter() - began_s), **hashed())
