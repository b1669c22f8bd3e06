"""GPT-2 124M as `regroup.train` trains it, beside a plain loop: tokens per second, and how long the GPU is idle."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from bench.gpu import judge
from bench.gpu.part import NOT_ON_CPU, SAMPLES, SCRIPTS, Context, Row, changes
from bench.trials import BenchError

VOCABULARY, PADDED = 50257, 50304
BATCH, LENGTH = 512, 1024
DRY_BATCH, DRY_LENGTH, DRY_VOCABULARY = 16, 64, 256
PROFILED = 2
"""Steps in the profiler's trace."""


def run(context: Context, say: Callable[[Row], None]) -> None:
    """Measure each loop in a process of its own, one after the other: they have the GPU for themselves."""
    small, large = context.sizes.microbatches[0], context.sizes.microbatches[-1]
    ours = _ours(context, large)
    say(Row(f"regroup.train, microbatch {large}", f"{ours:,.0f} tokens/s", value=round(ours)))
    same = _plain(context, large, VOCABULARY)
    say(Row(f"plain loop, microbatch {large}", f"{same:,.0f} tokens/s", value=round(same)))
    best = _plain(context, large, PADDED)
    say(Row(f"plain loop, vocabulary {PADDED}", f"{best:,.0f} tokens/s", value=round(best)))
    for row in verdicts(context, ours, same, best):
        say(row)
    say(idle(context, f"GPU idle, microbatch {small}", _profiled(context, small), judge.IDLE_GPT2))


def verdicts(context: Context, ours: float, same: float, best: float) -> list[Row]:
    """Return how ours compares, in tokens per second: with the same vocabulary, with the best, and with the aim. Pure."""
    rows = [
        context.judged(
            what, f"{ours / other:.3f}", f"at least {aim:g}", ours >= aim * other, round(ours / other, 4), speed=True
        )
        for what, other, aim in (
            ("beside the plain loop, same vocabulary", same, judge.OF_SAME),
            ("beside the plain loop's best", best, judge.OF_BEST),
        )
    ]
    gpu = context.machine.gpus[0] if context.machine.gpus else "a CPU"
    aim = judge.tokens_aim(gpu)
    what, found = "tokens/s on this GPU", f"{ours:,.0f}"
    if aim is None:
        return [*rows, Row(what, found, "aims are for H100 and H200", None, f"not judged on {gpu}", round(ours))]
    return [*rows, context.judged(what, found, f"at least {aim:,.0f}", ours >= aim, round(ours), speed=True)]


def idle(context: Context, what: str, trace: Path, aim: float) -> Row:
    """Return the verdict on the GPU's idle time in a trace."""
    share = judge.idle_share(json.loads(trace.read_text())["traceEvents"])
    wanted = f"below {100 * aim:g} %"
    if share is None and not context.machine.is_gpu:
        return Row(what, "the trace is there", wanted, None, NOT_ON_CPU)
    if share is None:
        raise BenchError(f"{trace} has no work of the GPU: the profiler did not record it")
    return context.judged(what, f"{100 * share:.1f} %", wanted, share < aim, round(share, 4), speed=True)


def _sizes(context: Context) -> tuple[int, int]:
    """Return samples in a step, and tokens in a sample."""
    return (BATCH, LENGTH) if context.machine.is_gpu else (DRY_BATCH, DRY_LENGTH)


def _rate(context: Context, loop: str, microbatch: int, *arguments: str) -> float:
    """Return the tokens per second of a loop of its own command: bench.gpt_train or bench.gpt_plain, with equal sizes."""
    batch, length = _sizes(context)
    sizes = {"size": context.sizes.model, "length": length, "batch": batch, "microbatch": microbatch}
    options = {**sizes, "steps": context.sizes.gpt_steps + 1, "device": context.machine.device}
    command = [sys.executable, "-m", loop, *(f"--{name}={value}" for name, value in options.items()), *arguments]
    name = "-".join([loop.removeprefix("bench."), str(microbatch), *arguments[:1]]).replace("--", "")
    lines = context.run(name, command, context.environment(1)).splitlines()
    return float(json.loads(next(line for line in reversed(lines) if line.startswith("{")))["tokens_per_s"])


def _ours(context: Context, microbatch: int) -> float:
    dry = [f"--vocab={DRY_VOCABULARY}", "--no-compile"]
    return _rate(context, "bench.gpt_train", microbatch, *([] if context.machine.is_gpu else dry))


def _plain(context: Context, microbatch: int, vocabulary: int) -> float:
    size, regions = (vocabulary, "parts") if context.machine.is_gpu else (DRY_VOCABULARY, "none")
    return _rate(context, "bench.gpt_plain", microbatch, f"--vocab={size}", f"--compile={regions}")


def _profiled(context: Context, microbatch: int) -> Path:
    """Return the trace of some steps of `regroup.train`."""
    trace = context.out / f"ours-{microbatch}.trace.json"
    trace.unlink(missing_ok=True)
    first = context.sizes.gpt_steps
    command = [sys.executable, str(SCRIPTS / "profiled_train.py"), str(trace), str(first), str(PROFILED)]
    batch, length = _sizes(context)
    fields = [f"global_batch={batch}", f"microbatch={microbatch}", f"task.size={context.sizes.model}"]
    fields += [f"task.length={length}", "print_every=1", "evaluate_every=null", "schedule.warmup_steps=2", "steps=1000"]
    fields += [] if context.machine.is_gpu else ["compile=false"]
    command += [str(SAMPLES / "gpt2.yaml"), *changes(*fields)]
    with context.started(f"profiled-{microbatch}", command, context.environment(1)) as process:
        process.until("the trace was written", trace.exists)
    return trace
