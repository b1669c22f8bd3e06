"""The bytes of a state on their way: every dtype and shape arrives, whatever the size of a chunk. The wire is a list."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regroup.checkpoint.tree import pack
from regroup.generation import nccl, transfer
from regroup.protocol.state import StatePair
from regroup.state.training import CommitRecord
from tests.unit.parallel.fake_device import DEVICE, FakeDevice

TREE: dict[str, Any] = {
    "model": {
        "weight": torch.arange(10, dtype=torch.float32).reshape(2, 5),
        "half": torch.arange(7, dtype=torch.bfloat16),
        "mask": torch.tensor([True, False, True]),
        "count": torch.tensor(5),
        "empty": torch.zeros(0, 3),
        "slice": torch.arange(12).reshape(3, 4)[:, 1],
    },
    "optimizer": {
        "state": {0: {"step": torch.tensor(3.0)}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "x": None}],
    },
    "state": {},
}


def rank(number: int, device: torch.device | None = None) -> Any:
    return SimpleNamespace(rank=number, world_size=2, device=device or torch.device("cpu"))


@pytest.mark.parametrize("chunk_bytes", [16, 48, 1 << 20])
def test_state_arrives_as_it_was_sent(
    wire: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", chunk_bytes)
    record = CommitRecord(StatePair(2, 7), 0.5, 48.0, torch.tensor(1.5))
    transfer.send(rank(0), pack(TREE), "00ff", record)
    received = transfer.receive(rank(1), 0, keep=True)
    assert wire == []
    assert received is not None
    got, digest, told = received
    assert (digest, told) == ("00ff", record)
    assert got["optimizer"]["param_groups"] == TREE["optimizer"]["param_groups"]
    assert list(got["optimizer"]["state"]) == [0]
    for name, tensor in TREE["model"].items():
        assert got["model"][name].dtype == tensor.dtype
        assert torch.equal(got["model"][name], tensor), name


def test_rank_that_needs_nothing_takes_part_in_every_broadcast(
    wire: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 32)
    transfer.send(rank(0), pack(TREE), "00ff")
    assert transfer.receive(rank(1), 0, keep=False) is None
    assert wire == []


def on_device() -> dict[str, Any]:
    """TREE with the model and a part of the optimizer on the GPU. Call it inside a FakeDevice."""
    model = {name: tensor.to(DEVICE) for name, tensor in TREE["model"].items()}
    moments = {"exp_avg": torch.arange(10.0).to(DEVICE), "step": torch.tensor(3.0)}
    return {**TREE, "model": model, "optimizer": {**TREE["optimizer"], "state": {0: moments}}}


def same(got: dict[str, Any]) -> None:
    """Assert that a tree has the values of `on_device()`."""
    for name, tensor in TREE["model"].items():
        assert got["model"][name].dtype == tensor.dtype
        assert torch.equal(got["model"][name].to("cpu"), tensor), name
    assert torch.equal(got["optimizer"]["state"][0]["exp_avg"].to("cpu"), torch.arange(10.0))
    assert got["optimizer"]["state"][0]["step"].item() == 3.0


@pytest.mark.parametrize("chunk_bytes", [48, 1 << 20])
def test_what_is_on_the_gpu_never_passes_through_host_memory(
    wire: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(nccl, "serves", lambda device: device == DEVICE)
    with FakeDevice() as device:
        tree = on_device()
        fresh = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in tree["model"].items()}
        fresh["model.slice"] = torch.zeros(3, 4, dtype=torch.int64, device=DEVICE)[:, 1]  # it has no bytes of its own
        device.take()
        transfer.send(rank(0, DEVICE), pack(tree), "00ff")
        received = transfer.receive(rank(1, DEVICE), 0, keep=True, into=fresh)
        assert device.take() == []
        assert received is not None
        assert wire == []
        moment = received[0]["optimizer"]["state"][0]["exp_avg"]
        assert moment.device == DEVICE, "an optimizer without a state gets it there"
        assert received[0]["optimizer"]["state"][0]["step"].device.type == "cpu"
        assert received[0]["model"]["weight"] is fresh["model.weight"], "there is no second copy"
        same(received[0])


def test_who_holds_a_state_keeps_it_until_the_last_byte_is_there(
    wire: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 48)
    with FakeDevice():
        transfer.send(rank(0, DEVICE), pack(on_device()), "00ff")
        received = transfer.receive(rank(1, DEVICE), 0, keep=True)
        assert received is not None
        assert received[0]["model"]["weight"].device.type == "cpu"
        same(received[0])
    assert wire == []


def test_each_tensor_goes_by_the_backend_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, bool]] = []

    def launch(_method: str, tensors: list[torch.Tensor], _options: Any, *, control: bool) -> None:
        sent.append((tensors[0].device.type, control))

    groups = rank(0, DEVICE)
    groups.launch, groups.wait = launch, lambda _pending: None
    monkeypatch.setattr(nccl, "serves", lambda device: device == DEVICE)
    with FakeDevice():
        transfer.send(groups, pack(on_device()), "00ff")
    assert sent == [("cpu", True)] * 3 + [("meta", False)]  # two of the description, host memory, GPU


@pytest.mark.parametrize("text", ["", "[3, 100]"])
def test_text_reaches_every_rank(wire: list[torch.Tensor], text: str) -> None:
    assert transfer.share_text(rank(0), 0, text) == text
    assert transfer.share_text(rank(1), 0, "") == text
    assert wire == []
