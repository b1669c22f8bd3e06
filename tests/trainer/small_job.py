"""A small training script for the tests of the elastic session. What it does beyond training is read from TEST_* variables.

TEST_PACE       seconds that a step takes until the file TEST_GO is there (default 0.03), so that there is time for the test
TEST_EVAL       evaluate after every fifth step
TEST_EVAL_WAIT  G:N  in generation G, stay in the evaluation after step N until a newer one interrupts it
TEST_STEP_WAIT  G:N  in generation G, do not commit step N before a newer one was heard, planned or forced
TEST_BEFORE     a collective before the loop
TEST_BREAK      N    break out of the loop after step N
TEST_MICROBATCH samples in a microbatch of a batch of 48 (default 4)
TEST_DATA       loader: a DataLoader of a dataset that draws noise, read by a process of its own
TEST_COMPILE    seconds that torch.compile takes for the model, in its first forward (default: it is not compiled)
TEST_REHEARSE   0: do not run a step before joining, though the model is compiled
TEST_ZERO_GRAD  throw the gradients away at the beginning of a step, as many scripts do
TEST_PER_RANK   samples in a step for each rank, instead of 48 in all; the rate is scaled by the square root
TEST_HOOK       how gradients are compressed: fp16, bf16, powersgd; or ring: they are not, and go by that
TEST_UNEVEN     deal microbatches by how long ranks take for theirs
TEST_SLOW       seconds that a microbatch takes on this worker until TEST_GO is there
TEST_IDS        file for this worker's part of each step: a line for each microbatch, and one for each commit
TEST_NOISE      measure the gradient noise scale
TEST_SECOND     session or block: what may come only once, or not after the loop

Its last line is JSON: hash of the parameters, losses by step, identity of the model, what the evaluations gave.
"""

import hashlib
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import torch

import regroup


def number(name: str, default: float) -> float:
    return float(os.environ.get(name, default))


def waits(name: str, index: int) -> bool:
    return os.environ.get(name) == f"{job.generation}:{index}"


def note(event: str, step: int, **values: Any) -> None:
    if os.environ.get("TEST_IDS"):
        line = {"event": event, "generation": job.generation, "step": step, "rank": job.rank, **values}
        with open(os.environ["TEST_IDS"], "a") as file:
            file.write(json.dumps(line) + "\n")


torch.manual_seed(int(number("TEST_INIT", 3)))
hidden = int(number("TEST_HIDDEN", 32))
x = torch.randn(1000, 16, generator=torch.Generator().manual_seed(1))
y = (x @ torch.randn(16, 4, generator=torch.Generator().manual_seed(2))).argmax(1)


class Noisy(torch.utils.data.Dataset[Any]):
    """The same samples as an augmentation would give them."""

    def __len__(self) -> int:
        return len(x)

    def __getitem__(self, i: int) -> Any:
        return x[i] + 0.01 * torch.randn(16) + 0.01 * random.random(), y[i]


microbatch = int(number("TEST_MICROBATCH", 4))
data: Any = (x, y)
if os.environ.get("TEST_DATA") == "loader":
    data = torch.utils.data.DataLoader(Noisy(), batch_size=microbatch, num_workers=1)
layers = [torch.nn.Linear(16, hidden), torch.nn.ReLU()]
if os.environ.get("TEST_LAYER") == "batchnorm":
    layers.append(torch.nn.BatchNorm1d(hidden))
    layers[-1].register_buffer("phase", torch.ones(2, dtype=torch.complex64))  # gloo gathers no complex numbers
if os.environ.get("TEST_LAYER") == "dropout":
    layers.append(torch.nn.Dropout(0.3))
model = torch.nn.Sequential(*layers, torch.nn.Linear(hidden, 4))
if os.environ.get("TEST_COMPILE"):

    def slowly(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Any:
        time.sleep(number("TEST_COMPILE", 0))
        return graph.forward

    class Whole(torch.nn.Sequential):
        def forward(self, *inputs: Any) -> Any:  # torch skips the frames of its own containers
            return super().forward(*inputs)  # type: ignore[no-untyped-call]

    model = Whole(*model)
    model.compile(backend=slowly)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.5)
