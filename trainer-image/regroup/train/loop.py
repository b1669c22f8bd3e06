"""The loop: from a configuration to a trained model, top to bottom.

The code does not depend on the number of processes. `regroup.session` deals the samples, commits a step on all ranks or on none,
handles failures and resizes, and writes checkpoints. `build` assembles model and optimizer, `tasks` has models and data.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import regroup
from regroup.data import as_source
from regroup.parallel.pipeline import Pipeline
from regroup.step import Step

from . import build, shares, tasks
from .board import Board, curves
from .config import Config
from .digest import digest_of, digest_together
from .flops import peak_flops
from .sections import ParameterServer
from .speed import Meter, Speed


def train(config: Config) -> None:
    """Train to the last step, and print on one process. Raises ConfigError or DataError for mistakes of the user."""
    device = build.device_of(config.device)
    if config.compile:
        build.check_compiler(device)
    mesh = build.mesh_of(config, device)
    torch.manual_seed(config.seed)  # every process of a mesh builds the same model and keeps its part
    task = tasks.build(config.task)
    task.model.to(device)
    model = build.prepare(task, config, mesh)
    optimizer = build.optimizer_of(config.optimizer, model)
    schedule = build.schedule_of(config, optimizer)
    dtype = build.DTYPES[config.precision]
    scaler = torch.amp.GradScaler(device.type) if dtype == torch.float16 else None
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    server = config.strategy if isinstance(config.strategy, ParameterServer) else None
    meter = Meter(task, peak_flops(gpu, config.precision))
    board = Board(config, model, device)
    train_on, evaluate_on = task.train, as_source(task.held_out)
    del task  # frees the layers that other processes of a pipeline have
    is_pipeline = isinstance(model, Pipeline)
    context = mesh["context"] if mesh is not None and "context" in mesh.mesh_dim_names else None

    def in_precision() -> torch.autocast:
        return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)

    def taken(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets on the device, with this process's part of each sequence."""
        x, y = regroup.split_sequence(batch, context).batch if context is not None else batch
        return x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    def summed(scores: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
        """Return the loss summed over the targets, and their number. The last stage of a pipeline calls it."""
        _, y = taken(batch)
        with in_precision():
            return cross_entropy(scores.flatten(0, -2), y.flatten(), reduction="sum"), y.numel()

    def evaluate_share(rank: int, world_size: int, forward: Callable[..., Any]) -> torch.Tensor:
        """Return the sums of loss, right answers and targets over a process's share of the held-out data."""
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        with _evaluating(model, config.compile):
            for first, counts in shares.held_out(rank, world_size, len(evaluate_on), config.microbatch):
                x, y = taken(evaluate_on.fetch(torch.arange(first, min(first + config.microbatch, len(evaluate_on)))))
                with in_precision():
                    scores = forward(x)
                if scores is None or not counts:  # only the last stage of a pipeline has scores
                    continue
                scores = scores.flatten(0, -2)
                with in_precision():
                    loss = cross_entropy(scores, y.flatten())
                right = (scores.argmax(-1) == y.flatten()).sum()
                sums += torch.stack([loss.double() * y.numel(), right.double(), right.new_tensor(y.numel()).double()])
        return sums

    def evaluate() -> tuple[float, float] | None:
        """Return loss and accuracy on held-out data. Every rank must call it between two steps; a membership change repeats it.

        Returns None if another process of this model group has died, and under a parameter server on all ranks but the server.
        """
        whole = None
        if server is not None:
            whole = evaluate_share(0, 1, model) if job.is_main else None
        else:
            for attempt in job.collective("evaluate"):
                with attempt as team:
                    sums = evaluate_share(team.rank, team.world_size, team.forward)
                    team.all_reduce(sums)
                    whole = sums
        if whole is None:
            return None
        loss_sum, num_right, num_targets = whole.tolist()
        return loss_sum / num_targets, num_right / num_targets

    with regroup.session(
        model=model,
        optimizer=optimizer,
        data=train_on,
        global_batch=config.global_batch,
        batch_per_rank=config.batch_per_rank,
        rate_scaling=build.rate_scaling_of(config.rate_scaling),
        microbatch=config.microbatch,
        state={"schedule": schedule},
        seed=config.seed,
        reduction=config.reduction,
        scaler=scaler,
        strategy=build.strategy_of(config),
        noise_scale=config.noise_scale,
    ) as job:
        digest: str | None = None
        clips = server is not None or job.guarantees.whole_gradient  # other strategies clip their inner steps
        max_norm = config.max_norm if clips else None
        seen = 0  # steps done after the last block; a parameter server makes several in one, of which a worker may see none
        for step in job.steps(config.steps):
            board.begin(job, step)
            with step:  # a membership change ends this block; the same step comes again
                if is_pipeline:  # the session runs the microbatches through the stages
                    step.run(summed, inputs=lambda batch: taken(batch)[0])
                for batch in (
                    () if is_pipeline else step.microbatches()
                ):  # this rank's share, however many ranks there are now
                    x, y = taken(batch)
                    with in_precision():
                        loss = model(x, y)
                    step.backward(mean=loss, weight=y.numel())
                step.commit(max_norm=max_norm, after=[schedule.step])
            if step.times is None:  # not committed
                continue
            done = job.step if server is not None else step.index + 1
            before = min(seen, done) if server is not None and seen else step.index
            seen, is_last = done, done == config.steps
            samples = job.global_batch if server is None else server.step_samples(config.microbatch, job.global_batch)
            meter.add(step.times, (done - before) * samples)
            board.committed(job, step)
            if is_last or _passes(before, done, config.print_every):
                speed = meter.take(job.world_size)
                if job.is_main:
                    print(_line(step, done, job, speed), flush=True)
                    board.points(job, step, curves(step, speed, device))
            if is_last or (config.evaluate_every and _passes(before, done, config.evaluate_every)):
                result = evaluate()
                if job.is_main and result is not None:
                    held_out_loss, accuracy = result
                    print(f"step {done}  held-out loss {held_out_loss:.4f}  accuracy {accuracy:.4f}", flush=True)
            if is_last and mesh is not None:  # inside the loop, since all ranks have to take part
                digest = digest_together(model, job)
        board.close()
        if job.is_main and (mesh is None or digest is not None):
            print(f"parameters sha256 {digest or digest_of(model)}", flush=True)


@contextmanager
def _evaluating(model: torch.nn.Module, is_compiled: bool) -> Iterator[None]:
    """Run a block in evaluation mode, without gradients and uncompiled, since a joining worker has rehearsed only training."""
    eager = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
    model.eval()
    try:
        with torch.no_grad(), eager:
            yield
    finally:
        model.train()


def _passes(before: int, done: int, every: int) -> bool:
    """Return whether a multiple of `every` lies above `before` and not above `done`."""
    return done // every > before // every


def _line(step: Step, done: int, job: regroup.Job, speed: Speed) -> str:
    norm = "" if step.norm is None else f"  norm {step.norm:.3g}"
    noise = "" if step.noise_scale is None else f"  noise scale {step.noise_scale:.3g}"
    skipped = "  skipped" if step.skipped else ""
    tokens = f"  {speed.per_second:,.0f} tokens/s" if speed.unit == "tokens" else ""
    mfu = "" if speed.mfu is None else f"  MFU {100 * speed.mfu:.1f} %"
    return (
        f"step {done}  loss {step.loss:.4f}{norm}{noise}  rate {step.learning_rates[0]:.3g}{tokens}{mfu}{skipped}"
        f"  generation {job.generation}  ranks {job.world_size}"
    )
