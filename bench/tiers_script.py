"""The script of `bench.tiers`: blocks of steps with no tier, with memory snapshots, and with checkpoints, in turn.

It runs under `regroup run`. It switches the tier between two blocks, in the session's own parts. The job's settings say
how often a tier copies. Rank 0 writes one line of JSON a block to BENCH_OUT.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import regroup
from bench import gpt

rounds, steps = map(int, sys.argv[1:])
WARM = 5
out = Path(os.environ["BENCH_OUT"])
torch.manual_seed(0)
tokens = torch.randint(gpt.VOCABULARY, (512, gpt.LENGTH + 1), generator=torch.Generator().manual_seed(0))
model = gpt.GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
blocked = {"s": 0.0, "copies": 0}


def timed(call: Callable[..., Any], *, counts: bool) -> Callable[..., Any]:
    """Return the call, with a clock that adds up the time for which it blocks the training thread."""

    def run(*arguments: Any, **named: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            blocked["s"] += time.perf_counter() - began_s
            blocked["copies"] += counts

    return run


with regroup.session(
    model=model,
    optimizer=optimizer,
    data=(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
    global_batch=8,
    microbatch=4,
) as job:
    memory: Any = job._memory
    checkpointer: Any = job._durable.checkpointer
    every_s = {"memory": memory._every_s, "durable": checkpointer._every_s}
    memory.take = timed(memory.take, counts=True)
    job.state.before_change = timed(memory.settle, counts=False)
    checkpointer.save = timed(checkpointer.save, counts=True)

    def switch(kind: str) -> None:
        memory._every_s = every_s["memory"] if kind == "memory" else math.inf
        checkpointer._every_s = every_s["durable"] if kind == "durable" else math.inf
        blocked.update(s=0.0, copies=0)

    kinds = ("off", "memory", "durable")
    switch("off")
    began_s = time.perf_counter()
    for step in job.steps(WARM + rounds * len(kinds) * steps):
        with step:
            for batch in step.microbatches():
                loss = torch.nn.functional.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())
                step.backward(mean=loss, weight=len(batch.y))
            step.commit()
        done = step.index + 1 - WARM
        if done < 0 or done % steps:
            continue
        if done and job.is_main:
            line = {
                "kind": kinds[(done // steps - 1) % len(kinds)],
                "ms": (time.perf_counter() - began_s) / steps * 1e3,
                "blocked_ms": blocked["s"] * 1e3,
                "copies": blocked["copies"],
                "state_mb": sum(tensor.nbytes for tensor in job.state.packed()[1].values()) / 1e6,
            }
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
        memory.settle()
        switch(kinds[done // steps % len(kinds)])
        began_s = time.perf_counter()
