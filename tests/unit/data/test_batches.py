"""Batches are what collate returned, whoever reads them: as Hugging Face's datasets and collators, and others, make them."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

from regroup.data import Key, SamplePlan, as_source, make_feed
from regroup.data.feed import Ahead

PLAN = SamplePlan(3, 64, 16, 4, 4)
KEYS = [Key(0, 0), Key(0, 1), Key(1, 0)]
SHARE = range(2)
PAD = 0


class Rows:
    """As `datasets.Dataset` is looked at: no torch Dataset; a column by its name, one row by its number, rows by `__getitems__`."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __len__(self) -> int:
        return 64

    def __getitem__(self, key: Any) -> Any:
        self.calls.append("one")
        if isinstance(key, str):
            return [self._row(i)[key] for i in range(64)]
        return self._row(key)

    def __getitems__(self, keys: list[int]) -> list[Any]:
        assert all(type(key) is int for key in keys), "arrow looks up no tensors"
        self.calls.append("many")
        return [self._row(key) for key in keys]

    def _row(self, i: int) -> dict[str, Any]:
        """Return a text of 1 to 8 tokens, which cannot be stacked."""
        return {"input_ids": [1 + i] * (1 + i % 8), "label": i}


class Tensors(Rows):
    """As `Dataset.with_format("torch")`."""

    def _row(self, i: int) -> dict[str, Any]:
        return {"x": torch.full((3,), float(i)), "label": torch.tensor(i)}


class Encoding(UserDict[str, Any]):
    """As `transformers.BatchEncoding`: a mapping that is no dict."""

    def to(self, device: str) -> Encoding:
        self.data = {name: value.to(device) for name, value in self.items()}
        return self


class Masking:
    """As a collator of a language model: it pads, and masks what it draws."""

    def __call__(self, rows: list[dict[str, Any]]) -> Encoding:
        length = max(len(row["input_ids"]) for row in rows)
        ids = torch.tensor([row["input_ids"] + [PAD] * (length - len(row["input_ids"])) for row in rows])
        masked = torch.bernoulli(torch.full(ids.shape, 0.3)).bool() & (ids != PAD)
        return Encoding({"input_ids": ids.masked_fill(masked, -1), "labels": ids.masked_fill(~masked, -100)})


class Pair(NamedTuple):
    x: torch.Tensor
    name: list[str]


def as_pair(rows: list[dict[str, Any]]) -> Pair:
    return Pair(torch.stack([row["x"] for row in rows]), [f"row {int(row['label'])}" for row in rows])


def loader_of(rows: Any, **settings: Any) -> DataLoader[Any]:
    return DataLoader(rows, batch_size=4, **settings)


def batches(data: Any) -> list[Any]:
    feed = make_feed(as_source(data, 4), PLAN)
    try:
        return [feed.take(key, SHARE) for key in KEYS]
    finally:
        feed.close()


@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_collators_batch_comes_as_it_is_and_draws_the_same(num_workers: int, pin_memory: bool) -> None:
    torch.manual_seed(num_workers)
    loader = loader_of(Rows(), collate_fn=Masking(), num_workers=num_workers, pin_memory=pin_memory)
    found = batches(loader)
    alone = batches(loader_of(Rows(), collate_fn=Masking()))
    for key, batch, other in zip(KEYS, found, alone):
        assert type(batch) is Encoding
        assert torch.equal(batch["input_ids"], other["input_ids"])
        whole = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
        assert [row[0] for row in whole.tolist()] == [1 + i for i in PLAN.ids(*key).tolist()]
        assert whole.shape[1] == max(1 + i % 8 for i in PLAN.ids(*key).tolist())
        assert (batch["labels"] != -100).any()
        assert type(batch.to("cpu")) is Encoding


@pytest.mark.parametrize("num_workers", [None, 0, 2])
def test_rows_of_tensors_are_a_dict_of_tensors(num_workers: int | None) -> None:
    """None: the dataset itself is passed."""
    data = Tensors() if num_workers is None else loader_of(Tensors(), num_workers=num_workers)
    for key, batch in zip(KEYS, batches(data)):
        ids = PLAN.ids(*key)
        assert type(batch) is dict
        assert torch.equal(batch["label"], ids)
        assert torch.equal(batch["x"], ids.float().view(-1, 1).expand(4, 3))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_named_tuple_of_what_is_no_tensor_stays_one(num_workers: int) -> None:
    for key, batch in zip(KEYS, batches(loader_of(Tensors(), collate_fn=as_pair, num_workers=num_workers))):
        assert type(batch) is Pair
        assert batch.name == [f"row {i}" for i in PLAN.ids(*key).tolist()]


def test_rows_of_a_batch_are_looked_up_together() -> None:
    rows = Rows()
    batches(loader_of(rows, collate_fn=Masking()))
    assert rows.calls == ["many"] * len(KEYS)


@pytest.mark.parametrize("there", [True, False])
def test_loader_pins_where_there_is_a_device(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: there)
    for asked in (True, False):
        feed = make_feed(as_source(loader_of(Tensors(), pin_memory=asked), 4), PLAN)
        assert isinstance(feed, Ahead)
        assert feed._loader.pin_memory is (asked and there)
