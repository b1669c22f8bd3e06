"""A plain loop that trains GPT-2, in one file and without Regroup. The speed of `regroup.train` is compared with it.

    python -m bench.gpt_plain --vocab 50257 --microbatch 16 --steps 5 --device cuda

It prints one line of JSON; `bench.gpt_train` prints the same for the library's loop with the same sizes. AdamW,
clipping and gradient accumulation are those of nanoGPT's train.py. It is fastest with a vocabulary that is padded by
hand: --vocab 50304.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SIZES = {"gpt2": (12, 12, 768), "tiny": (4, 4, 128)}
"""`task.size` -> layers, heads and width."""
REGIONS = ("whole", "parts", "blocks", "none")
"""The regions that torch.compile compiles:

- `whole`: model and loss together;
- `parts`: each block, and the output layer with the loss;
- `blocks`: each block;
- `none`: nothing.
"""


class Block(nn.Module):
    """[n, length, width] -> the same."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        split = self.qkv(self.attention_norm(x)).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(n, length, width))
        return x + torch.as_tensor(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh")))


class GPT(nn.Module):
    """Tokens and the next ones, each [n, length] -> their mean loss."""

    def __init__(self, size: str, length: int, vocabulary: int) -> None:
        super().__init__()
        layers, heads, width = SIZES[size]
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(heads, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                is_out = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if is_out else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        return self.loss(hidden, targets)

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss for the last block's output."""
        scores = F.linear(self.norm(hidden), self.tokens.weight)
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def recomputed(forward: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a forward that keeps no activations: backward computes the block again."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(checkpoint(forward, x, use_reentrant=False))

    return run


def prepared(model: Any, region: str, *, recomputes: bool) -> Any:
    """Return the model with its blocks recomputed and compiled, as asked."""
    for block in model.blocks:
        if recomputes:
            block.forward = recomputed(block.forward)
        if region in ("parts", "blocks"):
            block.compile()
    if region == "parts":
        model.loss = torch.compile(model.loss)
    return torch.compile(model) if region == "whole" else model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return fused AdamW; weight decay for parameters of two dimensions only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train and return what was measured. The first step, which compiles, is not in the speed."""
    device = torch.device(args.device)
    num = args.batch // args.microbatch
    torch.manual_seed(0)
    model = GPT(args.size, args.length, args.vocab).to(device)
    call = prepared(model, args.compile, recomputes=args.activation_checkpointing)
    optimizer = optimizer_of(model)
    data = torch.randint(0, min(args.vocab, 256), (args.batch, args.length + 1))
    in_precision = torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bfloat16")
    ends, loss = [time.perf_counter()], math.nan
    for _ in range(args.steps):
        total = torch.zeros((), device=device)
        for first in range(0, num * args.microbatch, args.microbatch):
            rows = data[first : first + args.microbatch].to(device, non_blocking=True)
            with in_precision:
                mean = call(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
            (mean / num).backward()
            total += mean.detach() / num
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = total.item()  # waits for the device, as a loop that prints its loss does
        ends.append(time.perf_counter())
    return {
        "case": f"plain, {args.compile}",
        **sizes(args),
        **speed(args, ends),
        "loss": round(loss, 4),
        **memory(device),
    }


def sizes(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that are in the line of JSON."""
    names = ("size", "vocab", "length", "batch", "microbatch", "precision", "activation_checkpointing", "device")
    return {name: getattr(args, name) for name in names}


def speed(args: argparse.Namespace, ends_s: Sequence[float]) -> dict[str, float]:
    """Return the speed in the median step after the first, and the times of both.

    `ends_s` has the time at which training began, and the end of each step.
    """
    first_s, *steps_s = (after - before for before, after in itertools.pairwise(ends_s))
    step_s = statistics.median(steps_s)
    tokens = args.batch // args.microbatch * args.microbatch * args.length
    return {"tokens_per_s": round(tokens / step_s, 1), "step_s": round(step_s, 4), "first_step_s": round(first_s, 1)}


def memory(device: torch.device) -> dict[str, float]:
    """Return the peak of the device's memory, GiB; nothing for a CPU."""
    return {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)} if device.type == "cuda" else {}


def parser(about: str) -> argparse.ArgumentParser:
    """Return the arguments that both loops have."""
    arguments = argparse.ArgumentParser(description=about)
    arguments.add_argument("--size", choices=SIZES, default="gpt2", help="as task.size")
    arguments.add_argument("--vocab", type=int, default=50257)
    arguments.add_argument("--length", type=int, default=1024, help="tokens in a sample")
    arguments.add_argument("--batch", type=int, default=512, help="samples in a step")
    arguments.add_argument("--microbatch", type=int, default=16, help="samples in a forward pass")
    arguments.add_argument("--steps", type=int, default=5, help="at least 2: the first one is not in the speed")
    arguments.add_argument("--precision", choices=("float32", "bfloat16"), default="bfloat16")
    arguments.add_argument(
        "--activation-checkpointing", action="store_true", help="compute each block again in backward"
    )
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print one line of JSON."""
    arguments = parser("Train GPT-2 in a plain loop, and print its speed.")
    arguments.add_argument("--compile", choices=REGIONS, default="whole", help="what torch.compile is given")
    print(json.dumps(run(arguments.parse_args(argv))), flush=True)


if __name__ == "__main__":
    main()
