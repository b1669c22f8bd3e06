"""GPT-2's architecture, and the task of predicting the next token of a text.

The architecture has layer norms before attention and perceptron, biases, GELU in its tanh form, and output weights shared with
the embedding. It has no dropout, since no sample is seen often. Radford et al., Language Models are Unsupervised Multitask
Learners, 2019.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import regroup
from regroup.data import DataError
from regroup.train import sections, tokens
from regroup.train.flops import flops_per_token

from .task import Chain, Task

HELD_OUT, MOST_HELD_OUT = 0.05, 256
"""Share of the samples that is held out for evaluation, and the largest number of them. They are the last ones."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a GPT."""

    layers: int
    heads: int
    width: int
    length: int
    """Largest number of tokens in a sample."""
    vocabulary: int
    tied: bool = True
    """The output layer uses the embedding's weights."""
    experts: int | None = None
    """Number of experts in place of each block's perceptron; None: a perceptron."""
    top_k: int = 1
    """Experts that compute a token."""


TINY = Shape(
    layers=sections.LAYERS["tiny"],
    heads=sections.HEADS["tiny"],
    width=128,
    length=sections.LENGTHS["tiny"],
    vocabulary=tokens.BYTES,
)
GPT2 = Shape(
    layers=sections.LAYERS["gpt2"],
    heads=sections.HEADS["gpt2"],
    width=768,
    length=sections.LENGTHS["gpt2"],
    vocabulary=50257,
)


class Embedding(nn.Module):
    """Embeddings of tokens and positions: [n, length], int64 -> [n, length, width]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.part = 0
        """Number of this process's part of each sequence, by which positions are counted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, length = self.part * x.shape[1], x.shape[1]
        return torch.as_tensor(self.tokens(x) + self.positions(torch.arange(first, first + length, device=x.device)))


class Block(nn.Module):
    """Attention, and a perceptron or experts, each added to its input: [n, length, width] -> [n, length, width]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.head_width = width // shape.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv_by_head, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.experts: regroup.MixtureOfExperts | None = None
        if shape.experts is None:
            self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        else:
            self.experts = regroup.MixtureOfExperts(width, 4 * width, shape.experts, top_k=shape.top_k)
        self.context: Any = None
        """mesh["context"], whose processes each have a part of each sequence; None: sequences are whole."""
        self.algorithm = "ulysses"
        """Algorithm of regroup.attention, with `context`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, _ = x.shape
        # Query, key and value of head 0, then of head 1, so that `tensor` splits the rows into whole heads.
        split = self.qkv_by_head(self.attention_norm(x)).view(n, length, -1, 3, self.head_width)
        query, key, value = split.permute(3, 0, 2, 1, 4)
        if self.context is None:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            mixed = regroup.attention(query, key, value, self.context, causal=True, algorithm=self.algorithm)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(n, length, -1))
        hidden = self.mlp_norm(x)
        if self.experts is not None:
            return x + torch.as_tensor(self.experts(hidden))
        return x + torch.as_tensor(self.mlp_out(F.gelu(self.mlp_in(hidden), approximate="tanh")))


class Output(nn.Module):
    """The output layer: [n, length, width] -> scores of the next token [n, length, vocabulary]."""

    def __init__(self, shape: Shape, embedding: Embedding) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.linear = None if shape.tied else nn.Linear(shape.width, shape.vocabulary, bias=False)
        self._shared: tuple[Embedding, ...] = (embedding,) if shape.tied else ()
        """Module with the shared weights. It is in a tuple, and so no submodule, since a checkpoint has the weights once."""
        self.multiple = 1
        """Multiple to which the rows of the product are rounded up. Rows of zeros are added to the weights, and their scores are
        cut off. The parameter keeps its shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.linear.weight if self.linear is not None else self._shared[0].tokens.weight
        vocabulary = len(weight)
        added = -vocabulary % self.multiple
        if not added:
            return F.linear(self.norm(x), weight)
        return F.linear(self.norm(x), F.pad(weight, (0, 0, 0, added)))[..., :vocabulary]


class GPT(Chain):
    """A GPT: tokens [n, length], int64 -> scores of the next one [n, length, vocabulary]."""

    def __init__(self, shape: Shape) -> None:
        embedding = Embedding(shape)
        blocks = [Block(shape) for _ in range(shape.layers)]
        super().__init__({"embedding": embedding}, blocks, {"output": Output(shape, embedding)})
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # Scaled, so that the 2 * layers outputs which are added up keep the variance.
                out = name.endswith(("attention_out.weight", "mlp_out.weight", "experts.down"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers) if out else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def align(self, multiple: int) -> None:
        for module in self.modules():
            if isinstance(module, Output):
                module.multiple = multiple

    def split_sequences(self, mesh: Any, algorithm: str) -> None:
        """Let the model compute this process's part of each sequence, in `mesh`, whose only dimension is context."""
        for module in self.modules():
            if isinstance(module, Embedding):
                module.part = mesh.get_local_rank()
            elif isinstance(module, Block):
                module.context, module.algorithm = mesh, algorithm


def language_model(settings: sections.LanguageModel) -> Task:
    """Return a GPT and the samples of the configuration's tokens. Raises DataError."""
    shape = TINY if settings.size == "tiny" else GPT2
    found = tokens.corpus(settings.text, settings.tokens)
    if settings.size == "tiny":
        shape = replace(shape, length=settings.sample_tokens, vocabulary=found.vocabulary)
    shape = replace(shape, tied=settings.tied, experts=settings.experts, top_k=settings.top_k)
    if found.vocabulary > shape.vocabulary:
        raise DataError(
            f"task.tokens ({settings.tokens}) has a vocabulary of {found.vocabulary}, and size {settings.size} has "
            f"{shape.vocabulary}. Make the tokens with a smaller vocabulary, or use size tiny."
        )
    length = settings.sample_tokens
    train, held_out = tokens.split(found, length, HELD_OUT, MOST_HELD_OUT)
    model = GPT(shape)
    flops = flops_per_token(_in_products(model, shape), shape.layers, shape.width, length)
    return Task(
        model,
        train,
        held_out,
        tokens=length,
        layers=lambda: [_plan()] * shape.layers,
        split_sequences=model.split_sequences,
        flops_per_token=flops,
    )


def _in_products(model: GPT, shape: Shape) -> int:
    """Return the number of parameters in the matrix products of one token."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    unused = sizes.pop("embedding.positions.weight")
    if not shape.tied:
        unused += sizes["embedding.tokens.weight"]  # looked up, not multiplied
    if shape.experts is not None:
        of_experts = sum(size for name, size in sizes.items() if name.endswith(("experts.up", "experts.down")))
        unused += of_experts * (shape.experts - shape.top_k) // shape.experts
    return sum(p.numel() for p in model.parameters()) - unused


def _plan() -> dict[str, Any]:
    """Return the tensor parallel plan of a block: attention is split by heads, the perceptron by its inner width."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {
        "qkv_by_head": ColwiseParallel(),
        "attention_out": RowwiseParallel(),
        "mlp_in": ColwiseParallel(),
        "mlp_out": RowwiseParallel(),
    }
