"""The gradient noise scale: the estimators on paper, and as ranks measure it of gradients whose noise is known."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch

from regroup.data import SamplePlan, as_source, make_feed
from regroup.generation.groups import Groups
from regroup.parallel import ddp
from regroup.parallel.ddp import DataParallel
from regroup.parallel.host import bits_of
from regroup.parallel.noise import NoiseScale, OwnNorm, estimate, weigh
from regroup.parallel.strategy import Share
from regroup.state.memory import Memory
from regroup.state.training import TrainingState
from regroup.step import Step
from regroup.transaction.commit import Committer, Extras
from tests.unit.parallel.ranks import Ranks, Told
from tests.unit.transaction.test_host_syncs import member

SIGNAL, NOISE = 4.0, 10.0


def expected(batch: float) -> float:
    """Return the expectation of the squared norm of a mean gradient."""
    return SIGNAL + NOISE / batch


def bits(value: float) -> int:
    found = bits_of(torch.tensor(value, dtype=torch.float64))
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("batches", [[2, 2], [4, 4, 4, 4], [1, 7], [3, 5, 90]])
def test_estimates_are_those_of_the_expectations(batches: list[int]) -> None:
    """Norms that are just what they are expected to be, of equal and of unequal shares."""
    parts = [OwnNorm(float(batch), expected(batch) * batch**2) for batch in batches]
    weighed = weigh(parts)
    assert weighed is not None
    mean, inverse, inverse_total = weighed
    total = sum(batches)
    assert estimate(mean, inverse, expected(total), inverse_total) == pytest.approx((SIGNAL, NOISE))
    scale = NoiseScale()
    prescale = 0.25
    scaled = [OwnNorm(part.weight, part.norm_squared * prescale**2) for part in parts]
    scale.add(scaled, bits(expected(total) * (total * prescale) ** 2), prescale)
    assert scale.now() == pytest.approx(NOISE / SIGNAL)


GOOD = [OwnNorm(2.0, 36.0), OwnNorm(2.0, 36.0)]


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([], id="no rank has the rows"),
        pytest.param([OwnNorm(4.0, 9.0)], id="one rank"),
        pytest.param([OwnNorm(4.0, 9.0), OwnNorm(0.0, 0.0)], id="the other one had no samples"),
        pytest.param([OwnNorm(4.0, 9.0), OwnNorm(4.0, -1.0)], id="one does not measure"),
        pytest.param([OwnNorm(4.0, 9.0), OwnNorm(4.0, math.inf)], id="an overflow on one"),
        pytest.param([OwnNorm(4.0, 9.0), OwnNorm(4.0, math.nan)], id="no number on one"),
    ],
)
def test_step_that_says_nothing_is_left_out(parts: list[OwnNorm]) -> None:
    scale = NoiseScale()
    scale.add(GOOD, bits(5.0 * 16), 1.0)
    before = scale.state_dict()
    scale.add(parts, bits(80.0), 1.0)
    scale.add(GOOD, None, 1.0)
    scale.add(GOOD, bits(math.inf), 1.0)
    assert scale.state_dict() == before


def test_value_is_none_while_noise_hides_the_gradient() -> None:
    scale = NoiseScale()
    assert scale.now() is None
    scale.add([OwnNorm(1.0, 100.0), OwnNorm(1.0, 100.0)], bits(4.0 * 2.0), 1.0)  # the mean's norm is below tr / B
    assert scale.now() is None


def test_norm_on_a_device_is_read_with_the_next_row_or_when_it_is_asked_for() -> None:
    """`ask` gives what was not read; the state has it in any case."""
    mine, other = NoiseScale(), NoiseScale()
    on_device = torch.tensor(80.0, dtype=torch.float64).view(torch.int64)
    mine.add(GOOD, on_device, 1.0)
    assert mine.known is None
    assert len(mine.ask()) == 1
    other.load_state_dict(mine.state_dict())
    assert mine.ask() == []
    assert mine.known == other.known is not None


def measure(world_size: int, *, num_virtual: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Train on samples x with loss w . x, whose gradient is x itself: of mean MEAN and covariance 1. Return what ranks measured."""
    monkeypatch.setattr(
        "regroup.step.microbatch_rng", lambda: nullcontext(lambda *_: None)
    )  # threads share the generators
    data = torch.randn(20_000, WIDE, generator=torch.Generator().manual_seed(5)) + MEAN

    def one(groups: Groups) -> float | None:
        model = torch.nn.Sequential(torch.nn.Linear(WIDE - 8, 1, bias=False), torch.nn.Linear(8, 1, bias=False))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        source = as_source((data, torch.zeros(len(data))))
        plan = SamplePlan(0, len(source), 4 * num_virtual, 4, world_size)
        noise = NoiseScale()
        state = TrainingState(model, optimizer, {}, None)
        strategy = DataParallel(model, state.optimizer, plan, measures=True)
        memory = Memory(state, plan, None, groups.rank)
        committer = Committer(member(groups), strategy, state, plan, memory, lambda *_: None, Extras(noise=noise))
        committer.total = steps
        committer.begin_generation()
        feed = make_feed(source, plan)
        for index in range(steps):
            step = Step(index, committer, feed, model)
            with step:
                for batch in step.microbatches():
                    x = batch.x
                    loss = model[0](x[:, :-8]).sum() + model[1](x[:, -8:]).sum()
                    step.backward(sum=loss, weight=len(x))
                step.commit()
        return step.noise_scale

    return Ranks(world_size).run(one)


WIDE = 64
MEAN = 0.25
KNOWN = WIDE / (WIDE * MEAN**2)
"""tr(Sigma) / |G|^2."""


@pytest.mark.parametrize(
    ("world_size", "num_virtual", "parcel_bytes"),
    [
        pytest.param(2, 4, None, id="two ranks"),
        pytest.param(3, 7, None, id="shares that differ"),
        pytest.param(2, 4, 0, id="gradients that are sent while backward runs"),
    ],
)
def test_ranks_measure_the_noise_scale_of_a_problem_where_it_is_known(
    monkeypatch: pytest.MonkeyPatch, world_size: int, num_virtual: int, parcel_bytes: int | None
) -> None:
    if parcel_bytes is not None:
        monkeypatch.setattr(ddp, "PARCEL_BYTES", parcel_bytes)
        monkeypatch.setattr("regroup.parallel.gradients.BUCKET_BYTES", 64)  # two buckets
    found = measure(world_size, num_virtual=num_virtual, steps=300, monkeypatch=monkeypatch)
    assert len(set(found)) == 1, "equal on all ranks, bit by bit"
    assert found[0] == pytest.approx(KNOWN, rel=0.1)


def test_step_with_gradients_that_came_late_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in no bucket, so a rank's own norm lacks them."""
    monkeypatch.setattr(ddp, "PARCEL_BYTES", 0)

    def one(groups: Groups) -> list[bool]:
        model = torch.nn.Linear(3, 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = DataParallel(model, optimizer, SamplePlan(0, 64, 4, 2, 2), measures=True)
        strategy.begin_generation(groups)
        found = []
        for index, again in enumerate([True, False]):
            strategy.begin_step()
            loss = model(torch.ones(2, 3)).sum()
            strategy.backward(loss, torch.ones_like(loss), last=True)
            if again:
                model(torch.ones(2, 3)).sum().backward()
            found.append(strategy.reduce(Share(index), Told(groups)).norm_squared is not None)
            strategy.scale(1.0)
        return found

    assert Ranks(2).run(one) == [[False, True]] * 2
