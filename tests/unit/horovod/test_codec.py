"""Objects survive the codec as they were, and nothing but data travels."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import numpy
import pytest
import torch

from regroup.horovod import codec


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 1 << 80, -0.0, float("inf"), 0.1, 2 + 3j, "ü", b"\0\xff", bytearray(b"x"), (), [1, (2, [3])], {1, 2},
        frozenset("ab"), {"a": {(1, "b"): [None]}, 3: 4.5}, OrderedDict(b=1, a=2), range(3, 9, 2), slice(1, None, 2),
        torch.float16, torch.device("cpu"), torch.Size([2, 3]), numpy.float32(1.5), numpy.int64(7), numpy.str_("s"),
        numpy.str_(""), numpy.bytes_(b""),
        ["list", "float"],
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_value_comes_back_as_it_was(value: Any) -> None:
    back = codec.decode(codec.encode(value))
    assert type(back) is type(value)
    assert back == value


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64, torch.int64]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4, 5)])
def test_tensor_comes_back_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = (torch.randn(shape) * 9).to(dtype)
    if len(shape) == 4:
        value = value.to(memory_format=torch.channels_last)
    back = codec.decode(codec.encode({"t": value}))["t"]
    assert (back.dtype, back.shape) == (value.dtype, value.shape)
    assert torch.equal(back, value)


@pytest.mark.parametrize(
    "view", [torch.conj, lambda value: torch.conj(value).imag], ids=["conjugate", "negative imaginary part"]
)
def test_view_that_torch_has_not_computed_comes_back_as_its_value(view: Any) -> None:
    value = view(torch.tensor([1 + 2j, 3 - 4j]))
    assert torch.equal(codec.decode(codec.encode(value)), value.resolve_conj().resolve_neg())


def test_array_and_state_of_an_optimizer_come_back() -> None:
    array = numpy.arange(6, dtype="int16").reshape(2, 3).T
    back = codec.decode(codec.encode(array))
    assert back.dtype == array.dtype
    assert (back == array).all()
    back[0, 0] = 9  # it can be written
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step()
    state = codec.decode(codec.encode(optimizer.state_dict()))
    assert state["param_groups"] == optimizer.state_dict()["param_groups"]
    assert torch.equal(state["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


@pytest.mark.parametrize(
    "value",
    [object(), print, torch.nn.Linear(1, 1), numpy.array([object()]), {"a": [lambda: 0]}, Exception()],
    ids=["object", "function", "module", "array of objects", "a function inside", "exception"],
)
def test_code_and_objects_are_refused_with_a_sentence(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent to other ranks, because only data travels"):
        codec.encode(value)


def test_object_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="contains itself"):
        codec.encode(loop)


def test_bytes_that_are_no_object_are_refused() -> None:
    good = codec.encode([1.5, b"abc", torch.ones(3)])
    for data in (b"", pickle.dumps([1]), good[:-1], good[:9], codec.encode("x").replace(b'"x"', b'["a"')):
        with pytest.raises(ValueError):
            codec.decode(data)
