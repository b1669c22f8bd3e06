"""What a task is to the loop."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


class Row(torch.nn.Sequential):
    """A model as modules one behind the other, each called with what the one before returns: a pipeline cuts between them.

    Names are those of a checkpoint, at any split: what comes before the blocks, block0, block1 and so on, what comes after."""

    def __init__(
        self,
        before: Mapping[str, torch.nn.Module],
        blocks: Sequence[torch.nn.Module],
        after: Mapping[str, torch.nn.Module],
    ) -> None:
        named = {f"block{number}": block for number, block in enumerate(blocks)}
        super().__init__(OrderedDict({**before, **named, **after}))

    @property
    def blocks(self) -> list[torch.nn.Module]:
        """The expensive, repeated part, in order."""
        return [module for name, module in self.named_children() if name.startswith("block")]


@dataclass(frozen=True)
class Task:
    """What is trained on what."""

    model: Row
    train: Any
    """What a session takes as `data`; batches are pairs (x, y)."""
    held_out: Any
    """The same, for evaluation."""
    tokens: int | None = None
    """Tokens in a sample; None: its samples are not made of tokens."""
    layers: Callable[[], Sequence[dict[str, Any]]] | None = None
    """Returns, for each block, torch's tensor parallel plan: how each layer is split, by its name. None: they cannot be split. A
    function, because torch's classes of it take a second to import."""
    split_sequences: Callable[[Any], None] | None = None
    """Makes the model compute this process's part of each sequence, of a mesh with the dimension context. None: its samples are no
    sequences."""
    flops_per_token: float | None = None
    """FLOPs of forward and backward; None: not known."""
