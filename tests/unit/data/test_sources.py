"""What a user may pass as data."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler

from regroup.data import Batch, DataError, LoaderSource, SamplePlan, as_source

X, Y = torch.arange(12.0).view(6, 2), torch.arange(6)
IDS = torch.tensor([4, 0, 4])


class Pairs(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return X[i], int(Y[i])


class Own:
    def __len__(self) -> int:
        return 6

    def fetch(self, ids: torch.Tensor) -> Batch:
        return Batch(X[ids], Y[ids])


@pytest.mark.parametrize(
    "data",
    [
        pytest.param((X, Y), id="pair of tensors"),
        pytest.param([X, Y], id="list of two tensors"),
        pytest.param(TensorDataset(X, Y), id="TensorDataset"),
        pytest.param(Pairs(), id="map-style dataset"),
        pytest.param(list(zip(X, Y)), id="list of pairs"),
        pytest.param(Own(), id="own class"),
    ],
)
def test_source_fetches_the_samples_in_the_order_of_the_ids(data: Any) -> None:
    source = as_source(data)
    x, y = source.fetch(IDS)
    assert len(source) == 6
    assert torch.equal(x, X[IDS])
    assert torch.equal(y, Y[IDS])


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        pytest.param((X, Y[:5]), r"tensors have shapes \[6, 2\], \[5\]; their first dimensions", id="lengths differ"),
        pytest.param((X, torch.tensor(1.0)), r"shapes \[6, 2\], \[\]", id="a scalar"),
        pytest.param((X.numpy(), Y.numpy()), "data is a tuple of ndarray, ndarray", id="arrays"),
        pytest.param((X[:0], Y[:0]), "no samples", id="empty"),
        pytest.param(
            {"train": Pairs(), "test": Pairs()},
            r"dict of train, test\. .* such as data\['train'\]",
            id="several datasets",
        ),
        pytest.param("digits.csv", "data is str", id="a file name"),
        pytest.param(iter([1]), "data is a list_iterator, which no other process can continue", id="an iterator"),
        pytest.param((i for i in X), r"data is a generator, .*Pass regroup.stream\(open_at\)", id="a generator"),
        pytest.param(sorted, "data is a builtin_function_or_method. Pass regroup.stream", id="a function"),
        pytest.param(object(), "no samples to look up by number", id="anything else"),
        pytest.param(type("F", (), {"fetch": print})(), "has fetch but no __len__", id="fetch without length"),
    ],
)
def test_data_that_is_no_source_is_refused_in_one_sentence(data: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        as_source(data)


def test_batch_is_what_collate_returned() -> None:
    words = [{"ids": torch.arange(3) + i, "label": i} for i in range(6)]
    batch = as_source(words).fetch(IDS)
    assert batch["label"].tolist() == IDS.tolist()
    assert batch["ids"].shape == (3, 3)
    assert as_source([1.0, 2.0, 3.0]).fetch(torch.tensor([2, 0])).tolist() == [3.0, 1.0]
    (only,) = as_source((X,)).fetch(IDS)
    assert torch.equal(only, X[IDS])


def test_loader_is_taken_for_its_collate_function() -> None:
    loader = DataLoader(Pairs(), batch_size=3, shuffle=True, collate_fn=lambda items: [y for _, y in items])
    assert as_source(loader, 3).fetch(IDS) == IDS.tolist()


class Turned(TensorDataset):
    """It does something to its samples."""

    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)  # type: ignore[no-untyped-call]
        return -x, y


def test_samples_are_what_the_dataset_makes_of_them() -> None:
    assert torch.equal(as_source(Turned(X, Y)).fetch(IDS)[0], -X[IDS])
    rows = as_source([X[i] for i in range(6)])
    assert len(rows) == 6
    assert torch.equal(rows.fetch(IDS), X[IDS])


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter(())


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


@pytest.mark.parametrize(
    ("loader", "sentence"),
    [
        pytest.param(DataLoader(Stream(), batch_size=3), "IterableDataset, which has no samples", id="a stream"),
        pytest.param(
            DataLoader(Pairs(), batch_size=None), "batch_size=None, whose dataset makes batches", id="no batches"
        ),
        pytest.param(
            DataLoader(Pairs(), batch_size=3, sampler=WeightedRandomSampler([1.0] * 6, 6)),
            "WeightedRandomSampler, which would be ignored",
            id="a sampler",
        ),
        pytest.param(
            DataLoader(Pairs(), batch_sampler=[[0, 1, 2], [3, 4, 5]]),
            "list, which would be ignored",
            id="a batch sampler",
        ),
        pytest.param(
            DataLoader(Pairs(), batch_size=3, sampler=RandomSampler(Pairs(), replacement=True, num_samples=9)),
            "RandomSampler, which would be ignored",
            id="samples that come again",
        ),
        pytest.param(OwnLoader(Pairs(), batch_size=3), "__iter__ of its own", id="an own loader"),
        pytest.param(DataLoader(Pairs(), batch_size=4), "batch_size=4, and microbatch is 3", id="another size"),
    ],
)
def test_loader_that_decides_which_samples_come_is_refused(loader: DataLoader[Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        as_source(loader, 3)


@pytest.mark.parametrize(("shuffle", "in_order"), [(False, True), (None, True), (True, False)])
def test_loader_that_does_not_shuffle_keeps_the_datasets_order(shuffle: bool | None, in_order: bool) -> None:
    source = as_source(DataLoader(Pairs(), batch_size=3, shuffle=shuffle), 3)
    assert isinstance(source, LoaderSource)
    assert source.in_order == in_order


def test_each_epoch_of_a_plan_that_does_not_shuffle_is_in_order() -> None:
    plan = SamplePlan(0, 6, 4, 2, shuffles=False)
    drawn = [plan.ids(step, v).tolist() for step in range(3) for v in range(2)]
    assert drawn == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3], [4, 5]]
    assert plan.digest(3) == SamplePlan(0, 6, 4, 2).digest(3), "whole epochs are of the same samples in any order"
