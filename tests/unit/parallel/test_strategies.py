"""What a strategy makes of the gradients of several ranks: the sum over all of them, whoever got which, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from regroup import strategies
from regroup.data import SamplePlan
from regroup.errors import UsageError
from regroup.generation import rows
from regroup.generation.groups import Groups
from regroup.layout import Layout
from regroup.parallel import ddp, gradients
from regroup.parallel.ddp import DataParallel
from regroup.parallel.exact import Exact
from regroup.parallel.strategy import Share, Strategy
from tests.unit.parallel.ranks import Ranks, Told

Loss = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
VIRTUAL_WORKERS = 4
BATCH = [torch.full((2, 3), float(v + 1)) for v in range(VIRTUAL_WORKERS)]


@dataclass
class Outcome:
    """What one rank has after some steps: gradients by name, and how often rows were gathered in each step."""

    gradients: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)


def train(
    kind: type[DataParallel] | type[Exact],
    make: Callable[[], torch.nn.Module],
    loss: Loss,
    groups: Groups | None,
    *,
    steps: int = 1,
    after_backward: Callable[[torch.nn.Module, int], None] | None = None,
) -> Outcome:
    """Run steps of a strategy as `Committer` does, without an optimizer."""
    model = make()
    own = torch.Generator().manual_seed(5)  # the process's is shared with the other ranks, and checkpoints set it
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=own) / 2)
    plan = SamplePlan(0, 64, 2 * VIRTUAL_WORKERS, 2, VIRTUAL_WORKERS)
    strategy: Strategy = kind(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    strategy.begin_generation(groups)
    rank, world_size = (groups.rank, groups.world_size) if groups is not None else (0, 1)
    outcome = Outcome()
    for index in range(steps):
        strategy.begin_step()
        mine = plan.share(rank, world_size)
        share = Share(index)
        for v in mine:
            value = loss(model, BATCH[v])
            strategy.backward(value, torch.ones_like(value), last=v == mine[-1])
            strategy.added(v, 2.0)
            share.loss_sums[v], share.weights[v] = float(value.detach()), 2.0
        if after_backward is not None:
            after_backward(model, rank)
        told = Told(groups)
        strategy.reduce(share, told)
        strategy.scale(1.0)
        named = model.named_parameters()
        outcome.gradients.append({name: None if p.grad is None else p.grad.clone() for name, p in named})
        outcome.rounds.append(told.rounds)
    strategy.close()
    return outcome


def assert_same(got: dict[str, torch.Tensor | None], want: dict[str, torch.Tensor | None]) -> None:
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        mine = got[name]
        assert (mine is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(cast(torch.Tensor, mine), gradient)


class Chain(torch.nn.Module):
    """Four layers, each a bucket of its own; the second is used twice where `twice` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def plain(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, model(x).pow(2).sum())


def shared_in_checkpoints(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A layer that is computed again in two re-entrant checkpoints: its gradient comes in two parts. The ranks are threads and
    share torch's generator, whose lock and Python's can wait for each other: nothing is drawn here, and its state is not kept."""
    layers = cast(Any, model).layers
    x = layers[0](x)
    x = checkpoint(layers[3], x, use_reentrant=True, preserve_rng_state=False)
    x = layers[1](x)
    x = checkpoint(layers[3], x, use_reentrant=True, preserve_rng_state=False)
    return cast(torch.Tensor, layers[2](x).pow(2).sum())


def second_backward(model: torch.nn.Module, rank: int) -> None:
    if rank == 0:  # on one rank only, after its share: it belongs to the sum all the same
        (0.5 * cast(Any, model).layers[3].weight.pow(2).sum()).backward()


def some_unused(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Layer 3 is used nowhere, layer 2 by the last virtual worker only."""
    layers = cast(Any, model).layers
    is_last = torch.equal(x, BATCH[-1])
    x = layers[1](layers[0](x))
    if is_last:
        x = layers[2](x)
    return x.pow(2).sum()


@pytest.fixture(autouse=True)
def one_bucket_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 50)


