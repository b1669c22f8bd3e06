"""Running statistics: a step that is redone changes them once."""

from typing import Any

import pytest
import torch

from regroup.parallel.buffers import Buffers


def test_redone_step_changes_running_statistics_once() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    once = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    once.load_state_dict(model.state_dict())
    batch = torch.randn(8, 4)
    buffers = Buffers(model)

    buffers.keep()
    assert not buffers.changed()
    model(batch)
    assert buffers.name_of_changed() == "1.running_mean"
    buffers.restore()
    assert not buffers.changed()
    model(batch)
    once(batch)

    for (name, got), (_, want) in zip(model.named_buffers(), once.named_buffers()):
        assert torch.equal(got, want), name


class Two:
    """In place of the groups of two ranks that hold the same: what is gathered is this rank's part twice."""

    world_size = 2

    def launch(self, _method: str, gathered: torch.Tensor, mine: torch.Tensor) -> None:
        assert gathered.dtype == torch.uint8  # gloo knows some types only
        gathered.copy_(mine.repeat(2))

    def wait(self, _pending: Any) -> None:
        pass


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
def test_buffer_of_any_type_is_averaged(dtype: torch.dtype) -> None:
    model = torch.nn.Module()
    model.register_buffer("some", torch.tensor([[0.0, 1.0], [2.0, 3.0]]).to(dtype))
    model.register_buffer("conjugated", torch.tensor([1 + 2j]).conj())
    model.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
    want = {name: buffer.clone() for name, buffer in model.named_buffers()}
    buffers = Buffers(model)
    buffers.keep()
    buffers.average(Two(), [0, 1], exact=False)  # type: ignore[arg-type]
    assert not buffers.changed()
    for name, buffer in model.named_buffers():
        assert buffer.tolist() == want[name].tolist()
