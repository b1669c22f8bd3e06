"""A small GPT for benchmarks. Its time goes into matrix products, and two cores can train it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

VOCABULARY = 512
LENGTH = 128
WIDTH = 256
HEADS = 8
LAYERS = 4


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return causal attention. query, key, value and the result: [batch, heads, length, size]."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Block(torch.nn.Module):
    """Attention and a perceptron, each beside a path that leaves its input as it is."""

    attend: Attend = staticmethod(causal)

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, length, width] for x: [batch, length, width]."""
        batch, length, _ = x.shape
        heads = self.qkv(self.before_attention(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = self.attend(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + torch.as_tensor(self.mlp(self.before_mlp(x)))


class GPT(torch.nn.Module):
    """Tokens [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.positions = torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.last = torch.nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits. `positions` [length] are the tokens' places in their sequence; None counts them from 0."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        return F.linear(self.last(self.blocks(x)), self.tokens.weight)


class First(torch.nn.Module):
    """The embedding in front of the blocks, for a model that is a row of modules. Tokens [batch, length] -> [batch,
    length, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])))


def row() -> list[torch.nn.Module]:
    """Return the same model as a row of modules. It has an output matrix of its own: in a pipeline another rank has the first."""
    last = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, VOCABULARY, bias=False))
    return [First(), *(Block() for _ in range(LAYERS)), last]
