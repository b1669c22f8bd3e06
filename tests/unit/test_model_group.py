"""The device of `regroup.mesh()`, and what follows from it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import _random

from regroup import accelerator, model_group
from regroup.checkpoint import shards
from regroup.errors import UsageError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 3)


@pytest.mark.parametrize(
    ("said", "own", "want"),
    [
        pytest.param(None, GPU, GPU, id="the process's own GPU"),
        pytest.param(None, CPU, CPU, id="or the CPU"),
        pytest.param("cuda", GPU, GPU, id="a GPU, without a number"),
        pytest.param(torch.device("cuda"), GPU, GPU, id="as a device"),
        pytest.param("cuda:1", GPU, torch.device("cuda", 1), id="the one that is named"),
        pytest.param("cpu", GPU, CPU, id="the CPU beside a GPU"),
        pytest.param("cuda", CPU, r"device of regroup\.mesh\(\) is 'cuda', and this process sees no GPU", id="none is there"),
        pytest.param("gpu", GPU, "is 'gpu'; it must be", id="no device of torch"),
        pytest.param("mps", GPU, "is 'mps'; it must be", id="one that nothing sums on"),
        pytest.param(2.5, GPU, r"is 2\.5; it must be", id="no device at all"),
    ],
)  # fmt: skip
def test_device_of_a_mesh(monkeypatch: pytest.MonkeyPatch, said: Any, own: torch.device, want: Any) -> None:
    monkeypatch.setattr(accelerator, "device", lambda: own)
    if isinstance(want, torch.device):
        assert model_group._device_of(said) == want
        return
    with pytest.raises(UsageError, match=want):
        model_group._device_of(said)


@pytest.mark.parametrize(("there", "fits"), [("cuda", False), ("cpu", True), (None, True)])
def test_model_lies_on_the_device_of_its_mesh(monkeypatch: pytest.MonkeyPatch, there: str | None, fits: bool) -> None:
    monkeypatch.setattr(shards, "mesh", None if there is None else SimpleNamespace(device_type=there))
    if fits:
        model_group.check_device(CPU)
        return
    with pytest.raises(UsageError, match=r"The model is on cpu, and regroup\.mesh\(\) was made for cuda"):
        model_group.check_device(CPU)


def test_random_operations_of_a_process_that_joins_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have drawn before, and would not answer."""

    class Tracker:
        def __init__(self, mesh: Any, run_state_sync: bool = True) -> None:
            assert not run_state_sync, "that would be a broadcast"
            self.mesh, self._device = mesh, torch.device("cuda", 0)

    monkeypatch.setattr(_random, "OffsetBasedRNGTracker", Tracker)
    monkeypatch.setattr(_random, "_rng_tracker", None)
    model_group._draw_without_asking("mesh", GPU)
    made: Any = _random._rng_tracker
    assert (made.mesh, made._device) == ("mesh", GPU)
