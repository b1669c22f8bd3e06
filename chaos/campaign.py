"""Run the job of one seed from its plan to its verdict, and keep its files if it failed."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from chaos import plan, totals
from chaos.drive import Drive
from chaos.job import Job
from chaos.local import REPOSITORY, LocalJob, script_of
from chaos.plan import SPLIT, WHOLE, Fault, Scenario
from chaos.reference import expected
from chaos.totals import Result
from cluster.kubectl import Kubectl

OUT = REPOSITORY / "bench" / "out"
FAULTS_PER_JOB = {"local": 40, "cluster": 10}
"""Faults per job if `--per-job` is not given."""
MakeJob = Callable[[Scenario, Path, int, Sequence[Fault]], Job]
"""Makes a job from its scenario, a directory for its files, the number of steps, and the faults that will come."""


def local(scenario: Scenario, directory: Path, steps: int, faults: Sequence[Fault]) -> Job:
    """Return a job under `regroup run`."""
    return LocalJob(scenario, directory, steps, needs_disk=any(f.kind == "disk-full" for f in faults))


def in_cluster(kubectl: Kubectl) -> MakeJob:
    """Return a function that makes jobs in a cluster in which the operator is installed."""
    from chaos.cluster_job import ClusterJob  # the local jobs need nothing of a cluster

    return lambda scenario, directory, steps, faults: ClusterJob(kubectl, scenario, directory, steps)  # noqa: ARG005


def place_of(where: str, model: str) -> str:
    """Return the name of a sort of campaign, for its files and results: "local", "local-split" or "cluster"."""
    return where if model == WHOLE else f"{where}-{model}"


def run_one(
    console: Console, make: MakeJob, seed: int, count: int, version: str, *, cluster: bool, model: str = WHOLE
) -> Result:
    """Run one job, print its outcome, and keep its files if it failed."""
    scenario = plan.scenario(seed, cluster=cluster, model=model)
    faults = plan.faults(seed, count, scenario, cluster=cluster)
    steps = plan.steps_for(count)
    console.print(f"\n[bold]seed {seed}[/]: {scenario}, {count} faults, {steps} steps")
    directory = Path(tempfile.mkdtemp(prefix=f"chaos-{seed}-"))
    directory.chmod(0o755)
    began_s = time.monotonic()
    job = make(scenario, directory, steps, faults)
    drive = Drive(job, faults, lambda line: console.print(f"  {line}", markup=False))
    try:
        try:
            verdict = drive.run(lambda: expected(script_of(scenario), steps, scenario.evaluate_every))
        finally:
            job.close()
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    result = Result(
        seed, count, place_of("cluster" if cluster else "local", model), version, str(scenario), tuple(drive.injected), verdict,
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
    again = replay(seed, count, result.where)
    console.print(f"    its files: {kept.relative_to(REPOSITORY)}; again: {again}", markup=False)
    return result


def replay(seed: int, count: int, where: str) -> str:
    """Return the command that runs this one job again. The number of faults is part of it, since it decides the last faults.

    `where` is a name from `place_of`.
    """
    place, _, split = where.partition("-")
    per_job = f" PER_JOB={count}" if count > FAULTS_PER_JOB[place] else ""
    other = (" CHAOS=cluster" if place == "cluster" else "") + (f" MODEL={SPLIT}" if split else "")
    return f"make chaos SEED={seed} FAULTS={count}{per_job}{other}"
