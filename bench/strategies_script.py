"""The script of `bench.strategies` under `regroup run`: steps of a session with one strategy.

Arguments: the key of the strategy, the number of ranks, the number of steps, and steps in a block. With 0 steps in a
block the script logs each commit (`bench.commits`) instead.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import regroup
from bench.commits import CommitLog
from bench.strategies import CASES
from bench.strategies_meter import Meter
from bench.strategies_model import (
    FEW,
    INNER_STEPS,
    MICROBATCH,
    POWER_RANK,
    build,
    data,
    loss_of,
    mean_of,
    optimizer_of,
    split,
)
from regroup import strategies

log = CommitLog()
log.imported()
key, (ranks, total, in_block) = sys.argv[1], map(int, sys.argv[2:])
case = next(case for case in CASES if case.key == key)
DESCRIBED: dict[str, strategies.Description] = {
    "ring": strategies.DataParallel(algorithm="ring"),
    "fp16": strategies.DataParallel(hook="fp16"),
    "bf16": strategies.DataParallel(hook="bf16"),
    "powersgd": strategies.DataParallel(hook=strategies.PowerSGD(rank=POWER_RANK, start_step=0)),
    "local_sgd": strategies.LocalSGD(inner_steps=INNER_STEPS),
    "server": strategies.ParameterServer(),
    "diloco": strategies.DiLoCo(inner_steps=INNER_STEPS),
}
mesh = regroup.mesh(device="cpu", **dict(case.mesh)) if case.mesh else None
model = build(key)
if mesh is not None:
    split(model, mesh)
if key == "pipeline":
    model = regroup.pipeline(model, schedule="1f1b")


def summed(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    """Return the summed loss of a microbatch and its weight, as `step.run` takes them."""
    return mean_of(output, batch.y) * len(batch.y), len(batch.y)


def train(step: Any) -> None:
    """Compute this rank's share of the step."""
    if key == "pipeline":
        step.run(summed, inputs=lambda batch: batch.x)
        return
    for batch in step.microbatches():
        parts: tuple[torch.Tensor, ...] = (batch.x, batch.y)
        if key == "context":
            assert mesh is not None
            parts, positions = regroup.split_sequence(parts, mesh["context"])
            parts = (*parts, positions)
        step.backward(mean=loss_of(model, *parts), weight=len(batch.y))


optimizer = optimizer_of(model)
microbatch = MICROBATCH // case.cuts
with regroup.session(
    model=model,
    optimizer=optimizer,
    data=data(),
    # Where recovery is measured, steps are short, and there are microbatches for every size that a resize leads to.
    global_batch=MICROBATCH * ranks * case.optimizer_steps if in_block else FEW * case.optimizer_steps,
    microbatch=microbatch if in_block else 1,
    reduction="exact" if key == "exact" else "fast",
    strategy=DESCRIBED.get(key),
) as job:
    meter = Meter(in_block, lambda: job.is_main) if in_block else None
    for step in job.steps(total):
        if meter is not None:
            meter.before(step.index)
        with step:
            train(step)
            step.commit()
        if meter is not None:
            meter.after(step.index)
        elif step.committed:
            log.committed(rank=job.rank, step=step.index + 1, epoch=job.generation, world=job.world_size)
