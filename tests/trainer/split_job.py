"""A small training script whose model is split over a model group. What it does beyond training is read from TEST_* variables.

TEST_MESH       the mesh, such as "shard=2" (default: none, each process has all of the model)
TEST_SCHEDULE   of the pipeline (default: 1f1b); with one, or with TEST_RUN, the loop calls step.run()
TEST_LOOP       the loop calls step.backward() whatever the model is
TEST_OPTIMIZER  adamw (default) or sgd
TEST_PACE       seconds that a step takes until the file TEST_GO is there
TEST_FAULT      see faults.py
TEST_MODEL      what is odd about the model, and how many optimizers it has: words of split_models.py
TEST_SEEDLESS   torch is not seeded before the model is built
TEST_EVAL       the model is evaluated in job.collective() after every step
TEST_RAISE      G:N  all ranks raise in step N of generation G, after a backward, once all are there
TEST_ROWS       the data has so many rows (default: 1000)
TEST_TRACE      a file to which each rank appends {generation, step, rank} for each commit
TEST_BREAK      the loop is left after this step
TEST_END_FAILS  the rank whose script fails after its loop, once: a file in TEST_PARTS says that it has
TEST_NCCL       tensors go the way of those on a GPU, over gloo (gloo_for_nccl.py)
TEST_PARTS      directory in which each process leaves its part of the parameters and of the optimizer's state at the end

Its last line is JSON: losses by step, identity of the model, number of right answers by step where it is evaluated.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

import regroup
from regroup.checkpoint.shards import is_split, local_of

from split_models import Model  # type: ignore[import-not-found]  # isort: skip  # it lies beside this script

if os.environ.get("TEST_NCCL"):
    from gloo_for_nccl import install  # type: ignore[import-not-found]  # it lies beside this script

    install()
sizes = {name: int(size) for name, _, size in (one.partition("=") for one in os.environ.get("TEST_MESH", "").split())}
mesh = regroup.mesh(**sizes) if sizes else None
words = frozenset(os.environ.get("TEST_MODEL", "").split())
if os.environ.get("TEST_SEEDLESS"):
    torch.seed()  # the processes are forked from one
else:
    torch.manual_seed(3)
x = torch.randn(int(os.environ.get("TEST_ROWS", "1000")), 16, generator=torch.Generator().manual_seed(1))
y = (x @ torch.randn(16, 4, generator=torch.Generator().manual_seed(2))).argmax(1)
whole_model = Model(words)
runs = "pipeline" in sizes or bool(os.environ.get("TEST_RUN"))
# A pipeline is made of a plain row of modules, which is what the model computes without odd words.
model: torch.nn.Module = torch.nn.Sequential(*whole_model) if runs else whole_model
blocks = whole_model.blocks
if "tensor" in sizes and mesh is not None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in blocks:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
for block in blocks if "compiled" in words else ():
    block.compile(backend="aot_eager")
if "shard" in sizes and mesh is not None:
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        fully_shard(block, mesh=mesh["shard"])
    if (
        not os.environ.get("TEST_PARTLY") and "pipeline" not in sizes
    ):  # else the first and the last layer are whole on every rank
        fully_shard(model, mesh=mesh["shard"])
if runs:
    model = regroup.pipeline(model, schedule=os.environ.get("TEST_SCHEDULE", "1f1b"))
optimizer: torch.optim.Optimizer = (
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if os.environ.get("TEST_OPTIMIZER") == "sgd"
    else torch.optim.AdamW(model.parameters(), lr=0.01)
)
optimizers = [optimizer]
if "two" in words:
    optimizers = [
        torch.optim.SGD(blocks.pop().parameters(), lr=0.05, momentum=0.9),
        torch.optim.AdamW([one for number in (0, 1, 3) for one in whole_model[number].parameters()], lr=0.01),
    ]
schedule = torch.optim.lr_scheduler.StepLR(optimizers[-1], step_size=7, gamma=0.5)
mine = [id(p) for p in model.parameters()]
losses, rights = {}, {}


def summed(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return torch.nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def meet(rank: int, world_size: int) -> None:
    """Return once all ranks have called it."""
    there = [Path(os.environ["TEST_TRACE"]).with_suffix(f".{one}") for one in range(world_size)]
    there[rank].touch()
    ends_s = time.monotonic() + 60
    while not all(one.exists() for one in there):
        assert time.monotonic() < ends_s, "not all ranks came"
        time.sleep(0.001)


if os.environ.get("TEST_FAULT"):
    import faults  # type: ignore[import-not-found]  # it lies beside this script

    faults.install(os.environ["TEST_FAULT"])

with regroup.session(
    model=model,
    optimizer=optimizers if len(optimizers) > 1 else optimizers[0],
    data=(x, y),
    global_batch=48,
    microbatch=4,
    state={"schedule": schedule},
) as job:
    for step in job.steps(int(os.environ.get("TEST_STEPS", "20"))):
        with step:
            if not Path(os.environ.get("TEST_GO", "/")).exists():
                time.sleep(float(os.environ.get("TEST_PACE", "0.03")))
            if runs and not os.environ.get("TEST_LOOP"):
                step.run(summed if not os.environ.get("TEST_ONE_VALUE") else lambda *batch: summed(*batch)[0])  # type: ignore[arg-type]
            else:
                for inputs, targets in step.microbatches():
                    loss = torch.nn.functional.cross_entropy(model(inputs, step.virtual_worker % 4 == 1), targets)
                    step.backward(mean=loss, weight=len(targets))
            if os.environ.get("TEST_RAISE") == f"{job.generation}:{step.index}":
                meet(job.rank, job.world_size)
                raise OSError("the file server does not answer")
            step.commit(after=[schedule.step], max_norm=0.5)
            losses[step.index] = step.loss
        if os.environ.get("TEST_TRACE") and step.committed:
            with Path(os.environ["TEST_TRACE"]).open("a") as lines:
                lines.write(json.dumps({"generation": job.generation, "step": step.index, "rank": job.rank}) + "\n")
        if os.environ.get("TEST_EVAL") and step.committed:
            for attempt in job.collective("eval"):
                with attempt as team, torch.no_grad():
                    model.eval()
                    # The processes of a pipeline compute the same samples.
                    alike = sizes.get("pipeline", 1)
                    at, of = team.rank // alike, max(1, team.world_size // alike)
                    chosen = slice(at * 1000 // of, (at + 1) * 1000 // of)
                    output = team.forward(x[chosen])
                    right = torch.tensor(0) if output is None else (output.argmax(1) == y[chosen]).sum()
                    rights[step.index] = int(team.all_reduce(right))
            model.train()
        if step.committed and step.index == int(os.environ.get("TEST_BREAK", "-1")):
            break

if os.environ.get("TEST_END_FAILS") == str(job.rank):
    tried = Path(os.environ["TEST_PARTS"]) / "tried"
    if not tried.exists():
        tried.touch()
        raise RuntimeError("could not save the model to the bucket")
if os.environ.get("TEST_PARTS"):
    parts: dict[str, Any] = {}
    parameter: Any  # perhaps a DTensor
    for name, parameter in model.named_parameters():
        split = [str(placement) for placement in parameter.placements] if is_split(parameter) else []
        dims = list(parameter.device_mesh.mesh_dim_names or ()) if is_split(parameter) else []
        held = {"parameter": parameter, **{k: v for one in optimizers for k, v in one.state.get(parameter, {}).items()}}
        parts[name] = {
            "dims": dims,
            "split": split,
            "local": {key: local_of(one.detach()) for key, one in held.items()},
        }
    for name, buffer in model.named_buffers():
        parts[name] = {"dims": [], "split": [], "local": {"buffer": buffer}}
    torch.save(parts, Path(os.environ["TEST_PARTS"]) / f"{job.rank}.pt")
same = mine == [id(p) for p in model.parameters()]
print(
    json.dumps(
        {
            "losses": losses,
            "rights": rights,
            "same_model": same,
            "rank": job.rank,
            "rate": schedule.get_last_lr()[0],
            "step": job.step,
        }
    ),
    flush=True,
)
