"""Running statistics: a step that is redone changes them once, and all ranks have the same after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from regroup.errors import UsageError
from regroup.generation.groups import Groups
from regroup.parallel.buffers import Buffers
from tests.unit.parallel.ranks import Ranks


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of its thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num = 0

    def __torch_dispatch__(self, operation: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return operation(*args, **(kwargs or {}))


def test_redone_step_changes_running_statistics_once() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    once = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    once.load_state_dict(model.state_dict())
    batch = torch.randn(8, 4)
    buffers = Buffers(model)

    buffers.keep()
    assert buffers.changed() == []
    model(batch)
    assert buffers.changed() == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    buffers.restore()
    assert buffers.changed() == []
    model(batch)
    once(batch)

    for (name, got), (_, want) in zip(model.named_buffers(), once.named_buffers()):
        assert torch.equal(got, want), name


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.int64,
        torch.uint8,
        torch.uint16,
        torch.bool,
    ],
    ids=str,
)
def test_buffers_of_any_type_are_averaged_together(dtype: torch.dtype) -> None:
    def average(groups: Groups) -> dict[str, torch.Tensor]:
        model = torch.nn.Module()
        model.register_buffer("byte", torch.zeros(1, dtype=torch.uint8))  # what follows does not begin at a whole word
        model.register_buffer("conjugated", torch.tensor([1 + 2j]).conj())
        model.register_buffer("other", torch.ones(3))
        model.register_buffer("some", torch.zeros(2, 2).to(dtype))
        model.register_buffer("turned", torch.zeros(2, 3).t())
        buffers = Buffers(model)
        buffers.begin_generation(groups)
        for _ in range(2):  # the first step finds what changes, the next one sends it with the gradients
            buffers.keep()
            with torch.no_grad():
                model.byte.add_(1)  # type: ignore[operator]
                model.conjugated.mul_(2)  # type: ignore[operator]
                model.some.copy_(torch.tensor([[0.0, 1.0], [2.0, 3.0]]) + 2 * groups.rank)  # type: ignore[operator]
                model.turned.copy_(torch.arange(6.0).reshape(3, 2) + groups.rank)  # type: ignore[operator]
            buffers.launch()
            groups.wait(buffers.sent)
            buffers.average([0, 1])
            if any(groups_any(groups, bool(buffers.changed()))):
                buffers.average_changed([0, 1])
            assert buffers.changed() == []
        return dict(model.named_buffers())

    ranks = Ranks(2)
    first, second = ranks.run(average)
    assert ranks.calls.count("_allgather_base") == 2 + 2 + 1  # the question twice; which ones and those; all together
    for name in first:
        assert first[name].tolist() == second[name].tolist(), name
    whole = not (dtype.is_floating_point or dtype.is_complex)
    want = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(dtype)
    if whole:
        want = (torch.tensor([[0.0, 1.0], [2.0, 3.0]]) + 2).to(dtype)
    assert first["some"].tolist() == want.tolist()
    assert first["turned"].tolist() == (torch.arange(6.0).reshape(3, 2) + 0.5).tolist()
    assert first["conjugated"].tolist() == [4 - 8j]
    assert first["other"].tolist() == [1.0, 1.0, 1.0]


def groups_any(groups: Groups, mine: bool) -> list[bool]:
    theirs = torch.zeros(groups.world_size, dtype=torch.uint8)
    groups.wait([groups.launch("_allgather_base", theirs, torch.tensor([mine], dtype=torch.uint8))])
    return [bool(one) for one in theirs]


@pytest.mark.parametrize("size", [1, 3], ids=["a scalar and a number", "not a whole number of words"])
def test_only_rank_with_a_share_decides(size: int) -> None:
    def average(groups: Groups) -> list[Any]:
        model = torch.nn.Module()
        model.register_buffer("bytes", torch.zeros(size, dtype=torch.uint8))
        model.register_buffer("mean", torch.zeros(()))
        model.register_buffer("number", torch.zeros((), dtype=torch.int64))
        buffers = Buffers(model)
        buffers.begin_generation(groups)
        buffers.keep()
        if groups.rank == 0:
            for buffer in model.buffers():
                buffer.add_(3)
        buffers.average_changed([0])
        return [buffer.tolist() for buffer in model.buffers()]

    assert Ranks(2).run(average) == [[[3] * size, 3.0, 3]] * 2


def norms(num: int) -> torch.nn.Module:
    """Return batch norms of several widths and types, the last of them in channels_last, and scalars between them."""
    model = torch.nn.Sequential(*(torch.nn.BatchNorm1d(3 + i % 4) for i in range(num)))
    model[-1].to(torch.bfloat16)
    model.register_buffer("scale", torch.ones(()))
    model.register_buffer("table", torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last))
    return model


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_ran", [1, 3])
def test_averages_are_those_of_each_buffer_by_itself(world_size: int, num_ran: int) -> None:
    ran = range(min(num_ran, world_size))

    def average(groups: Groups) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = norms(5)
        buffers = Buffers(model)
        buffers.begin_generation(groups)
        generator = torch.Generator().manual_seed(groups.rank)
        own: list[torch.Tensor] = []
        for _ in range(2):  # found, then sent with the gradients
            buffers.keep()
            with torch.no_grad():
                for one in model.buffers():
                    one.copy_(torch.randn(one.shape, generator=generator) * 100)
            own = [one.clone() for one in model.buffers()]
            buffers.launch()
            buffers.average(ran)
            buffers.average_changed(ran)
        return own, list(model.buffers())

    results = Ranks(world_size).run(average)
    for i, got in enumerate(results[0][1]):
        rows = torch.stack([results[rank][0][i] for rank in ran])
        want = rows.mean(0) if got.is_floating_point() else rows.amax(0)
        torch.testing.assert_close(got, want if world_size > 1 else results[0][0][i], rtol=1e-6, atol=0)
        assert all(torch.equal(got, other[1][i]) for other in results), "the same bits on each rank"


@pytest.mark.parametrize("world_size", [4, 64])
def test_number_of_operations_is_not_that_of_buffers_times_ranks(world_size: int) -> None:
    class Alone:
        """The rank's own values from each rank."""

        rank, device = 0, torch.device("cpu")

        def __init__(self) -> None:
            self.world_size = world_size

        def launch(self, method: str, *arguments: Any, **_: Any) -> None:
            if method == "_allgather_base":
                gathered, mine = arguments
                gathered.view(world_size, -1).copy_(mine.expand(world_size, -1))
            elif method == "gather":
                (rows,), (mine,), _ = arguments
                for row in rows:
                    row.copy_(mine)

        def wait(self, _pending: Any) -> None:
            pass

    num_layers = 53  # as many as a ResNet-50 has
    model, groups = torch.nn.Sequential(*(torch.nn.BatchNorm1d(16) for _ in range(num_layers))), Alone()
    buffers = Buffers(model)
    buffers.begin_generation(groups)  # type: ignore[arg-type]
    x = torch.randn(8, 16)
    buffers.keep()
    model(x)
    buffers.average_changed(range(world_size))
    buffers.keep()
    model(x)
    with Operations() as sends:
        buffers.launch()
    with Operations() as averages:
        buffers.average(range(world_size))
    num_buffers = 3 * num_layers
    assert num_buffers < sends.num <= 2 * num_buffers, "one view of each, and a few"
    assert num_buffers < averages.num <= 3 * num_buffers + 2 * world_size, (
        "a view and a copy of each, and one row of each rank"
    )


