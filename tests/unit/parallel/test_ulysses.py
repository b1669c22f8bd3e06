"""Parts of sequences: what a rank gets, and attention where there is one rank. Ranks that exchange: tests/trainer."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import regroup
from regroup.errors import UsageError


class Row(NamedTuple):
    """What of a DeviceMesh of one dimension is asked for without communication."""

    ranks: int
    at: int
    mesh_dim_names: tuple[str, ...] = ("context",)

    def size(self) -> int:
        return self.ranks

    def get_local_rank(self) -> int:
        return self.at


class Batch(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_parts_of_all_ranks_are_the_whole(ranks: int) -> None:
    batch = Batch(torch.arange(24).view(2, 12), torch.randn(2, 12, 3))
    parts = [regroup.split_sequence(batch, Row(ranks, at)) for at in range(ranks)]
    for name in Batch._fields:
        assert torch.equal(torch.cat([getattr(part.batch, name) for part in parts], dim=1), getattr(batch, name))
    assert torch.cat([part.positions for part in parts]).tolist() == list(range(12))
    assert {len(part.positions) for part in parts} == {12 // ranks}


def test_a_batch_keeps_its_form() -> None:
    batch = {"x": torch.zeros(2, 4), "more": [torch.zeros(1, 4), (torch.zeros(3, 4),)]}
    part, positions = regroup.split_sequence(batch, Row(2, 1))
    assert part["x"].shape == (2, 2)
    assert part["more"][1][0].shape == (3, 2)
    assert positions.tolist() == [2, 3]
    whole, positions = regroup.split_sequence(torch.zeros(4, 9), None, dim=0)
    assert (whole.shape, positions.tolist()) == ((4, 9), [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (
            (torch.zeros(2, 4), torch.zeros(2)),
            r"tensors of shape \[2, 4\], \[2\]; dimension 1 of each must be the sequence",
        ),
        ((torch.zeros(2, 4), torch.zeros(2, 6)), "of one length"),
        ((), "tensors of shape none"),
        ((torch.zeros(2, 4), "text"), "with a str; it takes a tensor"),
        (torch.zeros(2, 7), "7 tokens cannot be split evenly over context=2. Pad it to 8 tokens"),
    ],
)
def test_what_is_no_batch_of_sequences_is_refused(batch: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        regroup.split_sequence(batch, Row(2, 0))


@pytest.mark.parametrize(
    ("names", "said"), [(("shard", "context"), "a mesh of shard, context"), (("expert",), "a mesh of expert")]
)
def test_another_dimension_is_refused(names: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said + r'; it takes one dimension, context\. Pass mesh\["context"\]\.'):
        regroup.split_sequence(torch.zeros(2, 4), Row(2, 0, names))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_of_one_rank_is_torchs(kv_heads: int) -> None:
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, kv_heads, 5, 8), torch.randn(2, kv_heads, 5, 6)
    want = torch.nn.functional.scaled_dot_product_attention(
        query,
        key.repeat_interleave(4 // kv_heads, 1),
        value.repeat_interleave(4 // kv_heads, 1),
        is_causal=True,
    )
    torch.testing.assert_close(regroup.attention(query, key, value, None, causal=True), want)
    assert not torch.equal(regroup.attention(query, key, value, None, causal=False), want)
    with pytest.raises(UsageError, match=r"algorithm of regroup\.attention\(\) is 'flash'; choose from ulysses, ring"):
        regroup.attention(query, key, value, None, causal=True, algorithm="flash")
