"""Random numbers of a microbatch."""

import pytest
import torch

from regroup.data import microbatch_rng


def draw(seed: int, step: int, v: int) -> list[float]:
    with microbatch_rng(seed, step, v):
        return torch.rand(4).tolist()


def test_microbatch_rng_depends_on_seed_step_and_virtual_worker_alone() -> None:
    first = draw(1, 2, 3)
    torch.rand(7)
    assert draw(1, 2, 3) == first
    assert len({tuple(draw(*key)) for key in [(1, 2, 3), (1, 3, 2), (2, 2, 3), (1, 2, 4), (3, 2, 1)]}) == 5


def test_microbatch_rng_leaves_the_generator_as_it_was() -> None:
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    with pytest.raises(IndexError), microbatch_rng(1, 1, 1):
        torch.rand(10)[10]
    assert torch.equal(torch.rand(3), want)
