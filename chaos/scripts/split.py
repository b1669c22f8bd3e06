"""The script of a job with a split model under chaos: a small model whose sums are exact.

In plain `python` it is the reference, with the whole model. The factors of each product are bounded multiples of a
power of two. So each sum, of a layer and of a batch, has at most 22 bits, and float32 adds without rounding. The
parameters depend neither on the split nor on the number of ranks. Operations after a sum are element by element, and
their rounding is the same everywhere. Learning rate and momentum are powers of two, so that a fused multiply-add gives
the same as two operations.

Environment: CHAOS_TRACE, CHAOS_STEPS (tracing.py), and

- CHAOS_MESH: "shard=2 tensor=2"; empty if the model is not split;
- CHAOS_SCHEDULE: of the pipeline, if there is one;
- CHAOS_EVALUATE: steps between two evaluations; 0 for none.
"""

import os
import sys
import time
from typing import Any

started = time.time()

import torch
from torch.nn.functional import linear
from tracing import pause, trace

import regroup

STEPS, EVALUATE = int(os.environ["CHAOS_STEPS"]), int(os.environ.get("CHAOS_EVALUATE", "0"))
SIZES = {name: int(size) for name, _, size in (one.partition("=") for one in os.environ.get("CHAOS_MESH", "").split())}
HAS_STAGES = "pipeline" in SIZES
WIDTH, HIDDEN, OUT, NUM_EVALUATED = 8, 16, 4, 96


class Rounded(torch.autograd.Function):
    """Values of a layer, and their gradients on the way back: multiples of 2^-4 up to 8, and of 2^-8 up to 4."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.clamp(torch.round(x * 2**4) / 2**4, -8, 8)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.clamp(torch.round(gradient * 2**8) / 2**8, -4, 4)


class RoundedWeight(torch.autograd.Function):
    """A parameter as it is multiplied: a multiple of 2^-7 up to 1. Its gradient is exact already."""

    @staticmethod
    def forward(_: Any, weight: torch.Tensor) -> torch.Tensor:
        return torch.clamp(torch.round(weight * 2**7) / 2**7, -1, 1)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Linear(torch.nn.Linear):
    """A layer of rounded parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, RoundedWeight.apply(self.weight), RoundedWeight.apply(self.bias))


class Block(torch.nn.Module):
    """Two layers and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Linear(WIDTH, HIDDEN), Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Rounded.apply(x)
        hidden = Rounded.apply(torch.relu(self.up(x)))
        out: torch.Tensor = x + Rounded.apply(self.down(hidden))
        return out


class Head(Linear):
    """The last layer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, OUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Rounded.apply(x))


def row() -> torch.nn.Sequential:
    """Return the whole model: four modules, so that two processes of a pipeline can have two stages each."""
    return torch.nn.Sequential(Block(), Block(), Block(), Head())


def split(whole: torch.nn.Sequential) -> torch.nn.Module:
    """Return this process's part of a model, by the mesh of its group."""
    *blocks, head = whole
    if "tensor" in SIZES:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        for block in blocks:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if "shard" in SIZES:
        from torch.distributed.fsdp import fully_shard

        # The head belongs to the root. A pipeline has no root, which is never called as a whole.
        for module in [*blocks, head if HAS_STAGES else whole]:
            fully_shard(module, mesh=mesh["shard"])
    return regroup.pipeline(whole, schedule=os.environ["CHAOS_SCHEDULE"]) if HAS_STAGES else whole


def local(parameter: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a parameter."""
    part: torch.Tensor = getattr(parameter, "_local_tensor", parameter)
    return part.detach().flatten()


mesh: Any = regroup.mesh(device="cpu", **SIZES) if SIZES else None
torch.manual_seed(7)
torch.use_deterministic_algorithms(True)
generator = torch.Generator().manual_seed(0)
x = torch.randint(-3, 4, (997, WIDTH), generator=generator).float()
y = torch.randint(-3, 4, (997, OUT), generator=generator).float()
model = split(row())
# A second model that is split in the same way: each element holds its own position in the whole parameter.
numbered = row()
with torch.no_grad():
    for parameter in numbered.parameters():
        parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape))
positions = {name: local(p).long().tolist() for name, p in split(numbered).named_parameters()}
optimizer = torch.optim.SGD(model.parameters(), lr=2**-6, momentum=0.5)
group_size = 1
for size in SIZES.values():
    group_size *= size
tensor = SIZES.get("tensor", 1)
trace("built", started=started)


def errors(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the distance of the model's output from its targets, in multiples of 2^-6 up to 4."""
    return torch.clamp(torch.round((out - targets).detach() * 2**6) / 2**6, -4, 4)


def loss(out: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    """Return a batch's loss, summed over its samples, and their number."""
    return (out * errors(out, batch.y)).sum(), len(batch.y)


def evaluate(job: Any) -> None:
    """Evaluate the first samples in all processes together, and write the sum of their errors."""
    for attempt in job.collective("eval"):
        with attempt as team, torch.no_grad():
            found = torch.zeros(())
            # The ranks along `tensor` compute the same samples; those along `shard` make equally many forward passes.
            mine, of = team.rank // tensor, team.world_size // tensor
            for first in range(0, NUM_EVALUATED, 4 * of):
                rows = slice(first + 4 * mine, min(first + 4 * mine + 4, NUM_EVALUATED))
                found = found + errors(model(x[rows]), y[rows]).abs().sum()
            team.all_reduce(found)
            trace("evaluated", step=job.step, value=float(found / tensor))


def finish(job: Any) -> None:
    """Write this process's part of the parameters, each element under its position in the whole parameter."""
    elements = {
        f"{name}[{at}]": value.hex()
        for name, p in model.named_parameters()
        for at, value in zip(positions[name], local(p).tolist(), strict=True)
    }
    trace(
        "done",
        generation=job.generation,
        world_size=job.world_size,
        parameters="",
        elements=elements,
        samples=job.plan.digest(job.step),
    )


with regroup.session(model=model, optimizer=optimizer, data=(x, y), global_batch=32, microbatch=4) as job:
    for step in job.steps(STEPS):
        with step:
            pause(step.index)
            if HAS_STAGES:
                step.run(loss)
            else:
                for batch in step.microbatches():
                    total, weight = loss(model(batch.x), batch)
                    step.backward(sum=total, weight=weight)
            step.commit(
                after=[
                    lambda: trace(
                        "commit", step=step.index, generation=job.generation, rank=job.rank, part=job.rank % group_size
                    )
                ]
            )
        if step.committed and job.is_main:
            print(f"step {step.index}  loss {step.loss:.4f}  generation {job.generation}  ranks {job.world_size}")
            print(f"step {step.index} to the agent's pipe", file=sys.stderr)
        if step.committed and EVALUATE and job.step % EVALUATE == 0:
            evaluate(job)
finish(job)  # as in session.py
