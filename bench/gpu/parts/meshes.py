"""Split models of each kind on the device: equal losses, a checkpoint of parts, and kills.

The losses are compared with those of one process that has the whole model. The checkpoint of parts is read at other
splits. The kills hit one of two model groups.

Processes that share a GPU take turns, and the start of a process takes most of the time of a short run. So the runs
have few steps, and those of one size run beside each other. Models that are equal without their mesh are compared with
the same run.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from bench.gpu import judge
from bench.gpu.part import SAMPLES, SCRIPTS, Context, Process, Row, changes, regroup_run, regroup_train
from bench.trials import BenchError, Trial, measure
from regroup.layout import KNOWN_DIMS

STEPS, MORE = 4, 6
"""Steps of a split model, and of the whole one. A model that continues from a checkpoint makes the steps up to MORE, too."""
FIELDS = (
    "global_batch=8",
    "schedule={name: constant, warmup_steps: 1}",
    "print_every=1",
    "evaluate_every=null",
)
ROUNDED = "bfloat16"


@dataclass(frozen=True)
class Case:
    """A split model: a sample configuration, with another mesh where `mesh` has one."""

    sample: str
    mesh: str = ""
    """Mesh in the form of a configuration, {shard: 2, context: 2}. Empty: the sample's own."""

    @property
    def config(self) -> dict[str, object]:
        """Configuration of the case."""
        config: dict[str, object] = yaml.safe_load((SAMPLES / f"{self.sample}.yaml").read_text())
        return config | ({"mesh": yaml.safe_load(self.mesh)} if self.mesh else {})

    @property
    def sizes(self) -> dict[str, int]:
        """Dimension of the mesh -> its size."""
        mesh: Any = self.config["mesh"]
        return {name: mesh[name] for name in mesh if name in KNOWN_DIMS}

    @property
    def ranks(self) -> int:
        """Number of processes that hold one copy of the model."""
        return math.prod(self.sizes.values())

    @property
    def whole(self) -> str:
        """Key of the model without its mesh. Cases with the same key are compared with the same run."""
        return json.dumps({key: value for key, value in self.config.items() if key != "mesh"}, sort_keys=True)

    def settings(self, *fields: str) -> list[str]:
        """Return the arguments of `regroup train`."""
        mesh = (f"mesh={self.mesh}",) if self.mesh else ()
        return [str(SAMPLES / f"{self.sample}.yaml"), *changes(*FIELDS, *mesh, *fields)]


CASES: Mapping[str, Case] = {
    **{
        name: Case(name)
        for name in (
            "fsdp",
            "zero1",
            "tensor",
            "context",
            "context-ring",
            "experts",
            "pipeline",
            "pipeline-interleaved",
            "pipeline-zero-bubble",
            "fsdp-tensor",
            "pipeline-fsdp",
            "pipeline-tensor",
        )
    },
    "context-ring-float32": Case("context", "{context: 2, attention: ring}"),
    "fsdp-context": Case("context", "{shard: 2, context: 2}"),
    "tensor-context": Case("context", "{tensor: 2, context: 2}"),
    "fsdp-experts": Case("experts", "{shard: 2, expert: 2}"),
}
"""Every dimension of regroup.mesh(), and every product of them that works."""
WRITER = Case("pipeline", "{shard: 2}")
READERS: Mapping[str, Case] = {
    "tensor: 2": Case("pipeline", "{tensor: 2}"),
    "pipeline: 2": Case("pipeline", "{pipeline: 2}"),
    "no mesh": Case("pipeline", "{shard: 1}"),
}
"""Other splits of the model that WRITER has written. All are of a model that each of them can split."""


def run(context: Context, say: Callable[[Row], None]) -> None:
    """Train each configuration for some steps in one model group, and without its mesh. Those of two ranks come first."""
    wholes: dict[str, dict[int, float]] = {}
    cases = _chosen(CASES, context.sizes.meshes)
    checkpoints = context.out / "checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    two = {name: case for name, case in cases.items() if case.ranks == 2}
    _together(context, say, wholes, two, writes_to=checkpoints)
    four = {name: case for name, case in cases.items() if case.ranks > 2}
    _together(context, say, wholes, four, reads_from=checkpoints)
    with ThreadPoolExecutor() as pool:
        for row in pool.map(partial(_kills_in_a_group, context), context.sizes.killed_meshes):
            say(row)


def _chosen(cases: Mapping[str, Case], names: Sequence[str] | None) -> Mapping[str, Case]:
    return cases if names is None else {name: cases[name] for name in names}


