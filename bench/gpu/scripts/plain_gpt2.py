"""GPT-2 in one file, without Regroup: SIZE MICROBATCH VOCABULARY BATCH LENGTH STEPS. Prints tokens per second of each step.

It does what a good plain loop does: bfloat16, flash attention, compiled blocks, output layer and loss compiled together, fused
AdamW, a clipped gradient, and one wait for the GPU in a step.
"""

from __future__ import annotations

import math
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

size = sys.argv[1]
microbatch, vocabulary, batch, length, steps = map(int, sys.argv[2:])
layers, heads, width = (12, 12, 768) if size == "gpt2" else (4, 4, 128)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x, and what is returned: [n, length, width]."""
        n, t, _ = x.shape
        query, key, value = self.qkv(self.norm1(x)).view(n, t, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, width))
        return x + torch.as_tensor(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                is_out = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if is_out else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens [n, length] -> [n, length, width]."""
        hidden = self.tokens(x) + self.positions(torch.arange(length, device=device))
        for block in self.blocks:
            hidden = block(hidden)
        return torch.as_tensor(hidden)

    def head(self, hidden: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        return F.cross_entropy(F.linear(self.norm(hidden), self.tokens.weight).flatten(0, -2), y.flatten())


model = GPT().to(device)
head = model.head
if device.type == "cuda":
    for block in model.blocks:
        block.compile()
    head = torch.compile(model.head)
decayed = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
data = torch.randint(0, 256, (batch, length + 1), device=device)
accumulate = batch // microbatch
for step in range(1, steps + 1):
    began_s = time.perf_counter()
    total = torch.zeros((), device=device)
    for i in range(accumulate):
        rows = data[i * microbatch : (i + 1) * microbatch]
        with torch.autocast(device.type, torch.bfloat16):
            loss = head(model.trunk(rows[:, :-1].contiguous()), rows[:, 1:].contiguous()) / accumulate
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    value = total.item()  # waits for the GPU
    print(
        f"step {step}  loss {value:.4f}  {batch * length / (time.perf_counter() - began_s):,.0f} tokens/s", flush=True
    )
