"""`python -m demo.local`: the tour without a cluster, behind `make run`. It kills one of three workers and says what happened.

Exits 1 if what the README promises did not happen, and 2 if the training could not run.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.local_run import LocalRun
from harness.polling import TimedOutError

SAMPLE = Path(__file__).parents[1] / "manifests/samples/digits.py"
WORKERS, STEPS, KILL_AT = 3, 1000, 300
SIZES = ("--workers", str(WORKERS), "--min", "2")
"""Two workers may train without the third."""
PACE_S = 0.008
"""Seconds added to each step, so that a person can follow."""
VICTIM = 1
"""Number of the worker whose process is killed."""
LOOK_S = 0.1


@dataclass(frozen=True)
class Seen:
    """The observations of the run."""

    pid: int
    """Process that was killed."""
    step: int
    """Last step before the kill in the job's status."""
    before: Mapping[str, int]
    after: Mapping[str, int]
    """Worker -> its process, before the kill and once all workers train again."""
    whole_after_s: float
    """Time from the kill until all workers trained again."""
    status: Mapping[str, Any]
    """Status of the job at its end."""
    output: str
    """Output of the run."""


def report(seen: Seen) -> tuple[list[str], bool]:
    """Return lines that tell what happened, and whether it is what the README promises. Pure."""
    status = seen.status
    incident: Mapping[str, Any] = next(
        (one for one in status.get("incidents", ()) if one.get("cause") == "ProcessExited"), {}
    )
    parts = ("detectMs", "decideMs", "persistMs", "formMs", "transferMs", "firstStepMs")
    pause_ms = sum(incident.get(part) or 0 for part in parts)
    others = {worker: pid for worker, pid in seen.before.items() if pid != seen.pid}
    kept = {worker: pid for worker, pid in others.items() if seen.after.get(worker) == pid}
    redone = incident.get("stepsRedone") or 0
    accuracy = re.search(r"^held-out accuracy ([0-9.]+)", seen.output, re.MULTILINE)
    succeeded = status.get("phase") == "Succeeded" and status.get("progress", {}).get("step") == STEPS
    holds = succeeded and accuracy is not None and bool(incident) and kept == others
    pids = " and ".join(str(pid) for pid in sorted(kept.values())) or "none"
    same = (
        f"They are the same processes as before ({pids})." if kept == others else f"Of their processes {pids} lived on."
    )
    lines = [
        f"Near step {seen.step} SIGKILL ended process {seen.pid}, one of {WORKERS}.",
        f"{pause_ms / 1000:.2f} s later the others had committed the next step, with {redone} redone. {same}",
        f"{seen.whole_after_s:.1f} s after the kill a new process trained in its place, with a copy of their state.",
        f"All {STEPS} steps are committed. The model's held-out accuracy is {accuracy[1]}."
        if succeeded and accuracy is not None
        else f"The job did not end as it should: its State is {status.get('phase')}.",
    ]
    return lines, holds


def run(directory: Path) -> Seen:
    """Train the sample, kill a process, and return the observations.

    Raises TimedOutError. Raises AssertionError if the run ends early.
    """
    arguments = ("--steps", str(STEPS), "--pace", str(PACE_S), "--save", str(directory / "model.pt"))
    job = LocalRun(directory, *SIZES, str(SAMPLE), *arguments)
    try:
        show = _Shown(job.log)
        job.wait(lambda status: show.more() or _step(status) >= KILL_AT, f"step {KILL_AT}")
        before, generation = job.trainers(), job.status()["membership"]["generation"]
        worker = sorted(before)[VICTIM]
        step = _step(job.status())
        os.kill(before[worker], signal.SIGKILL)
        killed_s = time.monotonic()
        show.say(f"kill -9 {before[worker]}: the process of {worker}, one of {WORKERS}")
        job.wait(lambda status: show.more() or _is_whole(status, generation), "all workers train again")
        whole_s = time.monotonic() - killed_s
        after = job.trainers()
        while job.process.poll() is None:
            show.more()
            time.sleep(LOOK_S)
        show.more()
        return Seen(before[worker], step, before, after, whole_s, job.status(), job.log.read_text(errors="replace"))
    finally:
        job.close()


class _Shown:
    """Prints the run's output as it comes."""

    def __init__(self, log: Path) -> None:
        self._log = log.open(errors="replace")

    def more(self) -> bool:
        """Print new output. Return False, so that a condition can call it."""
        print(self._log.read(), end="", flush=True)
        return False

    def say(self, what: str) -> None:
        self.more()
        bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
        print(f"{bold}>>> {what}{plain}", flush=True)


def _step(status: Mapping[str, Any]) -> int:
    return int((status.get("progress") or {}).get("step") or 0)


def _is_whole(status: Mapping[str, Any], generation: int) -> bool:
    membership = status.get("membership") or {}
    has_all = bool(membership.get("adopted")) and membership.get("worldSize") == WORKERS
    return has_all and membership["generation"] > generation


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tour and print what happened."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.local",
        description="Train a sample with three local workers, kill one of them on the way, and say what happened.",
    )
    parser.parse_args(arguments)
    print(f"$ regroup run {' '.join(SIZES)} manifests/samples/{SAMPLE.name}")
    try:
        with tempfile.TemporaryDirectory(prefix="regroup-run-") as directory:
            seen = run(Path(directory))
    except (TimedOutError, AssertionError, OSError) as error:
        print(f"run: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("run: interrupted.", file=sys.stderr)
        return 130
    lines, holds = report(seen)
    print("\nWhat happened")
    for line in lines:
        print(f"  {line}")
    print(
        "Next: docs/tutorials/from-ddp.md converts a script of yours, and `make demo` breaks a job in a one-machine Kubernetes."
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
