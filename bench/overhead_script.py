"""The script of `bench.overhead`: steps of a session and of a plain loop take turns in the same processes.

Under `regroup run` the plain loop is DistributedDataParallel over a process group of its own. The backend is gloo, or
NCCL if BENCH_DEVICE is cuda. In plain `python` it is the bare training loop. With the model `noise` the other side is a
session without the noise scale. Both sides have the same model, data, batch and optimizer. Blocks alternate, so that
other load on the machine meets both. Rank 0 writes one line of JSON a block to BENCH_OUT.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import regroup
from bench import gpt, tiny

name, (world_size, pairs, steps) = sys.argv[1], map(int, sys.argv[2:])
WARM = 5
"""Steps of each kind before anything is measured."""


def build() -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor], int]:
    """Return model, data and the samples of one microbatch."""
    if name == "gpt":
        torch.manual_seed(0)
        tokens = torch.randint(gpt.VOCABULARY, (512, gpt.LENGTH + 1), generator=torch.Generator().manual_seed(0))
        return gpt.GPT(), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), 4
    return tiny.build()[0], tiny.digits_like(), 32


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    if name == "gpt":
        return torch.optim.AdamW(model.parameters(), lr=3e-4)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


device = regroup.device() if os.environ["BENCH_DEVICE"] == "cuda" else torch.device("cpu")
model, data, microbatch = build()
model.to(device)
plain = copy.deepcopy(model)
optimizer, plain_optimizer = optimizer_of(model), optimizer_of(plain)
out = Path(os.environ["BENCH_OUT"])


def plain_loop() -> Callable[[int], None]:
    """Return a function that makes a block of plain steps, the first of which has the number that it is given."""
    rank, runs = job.rank, plain
    if world_size > 1:
        store = dist.FileStore(str(out.with_suffix(".store")), world_size)  # type: ignore[attr-defined]
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=world_size
        )
        runs = DistributedDataParallel(plain)
    x, y = data

    def run(first: int) -> None:
        for index in range(first, first + steps):
            begin = (index * world_size + rank) * microbatch
            ids = torch.arange(begin, begin + microbatch) % len(x)
            plain_optimizer.zero_grad()
            loss = loss_of(runs, x[ids].to(device), y[ids].to(device))
            loss.backward()  # type: ignore[no-untyped-call]
            plain_optimizer.step()
            loss.item()  # a loop that reports its loss waits for it, as the session does

    return run


def note(kind: str, began_s: float, cpu_s: float) -> None:
    if job.is_main:
        line = {
            "kind": kind,
            "ms": (time.perf_counter() - began_s) / steps * 1e3,
            "cpu_ms": (time.process_time() - cpu_s) / steps * 1e3,
        }
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


measures = name == "noise"
with regroup.session(
    model=model,
    optimizer=optimizer,
    data=data,
    global_batch=microbatch * world_size,
    microbatch=microbatch,
    noise_scale=measures,
) as job:
    session: Any = job
    run_by_session = "ours"
    kinds = 2 if measures else 1
    run_plain: Callable[[int], None] | None = None
    began_s, cpu_s = 0.0, 0.0
    for step in job.steps(WARM + kinds * pairs * steps):
        with step:
            for batch in step.microbatches():
                loss = loss_of(model, batch.x.to(device), batch.y.to(device))
                step.backward(mean=loss, weight=len(batch.y))
            step.commit()
        done = step.index + 1 - WARM
        if done < 0 or done % steps:
            continue
        if done:
            note(run_by_session, began_s, cpu_s)
        if measures:  # nothing but the session runs: it measures in every other block
            session._strategy.measures = done // steps % 2 == 1
            session._committer._noise = session._noise if session._strategy.measures else None
            run_by_session = "ours" if session._strategy.measures else "plain"
            began_s, cpu_s = time.perf_counter(), time.process_time()
            continue
        if run_plain is None:
            run_plain = plain_loop()
            run_plain(0)
        began_s, cpu_s = time.perf_counter(), time.process_time()
        run_plain(step.index)
        note("plain", began_s, cpu_s)
        began_s, cpu_s = time.perf_counter(), time.process_time()
if dist.is_initialized():
    dist.destroy_process_group()
