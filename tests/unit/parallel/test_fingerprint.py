"""Equal bits, equal hash, wherever they are; and any difference is another one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from regroup.bits import float_of
from regroup.parallel.fingerprint import Fingerprint, ask_settings, settings_hash
from regroup.parallel.host import bits_of, to_host
from tests.unit.parallel.fake_device import DEVICE, FakeDevice


def tensors() -> list[torch.Tensor]:
    return [torch.arange(5.0), torch.zeros(3, 2, dtype=torch.bool), torch.ones(7, dtype=torch.bfloat16), torch.zeros(0)]


def parameters_hash(held: list[torch.Tensor], step: int = 0) -> int:
    fingerprint = Fingerprint(held)
    return fingerprint.hash(step, to_host(fingerprint.ask(held, step)))


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_changed_element_of_any_tensor_is_another_hash(changed: int) -> None:
    before, after = tensors(), tensors()
    assert parameters_hash(before) == parameters_hash(after)
    after[changed].view(-1)[-1] = 4.5
    assert parameters_hash(before) != parameters_hash(after)


def by_settings(**settings: Any) -> int:
    groups = [{"params": [torch.zeros(1)], **settings}, {"params": [], "lr": 1.0}]
    return settings_hash(groups, to_host(ask_settings(groups)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({"lr": 0.1}, {"lr": 0.2}, id="numbers"),
        pytest.param({"lr": torch.tensor(0.1)}, {"lr": torch.tensor(0.2)}, id="tensors"),
        pytest.param(
            {"betas": (torch.tensor(0.9), 0.99)}, {"betas": (torch.tensor(0.8), 0.99)}, id="a tensor in a tuple"
        ),
        pytest.param({"lr": torch.tensor([1.0, 2.0])}, {"lr": torch.tensor([1.0, 3.0])}, id="several elements"),
        pytest.param({"a": torch.tensor(1.0), "b": 2.0}, {"a": 1.0, "b": torch.tensor(2.0)}, id="another one of two"),
    ],
)
def test_other_settings_are_another_hash(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert by_settings(**one) == by_settings(**one)
    assert by_settings(**one) != by_settings(**other)


def test_hashes_are_those_of_host_memory_on_any_device() -> None:
    here = tensors()
    want = parameters_hash(here), by_settings(lr=torch.tensor(0.1))
    with FakeDevice() as device:
        there = [tensor.to(DEVICE, non_blocking=True) for tensor in here]
        mixed = [there[0], here[1], there[2], here[3]]
        rate = torch.tensor(0.1).to(DEVICE, non_blocking=True)
        assert (parameters_hash(there), by_settings(lr=rate)) == want
        assert parameters_hash(mixed) == want[0]
        assert len(device.take()) == 3


@pytest.mark.parametrize("value", [0.1, -0.0, math.inf, math.nan, 65504.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_number_that_is_read_is_the_one_that_was_asked_for(value: float, dtype: torch.dtype, shape: Any) -> None:
    held = torch.full(shape, value, dtype=dtype)
    with FakeDevice():
        values = to_host([bits_of(held), 7, bits_of(held.to(DEVICE, non_blocking=True))])
    assert values[1] == 7
    for got in (float_of(values[0]), float_of(values[2])):
        assert (math.isnan(got) and math.isnan(value)) or (got, math.copysign(1, got)) == (
            float(held),
            math.copysign(1, value),
        )
