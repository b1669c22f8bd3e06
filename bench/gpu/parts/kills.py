"""SIGKILL of a rank, again and again: survivors keep process and state, and commit soon after."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.gpu import judge
from bench.gpu.part import SCRIPTS, Context, Row, regroup_run
from bench.trials import Trial, measure

RANKS = 2
NCCL_LOGS = "nccl"
"""Directory of NCCL's own logs, which show when a process begins to connect."""


def in_steps(context: Context, say: Callable[[Row], None]) -> None:
    """Kill a random rank in the middle of its steps, once all have made some."""
    done = _killed(context, say, context.sizes.kills, connecting=False)
    for row in verdicts(context, done):
        say(row)


def connecting(context: Context, say: Callable[[Row], None]) -> None:
    """Kill a rank, and the process that takes its place as well, while that one connects."""
    done = _killed(context, say, context.sizes.connecting_kills, connecting=True)
    say(_kept(context, done))
    say(_full(done))


def verdicts(context: Context, trials: Sequence[Trial]) -> list[Row]:
    """Return what the kills say. Pure."""
    times = [trial.recovery_s for trial in trials]
    median, worst = statistics.median(times), max(times)
    return [
        context.judged(
            "next commit after a kill, median",
            f"{median:.2f} s",
            f"at most {judge.FIRST_COMMIT_MEDIAN_S:g} s",
            median <= judge.FIRST_COMMIT_MEDIAN_S,
            round(median, 3),
            speed=True,
        ),
        context.judged(
            f"the slowest of {len(trials)}",
            f"{worst:.2f} s",
            f"at most {judge.FIRST_COMMIT_WORST_S:g} s",
            worst <= judge.FIRST_COMMIT_WORST_S,
            round(worst, 3),
            speed=True,
        ),
        _kept(context, trials),
        _full(trials),
    ]


def _kept(context: Context, trials: Sequence[Trial]) -> Row:
    kept, rolled_back = sum(trial.kept for trial in trials), sum(trial.rolled_back for trial in trials)
    survivors = (RANKS - 1) * len(trials)
    return context.judged(
        "survivors that train on; steps committed again",
        f"{kept} of {survivors}; {rolled_back}",
        "all; none",
        kept == survivors and rolled_back == 0,
        {"kept": kept, "survivors": survivors, "rolled_back": rolled_back},
    )


def _full(trials: Sequence[Trial]) -> Row:
    times = [trial.full_s for trial in trials]
    found = f"{statistics.median(times):.1f} s, worst {max(times):.1f} s"
    return Row("next commit of all ranks, median", found, value=[round(one, 3) for one in times])


def _killed(context: Context, say: Callable[[Row], None], kills: int, *, connecting: bool) -> list[Trial]:
    logs = context.out / NCCL_LOGS
    logs.mkdir(parents=True, exist_ok=True)
    environment = context.environment(RANKS, BENCH_WIDTH=str(context.sizes.width))
    if connecting and context.machine.is_gpu:
        environment |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": str(logs / "%p")}
    done: list[Trial] = []

    def progress(trial: Trial) -> None:
        done.append(trial)
        found = f"next commit {trial.recovery_s:.2f} s, of all {trial.full_s:.1f} s"
        say(Row(f"kill {len(done)} of {kills}, rank {trial.killed_rank}", found, value=vars(trial)))

    elastic = ("--min", "1", "--max", str(RANKS), "--max-restarts", "1000")
    return measure(
        regroup_run(RANKS, *elastic, script=[str(SCRIPTS / "steps.py")]),
        environment,
        output=context.out / "run.log",
        ranks=RANKS,
        trials=kills,
        steady_steps=context.sizes.steady,
        seed=1,
        progress=progress,
        is_next=(lambda pid: _connects(context, logs / str(pid))) if connecting else None,
    )


def _connects(context: Context, log: Path) -> bool:
    """Return whether NCCL has begun to connect in the process that writes this log. With gloo that is when the script begins."""
    if not context.machine.is_gpu:
        return True
    return log.exists() and "Init START" in log.read_text(errors="replace")
