"""The interface between a task and the loop: a model as a `Chain`, and its data."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy


class Chain(torch.nn.Sequential):
    """A model as a row of modules, each of which gets the output of the one before. A pipeline cuts between them.

    A checkpoint has the names of the modules, whatever the split: those of `before`, then block0, block1 .., then those of `after`.
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
        """The expensive, repeated modules, in order."""
        return [module for name, module in self.named_children() if name.startswith("block")]

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        for name, module in zip(self._modules, self):  # named_children() leaves out a module that comes a second time
            if name not in self._after:
                x = module(x)
        return self.scores(x) if targets is None else self.loss(x, targets)

    def align(self, multiple: int) -> None:
        """Round the classes of the output product up to a multiple, for speed. Scores stay those of the model's own classes.

        A model with few classes does nothing.
        """

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores for the output of the last block."""
        for name in self._after:
            x = self._modules[name](x)
        return x

    def loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss for the output of the last block.

        torch.compile makes one region of it. So the scores of a large vocabulary are not written to memory in full between the last
        product and the loss.
        """
        return cross_entropy(self.scores(x).flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class Task:
    """A model and its data."""

    model: Chain
    train: Any
    """Training data, as a session's `data`. Batches are pairs (x, y)."""
    held_out: Any
    """Data for evaluation, in the same form."""
    tokens: int | None = None
    """Tokens in a sample; None: samples do not consist of tokens."""
    layers: Callable[[], Sequence[dict[str, Any]]] | None = None
    """Function that returns torch's tensor parallel plan for each block, by the names of its layers. None: the layers cannot be
    split. It is a function because torch's classes take a second to import."""
    split_sequences: Callable[[Any, str], None] | None = None
    """Function of (mesh["context"], algorithm of regroup.attention) that makes the model compute this process's part of each
    sequence. None: samples are no sequences."""
    flops_per_token: float | None = None
    """FLOPs of forward and backward for a token; None: not known."""
