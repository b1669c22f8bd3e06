"""The model and the data of the benchmarks of recovery. They are small, so that training takes little of the time."""

from __future__ import annotations

import os
import time

import torch
import torch._dynamo  # the first optimizer imports it, 900 modules: here it counts as what it is, an import

from bench.commits import BENCH_SAMPLE_S, BENCH_STEP_S

GLOBAL_BATCH = 64
STEPS = 10**9
"""More steps than any run makes: the benchmark ends the job."""


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a 64 -> 32 -> 10 perceptron and its optimizer, equal in every process."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def digits_like() -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tensors in the shape of scikit-learn's digits: [1797, 64] float32, [1797] int64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1797, 64, generator=generator)
    return x, torch.randint(0, 10, (1797,), generator=generator)


class Work:
    """Sleeps in place of a larger model's work. The environment has the seconds for each step and for each sample."""

    def __init__(self) -> None:
        self._step_s = float(os.environ.get(BENCH_STEP_S, "0"))
        self._sample_s = float(os.environ.get(BENCH_SAMPLE_S, "0"))

    def step(self) -> None:
        """Sleep for a step. Called once in each."""
        time.sleep(self._step_s)

    def samples(self, count: int) -> None:
        """Sleep for `count` samples. Called before this rank computes them."""
        time.sleep(count * self._sample_s)
