"""`make bench-strategies`: what each strategy costs, and what a failure and a resize cost with it, on one model.

The model is the small GPT of bench/gpt.py. Three measurements for each strategy:

- *Throughput*, two ranks of one thread, beside the same training with torch alone (torchrun) where torch has the
  strategy. Both run at once, and take turns block by block. Each is in a network namespace of its own, whose loopback
  counts what it sends.
- *Recovery*: SIGKILL of a random process to the next committed step of any rank, two model groups, by the trainers'
  clock.
- *Resize*: the longest time without a commit while the job grows from two model groups to three.

The file bench/out/strategies.json is a list. An entry has `strategy`, `title`, `ranks`, `setup`, and

- `tokens_per_s`, `plain_tokens_per_s`: medians over blocks. The plain one is null if torch has no counterpart.
- `ratio`: median over pairs of session / plain, in time for one step. `ratio_middle_half` is its spread.
- `step_ms`: median time of a step. `cpu_ms`, `plain_cpu_ms`: CPU time of rank 0 in a step.
- `sent_mb`, `plain_sent_mb`: sent by all ranks in a step. They are null without namespaces.
- `peak_mb`, `plain_peak_mb`: memory of rank 0, with the interpreter and torch.
- `recovery_s`, `resize_s`: medians. `recovery_trials_s` and `resize_trials_s` have all of them.
- `recovery_of_four_s`, only for data parallel: recovery with four processes, as many as two copies of a split model
  have.

`--figure` also draws the list, `--page` writes the table into a page.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import gpt
from bench.overhead import OUT, REPOSITORY, setup
from bench.trials import BenchError, Trial, measure, measure_resize
from harness.polling import until

BEGIN = "<!-- bench.strategies: this part is written by the benchmark -->"
END = "<!-- end -->"
STEPS = 5  # in a block: about a second of work
TIMEOUT_S = 300.0
STEADY_STEPS = 10
FOREVER = 10**9
NAMESPACE = ["unshare", "--net", "--map-root-user", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


@dataclass(frozen=True)
class Case:
    """One strategy. `mesh` splits the model within a model group. `has_plain`: torch alone has the strategy, too."""

    key: str
    title: str
    mesh: tuple[tuple[str, int], ...] = ()
    has_plain: bool = True
    optimizer_steps: int = 1  # in one step of the session
    cuts: int = 1
    """Microbatches for each microbatch of the other strategies: a pipeline needs many."""

    @property
    def group_size(self) -> int:
        """Ranks that hold one copy of the model."""
        size = 1
        for _, one in self.mesh:
            size *= one
        return size


CASES = (
    Case("data_parallel", "data parallel"),
    Case("fp16", "gradients in fp16"),
    Case("bf16", "gradients in bf16"),
    # torch's own hook ends with mismatched collectives on gloo, where there is more than one bucket.
    Case("powersgd", "PowerSGD, rank 2", has_plain=False),
    Case("ring", "ring written out", has_plain=False),
    Case("exact", 'reduction="exact"', has_plain=False),
    Case("local_sgd", "local SGD, 4 inner steps", optimizer_steps=4),
    Case("diloco", "DiLoCo, 4 inner steps", has_plain=False, optimizer_steps=4),
    Case("fsdp", "FSDP2", (("shard", 2),)),
    Case("tensor", "tensor parallel", (("tensor", 2),)),
    Case("pipeline", "pipeline, 1F1B", (("pipeline", 2),), cuts=2),
    Case("context", "context parallel, Ulysses", (("context", 2),), has_plain=False),
    Case("expert", "4 experts in each block", (("expert", 2),), has_plain=False),
    Case("server", "parameter server, synchronous", has_plain=False),
)
AS_MANY = "data_parallel"
"""The strategy whose recovery is also measured with four processes, as many as the strategies have that split the model."""


def environment(out: Path | None = None) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("REGROUP_")}
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | ({"BENCH_OUT": str(out)} if out else {})


def has_namespaces() -> bool:
    """Return whether processes can have a loopback of their own here."""
    try:
        return subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False, timeout=10).returncode == 0
    except OSError:
        return False


def commands(case: Case, ranks: int, pairs: int) -> dict[str, list[str]]:
    """Return the command of each side."""
    from bench.strategies_meter import WARM

    arguments = [case.key, str(ranks), str(WARM + pairs * STEPS), str(STEPS)]
    workers = ["--workers", str(ranks // case.group_size), "--processes-per-worker", str(case.group_size)]
    ours = [sys.executable, "-m", "regroup_cli", "run", *workers, str(REPOSITORY / "bench" / "strategies_script.py")]
    plain = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    found = {"ours": [*ours, *arguments]}
    if case.has_plain and not (ranks > case.group_size and {"tensor", "pipeline"} & set(dict(case.mesh))):
        found["plain"] = [*plain, str(REPOSITORY / "bench" / "strategies_plain.py"), *arguments]
    return found


@contextmanager
def started(command: list[str], out: Path, log: Path, *, apart: bool) -> Iterator[subprocess.Popen[bytes]]:
    """Run one side until the `with` block ends. SIGTERM ends its processes."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*(NAMESPACE if apart else ()), *command],
            env=environment(out),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def throughput(case: Case, ranks: int, pairs: int, *, apart: bool, show: Callable[[str], None]) -> dict[str, Any]:
    """Run both sides and return the blocks of each, in their order. Raises BenchError."""
    blocks: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        sides = {}
        with ExitStack() as stack:
            for side, command in commands(case, ranks, pairs).items():
                out = Path(directory) / side
                out.mkdir()
                log = OUT / f"strategies-{case.key}-{side}.log"
                sides[side] = (out, stack.enter_context(started(command, out, log, apart=apart)), log)
                blocks[side] = []
            for number in range(pairs):
                # In turn: what the machine does beside meets both, and neither always comes first.
                for side in sorted(sides, reverse=number % 2 == 1):
                    show(f"block {number + 1} of {pairs}, {side}")
                    blocks[side].append(_block(number, *sides[side]))
            for side, (_, process, log) in sides.items():
                try:
                    code = process.wait(60)
                except subprocess.TimeoutExpired as error:
                    raise BenchError(f"{case.title}, {side}: it does not end. Its output is in {log}.") from error
                if code:
                    raise BenchError(f"{case.title}, {side}: exit code {code}. Its output is in {log}.")
    return blocks


