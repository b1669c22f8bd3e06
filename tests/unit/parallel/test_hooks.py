"""Compressed sums: what they add up to over many steps, after a redo, and when ranks come and go."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from regroup import strategies
from regroup.data import SamplePlan
from regroup.generation.groups import Groups
from regroup.parallel import ddp, gradients
from regroup.parallel.ddp import DataParallel
from regroup.parallel.hooks import Plain, scale_for
from regroup.parallel.powersgd import LowRank
from regroup.parallel.strategy import Share
from regroup.strategies import PowerSGD
from tests.long import only_long
from tests.unit.parallel.ranks import Ranks, Told
from tests.unit.parallel.test_strategies import (
    BATCH,
    CASES,
    Chain,
    Loss,
    assert_same,
    shared_in_checkpoints,
)
from tests.unit.parallel.test_strategies import train as sum_of

STEPS = 20
VIRTUAL_WORKERS = 5
"""Shares of two to four ranks are uneven."""
WEIGHTS = [3.0, 1.0, 4.0, 1.0, 5.0]
POWER = PowerSGD(rank=2, start_step=3, min_compression=1.0)
Make = Callable[[torch.nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4),
}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 400)


def make_model() -> torch.nn.Sequential:
    model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    own = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=own) / 4)
    return model


def loss_of(model: torch.nn.Module, step: int, v: int, scale: float = 1.0) -> torch.Tensor:
    own = torch.Generator().manual_seed(1000 * step + v)
    x, y = torch.randn(4, 12, generator=own), torch.randn(4, 8, generator=own)
    return cast(torch.Tensor, (model(x) - y).pow(2).mean() * WEIGHTS[v] * scale)


class Trainer:
    """One rank's model, optimizer and strategy, through steps and generations."""

    def __init__(self, hook: Any, optimizer: Make, max_norm: float | None = None) -> None:
        self.model, self.max_norm = make_model(), max_norm
        self.optimizer = optimizer(self.model)
        self.plan = SamplePlan(0, 64, 2 * VIRTUAL_WORKERS, 2, VIRTUAL_WORKERS)
        self.strategy = DataParallel(self.model, self.optimizer, self.plan, strategies.DataParallel(hook))
        self.applied: list[list[torch.Tensor]] = []
        """By step: the gradients before they are clipped."""
        self.rank, self.world_size = 0, 1

    def join(self, groups: Groups | None, *, replaced: bool = False) -> Trainer:
        self.groups = groups
        if groups is not None:
            self.rank, self.world_size = groups.rank, groups.world_size
        else:
            self.rank, self.world_size = 0, 1
        self.strategy.begin_generation(groups, replaced=replaced)
        return self

    def run(
        self, steps: Sequence[int], *, cut: Sequence[int] = (), scale: Callable[[int], float] = lambda _: 1.0
    ) -> Trainer:
        """`cut`: steps that are reduced, interrupted before they are applied, and done again."""
        for index in steps:
            for is_cut in (True, False) if index in cut else (False,):
                self._reduce(index, scale(index))
                if is_cut:
                    self.strategy.undo()
            self.strategy.scale(sum(WEIGHTS))
            parameters = list(self.model.parameters())
            self.applied.append([cast(torch.Tensor, p.grad).clone() for p in parameters])
            if self.max_norm is not None:
                self.strategy.clip(self.max_norm)
            self.optimizer.step()
        return self

    def _reduce(self, index: int, scale: float) -> None:
        strategy, mine = self.strategy, self.plan.share(self.rank, self.world_size)
        strategy.begin_step()
        for v in mine:
            loss = loss_of(self.model, index, v, scale)
            strategy.backward(loss, torch.ones_like(loss), last=v == mine[-1])
        told = Told(self.groups)
        strategy.reduce(Share(index), told)
        assert told.parcels is None or type(strategy._hook) is Plain, "small gradients are compressed, too"

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    @property
    def owed(self) -> dict[int, torch.Tensor]:
        hook = self.strategy._hook
        assert isinstance(hook, LowRank)
        return {index: error.clone() for index, error in hook._errors.items()}

    @property
    def factors(self) -> dict[int, torch.Tensor]:
        hook = self.strategy._hook
        assert isinstance(hook, LowRank)
        return hook._factors


def gradient_of(model: torch.nn.Module, step: int) -> list[torch.Tensor]:
    """The sum over all virtual workers, in one process."""
    losses = torch.stack([loss_of(model, step, v) for v in range(VIRTUAL_WORKERS)])
    return list(torch.autograd.grad(losses.sum(), list(model.parameters())))


