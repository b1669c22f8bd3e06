"""Tensors of a checkpoint are read straight into their places where that is possible, and by DCP where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from regroup.checkpoint import store
from regroup.checkpoint import tree as trees
from regroup.checkpoint.errors import CheckpointError
from regroup.checkpoint.selection import name_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
LARGE = (300, 120)


def written(directory: Path, model: dict[str, torch.Tensor]) -> Path:
    structure, tensors = trees.pack({"model": model, "optimizer": {}, "state": {}})
    return store.write_data(directory, name_of(1, 1, "a"), "job", structure, tensors)


@pytest.fixture
def by_dcp(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors that DCP has read, by their names."""
    names: list[str] = []
    read = FileSystemReader.read_data

    def recorded(self: Any, plan: Any, planner: Any) -> Any:
        names.extend(item.storage_index.fqn for item in plan.items)
        return read(self, plan, planner)

    monkeypatch.setattr(FileSystemReader, "read_data", recorded)
    return names


def test_large_tensors_of_all_types_are_read_straight_and_have_every_bit(tmp_path: Path, by_dcp: list[str]) -> None:
    torch.manual_seed(1)
    values = torch.randn(LARGE)
    types = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64)
    model = {f"{one}".removeprefix("torch."): (values * 50).abs().to(one).repeat(2, 2) for one in types}
    model |= {"turned": values.repeat(2, 2).t(), "scalar": torch.tensor(3.0), "one more": values.repeat(2, 2)}
    got = store.read_data(written(tmp_path, model))["model"]
    for name, one in model.items():
        assert torch.equal(got[name], one), name
        assert got[name].dtype == one.dtype
    assert sorted(name for name in by_dcp if name.startswith("model.")) == ["model.scalar", "model.turned"]


@pytest.mark.parametrize("kept", [0.5, 0.999])
def test_file_that_ends_too_early_is_one_sentence(tmp_path: Path, kept: float) -> None:
    path = written(tmp_path, {"weight": torch.randn(LARGE), "bias": torch.randn(LARGE)})
    (file,) = path.glob("*.distcp")
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(CheckpointError, match=r"^Checkpoint step-1\.g1-a cannot be read \(.*\)\.$"):
        store.read_data(path)


def test_like_is_asked_for_the_place_that_a_tensor_has_in_the_chosen_tree(tmp_path: Path) -> None:
    """A part of a pipeline has other numbers for its parameters than the whole model in the file."""
    path = written(tmp_path, {"0": torch.zeros(2), "1": torch.ones(3)})
    asked = []

    def like(place: str, shape: tuple[int, ...]) -> None:
        asked.append((place, shape))

    def choose(tree: trees.Tree) -> trees.Tree:
        return {**tree, "model": {"0": tree["model"]["1"]}}

    got = store.read_data(path, like, choose)
    assert asked == [("model.0", (3,))]
    assert torch.equal(got["model"]["0"], torch.ones(3))
