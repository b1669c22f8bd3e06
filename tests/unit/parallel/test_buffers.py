"""Running statistics: a step that is redone changes them once, and all ranks have the same after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regroup.errors import UsageError
from regroup.generation.groups import Groups
from regroup.parallel.buffers import Buffers
from tests.unit.parallel.ranks import Ranks


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
