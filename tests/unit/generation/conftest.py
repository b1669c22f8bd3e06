"""The wire between ranks of one process, for what copies a state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regroup.generation import transfer


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What the source sends, in order. A receiver reads it from the front."""
    sent: list[torch.Tensor] = []

    def broadcast(groups: Any, tensor: torch.Tensor, source: int) -> None:
        if groups.rank == source:
            sent.append(tensor.clone())
        else:
            tensor.copy_(sent.pop(0))

    monkeypatch.setattr(transfer, "_broadcast", broadcast)
    return sent
