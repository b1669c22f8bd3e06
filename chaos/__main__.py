"""`python -m chaos`: random faults over real jobs, and a verdict. Exit code 0: every promise held."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from chaos import plan, totals
from chaos.drive import Drive
from chaos.job import Job, JobError
from chaos.kinds import SCRIPT
from chaos.local import REPOSITORY, LocalJob
from chaos.reference import SOURCES, digest_of, expected
from chaos.totals import Journal, Result
from cluster.errors import ClusterError

OUT = REPOSITORY / "bench" / "out"
FAULTS_PER_JOB = {"local": 25, "cluster": 10}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    out = argparse.ArgumentParser(
        prog="python -m chaos",
        description="Break real training jobs at random moments, and judge: does each commit again within its bound, and does "
        "it end exactly like the run without faults? A seed stands for one job and its list of faults.",
        epilog="make chaos SEED=7 runs one job; FAULTS=1000 runs as many jobs as that takes, with the seeds from SEED on.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument(
        "--seed", type=int, metavar="N", help="the first job's seed (default: a random one, which is printed)"
    )
    out.add_argument("--faults", type=int, metavar="N", help="faults in all (default: one job's)")
    out.add_argument(
        "--where",
        choices=["local"],
        default="local",
        help="under `regroup run`",
    )
    out.add_argument("--per-job", type=int, metavar="N", help="faults in each job (default 25, in the cluster 10)")
    out.add_argument(
        "--resume",
        action="store_true",
        help="leave out the seeds that passed before with these sources, and count them in",
    )
    out.add_argument("--plan", action="store_true", help="print jobs and faults of the seeds, and run nothing")
    out.add_argument("--totals", action="store_true", help="add up every job that the journal has, and run nothing")
    out.add_argument("--stop-at-failure", action="store_true", help="end with the first job that fails")
    return out  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the jobs, print the verdict, write bench/out/chaos.json; 1 if a promise did not hold, 2 for what is no verdict."""
    args = parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    journal = Journal(OUT / f"chaos-{args.where}.jsonl")
    if args.totals:
        return _show(console, journal.read())
    per_job = args.per_job or FAULTS_PER_JOB[args.where]
    total = args.faults if args.faults is not None else per_job
    if total < 1 or per_job < 1:
        console.print(f"chaos: --faults ({total}) and --per-job ({per_job}) must be at least 1.", markup=False)
        return 2
    seed = args.seed if args.seed is not None else int.from_bytes(os.urandom(3), "big")
    console.print(f"seed {seed}, {total} faults, {args.where}")
    try:
        return _campaign(console, journal, args, seed, total, per_job)
    except (JobError, ClusterError, OSError, subprocess.SubprocessError) as error:
        console.print(f"chaos: {error}", markup=False)
        return 2
    except KeyboardInterrupt:
        console.print(
            f"chaos: stopped; {journal.path.relative_to(REPOSITORY)} has the jobs that ended. --resume goes on from there."
        )
        return 130


def _campaign(console: Console, journal: Journal, args: argparse.Namespace, seed: int, total: int, per_job: int) -> int:
    version = digest_of(SOURCES)
    known = totals.done_already(journal.read(), version=version) if args.resume else {}
    results: list[Result] = []
    left = total
    while left > 0:
        count = min(left, per_job)
        result = known.get((seed, count))
        if result is None and args.plan:
            _show_plan(console, seed, count, cluster=args.where == "cluster")
        elif result is None:
            result = _one(console, seed, count, version, cluster=args.where == "cluster")
            journal.add(result)
        if result is not None:
            results.append(result)
            if args.stop_at_failure and not result.verdict.passed:
                break
        seed, left = seed + 1, left - count
    return 0 if args.plan else _show(console, results)


def _one(console: Console, seed: int, count: int, version: str, *, cluster: bool) -> Result:
    """Run one job, say what came of it, and keep its files if it failed."""
    scenario = plan.scenario(seed, cluster=cluster)
    faults = plan.faults(seed, count, scenario, cluster=cluster)
    steps = plan.steps_for(count)
    console.print(f"\n[bold]seed {seed}[/]: {scenario}, {count} faults, {steps} steps")
    directory = Path(tempfile.mkdtemp(prefix=f"chaos-{seed}-"))
    directory.chmod(0o755)
    began_s = time.monotonic()
    job = _job(scenario, directory, steps, faults)
    drive = Drive(job, faults, lambda line: console.print(f"  {line}", markup=False))
    script = "plain.py" if scenario.tier == SCRIPT else "session.py"
    try:
        verdict = drive.run(lambda: expected(script, steps))
    finally:
        job.close()
    result = Result(
        seed, count, "cluster" if cluster else "local", version, str(scenario), tuple(drive.injected), verdict,
        round(time.monotonic() - began_s, 1),
    )  # fmt: skip
    for line in drive.skipped:
        console.print(f"  [dim]not injected: {line}[/]")
    if verdict.passed:
        shutil.rmtree(directory, ignore_errors=True)
        console.print(f"  [green]held[/]: {totals.sentence(totals.summary([result]))} {result.seconds:.0f} s")
        return result
    kept = OUT / "chaos" / f"{result.where}-{seed}"
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(directory, kept, ignore=shutil.ignore_patterns("*.sock"))
    shutil.rmtree(directory, ignore_errors=True)
    (kept / "plan.txt").write_text("".join(f"{f}\n" for f in faults))
    (kept / "diagnosis.txt").write_text(drive.diagnosis)
    console.print(f"  [bold red]FAILED[/]: {verdict.outcome}")
    for line in (*verdict.stuck, *verdict.unequal, *verdict.rolled_back):
        console.print(f"    {line}", markup=False)
    console.print(
        f"    its files: {kept.relative_to(REPOSITORY)}; again: make chaos SEED={seed} FAULTS={count}", markup=False
    )
    return result


def _job(scenario: plan.Scenario, directory: Path, steps: int, faults: list[plan.Fault]) -> Job:
    return LocalJob(scenario, directory, steps, needs_disk=any(f.kind == "disk-full" for f in faults))


def _show_plan(console: Console, seed: int, count: int, *, cluster: bool) -> None:
    scenario = plan.scenario(seed, cluster=cluster)
    console.print(f"seed {seed}: {scenario}")
    for fault in plan.faults(seed, count, scenario, cluster=cluster):
        console.print(
            f"  {fault}  delay {fault.delay_s:.2f} s  target {fault.target}  number {fault.number}", markup=False
        )


def _show(console: Console, results: list[Result]) -> int:
    if not results:
        console.print("No job has been run.")
        return 0
    found = totals.summary(results)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "chaos.json").write_text(json.dumps(found, indent=2) + "\n")
    console.print()
    console.print(totals.table(found))
    console.print(f"\n{totals.sentence(found)}")
    if found["failing_seeds"]:
        console.print(f"Failing seeds: {', '.join(map(str, found['failing_seeds']))}")
    console.print("written to bench/out/chaos.json")
    return 0 if all(r.verdict.passed for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
