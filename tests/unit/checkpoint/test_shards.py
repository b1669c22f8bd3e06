"""Which process of a model group writes a tensor: each piece is written once. And what a copy of a split state is, beside a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from regroup.checkpoint import shards
from regroup.checkpoint.shards import REPLICATE, SHARD, STRIDED, writes
from regroup.checkpoint.tree import TensorPart
from regroup.state.optimizers import load_exactly

SHAPE = (2, 3)


class Place:
    """What is asked of a process's DeviceMesh, of 2 x 3 processes."""

    mesh_dim_names = ("shard", "tensor")

    def __init__(self, *at: int) -> None:
        self._at = at

    def get_coordinate(self) -> list[int]:
        return list(self._at)


def part(**dims: str) -> TensorPart:
    placements = tuple((kind, 0, 1) for kind in dims.values())
    return TensorPart(torch.ones(1), tuple(dims), placements, (6,))


@pytest.mark.parametrize(
    ("value", "want"),
    [
        pytest.param(torch.ones(1), [(0, 0)], id="whole"),
        pytest.param(part(shard=SHARD), [(0, 0), (1, 0)], id="split over shard only"),
        pytest.param(part(tensor=SHARD), [(0, 0), (0, 1), (0, 2)], id="split over tensor only"),
        pytest.param(part(shard=SHARD, tensor=REPLICATE), [(0, 0), (1, 0)], id="equal along tensor"),
        pytest.param(part(shard=STRIDED, tensor=SHARD), list(product(range(2), range(3))), id="split over both"),
    ],
)
def test_each_piece_is_written_once(value: Any, want: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for at in product(*map(range, SHAPE)):
        monkeypatch.setattr(shards, "mesh", Place(*at))
        if writes(value):
            found.append(at)
    assert found == want


@pytest.fixture
def of_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A mesh of two processes with a GPU each; this one is the second."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("shard",))
        monkeypatch.setattr(shards, "mesh", mesh)
        yield mesh
    finally:
        dist.destroy_process_group()


def test_copy_of_a_split_state_stays_in_host_memory(of_gpus: Any) -> None:
    """A checkpoint is read into these tensors, and written from them. (There is no GPU here: what goes to one fails.)"""
    copied = TensorPart(torch.randn(2, 3), ("shard",), ((SHARD, 0, 1),), (4, 3))
    whole: Any = shards.whole(copied)
    assert (tuple(whole.shape), whole.stride(), whole.device_mesh) == ((4, 3), (3, 1), of_gpus)
    assert whole.to_local().data_ptr() == copied.local.data_ptr()
    target: Any = shards.empty_like(whole, torch.bfloat16)
    assert (target.device.type, target.dtype, target.to_local().shape) == ("cpu", torch.bfloat16, (2, 3))
    assert torch.equal(shards.local_of(shards.with_values(whole, whole)), copied.local)
    found = shards.part_of(whole, "weight")
    assert (found.dims, found.placements, found.shape) == (copied.dims, copied.placements, copied.shape)


def test_split_state_is_loaded_from_host_memory_onto_the_gpu(of_gpus: Any) -> None:
    with FakeTensorMode():
        here, there = (
            shards.around(torch.empty(2, 3, device=device), of_gpus, [Shard(0)], torch.Size((4, 3)), (3, 1))
            for device in ("cuda:0", "cpu")
        )
        layer = torch.nn.Linear(3, 4, bias=False)
        layer.weight = torch.nn.Parameter(here)
        layer.load_state_dict({"weight": there})
        optimizer = torch.optim.AdamW(layer.parameters())
        moments = {"step": torch.tensor(1.0), "exp_avg": there, "exp_avg_sq": there}
        load_exactly(optimizer, {"state": {0: moments}, "param_groups": optimizer.state_dict()["param_groups"]})
        held = optimizer.state[layer.weight]
        for tensor in (layer.weight.detach(), held["exp_avg"], held["exp_avg_sq"]):
            assert str(shards.local_of(tensor).device) == "cuda:0"
