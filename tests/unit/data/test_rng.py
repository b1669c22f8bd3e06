"""Random numbers of a microbatch."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from regroup.data import microbatch_rng


def draw(seed: int, step: int, v: int) -> list[float]:
    with microbatch_rng() as seed_for:
        seed_for(seed, step, v)
        return drawn()


def drawn() -> list[float]:
    return [*torch.rand(4).tolist(), random.random(), float(np.random.rand())]


def test_it_depends_on_seed_step_and_virtual_worker_alone() -> None:
    first = draw(1, 2, 3)
    drawn()
    assert draw(1, 2, 3) == first
    draws = [draw(*key) for key in [(1, 2, 3), (1, 3, 2), (2, 2, 3), (1, 2, 4), (3, 2, 1)]]
    assert all(len(set(numbers)) == 5 for numbers in zip(*draws))


def fails() -> None:
    with microbatch_rng() as seed_for:
        seed_for(1, 1, 1)
        drawn()
        raise ZeroDivisionError


def test_it_leaves_the_generators_as_they_were() -> None:
    def seed() -> None:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)

    seed()
    want = drawn()
    seed()
    with pytest.raises(ZeroDivisionError):
        fails()
    assert drawn() == want


def test_generator_of_the_current_gpu_is_seeded_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(torch.Generator().manual_seed(n) for n in range(2))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)
    states = [gpu.get_state() for gpu in gpus]
    with microbatch_rng() as seed_for:
        seed_for(1, 2, 3)
        drawn_there = torch.rand(2, generator=gpus[1])
        seed_for(1, 2, 3)
        assert torch.equal(torch.rand(2, generator=gpus[1]), drawn_there)
        assert torch.equal(gpus[0].get_state(), states[0])
    assert [torch.equal(gpu.get_state(), state) for gpu, state in zip(gpus, states)] == [True, True]
