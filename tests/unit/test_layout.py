"""What follows from a mesh for each rank: pure arithmetic."""

from __future__ import annotations

from itertools import pairwise

import pytest

from regroup.data import DataError, SamplePlan
from regroup.errors import UsageError
from regroup.layout import WHOLE, Layout, inner_index

BOTH = Layout.of({"shard": 2, "tensor": 3})


def test_ranks_lie_in_the_mesh_as_torch_lays_them() -> None:
    assert [tuple(BOTH.coordinates(inner).values()) for inner in range(6)] == [
        (tensor, shard) for shard in range(2) for tensor in range(3)
    ]
    assert (BOTH.size, BOTH.num_data, BOTH.data_dims) == (6, 2, frozenset({"shard"}))
    assert [BOTH.data_index(inner) for inner in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [rank for rank in range(12) if BOTH.speaks(rank)] == [0, 3, 6, 9]


def test_who_sums_with_whom() -> None:
    assert BOTH.across(8, 12) == (2, 8)
    assert BOTH.across(8, 12, BOTH.data_dims) == (2, 5, 8, 11)
    assert BOTH.parts(8, 12) == {"across ": (2, 8), "across shard": (2, 5, 8, 11)}
    assert WHOLE.parts(1, 4) == {}


@pytest.mark.parametrize("layout", [WHOLE, Layout.of({"shard": 2}), Layout.of({"tensor": 2}), BOTH], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 3, 5])
def test_each_microbatch_is_dealt_once_and_evenly_inside_a_group(layout: Layout, groups: int) -> None:
    plan = SamplePlan(0, 1000, 20, 1, 5 * layout.size, layout)
    shares = plan.shares(groups * layout.size)
    spoken = [share for rank, share in enumerate(shares) if layout.speaks(rank)]
    assert sorted(v for share in spoken for v in share) == list(range(20))
    for first in range(0, len(shares), layout.size):
        group = shares[first : first + layout.size]
        assert len({len(share) for share in group}) == 1, "a forward of one rank is a forward of all"
        for inner in range(layout.size):
            same = [other for other in range(layout.size) if layout.data_index(other) == layout.data_index(inner)]
            assert {group[other] for other in same} == {group[inner]}
    for before, after in pairwise(dict.fromkeys(spoken)):
        assert before.stop == after.start


@pytest.mark.parametrize(
    ("place", "processes", "workers", "want"),
    [(0, 2, 1, 0), (3, 4, 1, 1), (1, 1, 2, 1), (0, 1, 1, None), (2, 2, 2, None)],
)
def test_inner_index_of_a_mesh_of_two(place: int, processes: int, workers: int, want: int | None) -> None:
    layout = Layout.of({"shard": 2})
    if want is not None:
        assert inner_index(layout, place, processes, workers) == want
        return
    with pytest.raises(UsageError, match=r"regroup\.mesh\(shard=2\) has 2 ranks"):
        inner_index(layout, place, processes, workers)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({}, "without a dimension"),
        ({"data": 2}, "no known dimension; choose from shard, tensor"),
        ({"shard": 0}, "shard of regroup.mesh() is 0"),
        ({"shard": 2.0}, "a whole number of at least 1"),
        ({"tensor": True}, "tensor of regroup.mesh() is True"),
    ],
)
def test_a_mesh_that_is_none_is_refused(sizes: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError) as error:
        Layout.of(sizes)
    assert said in str(error.value)


def test_a_batch_that_cannot_be_dealt_evenly_is_refused() -> None:
    with pytest.raises(DataError, match=r"not a multiple of 2, .* \(shard=2\).* Pass global_batch=6"):
        SamplePlan(0, 1000, 5, 1, 2, Layout.of({"shard": 2}))
    with pytest.raises(DataError, match="less than the largest number of ranks"):
        SamplePlan(0, 1000, 4, 1, 6, Layout.of({"shard": 2}))