def reference(optimizer: Make, max_norm: float | None, *, approximates: bool) -> list[torch.Tensor]:
    """PowerSGD, or no compression at all, in one process: the gradient of the whole batch and one error."""
    model = make_model()
    optimizer_ = optimizer(model)
    owed: dict[int, torch.Tensor] = {}
    factors: dict[int, torch.Tensor] = {}
    for step in range(STEPS):
        for index, (parameter, gradient) in enumerate(zip(model.parameters(), gradient_of(model, step))):
            if approximates and step >= POWER.start_step and gradient.dim() == 2:
                if index not in factors:
                    own = torch.Generator().manual_seed(1 << 20 | index)
                    factors[index] = torch.randn(gradient.shape[1], POWER.rank, generator=own)
                whole = gradient + owed.get(index, 0)
                left = torch.linalg.qr(whole @ factors[index]).Q
                factors[index] = whole.T @ left
                gradient = left @ factors[index].T
                owed[index] = whole - gradient
            parameter.grad = gradient / sum(WEIGHTS)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer_.step()
    return [parameter.detach() for parameter in model.parameters()]


def _settings() -> list[Any]:
    """Return ranks, optimizer and norm of the test below: all pairs of the last two with three ranks, one with other numbers."""
    also = {(1, "sgd", None), (2, "adamw", 0.1), (4, "sgd", 0.1)}
    return [
        pytest.param(*one, marks=() if one[0] == 3 or one in also else only_long("as with three ranks"))
        for one in product([1, 2, 3, 4], OPTIMIZERS, [None, 0.1])
    ]


