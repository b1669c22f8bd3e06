"""What a user may pass as data."""

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from regroup.data import Batch, DataError, as_source

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
    batch = source.fetch(IDS)
    assert len(source) == 6
    assert torch.equal(batch.x, X[IDS])
    assert torch.equal(batch.y, Y[IDS])


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        pytest.param((X, Y[:5]), r"x has shape \[6, 2\] and y \[5\]", id="lengths differ"),
        pytest.param((X,), "data has 1 tensors; two are needed", id="one tensor"),
        pytest.param((X[:0], Y[:0]), "no samples", id="empty"),
        pytest.param("digits.csv", "data is str", id="a file name"),
        pytest.param(iter([1]), "no samples to look up by number", id="an iterator"),
        pytest.param(type("F", (), {"fetch": print})(), "has fetch but no __len__", id="fetch without length"),
    ],
)
def test_data_that_is_no_source_is_refused_in_one_sentence(data: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        as_source(data)


def test_dataset_of_single_items_is_refused_when_read() -> None:
    source = as_source([1.0, 2.0, 3.0])
    with pytest.raises(DataError, match=r"items of data \(list\) are float, not pairs"):
        source.fetch(torch.tensor([0]))
