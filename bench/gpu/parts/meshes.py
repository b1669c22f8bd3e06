"""Each kind of split model: its losses beside those of one process that has the whole model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from bench.gpu import judge
from bench.gpu.part import SAMPLES, SCRIPTS, Context, Process, Row, changes, regroup_run, regroup_train
from bench.trials import BenchError, Trial, measure

RANKS = {"fsdp-tensor": 4, "pipeline-fsdp": 4, "pipeline-tensor": 4}
"""Of a model group; of all others it has two."""
IN_BFLOAT16 = ("fsdp-tensor", "pipeline-fsdp")
FIELDS = ("steps=6", "schedule.warmup_steps=1", "print_every=1", "evaluate_every=null")


def run(context: Context, say: Callable[[Row], None]) -> None:
    """Train each configuration for some steps in one model group, and without its mesh; groups of one size beside each other."""
    for ranks in sorted({RANKS.get(name, 2) for name in context.sizes.meshes}):
        _compare(context, say, ranks, [name for name in context.sizes.meshes if RANKS.get(name, 2) == ranks])
    _kill_in_a_group(context, say)


def _kill_in_a_group(context: Context, say: Callable[[Row], None]) -> None:
    """Kill ranks of two groups that each hold a model split by FSDP2: the other group goes on."""
    kills = context.sizes.group_kills
    arguments = ("--workers-per-group", "2", "--min", "2", "--max", "4", "--max-restarts", "1000")
    trials = measure(
        regroup_run(4, *arguments, script=[str(SCRIPTS / "steps.py")]),
        context.environment(4, BENCH_WIDTH=str(context.sizes.width), BENCH_SHARDS="2"),
        output=context.out / "kills.log",
        ranks=4,
        trials=kills,
        steady_steps=context.sizes.steady,
        seed=1,
        progress=lambda _: None,
    )
    say(verdict_on_groups(context, trials))


def verdict_on_groups(context: Context, trials: Sequence[Trial]) -> Row:
    """Return what kills in one of two groups say. Pure."""
    again, kept = sum(trial.rolled_back for trial in trials), min(trial.kept for trial in trials)
    times = [trial.recovery_s for trial in trials]
    return context.judged(
        f"fsdp, 2 groups of 2: {len(trials)} kills in a group",
        f"{again} steps committed again, at least {kept} of 3 ranks train on, next commit {max(times):.2f} s at most",
        "none again; 2 ranks train on",
        again == 0 and kept >= 2,
        {"rolled_back": again, "kept": [trial.kept for trial in trials], "next_commit_s": [round(t, 3) for t in times]},
    )


def _compare(context: Context, say: Callable[[Row], None], ranks: int, names: Sequence[str]) -> None:
    with contextlib.ExitStack() as stack:

        def started(name: str, command: list[str], of: int) -> Process:
            return stack.enter_context(context.started(name, command, context.environment(of)))

        whole, split = {}, {}
        for name in names:
            settings = [str(SAMPLES / f"{name}.yaml"), *changes(*FIELDS)]
            whole[name] = started(f"{name}-whole", regroup_train(*settings, *changes("mesh=null")), 1)
            group = regroup_run(ranks, "--workers-per-group", str(ranks), "--max-restarts", "0", script=settings)
            split[name] = started(f"{name}-split", group, ranks)
        for name in names:
            aim = judge.LOSS_ROUNDED if name in IN_BFLOAT16 else judge.LOSS_ABOVE
            what, wanted = f"{name}, {ranks} ranks beside 1", f"at most {aim:g}"
            try:
                alone, found = (judge.losses(process.finished()) for process in (whole[name], split[name]))
            except BenchError as error:  # the others are compared all the same
                say(context.judged(what, str(error).splitlines()[0], wanted, False))
                continue
            difference = judge.largest_difference(alone, found)
            say(context.judged(what, f"losses differ by at most {difference:.4f}", wanted, difference <= aim))
