"""Ranks that sum with each other have the same buckets, although a norm counts a parameter on one of them only."""

from __future__ import annotations

import torch

from regroup.parallel.gradients import buckets_of
from regroup.parallel.placement import Place


def test_ranks_that_sum_together_have_the_same_buckets() -> None:
    """Of shard, tensor and context, at tensor=1: one parameter is split over shard only, the other over tensor, too."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(4)]
    over = [frozenset({"shard"}), frozenset({"shard", "tensor"})] * 2
    partitions = []
    for context in (0, 1):
        places = [Place(frozenset({"context"}), context == 0 and "tensor" in split, False, split) for split in over]
        partitions.append([bucket.indices for bucket in buckets_of(parameters, 1 << 20, places)])
    assert partitions[0] == partitions[1] == [[3, 1], [2, 0]]
