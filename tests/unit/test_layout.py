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
    assert (BOTH.size, BOTH.num_data, BOTH.summed_dims) == (6, 2, frozenset({"shard"}))
    assert [BOTH.data_index(inner) for inner in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [rank for rank in range(12) if BOTH.speaks(rank)] == [0, 3, 6, 9]


def test_who_sums_with_whom() -> None:
    assert BOTH.across(8, 12) == (2, 8)
    assert BOTH.across(8, 12, BOTH.summed_dims) == (2, 5, 8, 11)
    assert BOTH.parts(8, 12) == {"across ": (2, 8), "across shard": (2, 5, 8, 11)}
    assert WHOLE.parts(1, 4) == {}


def test_ranks_with_parts_of_a_sequence_sum_gradients_and_count_samples_once() -> None:
    layout = Layout.of({"shard": 2, "context": 2})
    assert (layout.num_data, layout.summed_dims) == (2, frozenset({"shard", "context"}))
    assert [layout.data_index(inner) for inner in range(4)] == [0, 0, 1, 1]
    assert [layout.sequence_part(rank) for rank in range(8)] == [0, 1] * 4
    assert [rank for rank in range(8) if layout.speaks(rank)] == [0, 2, 4, 6]
    assert all(layout.adds_loss(rank) for rank in range(8))
    assert layout.parts(5, 8) == {
        "across ": (1, 5),
        "across context": (0, 1, 4, 5),
        "across context,shard": tuple(range(8)),
    }


def test_ranks_with_parts_of_a_layer_add_their_loss_once() -> None:
    layout = Layout.of({"context": 2, "tensor": 2})
    assert [rank for rank in range(8) if layout.speaks(rank)] == [0, 4]
    assert [rank for rank in range(8) if layout.adds_loss(rank)] == [0, 2, 4, 6]
    assert layout.parts(5, 8) == {"across ": (1, 5), "across context": (1, 3, 5, 7)}


def test_ranks_with_experts_compute_samples_of_their_own() -> None:
    layout = Layout.of({"shard": 2, "expert": 2})
    assert (layout.num_data, layout.summed_dims) == (4, frozenset({"shard", "expert"}))
    assert [layout.data_index(inner) for inner in range(4)] == [0, 1, 2, 3]
    assert all(layout.speaks(rank) and layout.adds_loss(rank) for rank in range(8))
    assert {name: ranks for name, ranks in layout.parts(5, 8).items() if len(ranks) < 8} == {
        "across ": (1, 5),
        "across expert": (0, 1, 4, 5),
        "across shard": (1, 3, 5, 7),
    }


LAYOUTS = [
    WHOLE,
    BOTH,
    *map(Layout.of, ({"shard": 2}, {"tensor": 2}, {"context": 2}, {"expert": 2}, {"shard": 2, "expert": 2})),
    *map(Layout.of, ({"context": 2, "tensor": 2}, {"shard": 2, "context": 2})),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
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
        ({"data": 2}, "no known dimension; choose from shard, tensor, context, expert"),
        ({"shard": 0}, "shard of regroup.mesh() is 0"),
        ({"shard": 2.0}, "a whole number of at least 1"),
        ({"tensor": True}, "tensor of regroup.mesh() is True"),
        ({"context": 2, "expert": 2}, "do not work together so far; choose one dimension, or shard with tensor, "),
        ({"shard": 2, "tensor": 2, "context": 2}, "regroup.mesh(shard=2, tensor=2, context=2) has dimensions"),
    ],
)
def test_a_mesh_that_is_none_is_refused(sizes: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError) as error:
        Layout.of(sizes)
    assert said in str(error.value)


def test_dimensions_of_one_rank_go_with_any() -> None:
    assert Layout.of({"context": 1, "expert": 2, "tensor": 1}).size == 2


def test_a_batch_that_cannot_be_dealt_evenly_is_refused() -> None:
    with pytest.raises(DataError, match=r"not a multiple of 2, .* \(shard=2\).* Pass global_batch=6"):
        SamplePlan(0, 1000, 5, 1, 2, Layout.of({"shard": 2}))
    SamplePlan(0, 1000, 5, 1, 2, Layout.of({"context": 2}))
    with pytest.raises(DataError, match="less than the largest number of ranks"):
        SamplePlan(0, 1000, 4, 1, 6, Layout.of({"shard": 2}))
