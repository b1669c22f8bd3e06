"""A small language model, whose tokens (context) or experts (expert) are split over a model group. From TEST_* variables:

TEST_MESH       the mesh, such as "context=2" (default: none, each process has all of the model)
TEST_EXPERTS    number of experts of each block (default 0: one feed-forward layer)
TEST_TOP_K      experts of each token (default 1)
TEST_ATTENTION  ulysses (default) or ring
TEST_PARTLY     what FSDP2 splits where there is a dimension shard: blocks or head (default: everything)
TEST_MEAN       pass the loss of a microbatch as a mean
TEST_OPTIMIZER  adamw (default) or sgd
TEST_PACE       seconds that a step takes until the file TEST_GO is there
TEST_RESIZE_AT  the first generation ends with this step: ranks wait in it until they know of the next one
TEST_FAULT      see faults.py
TEST_NCCL       tensors go the way of those on a GPU, over gloo (gloo_for_nccl.py)
TEST_PARTS      directory in which each process leaves its part of the parameters and of the optimizer's state at the end

Its last line is JSON: losses by step, identity of the model.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

import regroup
from regroup.checkpoint.shards import is_split, local_of

if os.environ.get("TEST_NCCL"):
    from gloo_for_nccl import install  # type: ignore[import-not-found]  # it lies beside this script

    install()
ATTENTION = os.environ.get("TEST_ATTENTION", "ulysses")
WIDTH, HEADS, VOCABULARY, LENGTH = 16, 4, 12, 16
EXPERTS, TOP_K = int(os.environ.get("TEST_EXPERTS", "0")), int(os.environ.get("TEST_TOP_K", "1"))
sizes = {name: int(size) for name, _, size in (one.partition("=") for one in os.environ.get("TEST_MESH", "").split())}
mesh = regroup.mesh(**sizes) if sizes else None
context = mesh["context"] if mesh is not None and "context" in sizes else None
expert = mesh["expert"] if mesh is not None and "expert" in sizes else None


class FeedForward(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        # Without biases: that of the keys has no gradient but rounding, which Adam would scale up.
        self.query, self.key, self.value, self.out = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.then: torch.nn.Module = FeedForward()
        if EXPERTS:
            self.then = regroup.MixtureOfExperts(WIDTH, 2 * WIDTH, EXPERTS, expert, top_k=TOP_K)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        heads = [
            layer(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        ]
        mixed = regroup.attention(heads[0], heads[1], heads[2], context, causal=True, algorithm=ATTENTION)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.then(self.between(x))  # type: ignore[no-any-return]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


torch.manual_seed(3)
draw = torch.Generator().manual_seed(1)
text = torch.randint(VOCABULARY, (1000, LENGTH + 1), generator=draw).cumsum(1) % VOCABULARY
x, y = text[:, :-1].contiguous(), text[:, 1:].contiguous()
lengths = torch.randint(4, LENGTH + 1, (1000, 1), generator=draw)
y[torch.arange(LENGTH) >= lengths] = -100  # padding: the second half of some microbatches has no weight at all
model = Model()
blocks: Any = model.blocks
if "tensor" in sizes and mesh is not None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = {f"{name}": ColwiseParallel() for name in ("query", "key", "value", "then.up")}
    for block in blocks:
        parallelize_module(block, mesh["tensor"], {**columns, "out": RowwiseParallel(), "then.down": RowwiseParallel()})
if "shard" in sizes and mesh is not None:
    from torch.distributed.fsdp import fully_shard

    # What it does not split is whole on every rank, but for the experts, which are split anyhow.
    for layer in {"blocks": blocks, "head": [model.head]}.get(os.environ.get("TEST_PARTLY", ""), [*blocks, model]):
        fully_shard(layer, mesh=mesh["shard"])
optimizer: torch.optim.Optimizer = (
    torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    if os.environ.get("TEST_OPTIMIZER") == "sgd"
    else torch.optim.AdamW(model.parameters(), lr=0.01)
)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.5)
mine = [id(p) for p in model.parameters()]
losses, norms = {}, {}
drawn: list[float] = []
if os.environ.get("TEST_FAULT"):
    import faults  # type: ignore[import-not-found]  # it lies beside this script

    faults.install(os.environ["TEST_FAULT"])

with regroup.session(
    model=model,
    optimizer=optimizer,
    data=(x, y),
    global_batch=24,
    microbatch=2,
    state={"schedule": schedule},
) as job:
    for step in job.steps(int(os.environ.get("TEST_STEPS", "20"))):
        with step:
            if not Path(os.environ.get("TEST_GO", "/")).exists():
                time.sleep(float(os.environ.get("TEST_PACE", "0.03")))
            while os.environ.get("TEST_RESIZE_AT") == str(step.index) and job.generation == 1 and not job.knows_newer():
                time.sleep(0.005)
            for batch in step.microbatches():
                (tokens, targets), positions = regroup.split_sequence(batch, context)
                drawn = drawn or [float(torch.rand(()))]
                said = model(tokens, positions).flatten(0, 1)
                weight = int((targets >= 0).sum())
                if os.environ.get("TEST_MEAN"):
                    step.backward(mean=torch.nn.functional.cross_entropy(said, targets.flatten()), weight=weight)
                else:
                    loss = torch.nn.functional.cross_entropy(said, targets.flatten(), reduction="sum")
                    step.backward(sum=loss, weight=weight)
            step.commit(after=[schedule.step], max_norm=0.5)
            losses[step.index], norms[step.index] = step.loss, step.norm

if os.environ.get("TEST_PARTS"):
    parts: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        split = [str(placement) for placement in parameter.placements] if is_split(parameter) else []  # type: ignore[attr-defined]
        dims = list(parameter.device_mesh.mesh_dim_names or ()) if is_split(parameter) else []  # type: ignore[attr-defined]
        held = {"parameter": parameter, **optimizer.state[parameter]}
        parts[name] = {
            "dims": dims,
            "split": split,
            "local": {key: local_of(one.detach()) for key, one in held.items()},
        }
    torch.save(parts, Path(os.environ["TEST_PARTS"]) / f"{job.rank}.pt")
same = mine == [id(p) for p in model.parameters()]
print(
    json.dumps(
        {
            "losses": losses,
            "norms": norms,
            "drawn": drawn,
            "same_model": same,
            "rank": job.rank,
            "rate": schedule.get_last_lr()[0],
        }
    ),
    flush=True,
)
