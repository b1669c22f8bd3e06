"""A state as tensors and JSON."""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from regroup.checkpoint.errors import CheckpointError
from regroup.checkpoint.tree import differences, pack, unpack


class P(NamedTuple):
    x: int


def nested() -> torch.Tensor:
    """Return two rows of different lengths in one tensor."""
    return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({"a": 1, "b": 0.1, "c": "x", "d": True, "e": None}, id="plain values"),
        pytest.param({"nan": math.nan, "inf": -math.inf, "tiny": 5e-324, "big": 2**80}, id="odd numbers"),
        pytest.param({0: {"1": []}, 1: {}, "t": (1, (2.5, ()))}, id="integer keys, empty containers, tuples"),
        pytest.param({"x": [torch.ones(2), (torch.zeros(0, 3), 3)], "s": torch.tensor(7)}, id="tensors anywhere"),
        pytest.param({"tensor": {"tensor": "tensor", "dict": [["a"]]}, "tuple": []}, id="keys like our own marks"),
        pytest.param({"b": torch.ones(2, dtype=torch.bfloat16), "i": torch.arange(3)}, id="dtypes"),
    ],
)
def test_tree_comes_back_as_it_was(state: dict[Any, Any]) -> None:
    structure, tensors = pack({"state": state})
    assert same(unpack(structure, tensors), {"state": state})


def test_tensor_keys_are_dotted_paths() -> None:
    _, tensors = pack({"model": {"fc.weight": torch.ones(1)}, "state": {"l": [torch.ones(1)]}})
    assert list(tensors) == ["model.fc.weight", "state.l.0"]


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        pytest.param({"f": print}, "state.f is a builtins.builtin_function_or_method", id="a function"),
        pytest.param({"r": [np.float64(1)]}, "state.r.0 is a numpy.float64", id="a numpy scalar"),
        pytest.param({"n": P(1)}, "state.n is a", id="a named tuple"),
        pytest.param({(1, 2): 3}, r"state has the key (1, 2), a tuple", id="a tuple as key"),
        pytest.param({"s": torch.eye(2).to_sparse()}, "state.s is a torch.sparse_coo tensor", id="a sparse tensor"),
        pytest.param({"n": nested()}, "state.n is a nested tensor", id="a nested tensor"),
        pytest.param(
            {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "called state.a.b", id="two tensors of one name"
        ),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name(state: dict[Any, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        pack({"state": state})
    assert sentence in str(caught.value)


@pytest.mark.parametrize("text", ["", "[1]", '{"dict":[["a"]]}', '{"what":1}', '{"tensor":"gone"}'])
def test_damaged_structure_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="structure of a state"):
        unpack(text, {})


MODEL = {"w": torch.ones(2, 3), "b": torch.ones(2)}


@pytest.mark.parametrize(
    ("held", "want"),
    [
        pytest.param(MODEL, None, id="the same"),
        pytest.param({"w": torch.ones(2, 3)}, "Its model lacks b.", id="a name is missing"),
        pytest.param({**MODEL, "x": 1, "y": 2}, "Its model has x and 1 more, which the script's has not.", id="more"),
        pytest.param(
            {**MODEL, "w": torch.ones(3, 2)}, "Its model's w is [3, 2], the script's is [2, 3].", id="a shape"
        ),
    ],
)
def test_differences(held: dict[str, Any], want: str | None) -> None:
    assert differences({"model": held}, MODEL) == want
