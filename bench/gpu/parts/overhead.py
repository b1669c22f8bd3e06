"""A step of the session beside the same step under DDP, and the GPU's idle time in a step of 20 ms."""

from __future__ import annotations

import sys
from collections.abc import Callable

from bench import overhead
from bench.gpu import judge
from bench.gpu.part import SCRIPTS, Context, Row
from bench.gpu.parts.gpt2 import idle

STEPS = {"tiny": 100, "gpt": 20}
DRY_STEPS = 3


def run(context: Context, say: Callable[[Row], None]) -> None:
    """Compare blocks of steps, one process alone and two beside DDP, and profile steps of 20 ms."""
    trace = context.out / "short-steps.trace.json"
    command = [sys.executable, str(SCRIPTS / "short_steps.py"), str(trace)]
    context.run("short-steps", command, context.environment(1))
    say(idle(context, "GPU idle in a step of 20 ms", trace, judge.IDLE_SHORT_STEP))
    for name, ranks, other in (("gpt", 1, "plain"), ("gpt", 2, "ddp")):
        case = overhead.Case(
            f"{name}-{ranks}", name, ranks, STEPS[name] if context.machine.is_gpu else DRY_STEPS, other
        )
        blocks = overhead.run(
            case,
            context.sizes.pairs,
            environment=context.environment(ranks),
            out=context.out,
            timeout_s=context.left_s(),
        )
        found = overhead.summary(case, blocks)
        beside = "a plain loop" if other == "plain" else "DDP"
        what = f"a step of a small GPT, {ranks} rank{'s' if ranks > 1 else ''}, beside {beside}"
        shared = ", sharing a GPU" if context.machine.shares(ranks) else ""
        times = f"{found['ours_ms']:.2f} ms, {found[f'{other}_ms']:.2f} ms: {found['ratio']:.3f}{shared}"
        say(Row(what, times, value=found))
