"""What a parameter server costs in loss: digits, four ranks, one of which is slow, beside the same optimizer with data parallel.

`python -m tests.trainer.served_loss` prints the table of docs/design/adr/0031-parameter-server.md. The server's own decisions
(`Desk`) are made for four ranks that one process plays in turn, with times drawn at random; gradients are computed on the version
that each has pulled.
"""

from __future__ import annotations

import copy
import random
import statistics
from typing import Any

import torch

from regroup.data import SamplePlan, as_source
from regroup.parameter_server.dealing import Deal, Desk, Terms, roles_of
from regroup.parameter_server.ledger import Ledger, key_of
from regroup.train import tasks
from regroup.train.sections import Digits

BATCH, MICROBATCH, RANKS, SEEDS, STEPS, RATE = 80, 20, 4, 5, 400, 0.05
SLOW = 3.0
"""So many times as long the last rank takes for a microbatch."""

ROWS: list[tuple[str, tuple[int | None, int] | None]] = [
    ("data parallel", None),
    ("ParameterServer(staleness=0, shares_per_version=3)", (0, 3)),
    ("ParameterServer(staleness=4)", (4, 1)),
    ("ParameterServer(staleness=None)", (None, 1)),
]
"""Name, staleness and shares per version. The learning rate goes with the samples in a version; all use equally many samples."""


def losses(way: tuple[int | None, int] | None, seed: int) -> tuple[float, float, float]:
    """Train once; return the loss on all samples to train on, that on those held out, and the mean age of a gradient."""
    torch.manual_seed(seed)
    task = tasks.build(Digits(name="digits"))
    source = as_source(task.train)
    data = source.fetch(torch.arange(len(source)))
    staleness, shares = way or (0, BATCH // MICROBATCH)
    versions = STEPS * BATCH // (shares * MICROBATCH)
    model: Any = task.model
    rate = RATE * shares * MICROBATCH / BATCH
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)
    plan, ledger = SamplePlan(seed, len(data[0]), BATCH, MICROBATCH, RANKS), Ledger()
    terms = Terms(staleness, shares, roles_of(RANKS, 1, computes=True), is_whole=way is None)
    desk = Desk(ledger, terms, RANKS, 0.0, versions)
    draws, worker = random.Random(seed), copy.deepcopy(model)
    ages: list[int] = []
    events: list[tuple[float, int]] = []
    pushed: dict[int, list[torch.Tensor]] = {}
    pulled: dict[int, dict[str, torch.Tensor]] = {}
    dealt: dict[int, Deal] = {}

    def pull(rank: int, now_s: float) -> None:
        deal = desk.pull(rank, now_s)
        if isinstance(deal, Deal):
            dealt[rank], pulled[rank] = deal, copy.deepcopy(model.state_dict())
            takes_s = len(deal.shares) * draws.uniform(0.5, 1.5) * (SLOW if rank == RANKS - 1 else 1.0)
            events.append((now_s + takes_s, rank))

    for rank in range(RANKS):
        pull(rank, 0.0)
    while events:
        now_s, rank = min(events)
        events.remove((now_s, rank))
        pushed[rank] = _gradients(worker, pulled[rank], dealt[rank], plan, data)
        desk.push(rank, float(len(dealt[rank].shares) * MICROBATCH), 0.0, now_s)
        while (version := desk.next_version(now_s)) is not None:
            for number, parameter in enumerate(model.parameters()):
                total = sum(pushed[push.deal.rank][number] for push in version.pushes)
                parameter.grad = total / version.entry.weight
            optimizer.step()
            ages += [version.number - 1 - push.deal.base for push in version.pushes]
            ledger.count(version.entry, plan)
            desk.made(now_s)
        told, desk.decided = [push.deal.rank for push, _ in desk.decided], []
        for one in told:
            pull(one, now_s)
    assert desk.version == versions
    held_out = as_source(task.held_out)
    held = held_out.fetch(torch.arange(len(held_out)))
    with torch.no_grad():
        trained, other = (float(torch.nn.functional.cross_entropy(model(x), y)) for x, y in (data, held))
    return trained, other, statistics.mean(ages)


def _gradients(
    worker: Any, state: dict[str, torch.Tensor], deal: Deal, plan: SamplePlan, data: Any
) -> list[torch.Tensor]:
    """Return the summed gradients of a deal."""
    x, y = data
    worker.load_state_dict(state)
    worker.zero_grad()
    for share in deal.shares:
        ids = plan.ids(*key_of(share, plan))
        torch.nn.functional.cross_entropy(worker(x[ids]), y[ids], reduction="sum").backward()  # type: ignore[no-untyped-call]
    return [parameter.grad.clone() for parameter in worker.parameters()]


def main() -> None:
    torch.set_num_threads(1)
    print(
        "| run | age of a gradient | loss, training samples | loss, held out: mean | lowest to highest of five seeds |"
    )
    print("| --- | --- | --- | --- | --- |")
    for name, way in ROWS:
        runs = [losses(way, seed) for seed in range(SEEDS)]
        trained, held, ages = ([run[i] for run in runs] for i in range(3))
        print(
            f"| {name} | {statistics.mean(ages):.2f} | {statistics.mean(trained):.4f} | {statistics.mean(held):.4f} | "
            f"{min(held):.4f} to {max(held):.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
