"""What local steps cost in loss: digits, four ranks, beside the same optimizer with the gradient of the whole batch.

`python -m tests.trainer.rounds_loss` prints the table of docs/design/adr/0030-local-steps.md. Ranks are replayed in one process
(`rounds`): what real ones come to, but for the order of a sum that is too large to travel with the rows.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch

from regroup.data import SamplePlan, as_source
from regroup.train import tasks
from regroup.train.sections import Digits
from tests.trainer.rounds import Holder, Way, replay_round

BATCH, MICROBATCH, RANKS, SEEDS = 80, 20, 4, 5
Optimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


ROWS: list[tuple[str, Optimizer, int, Way | None]] = [
    ("SGD, data parallel", sgd, 400, None),
    ("SGD, LocalSGD(inner_steps=20)", sgd, 400, Way(20)),
    ("AdamW, data parallel", adamw, 600, None),
    ("AdamW, LocalSGD(inner_steps=20)", adamw, 600, Way(20)),
    ("AdamW, DiLoCo(inner_steps=20, outer_momentum=0.5)", adamw, 600, Way(20, 0.7, 0.5)),
    ("AdamW, DiLoCo(inner_steps=20)", adamw, 600, Way(20, 0.7, 0.9)),
]
"""Name, optimizer, its steps in all, and how rounds are made; None: without any."""


def losses(optimizer: Optimizer, steps: int, way: Way | None, seed: int) -> tuple[float, float]:
    """Train once; return the loss on all samples to train on, and on those held out."""
    torch.manual_seed(seed)
    task = tasks.build(Digits(name="digits"))
    source = as_source(task.train)
    x, y = source.fetch(torch.arange(len(source)))
    model: Any = copy.deepcopy(task.model)
    if way is None:
        stepped = optimizer(model)
        plan = SamplePlan(seed, len(x), BATCH, BATCH)
        for index in range(steps):
            ids = plan.ids(index, 0)
            stepped.zero_grad()
            torch.nn.functional.cross_entropy(model(x[ids]), y[ids]).backward()  # type: ignore[no-untyped-call]
            stepped.step()
    else:
        plan = SamplePlan(seed, len(x), BATCH * way.inner_steps, MICROBATCH, RANKS)
        ranks = [Holder.new(way, copy.deepcopy(task.model), optimizer) for _ in range(RANKS)]
        for index in range(steps // way.inner_steps):
            replay_round(ranks, way, plan, (x, y), index)
        model = ranks[0].model
    held_out = as_source(task.held_out)
    held_x, held_y = held_out.fetch(torch.arange(len(held_out)))
    with torch.no_grad():
        return tuple(float(torch.nn.functional.cross_entropy(model(a), b)) for a, b in ((x, y), (held_x, held_y)))  # type: ignore[return-value]


def main() -> None:
    torch.set_num_threads(1)
    print("| run | loss, training samples | loss, held out: mean | lowest to highest of five seeds |")
    print("| --- | --- | --- | --- |")
    for name, optimizer, steps, way in ROWS:
        runs = [losses(optimizer, steps, way, seed) for seed in range(SEEDS)]
        trained, held = ([run[i] for run in runs] for i in range(2))
        print(
            f"| {name} | {statistics.mean(trained):.4f} | {statistics.mean(held):.4f} | {min(held):.4f} to {max(held):.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
