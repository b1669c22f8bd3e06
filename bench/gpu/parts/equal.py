"""The same training at several numbers of ranks: equal losses, and with `reduction: exact` equal bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from bench.gpu import judge
from bench.gpu.part import SAMPLES, Context, Row, changes, regroup_run, regroup_train
from bench.trials import BenchError


def losses(context: Context, say: Callable[[Row], None]) -> None:
    """Train a small language model in float32 at each number of ranks, and compare the losses of all steps."""
    fields = ("precision=float32", "activation_checkpointing=none", "schedule.warmup_steps=5", "evaluate_every=null")
    found = _trained(
        context, "language-model.yaml", [("1", 1), *((str(n), n) for n in context.sizes.worlds[1:])], fields
    )
    alone = judge.losses(found.pop("1"))
    for name, text in found.items():
        difference = judge.largest_difference(alone, judge.losses(text))
        say(
            context.judged(
                f"{name} ranks beside 1, {len(alone)} steps",
                f"losses differ by at most {difference:.4f}",
                f"at most {judge.LOSS_ABOVE:g}",
                difference <= judge.LOSS_ABOVE,
            )
        )


def exact(context: Context, say: Callable[[Row], None]) -> None:
    """Train with exact sums, twice alone and at each number of ranks, and compare the hashes of the parameters."""
    runs = [("1", 1), ("1 rank, again,", 1), *((f"{n} ranks", n) for n in context.sizes.worlds[1:])]
    texts = _trained(context, "exact.yaml", runs, ("schedule.warmup_steps=5",))
    hashes = {name: judge.parameter_hash(text) for name, text in texts.items()}
    first = hashes.pop("1")
    if first is None:
        raise BenchError("the run of one process printed no hash")
    for name, one in hashes.items():
        say(
            context.judged(
                f"{name} beside 1",
                (one or "none")[:12] + (" = " if one == first else " is not ") + first[:12],
                "equal hashes",
                one == first,
                one,
            )
        )


def _trained(context: Context, sample: str, runs: list[tuple[str, int]], fields: tuple[str, ...]) -> dict[str, str]:
    """Return the output of each run, by its name. All run beside each other. `runs`: names and ranks."""
    steps = context.sizes.steps
    settings = [str(SAMPLES / sample), *changes(f"steps={steps}", "print_every=1", *fields)]
    with contextlib.ExitStack() as stack:
        processes = {
            name: stack.enter_context(
                context.started(
                    f"run-{number}",
                    regroup_run(ranks, script=settings) if ranks > 1 else regroup_train(*settings),
                    context.environment(ranks),
                )
            )
            for number, (name, ranks) in enumerate(runs)
        }
        return {name: process.finished() for name, process in processes.items()}
