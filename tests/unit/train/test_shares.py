"""Held-out samples are dealt so that each counts once, and the ranks of a model group make as many forward passes as each other."""

from __future__ import annotations

import itertools

import pytest

from regroup.layout import Layout
from regroup.train.shares import held_out

WHOLE, SHARD, TENSOR, BOTH, PIPELINE, CONTEXT = (
    Layout(dims)
    for dims in (
        (),
        (("shard", 2),),
        (("tensor", 2),),
        (("shard", 2), ("tensor", 2)),
        (("pipeline", 2),),
        (("context", 2),),
    )
)


@pytest.mark.parametrize(
    ("layout", "world_size", "want"),
    [
        pytest.param(WHOLE, 2, [[(0, True), (8, True)], [(4, True)]], id="without a mesh nobody computes for nothing"),
        pytest.param(SHARD, 2, [[(0, True), (8, True)], [(4, True), (0, False)]], id="a pass that the group makes together"),
        pytest.param(TENSOR, 2, [[(0, True), (4, True), (8, True)], [(0, False), (4, False), (8, False)]], id="parts of a layer"),
        pytest.param(
            BOTH,
            8,
            [[(0, True)], [(0, False)], [(4, True)], [(4, False)], [(8, True)], [(8, False)], [(0, False)], [(0, False)]],
            id="two groups",
        ),
        pytest.param(PIPELINE, 2, [[(0, False), (4, False), (8, False)], [(0, True), (4, True), (8, True)]], id="the last stage"),
        pytest.param(SHARD, 1, [[(0, True), (8, True)]], id="a rank without its group, whose first pass ends it"),
        pytest.param(CONTEXT, 2, [[(0, True), (4, True), (8, True)]] * 2, id="each has its own tokens"),
    ],
)  # fmt: skip
def test_batches_of_each_rank(layout: Layout, world_size: int, want: list[list[tuple[int, bool]]]) -> None:
    assert [list(held_out(rank, world_size, 10, 4, layout)) for rank in range(world_size)] == want


@pytest.mark.parametrize("layout", [WHOLE, SHARD, TENSOR, BOTH, PIPELINE], ids=str)
def test_each_sample_counts_once_and_groups_stay_together(layout: Layout) -> None:
    for groups, num_samples, batch in itertools.product(range(1, 4), range(1, 30), range(1, 6)):
        world_size = groups * layout.size
        dealt = [list(held_out(rank, world_size, num_samples, batch, layout)) for rank in range(world_size)]
        counting = sorted(first for one in dealt for first, counts in one if counts)
        assert counting == list(range(0, num_samples, batch))
        for first in range(0, world_size, layout.size):
            assert len({len(one) for one in dealt[first : first + layout.size]}) == 1
