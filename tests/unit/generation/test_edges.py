"""The edges of a pipeline: who is at which end, and what goes in front of a tensor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from regroup.errors import UsageError
from regroup.generation import edges
from regroup.layout import Layout


@pytest.fixture
def four_stages() -> Iterator[None]:
    edges.plan(4)
    yield
    edges.plan(1)


@pytest.mark.usefixtures("four_stages")
def test_both_ends_of_an_edge_name_it_alike_and_in_one_order() -> None:
    layout = Layout((("pipeline", 2), ("tensor", 2)))  # two stages a process
    by_rank = [edges.parts(layout, rank) for rank in range(8)]
    assert list(by_rank[5].items()) == [
        ("activations of stages 0 and 1", (5, 7)),
        ("gradients of stages 0 and 1", (5, 7)),
        ("activations of stages 1 and 2", (7, 5)),
        ("gradients of stages 1 and 2", (7, 5)),
        ("activations of stages 2 and 3", (5, 7)),
        ("gradients of stages 2 and 3", (5, 7)),
    ]
    assert by_rank[7] == by_rank[5]
    assert by_rank[0] == {name: tuple(rank - 5 for rank in both) for name, both in by_rank[5].items()}


@pytest.mark.usefixtures("four_stages")
def test_a_process_has_the_edges_of_its_own_stages_only() -> None:
    layout = Layout.of({"pipeline": 4})
    assert set(edges.parts(layout, 6).values()) == {(5, 6), (6, 7)}
    assert set(edges.parts(layout, 4).values()) == {(4, 5)}
    assert edges.parts(Layout.of({"shard": 2}), 0) == {}


CPU = torch.device("cpu")


def test_a_header_describes_what_follows() -> None:
    tensors = [
        torch.ones(2, 3, 5, requires_grad=True),
        torch.ones((), dtype=torch.float64),
        torch.ones(0, 7, dtype=torch.bfloat16),
        torch.ones(4, dtype=torch.bool),
    ]
    header = edges.header_of(tensors, CPU)
    assert header.shape == (edges.HEADER,)
    made = edges.empty_like(header.tolist(), CPU)
    for one, other in zip(tensors, made, strict=True):
        assert (one.shape, one.dtype, one.requires_grad) == (other.shape, other.dtype, other.requires_grad)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([torch.ones(1)] * 20, "20 tensors, which take 81 numbers"),
        ([torch.ones(3).to_sparse()], "sparse"),
        ([torch.ones(3, dtype=torch.uint16)], "uint16"),
    ],
)
def test_what_cannot_be_sent_is_refused(tensors: list[torch.Tensor], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        edges.header_of(tensors, CPU)