mine = id(model), [id(p) for p in model.parameters()]
losses = {}
noise = {}
evaluations = []
before = []
if os.environ.get("TEST_FAULT"):
    import faults  # type: ignore[import-not-found]  # it lies beside this script

    faults.install(os.environ["TEST_FAULT"])

hooks: dict[str, Any] = {
    "fp16": "fp16",
    "bf16": "bf16",
    "powersgd": regroup.strategies.PowerSGD(rank=2, start_step=3),
}
how = os.environ.get("TEST_HOOK", "")
settings: dict[str, Any] = {
    "model": model,
    "optimizer": optimizer,
    "data": data,
    "global_batch": 48,
    "microbatch": microbatch,
    "state": {"schedule": schedule},
    "reduction": os.environ.get("TEST_REDUCTION", "fast"),
    "strategy": regroup.strategies.DataParallel(
        hooks.get(how), "ring" if how == "ring" else "library", uneven=bool(os.environ.get("TEST_UNEVEN"))
    ),
    "rehearse": False if os.environ.get("TEST_REHEARSE") == "0" else None,
}
if os.environ.get("TEST_NOISE"):
    settings["noise_scale"] = True
if os.environ.get("TEST_PER_RANK"):
    settings |= {"global_batch": None, "batch_per_rank": int(number("TEST_PER_RANK", 0))}
    settings |= {"rate_scaling": regroup.strategies.RateScaling(24, "sqrt", 5)}
with regroup.session(**settings) as job:
    if os.environ.get("TEST_SECOND") == "session":
        regroup.session(**settings)
    if os.environ.get("TEST_BEFORE"):
        for attempt in job.collective("before"):
            with attempt as team:
                before = [team.world_size, team.all_reduce(torch.full((1,), 100.0)).item()]
    for step in job.steps(int(number("TEST_STEPS", 100))):
        with step:
            if not Path(os.environ.get("TEST_GO", "/")).exists():
                time.sleep(number("TEST_PACE", 0.03))
            if os.environ.get("TEST_ZERO_GRAD"):
                optimizer.zero_grad()
            for inputs, targets in step.microbatches():
                if not Path(os.environ.get("TEST_GO", "/")).exists():
                    time.sleep(number("TEST_SLOW", 0))
                note("microbatch", step.index, v=step.virtual_worker, ids=step.ids.tolist())
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
                step.backward(mean=loss, weight=len(targets))
            while waits("TEST_STEP_WAIT", step.index) and not job.knows_newer():
                time.sleep(0.01)
            step.commit(after=[schedule.step], max_norm=1.0)
            losses[step.index] = step.loss
            noise[step.index] = step.noise_scale
            note("commit", step.index)
        if os.environ.get("TEST_FORK") and step.index == 2 and os.fork() == 0:
            time.sleep(12)  # a data loader's worker that outlives its parent; longer than the test's bound
            os._exit(0)
        if os.environ.get("TEST_EVAL") and step.committed and step.index % 5 == 0:
            for attempt in job.collective("eval"):
                with attempt as team:
                    while waits("TEST_EVAL_WAIT", step.index):
                        time.sleep(0.01)
                        team.all_reduce(torch.ones(1))
                    time.sleep(0.05)
                    total = team.all_reduce(torch.ones(1))
                    time.sleep(0.05)
                    total += team.all_reduce(torch.ones(1))
            evaluations.append([step.index, team.world_size, total.item()])
        if step.committed and step.index == number("TEST_BREAK", -1):
            break
    if os.environ.get("TEST_SECOND") == "block":
        for attempt in job.collective("final"):
            with attempt as team:
                team.all_reduce(torch.ones(1))
    same = job.model is model and (id(model), [id(p) for p in model.parameters()]) == mine

tensors = [*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]
print(
    json.dumps(
        {
            "hash": hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest(),
            "same_model": same,
            "losses": losses,
            "noise": noise,
            "evaluations": evaluations,
            "before": before,
            "rank": job.rank,
            "generation": job.generation,
            "rate": schedule.get_last_lr()[0],
        }
    ),
    flush=True,
)