def test_buffer_that_grows_later_is_refused_too() -> None:
    model = torch.nn.Module()
    model.register_buffer("table", torch.zeros(4))
    buffers = Buffers(model)
    for grows in (False, True):
        buffers.keep()
        if grows:
            model.table = torch.ones(8)
            with pytest.raises(UsageError, match=r"Buffer table went from shape \[4\] to \[8\]"):
                buffers.changed()
        else:
            assert buffers.changed() == []


def test_rank_without_a_share_counts_for_nothing() -> None:
    def average(groups: Groups) -> list[float]:
        model = torch.nn.Module()
        model.register_buffer("mean", torch.zeros(2))
        buffers = Buffers(model)
        buffers.begin_generation(groups)
        buffers.keep()
        if groups.rank < 2:
            model.mean.add_(1 + groups.rank)  # type: ignore[operator]
        buffers.average_changed([0, 1])
        return list(model.mean.tolist())  # type: ignore[operator]

    assert Ranks(3).run(average) == [[1.5, 1.5]] * 3


def test_cache_that_grows_is_left_alone() -> None:
    """Rotary embeddings keep a table for the longest sequence so far."""
    model = torch.nn.Module()
    model.register_buffer("table", torch.zeros(4), persistent=False)
    buffers = Buffers(model)
    buffers.keep()
    model.register_buffer("table", torch.ones(8), persistent=False)
    model.register_buffer("another", torch.ones(2), persistent=False)
    assert buffers.changed() == []
    buffers.restore()
    assert len(model.table) == 8  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["table", "another"])
def test_part_of_the_state_that_grows_is_refused(name: str) -> None:
    model = torch.nn.Module()
    model.register_buffer("table", torch.zeros(4))
    buffers = Buffers(model)
    buffers.keep()
    model.register_buffer(name, torch.ones(8))
    with pytest.raises(UsageError, match=f"Buffer {name} .* persistent=False"):
        buffers.changed()
    buffers.restore()
