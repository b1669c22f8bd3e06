"""`make bench-recovery`: from SIGKILL of a rank to the next committed step, Regroup beside torchrun, in one run.

Both train the same tiny model with four local processes; each trial kills a random rank once all are steady. Regroup's
survivors keep process and state. torchrun starts every process again, which reads the checkpoint of the last step; so its
number is also given without the time that the new processes spent importing (the longest of them).
Writes bench/out/recovery.json: `regroup`, `torchrun`, `torchrun_without_imports` in seconds, `ratio` and
`ratio_without_imports` = torchrun / Regroup, each with p50 and p99; every trial; and the setup.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.commits import BENCH_STEP_S, percentile
from bench.trials import BenchError, Trial, measure

REPOSITORY = Path(__file__).resolve().parent.parent
OUT = REPOSITORY / "bench" / "out"
RANKS = 4
STEADY_STEPS = 50
STEP_S = 0.005
PERCENTS = (50, 99)


def regroup_command() -> list[str]:
    """Elastic, so that the survivors go on at once; every rank is killed more often than the default limit allows."""
    run = [sys.executable, "-m", "regroup_cli", "run", "--workers", str(RANKS), "--min", "1", "--max", str(RANKS)]
    return [*run, "--max-restarts", "1000", str(REPOSITORY / "bench" / "recovery_script.py")]


def torchrun_command() -> list[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(RANKS)]
    return [
        *run,
        "--max-restarts",
        "100",
        "--monitor-interval",
        "0.1",
        str(REPOSITORY / "bench" / "torchrun_script.py"),
    ]


def environment() -> dict[str, str]:
    """Return what both sides inherit.

    The last variable makes torchrun use a fresh store for each restart. Without it, torch 2.13 keeps the store, restarted
    gloo ranks read the dead ones' addresses in it, and the job never steps again (pytorch issue 135712).
    """
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, BENCH_STEP_S: str(STEP_S)}
    return {**os.environ, **ours, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Return the percentiles as they stand in the JSON file."""
    return {f"p{percent}": round(percentile(values, percent), 4) for percent in PERCENTS}


def ratio(of: dict[str, float], to: dict[str, float]) -> dict[str, float]:
    return {name: round(of[name] / to[name], 2) for name in of}


def result(regroup: Sequence[Trial], torchrun: Sequence[Trial]) -> dict[str, object]:
    """Return the JSON file's content. Pure, but for the setup's description."""
    ours = summarize([trial.recovery_s for trial in regroup])
    theirs = summarize([trial.recovery_s for trial in torchrun])
    without = summarize([trial.recovery_s - trial.imports_s for trial in torchrun])
    return {
        "regroup": ours,
        "torchrun": theirs,
        "torchrun_without_imports": without,
        "torchrun_imports": summarize([trial.imports_s for trial in torchrun]),
        "ratio": ratio(theirs, ours),
        "ratio_without_imports": ratio(without, ours),
        "trials": {"regroup": [vars(trial) for trial in regroup], "torchrun": [vars(trial) for trial in torchrun]},
        "setup": {
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cpus": os.cpu_count(),
            "ranks": RANKS,
            "step_s": STEP_S,
            "trials": len(regroup),
        },
    }


def table(found: dict[str, object]) -> Table:
    out = Table(title="SIGKILL of a rank to the next committed step", caption=_caption(found))
    for heading in ("", "p50", "p99"):
        out.add_column(heading, justify="left" if not heading else "right")
    for key, title, unit in (
        ("regroup", "Regroup, local processes", " s"),
        ("torchrun", "torchrun, checkpoint every step", " s"),
        ("torchrun_without_imports", "torchrun without its imports", " s"),
        ("ratio", "torchrun / Regroup", " x"),
        ("ratio_without_imports", "torchrun without its imports / Regroup", " x"),
    ):
        values = found[key]
        assert isinstance(values, dict)
        digits = 3 if unit == " s" else 1
        out.add_row(title, *(f"{values[f'p{percent}']:.{digits}f}{unit}" for percent in PERCENTS))
    return out


def _caption(found: dict[str, object]) -> str:
    setup = found["setup"]
    assert isinstance(setup, dict)
    return f"{setup['trials']} kills each, {setup['ranks']} ranks on {setup['cpus']} cores, torch {setup['torch']}"


def main() -> int:
    """Run both sides, print the table, write the JSON file; 1 and one sentence when a side cannot be measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.recovery", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trials", type=int, default=20, help="kills on each side (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="which ranks are killed (default 0)")
    args = parser.parse_args()
    if not 1 <= args.trials <= 100:
        parser.error(f"--trials ({args.trials}) must be from 1 to 100: torchrun gives up after 100 restarts.")
    console = Console()
    sides: dict[str, list[Trial]] = {}
    try:
        for name, command in (("regroup", regroup_command()), ("torchrun", torchrun_command())):
            with console.status(f"{name}: starting") as status:
                count = 0

                def show(trial: Trial, name: str = name, status: object = status) -> None:
                    nonlocal count
                    count += 1
                    line = f"{name}: kill {count} of {args.trials}, rank {trial.killed_rank}: {trial.recovery_s:.3f} s"
                    if console.is_terminal:
                        status.update(line)  # type: ignore[attr-defined]
                    else:
                        console.print(line)

                sides[name] = measure(
                    command,
                    environment(),
                    output=OUT / f"{name}.log",
                    ranks=RANKS,
                    trials=args.trials,
                    steady_steps=STEADY_STEPS,
                    seed=args.seed,
                    progress=show,
                )
    except BenchError as error:
        console.print(f"{name}: {error}", markup=False, highlight=False)
        return 1
    found = result(sides["regroup"], sides["torchrun"])
    (OUT / "recovery.json").write_text(json.dumps(found, indent=2) + "\n")
    console.print(table(found))
    console.print(f"written to {(OUT / 'recovery.json').relative_to(REPOSITORY)}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