def _block(number: int, out: Path, process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    (out / f"go-{number}").touch()
    there = out / f"block-{number}"

    def is_done() -> bool:
        if there.exists():
            return True
        if process.poll() is not None:
            last = "\n  ".join(log.read_text(errors="replace").splitlines()[-15:])
            raise BenchError(
                f"Exit code {process.returncode} before block {number + 1}. The last lines of {log}:\n  {last}"
            )
        return False

    until(is_done, f"block {number + 1} of {out.name}", timeout_s=TIMEOUT_S, every_s=0.005, error=BenchError)
    found: dict[str, Any] = json.loads(there.read_text())
    return found


def summary(case: Case, ranks: int, blocks: dict[str, Any], *, apart: bool) -> dict[str, Any]:
    """Return a strategy's part of the JSON file, without recovery. Blocks of the same turn are compared."""
    from bench.strategies_model import MICROBATCH

    tokens = MICROBATCH * ranks * case.optimizer_steps * gpt.LENGTH
    ours, plain = blocks["ours"], blocks.get("plain")
    found: dict[str, Any] = {
        "strategy": case.key,
        "title": case.title,
        "ranks": ranks,
        "tokens_per_s": round(tokens / _median(ours, "ms") * 1e3, 1),
        "plain_tokens_per_s": round(tokens / _median(plain, "ms") * 1e3, 1) if plain else None,
        "step_ms": round(_median(ours, "ms"), 2),
        "ratio": None,
        "ratio_middle_half": None,
        "blocks": len(ours),
    }
    if plain:
        ratios = sorted(mine["ms"] / other["ms"] for mine, other in zip(ours, plain))
        quarter = len(ratios) // 4
        found["ratio"] = round(statistics.median(ratios), 3)
        found["ratio_middle_half"] = [round(ratios[quarter], 3), round(ratios[-1 - quarter], 3)]
    for prefix, of in (("", ours), ("plain_", plain)):
        found[f"{prefix}cpu_ms"] = round(_median(of, "cpu_ms"), 2) if of else None
        found[f"{prefix}sent_mb"] = round(_median(of, "sent") / 1e6, 3) if of and apart else None
        found[f"{prefix}peak_mb"] = round(max(one["peak_mb"] for one in of)) if of else None
    return found


def _median(blocks: list[dict[str, Any]], key: str) -> float:
    return float(statistics.median(block[key] for block in blocks))


def elastic(case: Case, state: Path, groups: int = 2) -> list[str]:
    """Return the command of a job of `groups` model groups that may grow by one."""
    run = [sys.executable, "-m", "regroup_cli", "run", "--workers", str(groups), "--min", "1", "--max", str(groups + 1)]
    more = ["--max-restarts", "1000", "--state-dir", str(state), "--join-quiet", "0.1"]
    script = [str(REPOSITORY / "bench" / "strategies_script.py"), case.key, str(groups * case.group_size)]
    return [*run, *more, "--processes-per-worker", str(case.group_size), *script, str(FOREVER), "0"]


def recovery(case: Case, trials: int, show: Callable[[str], None], groups: int = 2) -> list[float]:
    """Return the seconds from each kill to the next commit. Raises BenchError."""

    def one(trial: Trial) -> None:
        show(f"a kill: {trial.recovery_s:.2f} s")

    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        done = measure(
            elastic(case, Path(directory) / "state", groups),
            environment(),
            output=OUT / f"strategies-{case.key}-recovery.log",
            ranks=groups * case.group_size,
            trials=trials,
            steady_steps=STEADY_STEPS,
            seed=0,
            progress=one,
        )
    return [round(trial.recovery_s, 3) for trial in done]


def resize(case: Case, trials: int, show: Callable[[str], None]) -> list[float]:
    """Return the longest times without a commit while the job grows by a group. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        state = Path(directory) / "state"

        def scale(groups: int) -> None:
            command = [sys.executable, "-m", "regroup_cli", "scale", str(state), str(groups)]
            ended = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
            if ended.returncode:
                raise BenchError(f"regroup scale: {ended.stderr.strip() or ended.stdout.strip()}")
            show(f"resize to {groups} groups")

        done = measure_resize(
            elastic(case, state),
            environment(),
            output=OUT / f"strategies-{case.key}-resize.log",
            ranks=(2 * case.group_size, 3 * case.group_size),
            trials=trials,
            steady_steps=STEADY_STEPS,
            scale=lambda ranks: scale(ranks // case.group_size),
        )
    return [round(one, 3) for one in done]


def table(found: list[dict[str, Any]]) -> Table:
    out = Table(title="Each strategy beside torch alone, and what a failure costs", caption="medians; a small GPT")
    for heading in (
        *(
            "",
            "ranks",
            "tokens/s",
            "torch alone",
            "time, beside it",
            "middle half",
            "sent a step",
            "peak",
            "recovery",
            "resize",
        ),
    ):
        out.add_column(heading, justify="left" if not heading else "right")
    for one in found:
        middle = one["ratio_middle_half"]
        sent = one["sent_mb"]
        out.add_row(
            one["title"],
            str(one["ranks"]),
            f"{one['tokens_per_s']:,.0f}",
            "" if one["plain_tokens_per_s"] is None else f"{one['plain_tokens_per_s']:,.0f}",
            "" if one["ratio"] is None else f"{one['ratio']:.3f}",
            "" if middle is None else f"{middle[0]:.3f} to {middle[1]:.3f}",
            "" if sent is None else f"{sent:.1f} MB",
            f"{one['peak_mb']} MB",
            *("" if one[name] is None else f"{one[name]:.2f} s" for name in ("recovery_s", "resize_s")),
        )
    return out


def with_table(page: str, found: list[dict[str, Any]]) -> str:
    """Return a page with the table of these figures between its two marks. Pure."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = [
        "| strategy | processes | tokens/s | torch alone | time | middle half | sent a step | recovery | resize |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for one in found:
        middle = one["ratio_middle_half"]
        cells = (
            one["title"],
            one["ranks"],
            f"{one['tokens_per_s']:,.0f}",
            "" if one["plain_tokens_per_s"] is None else f"{one['plain_tokens_per_s']:,.0f}",
            "" if one["ratio"] is None else f"{one['ratio']:.3f}",
            "" if middle is None else f"{middle[0]:.3f} to {middle[1]:.3f}",
            "" if one["sent_mb"] is None else f"{one['sent_mb']:.1f} MB",
            *("" if one[name] is None else f"{one[name]:.2f} s" for name in ("recovery_s", "resize_s")),
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    if found:
        load = statistics.median(one["setup"]["load_before"] for one in found)
        blocks, trials = found[0]["blocks"], len(found[0]["recovery_trials_s"])
        made = found[0]["setup"]
        of_four = next((one["recovery_of_four_s"] for one in found if "recovery_of_four_s" in one), None)
        if of_four is not None:
            lines += [
                "",
                f"Data parallel with four processes, as many as two copies of a split model have: recovery {of_four:.2f} s.",
            ]
        lines += [
            "",
            f"{blocks} pairs of blocks of {STEPS} steps, {trials} kills and resizes; {made['date'][:10]}, {made['cpus']} cores, "
            f"torch {made['torch']}, load of the machine {load:.1f} before a strategy's turn.",
        ]
    return f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}"


def main() -> int:
    """Measure the strategies, print the table, write the JSON file. Return 1, after one sentence, if one cannot be measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.strategies", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=10, help="pairs of blocks of each strategy (default 10)")
    parser.add_argument(
        "--trials", type=int, default=3, help="kills, and resizes, of each strategy (default 3; 0: none)"
    )
    parser.add_argument(
        "--only", metavar="KEY", choices=[case.key for case in CASES], help="one strategy; the file keeps the others"
    )
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2, help="ranks of the throughput (default 2)")
    parser.add_argument("--figure", metavar="PATH", type=Path, help="draw the file's figures into this SVG")
    parser.add_argument(
        "--page", metavar="PATH", type=Path, help="write the table into this page, between its two marks"
    )
    parser.add_argument("--draw-only", action="store_true", help="measure nothing; print and draw what the file has")
    args = parser.parse_args()
    if args.pairs < 2 or args.trials < 0:
        parser.error(f"--pairs ({args.pairs}) must be at least 2, and --trials ({args.trials}) at least 0.")
    console = Console(width=None if sys.stdout.isatty() else 160)
    path = OUT / "strategies.json"
    known: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    apart = has_namespaces()
    if not args.draw_only:
        if not (args.only or args.ranks != 2):
            known = []
        for case in CASES:
            if args.only in (None, case.key):
                try:
                    found = measure_one(case, args.ranks, args.pairs, args.trials, apart=apart, console=console)
                except BenchError as error:
                    console.print(f"{case.title}: {error}", style="red", highlight=False, markup=False)
                    return 1
                known = [one for one in known if (one["strategy"], one["ranks"]) != (case.key, args.ranks)]
                known.append(found)
                OUT.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(known, indent=2) + "\n")
    order = {case.key: number for number, case in enumerate(CASES)}
    known.sort(key=lambda one: (one["ranks"], order[one["strategy"]]))
    path.write_text(json.dumps(known, indent=2) + "\n")
    console.print(table(known))
    console.print(f"Written to {path.relative_to(REPOSITORY)}.")
    if args.figure is not None:
        from bench.strategies_figure import draw

        draw([one for one in known if one["ranks"] == 2], args.figure)
        console.print(f"Drawn into {args.figure}.")
    if args.page is not None:
        args.page.write_text(with_table(args.page.read_text(), known))
        console.print(f"Table written into {args.page}.")
    return 0


def measure_one(case: Case, ranks: int, pairs: int, trials: int, *, apart: bool, console: Console) -> dict[str, Any]:
    """Return one strategy's part of the file. Raises BenchError."""
    with console.status(case.title) as status:

        def show(words: str) -> None:
            status.update(f"{case.title}: {words}")

        load = os.getloadavg()[0]
        found = summary(case, ranks, throughput(case, ranks, pairs, apart=apart, show=show), apart=apart)
        for name, times in (
            ("recovery", recovery(case, trials, show) if trials and ranks == 2 else []),
            ("resize", resize(case, trials, show) if trials and ranks == 2 else []),
        ):
            found[f"{name}_s"] = round(statistics.median(times), 3) if times else None
            found[f"{name}_trials_s"] = times
        if case.key == AS_MANY and trials and ranks == 2:
            found["recovery_of_four_s"] = round(statistics.median(recovery(case, trials, show, groups=4)), 3)
    return {**found, "setup": {**setup(), "load_before": round(load, 2)}}


if __name__ == "__main__":
    sys.exit(main())
