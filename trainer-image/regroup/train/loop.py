"""The loop: from a configuration to a trained model, top to bottom.

The code does not depend on the number of processes. `regroup.session` deals the samples, commits a step on all ranks or on none,
handles failures and resizes, and writes checkpoints. `build` assembles model and optimizer, `tasks` has models and data.
"""

import torch

import regroup
from regroup.data import as_source
from regroup.step import Step

from . import build, tasks
from .board import Board, curves
from .config import Config
from .digest import digest_of, digest_together
from .flops import peak_flops
from .passes import Passes
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
    passes = Passes(model, config, device, dtype, mesh)
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
                passes.train(step)
                step.commit(max_norm=max_norm, after=[schedule.step])
            if step.times is None:  # not committed
                continue
            done = job.step if server is not None else step.index + 1
            before = min(seen, done) if server is not None and seen else step.index
            seen, is_last = done, done == config.steps
            samples = job.global_batch if server is None else server.step_samples(config.microbatch, job.global_batch)
            meter.add(step.times, (done - before) * samples)
            board.committed(job, step)
            if is_last or _reaches(before, done, config.print_every):
                speed = meter.take(job.world_size)
                if job.is_main:
                    print(_line(step, done, job, speed), flush=True)
                    board.points(job, step, curves(step, speed, device))
            if is_last or (config.evaluate_every and _reaches(before, done, config.evaluate_every)):
                result = passes.evaluate(job, evaluate_on)
                if job.is_main and result is not None:
                    held_out_loss, accuracy = result
                    print(f"step {done}  held-out loss {held_out_loss:.4f}  accuracy {accuracy:.4f}", flush=True)
            if is_last and mesh is not None:  # inside the loop, since all ranks have to take part
                digest = digest_together(model, job)
        board.close()
        if job.is_main and (mesh is None or digest is not None):
            print(f"parameters sha256 {digest or digest_of(model)}", flush=True)


def _reaches(before: int, done: int, every: int) -> bool:
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
