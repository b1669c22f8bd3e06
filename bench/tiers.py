"""`make bench-tiers`: the cost of each tier of the state: step time with it off and on, and the pause for one copy.

A small GPT at two ranks under `regroup run`. Blocks without a tier, with memory snapshots and with checkpoints take
turns in the same processes. The file bench/out/tiers.json has for `off`, `memory` and `durable` the median step time
`ms`, and the setup. For the two tiers it also has `ratio` (to the block without a tier before it) and `copies`.
`blocked_ms` is the time for which the training thread waits for one copy.
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

SCRIPT = REPOSITORY / "bench" / "tiers_script.py"
STEPS = 20  # in a block: some seconds of work
EVERY_S = 1
"""Seconds between two copies: far more often than anybody would ask for, so that a block has several."""
TIMEOUT_S = 900.0
KINDS = ("off", "memory", "durable")


def run(rounds: int) -> list[dict[str, Any]]:
    """Run the job and return the blocks in their order. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        out = Path(directory) / "blocks.jsonl"
        command = [
            *(sys.executable, "-m", "regroup_cli", "run", "--workers", "2"),
            *("--memory-snapshot", "4Gi", "--memory-snapshot-every", str(EVERY_S)),
            *("--checkpoint", str(Path(directory) / "checkpoints"), "--checkpoint-every", str(EVERY_S)),
            *(str(SCRIPT), str(rounds), str(STEPS)),
        ]
        log = OUT / "tiers.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("REGROUP_")}
        path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = inherited | {"OMP_NUM_THREADS": "1", "BENCH_OUT": str(out), "PYTHONPATH": path}
        with log.open("wb") as file:
            try:
                ended = subprocess.run(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                    timeout=TIMEOUT_S, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired as error:
                raise BenchError(f"Not done within {TIMEOUT_S:g} s. The output is in {log}.") from error
        blocks = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        if ended.returncode or len(blocks) < rounds * len(KINDS):
            last = "\n  ".join(log.read_text(errors="replace").splitlines()[-15:])
            raise BenchError(f"Exit code {ended.returncode} after {len(blocks)} blocks. The last lines:\n  {last}")
        return blocks


def summary(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of the JSON file. Each block with a tier is compared with the one without before it. Pure."""
    by_kind = {kind: [block for block in blocks if block["kind"] == kind] for kind in KINDS}
    found: dict[str, Any] = {"off": {"ms": _median([block["ms"] for block in by_kind["off"]])}}
    for kind in KINDS[1:]:
        of = by_kind[kind]
        copies = sum(block["copies"] for block in of)
        found[kind] = {
            "ms": _median([block["ms"] for block in of]),
            "ratio": _median([block["ms"] / off["ms"] for block, off in zip(of, by_kind["off"])]),
            "blocked_ms": round(sum(block["blocked_ms"] for block in of) / copies, 2) if copies else None,
            "copies": copies,
            "steps": len(of) * STEPS,
        }
    return found | {"state_mb": round(blocks[-1]["state_mb"], 1)}


def _median(values: list[float]) -> float:
    return round(float(statistics.median(values)), 3)


def table(found: dict[str, Any]) -> Table:
    out = Table(title=f"Tiers of the state, {found['state_mb']:g} MB, a copy every {EVERY_S} s at most")
    for heading in ("", "step", "beside no tier", "training stands for a copy", "copies"):
        out.add_column(heading, justify="left" if not heading else "right")
    out.add_row("no tier", f"{found['off']['ms']:.1f} ms", "", "", "")
    for kind, title in (("memory", "memory snapshot"), ("durable", "checkpoint")):
        one = found[kind]
        stands = "none was taken" if one["blocked_ms"] is None else f"{one['blocked_ms']:.1f} ms"
        out.add_row(
            title, f"{one['ms']:.1f} ms", f"{one['ratio']:.3f}", stands, f"{one['copies']} in {one['steps']} steps"
        )
    return out


def main() -> int:
    """Run it, print the table, write the JSON file. Return 1, after one sentence, if it cannot be measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.tiers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=8, help="blocks of each kind (default 8)")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds ({args.rounds}) must be at least 2.")
    console = Console()
    with console.status(f"{args.rounds} blocks of each kind"):
        try:
            found = {**summary(run(args.rounds)), "setup": setup()}
        except BenchError as error:
            console.print(str(error), style="red", highlight=False)
            return 1
    path = OUT / "tiers.json"
    path.write_text(json.dumps(found, indent=2) + "\n")
    console.print(table(found))
    console.print(f"Written to {path.relative_to(REPOSITORY)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
