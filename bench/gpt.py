"""A small GPT for benchmarks: enough of one that matrix products take the time, small enough for two cores."""

from __future__ import annotations

import torch
from torch.nn import functional as F

VOCABULARY = 512
LENGTH = 128
WIDTH = 256
HEADS = 8
LAYERS = 4


class Block(torch.nn.Module):
    """Attention and a perceptron, each beside a path that leaves its input as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, length, width]."""
        batch, length, _ = x.shape
        heads = self.qkv(self.before_attention(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
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

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return F.linear(self.last(self.blocks(x)), self.tokens.weight)
