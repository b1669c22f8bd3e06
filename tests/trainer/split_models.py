"""The models of split_job.py, and what is odd about them: the words in TEST_MODEL.

batchnorm     BatchNorm in place of LayerNorm: buffers that forward changes
unused        a layer that only every fourth microbatch uses, and one that none does
uneven        layers that the mesh does not divide, and a parameter with fewer rows than the mesh has ranks
bf16          parameters in bfloat16
two           two optimizers
tied          two layers share one weight
tied-across   a weight is shared by two modules that are split each on its own
compiled      each block is compiled
checkpointed  each block is computed again in backward (use_reentrant=False)
skipping      every fourth microbatch leaves a block out
turning       every fourth microbatch runs the blocks the other way round
"""

import torch
from torch.utils.checkpoint import checkpoint


class Block(torch.nn.Module):
    """Two layers and a residual, as a transformer's feed-forward part."""

    def __init__(self, width: int, words: frozenset[str]) -> None:
        super().__init__()
        self.norm: torch.nn.Module = torch.nn.BatchNorm1d(width) if "batchnorm" in words else torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
        self.again = "checkpointed" in words
        if "unused" in words:
            self.side, self.idle = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        if "uneven" in words:
            self.scale = torch.nn.Parameter(torch.ones(1))
        self.words = words

    def forward(self, x: torch.Tensor, is_fourth: bool = False) -> torch.Tensor:
        if self.again:
            return checkpoint(self.compute, x, is_fourth, use_reentrant=False)  # type: ignore[no-any-return]
        return self.compute(x, is_fourth)

    def compute(self, x: torch.Tensor, is_fourth: bool) -> torch.Tensor:
        """Return the block's output."""
        y: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        if is_fourth and "unused" in self.words:
            y = y + self.side(x)
        return x + (y * self.scale if "uneven" in self.words else y)


class Model(torch.nn.Sequential):
    """A layer, two blocks, a layer."""

    def __init__(self, words: frozenset[str]) -> None:
        width = 33 if "uneven" in words else 32
        first, last = torch.nn.Linear(16, width), torch.nn.Linear(width, 4)
        super().__init__(first, Block(width, words), Block(width, words), last)
        self.words = words
        if "tied" in words:
            self.twin = torch.nn.Linear(16, width)
            self.twin.weight = first.weight
        if "tied-across" in words:
            self.blocks[1].up.weight = self.blocks[0].up.weight
        if "bf16" in words:
            self.to(torch.bfloat16)

    @property
    def blocks(self) -> list[Block]:
        """Those that are split each on its own."""
        return [layer for layer in self if isinstance(layer, Block)]

    def forward(self, x: torch.Tensor, is_fourth: bool = False) -> torch.Tensor:
        y: torch.Tensor = self[0](x.to(torch.bfloat16 if "bf16" in self.words else torch.float32))
        if "tied" in self.words:
            y = y + self.twin(x)
        blocks = self.blocks[::-1] if "turning" in self.words and is_fourth else self.blocks
        for i, block in enumerate(blocks):
            if not ("skipping" in self.words and is_fourth and i == 1):
                y = block(y, is_fourth)
        return self[3](y).float()  # type: ignore[no-any-return]
