"""A small training state, and what writes checkpoints of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from regroup.checkpoint import Checkpointer, pack
from regroup.checkpoint.checkpointer import Origin
from regroup.protocol.document import LineageEntry
from regroup.protocol.state import StatePair

LINEAGE = (LineageEntry(1, 0), LineageEntry(2, 50))


def build(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), betas=(0.8, 0.99))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().sum().backward()
        optimizer.step()


def flat(tree: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    """Return every bit of a tree."""
    structure, tensors = pack(tree)
    return structure, {
        key: tensor.clone().view(-1).view(torch.uint8).numpy().tobytes() for key, tensor in tensors.items()
    }


def make(directory: Path, job_uid: str = "job-1", **changes: Any) -> Checkpointer:
    return Checkpointer(str(directory), every_s=0, job_uid=job_uid, **changes)


def save(
    checkpointer: Checkpointer,
    generation: int,
    step: int,
    *,
    acknowledged: Callable[[], bool] | None = None,
    wait: bool = True,
) -> dict[str, Any]:
    """Save a small state that is a function of (generation, step); return it."""
    tree = {"model": {"w": torch.full((5,), generation + step / 1000)}, "optimizer": {"state": {}}, "state": {}}
    start = next((entry.start_step for entry in LINEAGE if entry.generation == generation), 0)
    assert checkpointer.save(
        tree, pair=StatePair(generation, step), origin=Origin(generation, f"{generation:08x}-0000", generation - 1, start),
        digest=f"{step:016x}", acknowledged=acknowledged,
    )  # fmt: skip
    if wait:
        assert checkpointer.wait(30)
    return tree
