"""The device of `regroup.mesh()`: which one it is, and what is refused. No GPU is needed: torch is told that there are some."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import _random
from torch.testing._internal.distributed.fake_pg import FakeStore

from regroup import accelerator, model_group
from regroup.checkpoint import shards
from regroup.errors import UsageError
from regroup.protocol import env

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with four GPUs, of which this process has the third."""
    see(monkeypatch, 4)
    monkeypatch.setenv(env.LOCAL_RANK, "2")


def see(monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Returns a mesh of two processes for a kind of device."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        yield lambda kind: init_device_mesh(kind, (2,), mesh_dim_names=("shard",))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("num_gpus", "asked", "want"),
    [
        pytest.param(0, None, "cpu", id="no GPU"),
        pytest.param(4, None, "cuda:2", id="this process's own"),
        pytest.param(4, "cuda", "cuda:2", id="any GPU is this process's own"),
        pytest.param(4, torch.device("cuda"), "cuda:2", id="as torch writes it"),
        pytest.param(4, "cuda:1", "cuda:1", id="another one"),
        pytest.param(4, "cpu", "cpu", id="not the GPU"),
        pytest.param(0, "cuda", "'cuda'; it must be 'cpu', or a GPU that torch sees (0 here)", id="no such kind here"),
        pytest.param(4, "cuda:4", "'cuda:4'; it must be 'cpu', or a GPU that torch sees (4 here)", id="too few"),
        pytest.param(4, "mps", "'mps'; it must be", id="a kind that nothing here communicates with"),
        pytest.param(4, "gpu", "'gpu'; it must be", id="no device of torch"),
        pytest.param(4, 1.5, "'1.5'; it must be", id="no device at all"),
    ],
)
def test_device_of_a_mesh(monkeypatch: pytest.MonkeyPatch, num_gpus: int, asked: Any, want: str) -> None:
    see(monkeypatch, num_gpus)
    monkeypatch.setenv(env.LOCAL_RANK, "2")
    if "must be" not in want:
        assert str(model_group._device(asked)) == want
        return
    with pytest.raises(UsageError) as caught:
        model_group._device(asked)
    assert str(caught.value).startswith(f"device of regroup.mesh() is {want}")


@pytest.mark.parametrize(
    ("kind", "device", "said"),
    [
        ("cuda", "cuda:0", ""),
        ("cpu", "cpu", ""),
        (
            "cuda",
            "cpu",
            "Parameter weight of the model is on cpu, and regroup.mesh() is for cuda. Move the model to regroup.dev",
        ),
        (
            "cpu",
            "cuda:0",
            "Parameter weight of the model is on cuda:0, and regroup.mesh() is for cpu. Move the model to 'cpu'",
        ),
    ],
)
def test_model_is_on_the_kind_of_device_of_its_mesh(
    mesh: Any, monkeypatch: pytest.MonkeyPatch, kind: str, device: str, said: str
) -> None:
    monkeypatch.setattr(shards, "mesh", mesh(kind))
    with FakeTensorMode():
        model = torch.nn.Linear(2, 2, device=device)
        if not said:
            model_group.check_device(model)
            return
        with pytest.raises(UsageError) as caught:
            model_group.check_device(model)
    assert str(caught.value).startswith(said)


@pytest.mark.usefixtures("gpus")
def test_split_tensors_draw_their_numbers_without_the_other_ranks(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that joins has drawn none yet, and would wait for ranks that have. They are drawn on this process's own GPU."""
    monkeypatch.setattr(_random, "_rng_tracker", None)
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: pytest.fail("ranks have to agree"))
    # torch 2.11 reads the state of the GPU's generator here, and there is no GPU.
    monkeypatch.setattr(_random.OffsetBasedRNGTracker, "_get_device_state", lambda _self: torch.zeros(16))
    model_group._draw_apart(mesh("cpu"), CPU)
    assert _random._rng_tracker is None
    model_group._draw_apart(mesh("cuda"), accelerator.device())
    tracker: Any = _random._rng_tracker
    assert tracker._device == torch.device("cuda", 2)
