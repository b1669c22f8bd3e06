"""What a task is to the loop."""

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
    flops_per_token: float | None = None
    """FLOPs of forward and backward; None: not known."""
