"""`make bench-quotas`: the gain of shares that follow the speed of ranks, if one of four ranks takes twice as long.

A job of 28 microbatches runs under `regroup run`, with equal shares and with `DataParallel(uneven=True)`. The compute
is simulated by sleeping for each microbatch, so that two cores can stand for four machines. Sums, rows and commits are
real. The slow rank takes the time of 14 microbatches with equal shares, and of 8 with the best ones. So the throughput
can rise to 1.75 times at most.

The file bench/out/quotas.json has for `equal` and `uneven` the median step time `ms` after the deal has settled, and
the last `shares`. For `uneven` it also has the `changes` of the deal and the step `settled` after the first one. `gain`
and the setup complete it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.overhead import OUT, REPOSITORY, setup
from bench.trials import BenchError

SCRIPT = REPOSITORY / "bench" / "quotas_script.py"
RANKS, MICROBATCHES, SLOWDOWN = 4, 28, 2
MICROBATCH_S = 0.02  # on a rank that is not slowed
SETTLE = 30
"""Steps in which a deal may still change; the steps after them are measured."""
CEILING = 1.75
TIMEOUT_S = 300.0
KINDS = ("equal", "uneven")


def run(kind: str, steps: int) -> list[dict[str, Any]]:
    """Run a job and return rank 0's line for each step: `ms`, and `shares` by rank. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        out = Path(directory) / "steps.jsonl"
        log = OUT / f"quotas-{kind}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "regroup_cli", "run", "--workers", str(RANKS)]
        arguments = [str(SCRIPT), kind, str(SETTLE + steps), str(MICROBATCHES), str(MICROBATCH_S), str(SLOWDOWN)]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("REGROUP_")}
        path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = inherited | {"OMP_NUM_THREADS": "1", "BENCH_OUT": str(out), "PYTHONPATH": path}
        with log.open("wb") as file:
            try:
                ended = subprocess.run(
                    [*command, *arguments], env=environment, stdin=subprocess.DEVNULL, stdout=file,
                    stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired as error:
                raise BenchError(f"{kind}: not done within {TIMEOUT_S:g} s. Its output is in {log}.") from error
        lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        if ended.returncode or len(lines) < SETTLE + steps:
            last = "\n  ".join(log.read_text(errors="replace").splitlines()[-15:])
            raise BenchError(
                f"{kind}: exit code {ended.returncode} after {len(lines)} steps. The last lines:\n  {last}"
            )
        return lines


def summary(lines: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the content of the JSON file, from the lines of each kind. Pure."""
    found: dict[str, Any] = {}
    for kind, of in lines.items():
        ms = statistics.median(line["ms"] for line in of[SETTLE:])
        found[kind] = {"ms": round(ms, 1), "shares": of[-1]["shares"], "steps": len(of) - SETTLE}
    shares = [line["shares"] for line in lines["uneven"]]
    changed = [at for at in range(1, len(shares)) if shares[at] != shares[at - 1]]
    found["uneven"] |= {"changes": len(changed), "settled": changed[0] + 1 if changed else None}
    gain = round(found["equal"]["ms"] / found["uneven"]["ms"], 2)
    return found | {"gain": gain, "ceiling": CEILING}


def table(found: dict[str, Any]) -> Table:
    out = Table(title=f"{RANKS} ranks, one of them {SLOWDOWN} times slower, {MICROBATCHES} microbatches a step")
    for heading in ("", "shares", "step", "throughput"):
        out.add_column(heading, justify="left" if not heading else "right")
    for kind, gain in (("equal", ""), ("uneven", f"{found['gain']:.2f} of at most {CEILING}")):
        one = found[kind]
        out.add_row(kind, " ".join(map(str, one["shares"])), f"{one['ms']:.0f} ms", gain)
    return out


def main() -> int:
    """Run it, print the table, write the JSON file. Return 1, after one sentence, if it cannot be measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.quotas", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="measured steps of each kind (default 40)")
    args = parser.parse_args()
    if args.steps < 10:
        parser.error(f"--steps ({args.steps}) must be at least 10.")
    console = Console()
    lines = {}
    for kind in KINDS:
        with console.status(f"{args.steps} steps with {kind} shares"):
            try:
                lines[kind] = run(kind, args.steps)
            except BenchError as error:
                console.print(str(error), style="red", highlight=False)
                return 1
    found = {**summary(lines), "setup": setup()}
    path = OUT / "quotas.json"
    path.write_text(json.dumps(found, indent=2) + "\n")
    console.print(table(found))
    console.print(f"Written to {path.relative_to(REPOSITORY)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
