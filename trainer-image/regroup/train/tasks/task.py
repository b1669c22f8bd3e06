"""What a task is to the loop."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy


class Row(torch.nn.Sequential):
    """A model as modules one behind the other, each called with what the one before returns: a pipeline cuts between them.

    Names are those of a checkpoint, at any split: what comes before the blocks, block0, block1 and so on, what comes after.
    `model(x)` returns scores [..., classes]; `model(x, targets)` returns their loss, the mean over integer targets [...].
    """

    def __init__(
        self,
        before: Mapping[str, torch.nn.Module],
        blocks: Sequence[torch.nn.Module],
        after: Mapping[str, torch.nn.Module],
    ) -> None:
        named = {f"block{number}": block for number, block in enumerate(blocks)}
        super().__init__(OrderedDict({**before, **named, **after}))
        self._after = tuple(after)

    @property
    def blocks(self) -> list[torch.nn.Module]:
        """The expensive, repeated part, in order."""
        return [module for name, module in self.named_children() if name.startswith("block")]

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        for name, module in zip(self._modules, self):  # named_children() leaves out a module that comes a second time
            if name not in self._after:
                x = module(x)
        return self.scores(x) if targets is None else self.loss(x, targets)

    def align(self, multiple: int) -> None:
        """Compute the scores of a multiple of so many classes, and return those of the model's own. A model of few does nothing."""

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of what the last block returns."""
        for name in self._after:
            x = self._modules[name](x)
        return x

    def loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of what the last block returns. One region of torch.compile: the scores of a large vocabulary are
        not written in full between the last product and the loss, nor read again by each operator of it."""
        return cross_entropy(self.scores(x).flatten(0, -2), targets.flatten())


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
    split_sequences: Callable[[Any, str], None] | None = None
    """Makes the model compute this process's part of each sequence, of a mesh with the dimension context, with an algorithm of
    regroup.attention. None: its samples are no sequences."""
    flops_per_token: float | None = None
    """FLOPs of forward and backward; None: not known."""
