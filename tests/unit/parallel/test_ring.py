"""The ring all-reduce: the order of additions to the last bit, and who sends how much to whom."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from regroup import strategies
from regroup.generation.groups import Groups
from regroup.parallel import ddp
from regroup.parallel.ddp import DataParallel
from regroup.parallel.ring import ring_sum
from tests.unit.parallel.ranks import Ranks
from tests.unit.parallel.test_strategies import CASES, Chain, Loss, assert_same
from tests.unit.parallel.test_strategies import train as sum_of


def parts(world_size: int, length: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Magnitudes over eight decades, so that the order of additions shows."""
    own = torch.Generator().manual_seed(length)
    return [
        (torch.randn(length, generator=own) * 10 ** (8 * torch.rand(length, generator=own))).to(dtype)
        for _ in range(world_size)
    ]


def by_hand(given: list[torch.Tensor]) -> torch.Tensor:
    """Chunk c: the parts of rank c, c + 1, ... added from left to right."""
    size = len(given)
    chunks = [part.tensor_split(size) for part in given]
    sums = []
    for c in range(size):
        total = chunks[c][c].clone()
        for other in range(1, size):
            total = total + chunks[(c + other) % size][c]
        sums.append(total)
    return torch.cat(sums)


def run(groups: Groups, flat: torch.Tensor) -> torch.Tensor:
    for pending in ring_sum(groups, flat):
        groups.wait([pending])
    return flat


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 3, 64, 1001])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_every_rank_has_the_bits_of_the_stated_order(world_size: int, length: int, dtype: torch.dtype) -> None:
    given = parts(world_size, length, dtype)
    want = by_hand(given)
    results = Ranks(world_size).run(lambda groups: run(groups, given[groups.rank].clone()))
    assert all(torch.equal(result, want) for result in results)
    if world_size > 2 and length > 64 and dtype == torch.float32:
        assert not torch.equal(want, torch.stack(given).sum(0)), "the order of additions shows in these numbers"


def test_each_rank_sends_its_share_to_its_right_neighbour_only() -> None:
    world_size, length = 4, 1000

    class Counting:
        def __init__(self, groups: Any) -> None:
            self._groups, self.rank, self.world_size = groups, groups.rank, groups.world_size
            self.sent = [0] * world_size

        def launch(self, method: str, *arguments: Any, control: bool = False) -> Any:
            self.sent = [old + new for old, new in zip(self.sent, arguments[3])]
            return self._groups.launch(method, *arguments, control=control)

        def wait(self, pending: Any) -> None:
            self._groups.wait(pending)

    def one(groups: Groups) -> list[int]:
        counting = Counting(groups)
        run(cast(Groups, counting), torch.ones(length))
        return counting.sent

    for rank, sent in enumerate(Ranks(world_size).run(one)):
        want = [0] * world_size
        want[(rank + 1) % world_size] = 2 * (world_size - 1) * length * 4 // world_size
        assert sent == want


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("loss", "after_backward", "rounds"), CASES)
def test_gradients_by_the_ring_are_those_of_one_process(
    monkeypatch: pytest.MonkeyPatch, loss: Loss, after_backward: Any, rounds: list[int], world_size: int
) -> None:
    monkeypatch.setattr("regroup.parallel.gradients.BUCKET_BYTES", 50)
    monkeypatch.setattr(ddp, "PARCEL_BYTES", 1 << 20)
    ring = strategies.DataParallel(algorithm="ring")
    kind = cast(Any, lambda model, optimizer, plan: DataParallel(model, optimizer, plan, ring))
    want = sum_of(DataParallel, Chain, loss, None, steps=3, after_backward=after_backward)
    ranks = Ranks(world_size)
    outcomes = ranks.run(lambda groups: sum_of(kind, Chain, loss, groups, steps=3, after_backward=after_backward))
    for outcome in outcomes:
        for got, wanted in zip(outcome.gradients, want.gradients):
            assert_same(got, wanted)
        assert outcome.rounds == rounds
    # Four buckets, three steps.
    assert ranks.calls.count("alltoall_base") == 4 * 3 * 2 * (world_size - 1)
