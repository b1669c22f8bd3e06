"""The bytes of a state on their way: every dtype and shape arrives, whatever the size of a chunk. The wire is a list."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regroup.checkpoint.tree import pack
from regroup.generation import transfer
from regroup.protocol.state import StatePair
from regroup.state.training import CommitRecord

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


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What the source sends, in order; a receiver reads it from the front."""
    sent: list[torch.Tensor] = []

    def broadcast(groups: Any, tensor: torch.Tensor, source: int) -> None:
        if groups.rank == source:
            sent.append(tensor.clone())
        else:
            tensor.copy_(sent.pop(0))

    monkeypatch.setattr(transfer, "_broadcast", broadcast)
    return sent


def rank(number: int) -> Any:
    return SimpleNamespace(rank=number, world_size=2)


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


@pytest.mark.parametrize("text", ["", "[3, 100]"])
def test_text_reaches_every_rank(wire: list[torch.Tensor], text: str) -> None:
    assert transfer.share_text(rank(0), 0, text) == text
    assert transfer.share_text(rank(1), 0, "") == text
    assert wire == []
