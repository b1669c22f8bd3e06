"""The command line of `bench.gpu`: run the parts one after the other, print the table, write bench/out/gpu.json."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.gpu import machine
from bench.gpu.bounded import Ended, run_bounded
from bench.gpu.machine import Machine
from bench.gpu.part import Part, Row
from bench.gpu.parts import PARTS
from bench.gpu.report import Report
from bench.trials import BenchError

REPOSITORY = Path(__file__).resolve().parents[2]
OUT = REPOSITORY / "bench" / "out"
WHOLE_S = 480.0
"""Bound for all parts on a GPU. A part that would begin later is not run, and says so."""
PATIENCE = 5
"""Factor on the bound of a part in a dry run. The two cores may have other work, and no speed is judged."""


def bound_s(part: Part, *, left_s: float, is_gpu: bool) -> float:
    """Return how long a part may take: its own bound, and on a GPU no longer than the whole has left. Pure."""
    return min(part.bound_s, left_s) if is_gpu else part.bound_s * PATIENCE


def row_at_end(part: Part, ended: Ended, bound: float, log: Path) -> Row | None:
    """Return the row for a part that did not end by itself or left processes; None: it ended, and left none. Reads the log."""
    if ended.code is None:
        why = f"ended by its bound of {bound:.0f} s"
    elif ended.code:
        lines = log.read_text(errors="replace").strip().splitlines()
        why = f"exit code {ended.code}: {lines[-1] if lines else 'nothing was printed'}"
    elif not ended.is_clean:
        why = "processes of it could not be ended"
    else:
        return None
    return Row(part.name, f"{why} (log: {log})", "ends by itself", holds=False)


def run_part(part: Part, found: Machine, directory: Path, bound: float, report: Report) -> None:
    """Run one part in a process of its own and report what it says."""
    report.part(part.name)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "machine.json").write_text(json.dumps(found.__dict__))
    log = directory / "part.log"

    def on_line(line: str) -> None:
        if line.strip():
            report.add(part.name, Row(**json.loads(line)))

    environment = {**os.environ, **{key: value for key, value in found.environment(1).items() if key == "PYTHONPATH"}}
    ended = run_bounded(
        [sys.executable, "-m", "bench.gpu.worker", part.name, str(directory), str(bound)],
        environment,
        mark=f"{os.getpid()}-{time.time():.3f}-{part.name}",
        bound_s=bound,
        log=log,
        on_line=on_line,
    )
    said = row_at_end(part, ended, bound, log)
    if said is not None:
        report.add(part.name, said)
    report.end_part(part.name, ended.took_s)


def run_all(parts: Sequence[Part], found: Machine, out: Path, report: Report, clock: Callable[[], float]) -> None:
    """Run the parts within the bound of the whole. `clock`: monotonic seconds."""
    began_s = clock()
    report.begin()
    for part in parts:
        left_s = WHOLE_S - (clock() - began_s)
        bound = bound_s(part, left_s=left_s, is_gpu=found.is_gpu)
        if bound <= 0:
            report.part(part.name)
            report.add(part.name, Row(part.name, f"not run: {WHOLE_S:.0f} s were over", "is run", holds=False))
            report.end_part(part.name, 0.0)
            continue
        run_part(part, found, out / part.name, bound, report)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if all that was judged holds, 1 if something does not, 2 if nothing can be run here."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description="Does Regroup hold on this machine's GPUs, and how fast is it? At most 8 minutes on an H100 or H200.",
        epilog="Parts: " + "; ".join(f"{part.name} ({part.bound_s:.0f} s): {part.what}" for part in PARTS) + ".",
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run with gloo and tiny sizes"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=[part.name for part in PARTS],
        metavar="PART",
        help="one part; may be repeated",
    )
    parser.add_argument("--out", type=Path, default=OUT / "gpu", help="directory of the logs (default bench/out/gpu)")
    args = parser.parse_args(argv)
    try:
        found = machine.find(args.device, machine.packages())
    except BenchError as error:
        print(f"bench.gpu: {error}", file=sys.stderr)
        return 2
    out = args.out.absolute()
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    report = Report(found, out.with_suffix(".json"), date, commit())
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # as Ctrl-C: the part that runs is ended with its processes
    try:
        run_all([part for part in PARTS if not args.only or part.name in args.only], found, out, report, time.monotonic)
    except KeyboardInterrupt:
        print("bench.gpu: interrupted; the processes of the part that ran were ended.", file=sys.stderr)
        return 130
    print(report.last_line())
    print(f"Written to {report.path}.")
    return 0 if report.holds else 1


def commit() -> str:
    """Return the commit of this checkout; `unknown` for a copy without its history."""
    try:
        asked = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())
