"""The loop: from a configuration to a trained model, top to bottom.

Nothing here knows how many processes there are. `regroup.session` deals the samples, commits a step on all ranks or on none,
and handles failures and resizes; checkpoints are the job's. What is put together is in `build`, what is trained in `tasks`.
"""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.nn.functional import cross_entropy

import regroup
from regroup.checkpoint.shards import is_split
from regroup.data import as_source
from regroup.step import Step

from . import build, shares, tasks
from .board import Board, curves
from .config import Config, ParameterServer
from .flops import peak_flops
from .speed import Meter, Speed


def train(config: Config) -> None:
    """Train to the last step, printing on one process. Raises ConfigError or DataError for what the user can correct."""
    device = build.device_of(config.device)
    if config.compile:
        build.check_compiler(device)
    mesh = build.mesh_of(config)
    torch.manual_seed(config.seed)  # every process of a mesh builds the same model, and keeps its part
    task = tasks.build(config.task)
    model = task.model.to(device)
    build.prepare(task, config, mesh)
    optimizer = build.optimizer_of(config.optimizer, model)
    schedule = build.schedule_of(config, optimizer)
    dtype = build.DTYPES[config.precision]
    scaler = torch.amp.GradScaler(device.type) if dtype == torch.float16 else None
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    server = config.strategy if isinstance(config.strategy, ParameterServer) else None
    samples = server.step_samples(config.microbatch, config.global_batch) if server else config.global_batch
    meter = Meter(task, samples, peak_flops(gpu, config.precision))
    board = Board(config, model, device)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss, and the scores [number of targets, classes]."""
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            scores = model(x).flatten(0, -2)
            return cross_entropy(scores, y.flatten()), scores

    def evaluate_share(rank: int, world_size: int) -> torch.Tensor:
        """Return the sums of loss, right answers and targets over a process's share of the held-out data."""
        source = as_source(task.held_out)
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        with _evaluating(model, config.compile):
            for first, counts in shares.held_out(rank, world_size, len(source), config.microbatch):
                ids = torch.arange(first, min(first + config.microbatch, len(source)))
                x, y = (part.to(device, non_blocking=True) for part in source.fetch(ids))
                loss, scores = loss_of(x, y)
                if not counts:
                    continue
                right = (scores.argmax(-1) == y.flatten()).sum()
                sums += torch.stack([loss.double() * y.numel(), right.double(), right.new_tensor(y.numel()).double()])
        return sums

    def evaluate() -> tuple[float, float] | None:
        """Return loss and accuracy on held-out data. Called by every rank between two steps; a membership change repeats it. None:
        a process that holds a part of this one's model died, or it is another's: under a parameter server the server's."""
        whole = None
        if server is not None:
            whole = evaluate_share(0, 1) if job.is_main else None
        else:
            for attempt in job.collective("evaluate"):
                with attempt as team:
                    sums = evaluate_share(team.rank, team.world_size)
                    team.all_reduce(sums)
                    whole = sums
        if whole is None:
            return None
        loss_sum, num_right, num_targets = whole.tolist()
        return loss_sum / num_targets, num_right / num_targets

    with regroup.session(
        model=model,
        optimizer=optimizer,
        data=task.train,
        global_batch=config.global_batch,
        microbatch=config.microbatch,
        state={"schedule": schedule},
        seed=config.seed,
        reduction=config.reduction,
        scaler=scaler,
        strategy=build.strategy_of(config),
        noise_scale=config.noise_scale,
    ) as job:
        digest: str | None = None
        clips = server is not None or job.guarantees.whole_gradient  # else the strategy clips its own
        max_norm = config.max_norm if clips else None
        seen = 0  # steps after the last block: a parameter server makes several in one, and some that a worker does not see
        for step in job.steps(config.steps):
            board.begin(job, step)
            with step:  # a membership change ends this block; the same step comes again
                for batch in step.microbatches():  # this rank's share, whatever the number of processes is now
                    x, y = (part.to(device, non_blocking=True) for part in batch)
                    loss, _ = loss_of(x, y)
                    step.backward(mean=loss, weight=y.numel())
                step.commit(max_norm=max_norm, after=[schedule.step])
            if step.times is None:  # not committed
                continue
            done = job.step if server is not None else step.index + 1
            before = min(seen, done) if server is not None and seen else step.index
            seen, is_last = done, done == config.steps
            meter.add(step.times, done - before)
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
            if is_last and mesh is not None:  # the parts come together, so all ranks take part, while they still meet
                for attempt in job.collective("hash"):
                    with attempt:
                        digest = _hash(model)
        board.close()
        if job.is_main and (mesh is None or digest is not None):
            print(f"parameters sha256 {digest or _hash(model)}", flush=True)


@contextmanager
def _evaluating(model: torch.nn.Module, is_compiled: bool) -> Iterator[None]:
    """No gradients, evaluation mode; not compiled, because a worker that joins has rehearsed a step of training only."""
    eager = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
    model.eval()
    try:
        with torch.no_grad(), eager:
            yield
    finally:
        model.train()


def _passes(before: int, done: int, every: int) -> bool:
    """Return whether a multiple of `every` lies above `before` steps and not above `done`."""
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


def _hash(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    # Torch warns that what is split twice is gathered in two parts.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for parameter in model.parameters():
        whole = parameter.full_tensor() if is_split(parameter) else parameter  # type: ignore[attr-defined]
        digest.update(whole.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