CASES = [
    pytest.param(plain, None, [1, 1, 1], id="plain"),
    pytest.param(shared_in_checkpoints, None, [2, 2, 2], id="a shared layer in re-entrant checkpoints"),
    pytest.param(plain, second_backward, [2, 2, 2], id="a second backward on one rank"),
    pytest.param(some_unused, None, [2, 2, 2], id="unused on all ranks, and on one"),
]


@pytest.mark.parametrize("is_small", [False, True], ids=["all-reduced", "with the rows"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("loss", "after_backward", "rounds"), CASES)
def test_sum_is_that_of_one_process(
    monkeypatch: pytest.MonkeyPatch,
    loss: Loss,
    after_backward: Callable[[torch.nn.Module, int], None] | None,
    rounds: list[int],
    world_size: int,
    is_small: bool,
) -> None:
    monkeypatch.setattr(ddp, "PARCEL_BYTES", 1 << 20 if is_small else 0)
    want = train(DataParallel, Chain, loss, None, steps=3, after_backward=after_backward)
    ranks = Ranks(world_size)
    outcomes = ranks.run(lambda g: train(DataParallel, Chain, loss, g, steps=3, after_backward=after_backward))
    for outcome in outcomes:
        for got, wanted in zip(outcome.gradients, want.gradients):
            assert_same(got, wanted)
        # Nothing comes too late for what travels with the rows.
        assert outcome.rounds == ([1, 1, 1] if is_small and loss is not some_unused else rounds)
    assert ("allreduce" in ranks.calls) != is_small


@pytest.mark.parametrize(
    ("kind", "parcel_bytes"),
    [
        pytest.param(DataParallel, 0, id="fast"),
        pytest.param(DataParallel, 1 << 20, id="fast, with the rows"),
        pytest.param(Exact, 0, id="exact"),
    ],
)
def test_rows_along_a_tree_change_nothing(
    monkeypatch: pytest.MonkeyPatch, kind: type[DataParallel] | type[Exact], parcel_bytes: int
) -> None:
    """All that is gathered of each rank goes there: rows, parcels, unused parameters, sums of losses."""
    monkeypatch.setattr(ddp, "PARCEL_BYTES", parcel_bytes)
    by_ring = Ranks(3).run(lambda g: train(kind, Chain, some_unused, g, steps=2))
    monkeypatch.setattr(rows, "TREE_RANKS", 3)
    ranks = Ranks(3)
    for got, want in zip(ranks.run(lambda g: train(kind, Chain, some_unused, g, steps=2)), by_ring):
        assert got.rounds == want.rounds
        for mine, wanted in zip(got.gradients, want.gradients):
            for name, gradient in wanted.items():
                other = mine[name]
                assert other is gradient is None or torch.equal(cast(Any, other), cast(Any, gradient)), name
    assert "gather" in ranks.calls
    assert ("_allgather_base" in ranks.calls) == (kind is Exact), "the gradients of an exact sum are no rows"


@pytest.mark.parametrize("loss", [plain, shared_in_checkpoints, some_unused])
def test_exact_alone_leaves_the_same_parameters_without_a_gradient(loss: Loss) -> None:
    fast, exact = (train(kind, Chain, loss, None) for kind in (DataParallel, Exact))
    torch.use_deterministic_algorithms(False)
    assert_same(exact.gradients[0], fast.gradients[0])


def test_a_parameter_without_a_gradient_does_not_hold_back_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer 3 is in the first bucket; once it was not used for some steps all others are sent while backward runs."""
    monkeypatch.setattr(ddp, "PARCEL_BYTES", 0)
    sent: list[int] = []

    def note(_model: torch.nn.Module, rank: int) -> None:
        if rank == 0:
            sent.append(ranks.calls.count("allreduce"))

    ranks = Ranks(2)

    def unused(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        layers = cast(Any, model).layers
        return cast(torch.Tensor, layers[2](layers[1](layers[0](x))).pow(2).sum())

    ranks.run(lambda g: train(DataParallel, Chain, unused, g, steps=10, after_backward=note))
    before = [4 * step for step in range(ddp.IDLE_STEPS)]
    assert sent == [*before, 36, 40], "first the bucket is waited for; then all are on their way when backward ends"


def test_models_that_are_trained_in_turn_send_nothing_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp, "PARCEL_BYTES", 0)

    def alternating(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        layers = cast(Any, model).layers
        first = 2 * (int(x[0, 0]) < 0)
        return cast(torch.Tensor, layers[first + 1](layers[first](x)).pow(2).sum())

    def in_turn(step: int) -> Loss:
        return lambda model, x: alternating(model, x if step % 2 else -x)

    def run(groups: Groups | None) -> Outcome:
        losses = iter(range(10**6))
        each = VIRTUAL_WORKERS if groups is None else VIRTUAL_WORKERS // groups.world_size
        return train(DataParallel, Chain, lambda m, x: in_turn(next(losses) // each)(m, x), groups, steps=6)

    want = run(None)
    for outcome in Ranks(2).run(run):
        assert outcome.rounds == [1] * 6
        for got, wanted in zip(outcome.gradients, want.gradients):
            assert_same(got, wanted)


def test_sparse_gradients_are_summed_whenever_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp, "PARCEL_BYTES", 0)

    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(5, 3, sparse=True)
            self.out = torch.nn.Linear(3, 3)

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        words = cast(Any, model)
        return cast(torch.Tensor, words.out(words.table(x.long()[:, 0] - 1)).pow(2).sum())

    def more(model: torch.nn.Module, rank: int) -> None:
        if rank == 0:
            cast(Any, model).table(torch.tensor([4])).sum().backward()

    want = train(DataParallel, Words, loss, None, after_backward=more)
    for outcome in Ranks(2).run(lambda g: train(DataParallel, Words, loss, g, after_backward=more)):
        assert_same(outcome.gradients[0], want.gradients[0])


def test_frozen_sparse_embedding_and_a_sparse_cache_are_left_alone() -> None:
    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(5, 3, sparse=True).requires_grad_(False)
            self.out = torch.nn.Linear(3, 3)
            self.register_buffer("graph", torch.eye(3).to_sparse(), persistent=False)

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        words = cast(Any, model)
        rows = words.out(words.table(x.long()[:, 0] - 1))
        return cast(torch.Tensor, torch.sparse.mm(words.graph, rows.T).pow(2).sum())

    want = train(DataParallel, Words, loss, None, steps=2)
    for outcome in Ranks(2).run(lambda groups: train(DataParallel, Words, loss, groups, steps=2)):
        for got, wanted in zip(outcome.gradients, want.gradients):
            assert_same(got, wanted)


def test_gradients_of_a_step_that_was_cut_off_get_new_memory() -> None:
    """A GPU, or a thread, may write into the old one until the abort has ended."""

    def one(groups: Groups) -> tuple[list[int], list[int], list[int]]:
        model = torch.nn.Linear(3, 2)
        plan = SamplePlan(0, 64, 2 * VIRTUAL_WORKERS, 2, VIRTUAL_WORKERS)
        strategy = DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
        strategy.begin_generation(groups)
        strategy._in_parcel = False

        def memory() -> list[int]:
            return [bucket.flat.data_ptr() for bucket in strategy._gradients.buckets]

        strategy.begin_step()
        held = [bucket.flat for bucket in strategy._gradients.buckets]  # so that it is not used again
        first = memory()
        strategy._launch(Share(0))
        strategy.begin_step()
        second = memory()
        strategy._launch(Share(0))
        strategy._wait()
        strategy.begin_step()
        del held
        return first, second, memory()

    for first, second, third in Ranks(2).run(one):
        assert set(first).isdisjoint(second)
        assert second == third, "a step that was waited for leaves its memory"


def test_uneven_shares_in_a_model_group_are_refused() -> None:
    model = torch.nn.Linear(2, 2)
    plan = SamplePlan(0, 64, 8, 2, layout=Layout.of({"shard": 2}))
    with pytest.raises(UsageError, match=r"uneven=True\) does not work with regroup\.mesh\(\)"):
        DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, strategies.DataParallel(uneven=True))
