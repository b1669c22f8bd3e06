"""`make bench-overhead`: the cost of a step of the session beside the same step without it, in one run, alternating.

The cases:

- `tiny` and `gpt`: two ranks, beside torch's DistributedDataParallel in the same two processes.
- `alone`: the tiny model in plain `python`, beside the bare training loop.
- `noise`: the tiny model at two ranks, beside the same session without the gradient noise scale.

Everything that the session does in a step is on: comparison of parameters, progress, the digest of samples. The file
bench/out/overhead.json has for each case the medians over blocks: `ours_ms`, and `ddp_ms`, `plain_ms` or `without_ms`.
It also has the ratio of each pair of neighbouring blocks, CPU time, and the setup.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.trials import BenchError

if TYPE_CHECKING:
    from rich.table import Table

REPOSITORY = Path(__file__).resolve().parent.parent
OUT = REPOSITORY / "bench" / "out"
SCRIPT = REPOSITORY / "bench" / "overhead_script.py"
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Case:
    """One comparison. `other` is the name of the other side in the JSON file."""

    name: str
    model: str
    ranks: int
    steps: int  # in a block: about a second of work
    other: str


CASES = (
    Case("tiny", "tiny", 2, 200, "ddp"),
    Case("gpt", "gpt", 2, 5, "ddp"),
    Case("alone", "tiny", 1, 1000, "plain"),
    Case("noise", "noise", 2, 200, "without"),
)


def run(
    case: Case,
    pairs: int,
    *,
    environment: Mapping[str, str] | None = None,
    out: Path = OUT,
    timeout_s: float = TIMEOUT_S,
) -> list[dict[str, Any]]:
    """Run one case and return its blocks, in their order. Raises BenchError.

    The processes inherit `environment`, with BENCH_DEVICE in it. None means the environment of this process, and CPUs.
    `out` is the directory of the log.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        blocks_file = Path(directory) / "blocks.jsonl"
        script = [str(SCRIPT), case.model, str(case.ranks), str(pairs), str(case.steps)]
        launcher = ["-m", "regroup_cli", "run", "--workers", str(case.ranks)] if case.ranks > 1 else []
        log = out / f"overhead-{case.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("REGROUP_")}
        path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        inherited |= environment or {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "BENCH_DEVICE": "cpu"}
        with log.open("wb") as file:
            try:
                ended = subprocess.run(
                    [sys.executable, *launcher, *script],
                    env=inherited | {"BENCH_OUT": str(blocks_file)},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=timeout_s,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise BenchError(f"{case.name}: not done within {timeout_s:.0f} s. Its output is in {log}.") from error
        if ended.returncode:
            last = "\n  ".join(log.read_text(errors="replace").splitlines()[-15:])
            raise BenchError(f"{case.name}: exit code {ended.returncode}. Its last lines:\n  {last}")
        blocks = [json.loads(line) for line in blocks_file.read_text().splitlines()] if blocks_file.exists() else []
        if sum(block["kind"] == "ours" for block in blocks) < pairs:
            raise BenchError(
                f"{case.name}: it ended before {pairs} pairs of blocks were measured. Its output is in {log}."
            )
        return blocks


def summary(case: Case, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a case's part of the JSON file. Each block of the session is compared with the plain one before it. Pure."""
    ours = [block for block in blocks if block["kind"] == "ours"]
    plain = [block for block in blocks if block["kind"] == "plain"][: len(ours)]
    ratios = sorted(mine["ms"] / other["ms"] for mine, other in zip(ours, plain))
    added = [mine["ms"] - other["ms"] for mine, other in zip(ours, plain)]
    quarter = len(ratios) // 4
    return {
        "ours_ms": _median(ours, "ms"),
        f"{case.other}_ms": _median(plain, "ms"),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_middle_half": [round(ratios[quarter], 3), round(ratios[-1 - quarter], 3)],
        "added_ms": round(statistics.median(added), 4),
        "ours_cpu_ms": _median(ours, "cpu_ms"),
        f"{case.other}_cpu_ms": _median(plain, "cpu_ms"),
        "pairs": len(ours),
        "steps_in_a_block": case.steps,
    }


def setup() -> dict[str, Any]:
    """Return the date, the versions and the number of CPUs of a measurement."""
    import torch  # here: what measures needs none of it

    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
    }


def _median(blocks: list[dict[str, Any]], key: str) -> float:
    return round(float(statistics.median(block[key] for block in blocks)), 4)


def table(found: dict[str, Any]) -> Table:
    from rich.table import Table  # here: bench.gpu measures with this module where rich may be missing

    out = Table(
        title="One step of the session beside the same step without it", caption="medians over pairs of blocks, in turn"
    )
    for heading in ("", "session", "without it", "ratio", "middle half", "added", "CPU of rank 0"):
        out.add_column(heading, justify="left" if not heading else "right")
    titles = {
        "tiny": "tiny model, 2 ranks, beside DDP",
        "gpt": "small GPT, 2 ranks, beside DDP",
        "alone": "tiny model, plain python",
        "noise": "tiny model, 2 ranks, with the noise scale",
    }
    for case in CASES:
        if case.name not in found:
            continue
        one = found[case.name]
        low, high = one["ratio_middle_half"]
        out.add_row(
            titles[case.name],
            f"{one['ours_ms']:.3f} ms",
            f"{one[f'{case.other}_ms']:.3f} ms",
            f"{one['ratio']:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{one['added_ms']:+.3f} ms",
            f"{one['ours_cpu_ms']:.2f} / {one[f'{case.other}_cpu_ms']:.2f} ms",
        )
    return out


def main() -> int:
    """Run the cases, print the table, write the JSON file. Return 1, after one sentence, if one cannot be measured."""
    from rich.console import Console

    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=20, help="pairs of blocks in each case (default 20)")
    parser.add_argument("--only", choices=[case.name for case in CASES], help="one case; the file keeps the others")
    args = parser.parse_args()
    if args.pairs < 4:
        parser.error(f"--pairs ({args.pairs}) must be at least 4.")
    console = Console()
    path = OUT / "overhead.json"
    found: dict[str, Any] = json.loads(path.read_text()) if args.only and path.exists() else {}
    for case in CASES:
        if args.only in (None, case.name):
            with console.status(f"{case.name}: {args.pairs} pairs of blocks"):
                try:
                    found[case.name] = {**summary(case, run(case, args.pairs)), "setup": setup()}
                except BenchError as error:
                    console.print(str(error), style="red", highlight=False)
                    return 1
    OUT.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")
    console.print(table(found))
    console.print(f"Written to {path.relative_to(REPOSITORY)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
