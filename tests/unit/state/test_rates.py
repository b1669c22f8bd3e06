"""The factor of the learning rates: by the batch, with a warm-up, the same on ranks with different pasts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regroup.state.rates import Ramp, ScaledRates, factor_at, target_of
from regroup.strategies import RateScaling


def make_rates(**fields: Any) -> tuple[ScaledRates, torch.optim.Optimizer]:
    two: list[dict[str, Any]] = [{"params": [torch.zeros(1)], "lr": 0.5}, {"params": [torch.zeros(1)]}]
    optimizer = torch.optim.SGD(two, lr=0.1)
    return ScaledRates(RateScaling(**{"base_batch": 32, "warmup_steps": 4, **fields}), optimizer), optimizer


@pytest.mark.parametrize(
    ("rule", "batch", "want"),
    [
        pytest.param("linear", 32, 1.0, id="the base batch"),
        pytest.param("linear", 128, 4.0, id="linear, larger"),
        pytest.param("linear", 16, 0.5, id="linear, smaller"),
        pytest.param("sqrt", 128, 2.0, id="square root, larger"),
        pytest.param("sqrt", 8, 0.5, id="square root, smaller"),
    ],
)
def test_factor_after_warm_up(rule: str, batch: int, want: float) -> None:
    assert target_of(RateScaling(32, rule), batch) == want
    rates, _ = make_rates(rule=rule)
    rates.follow(0, batch)
    assert rates.factor(1000) == want


@pytest.mark.parametrize(
    ("step", "warmup", "want"),
    [
        pytest.param(10, 4, 1.0, id="the first step is as before"),
        pytest.param(11, 4, 1.5, id="a quarter of the way"),
        pytest.param(14, 4, 3.0, id="the end"),
        pytest.param(99, 4, 3.0, id="it stays"),
        pytest.param(10, 0, 3.0, id="without a warm-up it jumps"),
    ],
)
def test_factor_goes_in_a_straight_line(step: int, warmup: int, want: float) -> None:
    assert factor_at(Ramp(1.0, 3.0, 10), step, warmup) == want


def test_change_in_a_warm_up_goes_on_from_there() -> None:
    rates, _ = make_rates()
    rates.follow(0, 32)
    rates.follow(10, 96)  # to 3
    rates.follow(12, 32)  # from 2 back to 1
    assert [rates.factor(step) for step in (12, 13, 14, 15, 16, 17)] == [2.0, 1.75, 1.5, 1.25, 1.0, 1.0]


@pytest.mark.parametrize("last", [32, 64, 96])
def test_generation_without_a_commit_leaves_no_trace(last: int) -> None:
    """A rank that was in it, one that was not, and one that got a copy from the first: equal factors ever after."""
    was, was_not, copied = (make_rates()[0] for _ in range(3))
    for rates in (was, was_not):
        rates.follow(0, 32)
        rates.follow(10, 96)
    was.follow(12, 64)  # nobody commits step 12 with it
    copied.load_state_dict(was.state_dict())
    for rates in (was, was_not, copied):
        rates.follow(12, last)
    for step in range(12, 20):
        assert was.factor(step) == was_not.factor(step) == copied.factor(step)


def test_rates_are_the_scripts_own_before_and_after() -> None:
    rates, optimizer = make_rates()
    rates.follow(0, 32)
    rates.follow(5, 64)
    rates.multiply(9)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.2]
    rates.restore()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
