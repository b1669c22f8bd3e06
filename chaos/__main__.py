"""`python -m chaos`: random faults over real jobs, and a verdict. Exit code 0: every promise held."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from typing import Any

from rich.console import Console

from chaos import plan, totals
from chaos.campaign import FAULTS_PER_JOB, OUT, MakeJob, in_cluster, local, place_of, run_one
from chaos.job import JobError
from chaos.local import REPOSITORY
from chaos.reference import SOURCES, digest_of
from chaos.totals import Journal, Result
from cluster.errors import ClusterError


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    out = argparse.ArgumentParser(
        prog="python -m chaos",
        description="Inject faults into real training jobs at random moments. Check that each job commits again within a limit "
        "and ends exactly like a run without faults. A seed stands for one job and its list of faults.",
        epilog="make chaos SEED=7 runs one job. FAULTS=1000 runs as many jobs as needed, with seeds from SEED on.",
    )
    out.add_argument("--seed", type=int, metavar="N", help="seed of the first job (default: random; it is printed)")
    out.add_argument("--faults", type=int, metavar="N", help="number of faults (default: those of one job)")
    out.add_argument(
        "--where",
        choices=["local", "cluster"],
        default="local",
        help="local: under `regroup run` (default); cluster: in the one-machine cluster, as root",
    )
    out.add_argument(
        "--model",
        choices=[plan.WHOLE, plan.SPLIT],
        default=plan.WHOLE,
        help="split: jobs whose model is split over several processes, with FSDP2, tensor parallel and pipelines; "
        "--where local only. A seed is another job in each (default: whole)",
    )
    out.add_argument("--per-job", type=int, metavar="N", help="faults per job (default: local 40, cluster 10)")
    out.add_argument(
        "--resume",
        action="store_true",
        help="skip the seeds that passed before with the same sources; the totals include them",
    )
    out.add_argument("--plan", action="store_true", help="print the jobs and faults of the seeds without running them")
    out.add_argument(
        "--totals",
        action="store_true",
        help="print the totals and tables of all jobs that ran at --where, without running any",
    )
    out.add_argument("--stop-at-failure", action="store_true", help="stop after the first job that fails")
    return out  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the jobs, print and write the verdict. Return 1 if a promise did not hold, and 2 if there is no verdict."""
    args = parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    if args.where == "cluster" and args.model == plan.SPLIT:
        console.print("chaos: --model split runs with --where local only. Leave out --where cluster.", markup=False)
        return 2
    journal = Journal(OUT / f"chaos-{place_of(args.where, args.model)}.jsonl")
    if args.totals:
        return _show_totals(console, journal)
    per_job = args.per_job or FAULTS_PER_JOB[args.where]
    total = args.faults if args.faults is not None else per_job
    if total < 1 or per_job < 1:
        console.print(f"chaos: --faults ({total}) and --per-job ({per_job}) must be at least 1.", markup=False)
        return 2
    seed = args.seed if args.seed is not None else int.from_bytes(os.urandom(3), "big")
    console.print(f"seed {seed}, {total} faults, {place_of(args.where, args.model)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or what the job has started would stay behind
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
    try:
        if args.where == "local" or args.plan:
            return _campaign(console, journal, local, args, seed, total, per_job)
        from chaos.cluster_job import installed

        with installed() as kubectl:
            return _campaign(console, journal, in_cluster(kubectl), args, seed, total, per_job)
    except (JobError, ClusterError, OSError, subprocess.SubprocessError) as error:
        console.print(f"chaos: {error}", markup=False)
        return 2
    except KeyboardInterrupt:
        console.print(
            f"chaos: stopped; {journal.path.relative_to(REPOSITORY)} has the jobs that ended. --resume goes on from there."
        )
        return 130


def _campaign(
    console: Console, journal: Journal, make: MakeJob, args: argparse.Namespace, seed: int, total: int, per_job: int
) -> int:
    version = digest_of(SOURCES)
    known = totals.done_already(journal.read(), version=version) if args.resume else {}
    results: list[Result] = []
    left = total
    while left > 0:
        count = min(left, per_job)
        result = known.get((seed, count))
        if result is None and args.plan:
            _show_plan(console, seed, count, cluster=args.where == "cluster", model=args.model)
        elif result is None:
            result = run_one(console, make, seed, count, version, cluster=args.where == "cluster", model=args.model)
            journal.add(result)
        if result is not None:
            results.append(result)
            if args.stop_at_failure and not result.verdict.passed:
                break
        seed, left = seed + 1, left - count
    return 0 if args.plan else _show(console, results, place_of(args.where, args.model))


def _show_plan(console: Console, seed: int, count: int, *, cluster: bool, model: str) -> None:
    scenario = plan.scenario(seed, cluster=cluster, model=model)
    console.print(f"seed {seed}: {scenario}")
    for fault in plan.faults(seed, count, scenario, cluster=cluster):
        console.print(
            f"  {fault}  delay {fault.delay_s:.2f} s  target {fault.target}  number {fault.number}", markup=False
        )


def _show(console: Console, results: list[Result], where: str) -> int:
    found = totals.summary(results)
    OUT.mkdir(parents=True, exist_ok=True)
    # The verdict of the last run, and that of the last one in this place: a run in the other leaves it alone.
    for name in ("chaos.json", f"chaos-{where}.json"):
        (OUT / name).write_text(json.dumps(found, indent=2) + "\n")
    for grid in totals.grids(found):
        console.print()
        console.print(grid.table())
    _show_sentences(console, found)
    console.print(f"written to bench/out/chaos.json and chaos-{where}.json")
    return 0 if all(r.verdict.passed for r in results) else 1


def _show_totals(console: Console, journal: Journal) -> int:
    results = journal.read()
    if not results:
        console.print(f"No job has been run: {journal.path} has none.", markup=False, soft_wrap=True)
        return 0
    found = totals.summary(results)
    for grid in totals.grids(found):
        console.print(f"{grid.title}:\n\n{grid.markdown()}\n", markup=False, soft_wrap=True)
    _show_sentences(console, found)
    return 0 if all(r.verdict.passed for r in results) else 1


def _show_sentences(console: Console, found: dict[str, Any]) -> None:
    console.print(f"\n{totals.sentence(found)}")
    if found["failing_seeds"]:
        console.print(f"Failing seeds: {', '.join(map(str, found['failing_seeds']))}")


if __name__ == "__main__":
    sys.exit(main())