@pytest.mark.parametrize(("world_size", "optimizer", "max_norm"), _settings())
@pytest.mark.parametrize(
    ("hook", "tolerance"),
    [
        pytest.param(None, 1e-5, id="as they are"),
        pytest.param("fp16", 2e-3, id="fp16"),
        pytest.param("bf16", 2e-2, id="bf16"),
        pytest.param(POWER, 1e-4, id="powersgd"),
    ],
)
def test_twenty_steps_are_those_of_one_process(
    hook: Any, tolerance: float, world_size: int, optimizer: str, max_norm: float | None
) -> None:
    approximates = hook is POWER and world_size > 1
    want = reference(OPTIMIZERS[optimizer], max_norm, approximates=approximates)

    def make() -> Trainer:
        return Trainer(hook, OPTIMIZERS[optimizer], max_norm)

    if world_size == 1:
        trainers = [make().join(None).run(range(STEPS))]
    else:
        trainers = Ranks(world_size).run(lambda groups: make().join(groups).run(range(STEPS)))
    for trainer in trainers:
        for mine, first in zip(trainer.parameters, trainers[0].parameters):
            assert torch.equal(mine, first), "all ranks have the same bits"
        for mine, wanted in zip(trainer.parameters, want):
            torch.testing.assert_close(mine, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("hook", ["fp16", "bf16", POWER], ids=["fp16", "bf16", "powersgd"])
def test_step_that_is_done_again_leaves_the_bits_of_one_that_was_not(hook: Any) -> None:
    def run(cut: Sequence[int]) -> list[Trainer]:
        return Ranks(3).run(lambda groups: Trainer(hook, OPTIMIZERS["adamw"]).join(groups).run(range(8), cut=cut))

    for mine, wanted in zip(run([1, 4, 5, 7]), run([])):
        assert all(map(torch.equal, mine.parameters, wanted.parameters))


@pytest.mark.parametrize("size", [1e-9, 1e9], ids=["all below what fp16 has", "all above"])
def test_gradients_of_any_size_go_through_fp16(size: float) -> None:
    def run(hook: str | None) -> Trainer:
        def make() -> Trainer:
            return Trainer(hook, lambda model: torch.optim.SGD(model.parameters(), lr=0.0))

        return Ranks(2).run(lambda groups: make().join(groups).run(range(3), scale=lambda _: size))[1]

    for mine, wanted in zip(run("fp16").applied[2], run(None).applied[2]):
        assert float(wanted.abs().max()) > 0
        torch.testing.assert_close(mine, wanted, rtol=2e-3, atol=1e-3 * float(wanted.abs().max()))


def test_sum_that_overflows_fp16_is_sent_again_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient a million times that of the step before."""
    monkeypatch.setattr(ddp, "PARCEL_BYTES", 0)

    def run(hook: str | None) -> tuple[Trainer, int]:
        def make() -> Trainer:
            return Trainer(hook, lambda model: torch.optim.SGD(model.parameters(), lr=0.0))

        ranks = Ranks(2)
        trainers = ranks.run(
            lambda groups: make().join(groups).run(range(4), scale=lambda step: 1e6 if step == 2 else 1.0)
        )
        return trainers[0], ranks.calls.count("allreduce")

    (mine, sent), (wanted, sent_plain) = run("fp16"), run(None)
    num_buckets = sent_plain // 4
    # As it is in the first step, which knows no scale, rounded in the second; both in the third.
    assert sent == 5 * num_buckets
    assert num_buckets > 1
    for step, rtol in ((2, 1e-6), (3, 2e-3)):
        for got, want in zip(mine.applied[step], wanted.applied[step]):
            torch.testing.assert_close(got, want, rtol=rtol, atol=1e-4 if step == 3 else 0)


def test_scale_is_a_power_of_two_with_room_below_and_above() -> None:
    for exponent in range(-90, 90):
        largest = 1.37 * 2.0**exponent
        scale = scale_for(largest)
        assert scale.hex().startswith("0x1.0000000000000p"), "multiplying by it loses no bit"
        assert 2**9 <= largest * scale <= 2**10
    assert scale_for(1e-300) == 2.0**100


def test_nothing_of_a_gradient_is_lost_by_powersgd_while_no_rank_is() -> None:
    """What was applied and what the ranks still owe is the sum of all gradients, at whatever number of ranks, with a redo."""

    def make() -> Trainer:
        return Trainer(PowerSGD(2, 0, 1.0), lambda model: torch.optim.SGD(model.parameters(), lr=0.0))

    trainers = Ranks(2).run(lambda groups: make().join(groups).run(range(5), cut=[3]))
    assert_conserved(trainers[0].applied, trainers, range(5))
    # One more comes: it owes nothing and has no factor; the others go on with what they owe.
    joiner = make()
    joiner.applied = copy.deepcopy(trainers[0].applied)
    three = [*trainers, joiner]
    Ranks(3).run(lambda groups: three[groups.rank].join(groups, replaced=groups.rank == 2).run(range(5, 9)))
    assert_conserved(joiner.applied, three, range(9))
    for index, factor in joiner.factors.items():
        assert all(torch.equal(factor, other.factors[index]) for other in trainers)
    # One dies: what it owed is lost, and nothing else.
    gone, rest = three[1], [three[0], three[2]]
    lost = gone.owed
    Ranks(2).run(lambda groups: rest[groups.rank].join(groups).run(range(9, 12)))
    assert_conserved(rest[0].applied, rest, range(12), lost)
    # The last one alone applies what it owes at once; what the other owed is lost.
    lost = {index: error + rest[1].owed[index] for index, error in lost.items()}
    rest[0].join(None).run([12])
    assert rest[0].owed == {}
    assert_conserved(rest[0].applied, rest[:1], range(13), lost)


def assert_conserved(
    applied: list[list[torch.Tensor]], holders: list[Trainer], steps: range, lost: dict[int, torch.Tensor] | None = None
) -> None:
    model = make_model()
    want = [sum(parts) for parts in zip(*(gradient_of(model, step) for step in steps))]
    got = [sum(parts) * sum(WEIGHTS) for parts in zip(*applied)]
    for holder in holders:
        for index, error in holder.owed.items():
            got[index] = got[index] + error
    for index, error in (lost or {}).items():
        got[index] = got[index] + error
    for mine, wanted in zip(got, want):
        torch.testing.assert_close(mine, cast(torch.Tensor, wanted), rtol=1e-4, atol=1e-4)


def test_rank_that_gets_a_copy_of_the_state_owes_nothing() -> None:
    def one(groups: Groups) -> tuple[int, int]:
        trainer = Trainer(POWER, OPTIMIZERS["sgd"]).join(groups).run(range(5))
        before = len(trainer.owed)
        trainer.join(groups, replaced=True)
        return before, len(trainer.owed)

    assert Ranks(2).run(one) == [(2, 0), (2, 0)]


@pytest.mark.parametrize(("loss", "after_backward", "rounds"), CASES)
@pytest.mark.parametrize(
    ("hook", "rtol"),
    [("fp16", 2e-3), ("bf16", 2e-2), (PowerSGD(start_step=0), 1e-6)],
    ids=["fp16", "bf16", "powersgd: nothing is large enough"],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_late_and_unused_gradients_are_summed_as_without_a_hook(
    monkeypatch: pytest.MonkeyPatch,
    hook: Any,
    rtol: float,
    world_size: int,
    loss: Loss,
    after_backward: Any,
    rounds: Any,
) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 50)
    kind = cast(Any, lambda model, optimizer, plan: DataParallel(model, optimizer, plan, strategies.DataParallel(hook)))
    want = sum_of(DataParallel, Chain, loss, None, steps=3, after_backward=after_backward)
    outcomes = Ranks(world_size).run(
        lambda groups: sum_of(kind, Chain, loss, groups, steps=3, after_backward=after_backward)
    )
    for outcome in outcomes:
        assert_same(outcome.gradients[2], outcomes[0].gradients[2])
        for got, wanted in zip(outcome.gradients, want.gradients):
            for name, gradient in wanted.items():
                mine = got[name]
                assert (mine is None) == (gradient is None), name
                if mine is not None and gradient is not None:
                    torch.testing.assert_close(mine, gradient, rtol=rtol, atol=rtol * float(gradient.abs().max()))
        assert outcome.rounds[1:] == rounds[1:], (
            "small models' gradients do not travel with the rows, so that nothing depends on it"
        )


class Wide(Chain):
    """Layers that are wide enough to be approximated."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(4))


def widened(x: torch.Tensor) -> torch.Tensor:
    return x.repeat(1, 4)


def late(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return 1e-3 * shared_in_checkpoints(model, widened(x))


def partly_unused(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Layer 3 is used nowhere, layer 2 by the last virtual worker only."""
    layers = cast(Any, model).layers
    out = layers[1](layers[0](widened(x)))
    if torch.equal(x, BATCH[-1]):
        out = layers[2](out)
    return cast(torch.Tensor, 1e-3 * out.pow(2).sum())


@pytest.mark.parametrize("loss", [late, partly_unused])
def test_late_and_unused_gradients_are_neither_lost_nor_doubled_by_powersgd(loss: Loss) -> None:
    hooks: dict[int, LowRank] = {}

    def make(groups: Groups) -> Any:
        def kind(model: Any, optimizer: Any, plan: Any) -> DataParallel:
            strategy = DataParallel(
                model, optimizer, plan, strategies.DataParallel(PowerSGD(start_step=0, min_compression=1.0))
            )
            assert isinstance(strategy._hook, LowRank)
            hooks[groups.rank] = strategy._hook
            return strategy

        return kind

    want = sum_of(DataParallel, Wide, loss, None, steps=4)
    outcomes = Ranks(2).run(lambda groups: sum_of(make(groups), Wide, loss, groups, steps=4))
    assert hooks[0]._errors
    for index, name in enumerate(want.gradients[0]):
        wanted = [gradient[name] for gradient in want.gradients]
        got = [gradient[name] for gradient in outcomes[0].gradients]
        assert [one is None for one in got] == [one is None for one in wanted], name
        if wanted[0] is None:
            assert all(index not in hook._errors for hook in hooks.values())
            continue
        owed = [hook._errors[index] for hook in hooks.values() if index in hook._errors]
        applied_and_owed = torch.stack([*cast("list[torch.Tensor]", got), *owed]).sum(0)
        total = torch.stack(cast("list[torch.Tensor]", wanted)).sum(0)
        torch.testing.assert_close(applied_and_owed, total, rtol=1e-4, atol=1e-4 * float(total.abs().max()))


def test_what_no_rank_uses_any_more_is_still_owed() -> None:
    """A parameter without a gradient is not stepped; what it is owed is applied once it has one again."""
    hook = LowRank(PowerSGD(start_step=0, min_compression=1.0))
    hook._errors, hook._new = {0: torch.ones(2, 2)}, {0: (torch.zeros(2, 2), torch.zeros(2, 1))}
    hook.commit(bytes([0]))
    assert torch.equal(hook._errors[0], torch.ones(2, 2))
    assert hook._factors == {}


def test_factors_of_a_new_generation_are_equal_on_a_survivor_and_a_joiner() -> None:
    """And others than those of the generation before: what one projection never shows, the next one may."""

    def drawn(hook: LowRank, generation: int) -> torch.Tensor:
        hook.begin_generation(cast(Groups, SimpleNamespace(generation=generation)))
        return hook._factor(4, torch.zeros(6, 5))

    survivor = LowRank(POWER)
    first = drawn(survivor, 1)
    survivor._factors[4] = torch.full_like(first, 3.0)
    assert torch.equal(drawn(survivor, 2), drawn(LowRank(POWER), 2))
    assert not torch.equal(first, drawn(survivor, 2))
