"""The table of a DataLoader's arguments names each, and what it says of those that change a batch is so."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

from regroup.data import DataError, SamplePlan
from regroup.data.sources import LoaderSource

PAGE = Path(__file__).parents[3] / "docs/reference/library.md"
DATASET = TensorDataset(torch.arange(10))


def test_table_names_every_argument_of_a_dataloader() -> None:
    table = PAGE.read_text().split("| argument of DataLoader |")[1].split("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(set(inspect.signature(DataLoader.__init__).parameters) - {"self"})


@pytest.mark.parametrize(
    ("arguments", "in_order"),
    [
        pytest.param({}, True, id="the default"),
        pytest.param({"shuffle": True}, False, id="shuffled"),
        pytest.param({"sampler": SequentialSampler(DATASET)}, True, id="torch's own sampler in order"),
        pytest.param({"sampler": RandomSampler(DATASET)}, False, id="torch's own random one"),
        pytest.param({"sampler": RandomSampler(DATASET, replacement=True)}, None, id="with replacement"),
        pytest.param({"sampler": RandomSampler(DATASET, num_samples=4)}, None, id="of some samples"),
        pytest.param({"sampler": [3, 1, 2]}, None, id="a list as a sampler"),
        pytest.param({"batch_sampler": [[3, 1], [2, 0]], "batch_size": 1}, None, id="a sampler of batches"),
        pytest.param({"batch_size": None}, None, id="no batches"),
        pytest.param({"batch_size": 3}, None, id="batches of another size"),
        pytest.param({"drop_last": True}, True, id="no sample is dropped"),
        pytest.param({"in_order": False, "generator": torch.Generator()}, True, id="what is ignored"),
    ],
)
def test_order_that_a_dataloader_asks_for(arguments: dict[str, Any], in_order: bool | None) -> None:
    loader: DataLoader[Any] = DataLoader(DATASET, **{"batch_size": 2} | arguments)
    if in_order is None:
        with pytest.raises(DataError, match="data is a DataLoader with"):
            LoaderSource(loader, 2)
        return
    assert LoaderSource(loader, 2).in_order == in_order


def test_batch_at_the_end_of_an_epoch_goes_on_with_the_next_one() -> None:
    plan = SamplePlan(0, 10, 4, 2, shuffles=False)
    assert [plan.ids(step, v).tolist() for step in (0, 2) for v in (0, 1)] == [[0, 1], [2, 3], [8, 9], [0, 1]]
