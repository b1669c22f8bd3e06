"""Which process of a model group writes a tensor: each piece is written once."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from regroup.checkpoint import shards
from regroup.checkpoint.shards import REPLICATE, SHARD, STRIDED, writes
from regroup.checkpoint.tree import Part

SHAPE = (2, 3)


class Place:
    """What is asked of a process's DeviceMesh, of 2 x 3 processes."""

    mesh_dim_names = ("shard", "tensor")

    def __init__(self, *at: int) -> None:
        self._at = at

    def get_coordinate(self) -> list[int]:
        return list(self._at)


def part(**dims: str) -> Part:
    placements = tuple((kind, 0, 1) for kind in dims.values())
    return Part(torch.ones(1), tuple(dims), placements, (6,))


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
