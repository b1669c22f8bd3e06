"""Planned changes of the number of ranks, and the longest time without a commit at each."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.gpu import judge
from bench.gpu.part import SCRIPTS, Context, Row, regroup_run
from bench.trials import BenchError, measure_pauses


def run(context: Context, say: Callable[[Row], None]) -> None:
    """Bring a job to each size in turn."""
    sizes = context.sizes.sizes
    environment = context.environment(max(sizes), BENCH_WIDTH=str(context.sizes.width))
    before = list(sizes)

    def progress(size: int, pause_s: float) -> None:
        say(
            context.judged(
                f"{before.pop(0)} -> {size} ranks: longest time without a commit",
                f"{pause_s:.2f} s",
                f"at most {judge.PAUSE_S:g} s",
                pause_s <= judge.PAUSE_S,
                round(pause_s, 3),
                speed=True,
            )
        )

    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        state = Path(directory) / "job"

        def scale(size: int) -> None:
            command = [sys.executable, "-m", "regroup_cli", "scale", str(state), str(size)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise BenchError(f"regroup scale: {done.stderr.strip() or done.stdout.strip()}")

        elastic = ("--min", "1", "--max", str(max(sizes)), "--max-restarts", "1000", "--state-dir", str(state))
        measure_pauses(
            regroup_run(sizes[0], *elastic, script=[str(SCRIPTS / "steps.py")]),
            environment,
            output=context.out / "run.log",
            sizes=sizes,
            steady_steps=context.sizes.steady,
            scale=scale,
            progress=progress,
        )
