"""GPT-2's architecture, and the task of predicting the next token of a text.

Radford et al., Language Models are Unsupervised Multitask Learners, 2019: layer norms before attention and perceptron, biases,
GELU in its tanh form, output weights shared with the embedding. No dropout, as is usual where no sample is seen often.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from regroup.data import DataError
from regroup.train import config, tokens
from regroup.train.flops import flops_per_token

from .task import Task

HELD_OUT, MOST_HELD_OUT = 0.05, 256
"""The last part of the samples, and at most so many, are for evaluation."""


@dataclass(frozen=True)
class Shape:
    """Numbers of a GPT. `length`: the most tokens that it sees at once."""

    layers: int
    heads: int
    width: int
    length: int
    vocabulary: int


TINY = Shape(layers=4, heads=config.HEADS["tiny"], width=128, length=128, vocabulary=tokens.BYTES)
GPT2 = Shape(layers=12, heads=config.HEADS["gpt2"], width=768, length=1024, vocabulary=50257)


class Block(nn.Module):
    """Attention and a perceptron, each added to its input: [n, length, width] -> the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.head_width = width // shape.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv_by_head, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        n, length, _ = x.shape
        # Query, key and value of head 0, then of head 1: a part of the rows is whole heads, where `tensor` splits them.
        split = self.qkv_by_head(self.attention_norm(x)).view(n, length, -1, 3, self.head_width)
        query, key, value = split.permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # flash attention where there is one
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(n, length, -1))
        return x + torch.as_tensor(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh")))


class GPT(nn.Module):
    """Tokens [n, length], int64 -> scores of the next one [n, length, vocabulary]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.last_norm = nn.LayerNorm(shape.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # The 2 * layers outputs that are added to one path keep its variance.
                out = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers) if out else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.last_norm(hidden), self.tokens.weight)


def language_model(settings: config.LanguageModel) -> Task:
    """Return a GPT and the samples of the configuration's tokens. Raises DataError."""
    shape = TINY if settings.size == "tiny" else GPT2
    found = tokens.corpus(settings.text, settings.tokens)
    if settings.size == "tiny":
        shape = Shape(shape.layers, shape.heads, shape.width, settings.length or shape.length, found.vocabulary)
    if found.vocabulary > shape.vocabulary:
        raise DataError(
            f"task.tokens ({settings.tokens}) has a vocabulary of {found.vocabulary}, and size {settings.size} has "
            f"{shape.vocabulary}. Make the tokens with a smaller vocabulary, or use size tiny."
        )
    length = settings.length or shape.length
    train, held_out = tokens.split(found, length, HELD_OUT, MOST_HELD_OUT)
    model = GPT(shape)
    in_products = sum(p.numel() for p in model.parameters()) - model.positions.weight.numel()
    flops = flops_per_token(in_products, shape.layers, shape.width, length)
    return Task(model, train, held_out, tokens=length, layers=lambda: [_plan()] * shape.layers, flops_per_token=flops)


def _plan() -> dict[str, Any]:
    """Attention is split by heads, the perceptron by its inner width; what is added to a block's input is whole again."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {
        "qkv_by_head": ColwiseParallel(),
        "attention_out": RowwiseParallel(),
        "mlp_in": ColwiseParallel(),
        "mlp_out": RowwiseParallel(),
    }
