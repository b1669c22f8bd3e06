"""`make bench-scale`: pods a second to Running, API requests, CPU and memory, Regroup beside JobSet, Kubeflow Trainer and Job.

Real API server, scheduler and controllers; kwok plays the kubelets, and `fleet` the agents of Regroup's pods, over real TLS. Each
measurement has a control plane of its own, and they come one after the other. Every system gets `--jobs` jobs of 8 pods, created
at once, and before that a tenth of them. Then, for Regroup alone: one job of 5,000 pods of which 1 % are killed; the steady state
for 60 s; and a fail-over with all agents connected.

Writes bench/out/scale.json: `regroup`, `jobset`, `trainer`, `job`, each with `pods_per_s`, `requests_per_pod`, `cpu_ms_per_pod`,
`rss_mib` and more (`load.figures` and `report.result` explain them), `scenarios`, `failed` and `setup`. `regroup_by_ip` and
`jobset_by_ip` are those without a headless Service.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from bench.scale import builds, load, peers, plane, scenarios
from bench.scale.figure import draw
from bench.scale.operator import Regroup
from bench.scale.report import ORDER, SCENARIOS, result, tables
from bench.scale.system import System
from bench.trials import BenchError
from cluster import binaries
from cluster.errors import ClusterError
from harness.polling import TimedOutError

REPOSITORY = Path(__file__).resolve().parent.parent.parent
OUT = REPOSITORY / "bench" / "out"
JOBS, PODS_PER_JOB = 500, 8
S = TypeVar("S", bound=System)
LARGE, KILLED_SHARE, STEADY_S = 5000, 0.01, 60.0


def regroup(directory: Path, *, replicas: int = 1) -> Regroup:
    return Regroup(directory / "regroup", replicas=replicas)


MAKERS: Mapping[str, Callable[[Path], System]] = {
    "regroup": lambda directory: Regroup(directory / "regroup", rests=True),
    "regroup_by_ip": lambda directory: Regroup(directory / "regroup", rests=True, pod_names=False),
    "jobset": lambda _: peers.JobSet(),
    "jobset_by_ip": lambda _: peers.JobSet(pod_names=False),
    "trainer": lambda _: peers.Trainer(),
    "job": lambda _: peers.Job(),
}


class Bench:
    """One run: what was measured, and the line that says what is being done."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.measured: dict[str, dict[int, dict[str, Any]]] = {}
        self.titles: dict[str, str] = {}
        self.changed: dict[str, str] = {}
        self.scenarios: dict[str, Any] = {}
        self.failed: dict[str, str] = {}
        self._said_s = 0.0

    def compare(self, name: str, jobs: int) -> None:
        """Measure one system with so many jobs."""

        def measure(system: System, on: plane.Plane, say: Callable[[str], None]) -> None:
            self.titles[name], self.changed[name] = system.title, system.changed
            found = load.figures(load.measure(system, on, jobs=jobs, pods=PODS_PER_JOB, say=say))
            self.measured.setdefault(name, {})[jobs] = found
            self._print(
                f"{system.title}, {jobs} jobs: {found['pods_per_s']:.1f} pods/s, {found['requests_per_pod']:.2f} requests and "
                f"{found['cpu_ms_per_pod']:.1f} ms CPU a pod, {found['rss_mib']:.0f} MiB"
            )

        self._run(name, f"{name}, {jobs} jobs", MAKERS[name], jobs * PODS_PER_JOB, measure)

    def scenario(
        self,
        name: str,
        pods: int,
        act: Callable[[Regroup], dict[str, Any]],
        *,
        replicas: int = 1,
        pods_per_node: int = plane.PODS_PER_NODE,
    ) -> None:
        """Run one scenario of Regroup alone."""

        def measure(system: Regroup, _: plane.Plane, say: Callable[[str], None]) -> None:
            say("runs")
            began_s = time.monotonic()
            self.scenarios[name] = act(system)
            self._print(f"{name}: done in {time.monotonic() - began_s:.0f} s")

        self._run(name, name, lambda directory: regroup(directory, replicas=replicas), pods, measure, pods_per_node)

    def write(self, load_before: float) -> dict[str, Any]:
        """Write the JSON file with what there is so far, and return its content."""
        found = result(self.measured, self.titles, self.changed, self.scenarios, self.failed, setup(load_before))
        OUT.mkdir(parents=True, exist_ok=True)
        (OUT / "scale.json").write_text(json.dumps(found, indent=2) + "\n")
        return found

    def _run(
        self,
        key: str,
        title: str,
        make: Callable[[Path], S],
        pods: int,
        measure: Callable[[S, plane.Plane, Callable[[str], None]], None],
        pods_per_node: int = plane.PODS_PER_NODE,
    ) -> None:
        directory = Path(tempfile.mkdtemp(prefix=f"bench-scale-{key}-"))
        try:
            with self._console.status(f"{title}: the control plane starts") as status:

                def say(text: str) -> None:
                    if self._console.is_terminal:
                        status.update(f"{title}: {text}")
                    elif time.monotonic() - self._said_s >= 10.0:
                        self._said_s = time.monotonic()
                        self._print(f"{title}: {text}")

                # Half as much room again: a pod that is replaced needs some before the old one is gone.
                with plane.running(directory, 1 + pods * 3 // (2 * pods_per_node), pods_per_node) as on:
                    system = make(directory)
                    try:
                        system.start(on)
                        on.collects(system.kinds)
                        measure(system, on, say)
                    finally:
                        system.stop()
        except (BenchError, ClusterError, TimedOutError, RuntimeError) as error:
            self.failed[title] = f"{error} Its logs are in {directory}."
            self._print(f"{title} failed: {self.failed[title]}")
        else:
            shutil.rmtree(directory)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def setup(load_before: float) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "kubernetes": binaries.KUBERNETES_VERSION,
        "cpus": os.cpu_count(),
        "load_before": round(load_before, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "pods_per_job": PODS_PER_JOB,
    }


def main() -> int:
    """Measure, print the tables, write the JSON file; 1 when something could not be measured, which is named."""
    names = (*ORDER, *SCENARIOS)
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"jobs of {PODS_PER_JOB} pods (default {JOBS})")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="measure only these", metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="a tenth of everything, to try it out")
    parser.add_argument("--figure", type=Path, help="draw the comparison into this SVG")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"--jobs ({args.jobs}) must be at least 1.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the processes of a plane outlive it
    share = 0.1 if args.quick else 1.0
    jobs = max(1, int(args.jobs * share))
    large = int(LARGE * share)
    console = Console()
    load_before = os.getloadavg()[0]
    try:
        for build in (builds.KWOK, builds.JOBSET, builds.TRAINER):
            binaries.build_once(build)
    except ClusterError as error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 1
    bench = Bench(console)
    for size in sorted({max(1, jobs // 10), jobs}):
        for name in (name for name in ORDER if name in args.only):
            bench.compare(name, size)
            bench.write(load_before)
    if "large" in args.only:
        bench.scenario(
            "large",
            large,
            lambda system: scenarios.large(system, large, int(large * KILLED_SHARE)),
            pods_per_node=plane.GPUS_PER_NODE,
        )
        bench.write(load_before)
    if "steady" in args.only:
        bench.scenario("steady", jobs * PODS_PER_JOB, lambda system: scenarios.steady(system, jobs, STEADY_S * share))
        bench.write(load_before)
    if "fail_over" in args.only:
        bench.scenario("fail_over", jobs * PODS_PER_JOB, lambda system: scenarios.fail_over(system, jobs), replicas=2)
    found = bench.write(load_before)
    console.print(tables(found), highlight=False)
    if args.figure and bench.measured:
        draw(found, args.figure)
    console.print(f"written to {(OUT / 'scale.json').relative_to(REPOSITORY)}", highlight=False)
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
