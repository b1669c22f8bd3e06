"""Streams of a GPU on which gradients come: a bucket is read after all of them, and their memory is used again after that."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from regroup.data import SamplePlan
from regroup.generation.groups import Groups
from regroup.parallel import ddp
from regroup.parallel.ddp import DataParallel
from regroup.parallel.streams import Streams

GPU = torch.device("cuda", 0)


class Device:
    """In place of torch.cuda: which stream is current, and which has waited for which, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "main"
        self.streams: dict[str, Stream] = {}

    def current_stream(self, device: torch.device) -> Stream:
        assert device == GPU
        return self.streams.setdefault(self.current, Stream(self.current, self.log))


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self._name} waits for {other._name}")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "current_stream", made.current_stream)
    return made


@pytest.mark.parametrize(
    ("come_on", "read_on", "want"),
    [
        pytest.param(["main"], "main", ["reads"], id="on one stream: nobody waits"),
        pytest.param(["sums", "sums"], "sums", ["reads"], id="all on another one, where the bucket is read, too"),
        pytest.param(
            ["main", "sums", "main"], "sums", ["sums waits for main", "reads", "main waits for sums"], id="on two"
        ),
        pytest.param(
            ["main", "sums", "copies"],
            "main",
            ["main waits for sums", "main waits for copies", "reads", "sums waits for main", "copies waits for main"],
            id="on three",
        ),
        pytest.param(
            ["sums", "copies"],
            "main",
            ["main waits for sums", "main waits for copies", "reads", "sums waits for main", "copies waits for main"],
            id="none on the one where it is read",
        ),
    ],
)
def test_bucket_is_read_between_two_waits(device: Device, come_on: list[str], read_on: str, want: list[str]) -> None:
    streams = Streams(GPU)
    streams.begin()
    for device.current in come_on:
        streams.note()
    device.current = read_on
    with streams.joined():
        device.log.append("reads")
    assert device.log == want


def test_gradients_of_one_other_stream_are_waited_for(device: Device) -> None:
    streams = Streams(GPU)
    device.current = "sums"
    streams.note()
    device.current = "main"
    with streams.joined():
        device.log.append("reads")
    assert device.log == ["main waits for sums", "reads", "sums waits for main"]


def test_step_begins_without_the_streams_of_the_one_before(device: Device) -> None:
    streams = Streams(GPU)
    for device.current in ("main", "sums"):
        streams.note()
    streams.begin()
    with streams.joined():
        pass
    assert device.log == []


def test_cpu_has_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", None)
    streams = Streams(torch.device("cpu"))
    streams.note()
    with streams.joined():
        pass


class Sent:
    """Groups of two ranks, as far as sending goes."""

    rank, world_size = 0, 2

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def launch(self, *_: Any, **__: Any) -> None:
        self._log.append("sends")


def test_bucket_whose_gradients_come_on_two_streams_is_sent_after_both(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ddp, "PARCEL_BYTES", 0)
    model = torch.nn.Linear(2, 2)
    for name, one in model.named_parameters():
        parameter: Any = one
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: setattr(device, "current", name))
    strategy = DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), SamplePlan(0, 64, 4, 2, 2))
    strategy._streams = Streams(GPU)
    strategy.begin_generation(cast(Groups, Sent(device.log)))
    strategy.begin_step()
    loss = model(torch.ones(1, 2)).sum()
    strategy.backward(loss, torch.ones_like(loss), last=True)
    first, last = ("weight", "bias") if device.current == "bias" else ("bias", "weight")  # as autograd takes them
    assert device.log == [f"{last} waits for {first}", "sends", f"{first} waits for {last}"]
