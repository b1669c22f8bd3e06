"""What a task is to the loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Task:
    """What is trained on what."""

    model: torch.nn.Module
    train: Any
    """What a session takes as `data`; batches are pairs (x, y)."""
    held_out: Any
    """The same, for evaluation."""
    tokens: int | None = None
    """Tokens in a sample; None: its samples are not made of tokens."""
    layers: Callable[[], Sequence[dict[str, Any]]] | None = None
    """Returns, for each block, torch's tensor parallel plan: how each layer is split, by its name. None: they cannot be split. A
    function, because torch's classes of it take a second to import."""
    flops_per_token: float | None = None
    """FLOPs of forward and backward; None: not known."""
