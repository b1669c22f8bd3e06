"""Microbatches before a rank's last one of a step send nothing: gradients are summed over ranks once a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regroup import strategies
from regroup.data import SamplePlan
from regroup.generation.groups import Groups
from regroup.parallel import ddp, gradients
from regroup.parallel.ddp import DataParallel
from regroup.parallel.strategy import Share
from tests.unit.parallel.ranks import Ranks, Told
from tests.unit.parallel.test_strategies import Chain, plain

NUM_BUCKETS, MICROBATCHES, STEPS = 4, 3, 4


@pytest.fixture(autouse=True)
def one_bucket_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 50)
    monkeypatch.setattr(ddp, "PARCEL_BYTES", 0)


@pytest.mark.parametrize(
    ("hook", "first", "others"),
    [
        pytest.param(None, NUM_BUCKETS, NUM_BUCKETS, id="as they are"),
        pytest.param("bf16", NUM_BUCKETS, NUM_BUCKETS, id="bf16"),
        # The step's number is not known before the first commit of a generation, so all is sent after backward.
        pytest.param(strategies.PowerSGD(start_step=0), 0, NUM_BUCKETS, id="powersgd"),
    ],
)
def test_collectives_of_a_step_do_not_grow_with_its_microbatches(hook: Any, first: int, others: int) -> None:
    ranks = Ranks(2)

    def one(groups: Groups) -> list[list[int]]:
        """Return how many collectives had begun after each microbatch, and after the rows, by step."""
        torch.manual_seed(1)
        model = Chain()
        plan = SamplePlan(0, 64, 2 * 2 * MICROBATCHES, 2, 2)
        strategy = DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, strategies.DataParallel(hook))
        strategy.begin_generation(groups)
        found = []
        for index in range(STEPS):
            strategy.begin_step()
            before, counts = len(ranks.calls), []
            share = plan.share(groups.rank, groups.world_size)
            assert len(share) == MICROBATCHES
            for v in share:
                loss = plain(model, torch.full((2, 3), float(v + 1)))
                strategy.backward(loss, torch.ones_like(loss), last=v == share[-1])
                counts.append(len(ranks.calls) - before)
            told = Told(groups)
            strategy.reduce(Share(index), told)
            counts.append(len(ranks.calls) - before)
            assert told.rounds == 1
            strategy.scale(1.0)
            found.append(counts)
        return found

    steps = ranks.run(one)[0]
    nothing = [0] * (MICROBATCHES - 1)
    assert steps[0] == [*nothing, first, NUM_BUCKETS + 1]
    assert steps[1:] == [[*nothing, others, NUM_BUCKETS + 1]] * (STEPS - 1)


def test_small_gradients_are_sent_once_with_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp, "PARCEL_BYTES", 1 << 20)
    ranks = Ranks(2)

    def one(groups: Groups) -> None:
        model = Chain()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        plan = SamplePlan(0, 64, 2 * 2 * MICROBATCHES, 2, 2)
        strategy = DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
        strategy.begin_generation(groups)
        strategy.begin_step()
        for v in plan.share(groups.rank, 2):
            loss = plain(model, torch.ones(2, 3))
            strategy.backward(loss, torch.ones_like(loss), last=v == plan.share(groups.rank, 2)[-1])
            assert groups.rank != 0 or ranks.calls == []  # they are rank 0's
        told = Told(groups)
        strategy.reduce(Share(0), told)
        assert told.parcels is not None

    ranks.run(one)
    assert ranks.calls == ["_allgather_base"]