def _together(
    context: Context,
    say: Callable[[Row], None],
    wholes: dict[str, dict[int, float]],
    cases: Mapping[str, Case],
    *,
    writes_to: Path | None = None,
    reads_from: Path | None = None,
) -> None:
    """Run these beside each other. `wholes` has losses of models without a mesh, by `Case.whole`. Missing
    ones are run.

    `writes_to`: WRITER runs, too, and leaves a checkpoint there. `reads_from`: READERS go on from it.
    """
    readers = _chosen(READERS, context.sizes.read_at) if reads_from is not None else {}
    with contextlib.ExitStack() as stack:

        def started(name: str, command: list[str], ranks: int) -> Process:
            return stack.enter_context(context.started(name, command, context.environment(ranks)))

        def group(name: str, case: Case, steps: int, *arguments: str) -> Process:
            arguments += ("--workers-per-group", str(case.ranks), "--max-restarts", "0")
            return started(
                name, regroup_run(case.ranks, *arguments, script=case.settings(f"steps={steps}")), case.ranks
            )

        split = {name: group(f"{name}-split", case, STEPS) for name, case in cases.items()}
        for name, case in readers.items():
            own = f"{reads_from}-of-{name.replace(': ', '-').replace(' ', '-')}"
            shutil.rmtree(own, ignore_errors=True)
            split[name] = group(f"from-{Path(own).name}", case, MORE, "--resume", str(reads_from), "--checkpoint", own)
        writer = group("writer", WRITER, STEPS, "--checkpoint", str(writes_to)) if writes_to is not None else None
        needed = [*cases.items(), *readers.items()]
        missing = {case.whole: (name, case) for name, case in reversed(needed) if case.whole not in wholes}
        alone = {
            key: started(
                f"{name.replace(': ', '-')}-whole", regroup_train(*case.settings("mesh=null", f"steps={MORE}")), 1
            )
            for key, (name, case) in missing.items()
        }
        for key, process in alone.items():
            with contextlib.suppress(BenchError):  # what is compared with it says so
                wholes[key] = judge.losses(process.finished())
        for name, case in cases.items():
            say(
                compared(
                    context, f"{name}, {case.ranks} ranks beside 1", case, wholes, split[name], range(1, STEPS + 1)
                )
            )
        for name, case in readers.items():
            what = f"checkpoint of shard: 2, continued with {name}"
            say(compared(context, what, case, wholes, split[name], range(STEPS + 1, MORE + 1)))
        if writer is not None:
            with contextlib.suppress(BenchError):  # the readers of its checkpoint say so
                writer.finished()


def compared(
    context: Context,
    what: str,
    case: Case,
    wholes: Mapping[str, Mapping[int, float]],
    process: Process,
    steps: Iterable[int],
) -> Row:
    """Return the largest difference between losses of a split model and of the whole one in these steps."""
    aim = judge.LOSS_ROUNDED if case.config.get("precision") == ROUNDED else judge.LOSS_ABOVE
    wanted = f"at most {aim:g}"
    try:
        found = judge.losses(process.finished())
    except BenchError as error:  # the others are compared all the same
        return context.judged(what, str(error).splitlines()[0], wanted, False)
    whole = wholes.get(case.whole)
    if whole is None:
        return context.judged(what, "the run without a mesh failed", wanted, False)
    difference = judge.largest_difference({step: whole[step] for step in steps if step in whole}, found)
    return context.judged(what, f"losses differ by at most {difference:.4f}", wanted, difference <= aim, difference)


def _kills_in_a_group(context: Context, dimension: str) -> Row:
    """Kill ranks of two groups that each hold a model: the other group goes on."""
    arguments = ("--workers-per-group", "2", "--min", "2", "--max", "4", "--max-restarts", "1000")
    trials = measure(
        regroup_run(4, *arguments, script=[str(SCRIPTS / "steps.py")]),
        context.environment(4, BENCH_WIDTH=str(context.sizes.width), BENCH_MESH=dimension),
        output=context.out / f"kills-{dimension}.log",
        ranks=4,
        trials=context.sizes.group_kills,
        steady_steps=context.sizes.steady,
        seed=1,
        progress=lambda _: None,
    )
    return verdict_on_groups(context, trials, dimension)


def verdict_on_groups(context: Context, trials: Sequence[Trial], dimension: str) -> Row:
    """Return what kills in one of two groups say. Pure."""
    again, kept = sum(trial.rolled_back for trial in trials), min(trial.kept for trial in trials)
    times = [trial.recovery_s for trial in trials]
    return context.judged(
        f"{dimension}, 2 groups of 2: {len(trials)} kill{'s' if len(trials) > 1 else ''} in a group",
        f"{again} steps committed again, at least {kept} of 3 ranks train on, next commit {max(times):.2f} s at most",
        "none again; 2 ranks train on",
        again == 0 and kept >= 2,
        {"rolled_back": again, "kept": [trial.kept for trial in trials], "next_commit_s": [round(t, 3) for t in times]},
    )
