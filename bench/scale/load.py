"""Drive one system: create jobs at once, and measure until every pod runs and the status of every job says so.

The same client does it for all: CREATORS requests at once, and two watches that tell when something was first seen. What is
counted, and what is the system's own, says `figures`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from bench.commits import percentile
from bench.scale import audit
from bench.scale.api import Api
from bench.scale.meter import Meter, Use
from bench.scale.plane import JOB_CONTROLLER, JOB_CONTROLLER_USER, Plane
from bench.scale.system import NAMESPACE, System
from bench.trials import BenchError
from harness.polling import until

CREATORS = 16
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
_QUIET_S = 120.0
"""Without any further pod or job that runs, a measurement is given up."""


class Watched:
    """When each object of a collection was first seen to satisfy a condition; `running_s` is by name, in monotonic seconds.
    `newest` is each as last seen, `num_changes` how often it was seen to change until then.

    The thread that watches ends with `api.close()`; where the server ends a watch, it lists and watches anew.
    """

    def __init__(self, api: Api, path: str, is_running: Callable[[Mapping[str, Any]], bool]) -> None:
        self.running_s: dict[str, float] = {}
        self.newest: dict[str, Mapping[str, Any]] = {}
        self.num_changes: dict[str, int] = {}
        self._api, self._path, self._is_running = api, path, is_running
        version = self._list()
        threading.Thread(target=self._run, args=(version,), daemon=True).start()

    def _run(self, version: str) -> None:
        while not self._api.is_closed:
            for event in self._api.watch(self._path, version):
                if event["type"] == "ERROR":  # the version is too old
                    break
                self._see(event["object"])
            try:
                version = self._list()
            except BenchError:
                if not self._api.is_closed:
                    raise

    def _list(self) -> str:
        listed = self._api.get(self._path)
        for item in listed["items"]:
            self._see(item)
        return str(listed["metadata"]["resourceVersion"])

    def _see(self, item: Mapping[str, Any]) -> None:
        name, version = item["metadata"]["name"], item["metadata"]["resourceVersion"]
        before = self.newest.get(name)
        if before is not None and before["metadata"]["resourceVersion"] == version:
            return
        self.newest[name] = item
        if name in self.running_s:
            return
        self.num_changes[name] = self.num_changes.get(name, -1) + 1
        if self._is_running(item):
            self.running_s[name] = time.monotonic()


@dataclass(frozen=True)
class Measured:
    """One measurement, not yet interpreted. Times are monotonic seconds; requests are those during it."""

    jobs: int
    pods: int
    began_s: float
    created_s: Collection[float]
    """When the creation of each job was answered."""
    pods_running_s: Collection[float]
    jobs_running_s: Collection[float]
    """When the status of each job first said so."""
    requests: Mapping[audit.Key, int]
    refused: Mapping[str, int]
    """Requests that were answered with 409, 429 and so on, by `user: verb resource: status`."""
    use: Mapping[str, Use]
    """Of all processes: the system's by its own names, the plane's by theirs."""
    own_users: Collection[str]
    own_processes: Collection[str]
    details: Mapping[str, Any] = field(default_factory=dict)


def measure(system: System, plane: Plane, *, jobs: int, pods: int, say: Callable[[str], None]) -> Measured:
    """Run `jobs` jobs of `pods` pods each on a started system, and return what was seen. Raises BenchError.

    `say` is told of the progress, every second or so.
    """
    first = system.submit(0, pods)
    watching = Api(plane.kubeconfig)
    watched_pods = Watched(watching, _PODS, lambda pod: bool(pod.get("status", {}).get("phase") == "Running"))
    watched_jobs = Watched(watching, first.path, system.is_running)
    before, refused_before = plane.requests(), plane.refused()
    meter = Meter({**plane.pids(), **system.pids()})
    began_s = time.monotonic()

    def create(i: int) -> float:
        one = system.submit(i, pods)
        plane.api.post(one.path, one.body)
        return time.monotonic()

    try:
        with ThreadPoolExecutor(CREATORS) as threads:
            created_s = list(threads.map(create, range(jobs)))
        _wait(system, watched_pods, watched_jobs, jobs=jobs, pods=jobs * pods, say=say)
        use = meter.read()
        requests = audit.since(plane.requests(), before)
        refused = {
            f"{key.user}: {key.verb} {key.resource}: {code}": count - refused_before.get((key, code), 0)
            for (key, code), count in plane.refused().items()
            if count > refused_before.get((key, code), 0)
        }
    finally:
        watching.close()
    return Measured(
        jobs=jobs,
        pods=jobs * pods,
        began_s=began_s,
        created_s=created_s,
        pods_running_s=list(watched_pods.running_s.values()),
        jobs_running_s=list(watched_jobs.running_s.values()),
        requests=requests,
        refused=refused,
        use=use,
        own_users=system.users(),
        own_processes=list(system.pids()),
        details=system.details(),
    )


def _wait(
    system: System, in_pods: Watched, in_jobs: Watched, *, jobs: int, pods: int, say: Callable[[str], None]
) -> None:
    said_s = changed_s = time.monotonic()
    last = (0, 0)

    def done() -> bool:
        nonlocal said_s, changed_s, last
        system.pids()  # raises if one has ended
        now, now_s = (len(in_pods.running_s), len(in_jobs.running_s)), time.monotonic()
        if now != last:
            last, changed_s = now, now_s
        if now_s - said_s >= 1.0:
            said_s = now_s
            say(f"{now[0]} of {pods} pods run, {now[1]} of {jobs} jobs say so")
        if now_s - changed_s > _QUIET_S:
            raise BenchError(
                f"{now[0]} of {pods} pods run, {now[1]} of {jobs} jobs say so, no more in {_QUIET_S:.0f} s."
            )
        return now[0] >= pods and now[1] >= jobs

    until(done, "all pods and jobs run", timeout_s=3600.0, every_s=0.05, error=BenchError)


def figures(measured: Measured) -> dict[str, Any]:
    """Return the plain numbers of a measurement. Pure.

    `requests_per_pod` and `requests_per_s` count every request that the pods cost the API server, the scheduler's and the
    kubelets' too, but not the benchmark's own. `own_requests_per_pod` is the system's, `cpu_ms_per_pod` its processes': both with
    the Job controller's, where it has Jobs. `rss_mib` is the peak of its own processes; for plain Jobs, of the Job controller.
    """
    pods = measured.pods
    run_s = max(measured.pods_running_s) - measured.began_s
    true_s = max(max(measured.jobs_running_s), max(measured.pods_running_s)) - measured.began_s
    job_controller = audit.of_users(measured.requests, [JOB_CONTROLLER_USER])
    has_jobs = any(key.verb == "create" for key in job_controller)
    own = audit.of_users(measured.requests, [*measured.own_users, *([JOB_CONTROLLER_USER] if has_jobs else [])])
    own_cpu_s = sum(measured.use[name].cpu_s for name in measured.own_processes)
    job_cpu_s = measured.use[JOB_CONTROLLER].cpu_s if has_jobs else 0.0
    memory_of = list(measured.own_processes) or [JOB_CONTROLLER]
    num_requests = sum(measured.requests.values())
    return {
        "jobs": measured.jobs,
        "pods": pods,
        "pods_per_s": round(pods / run_s, 1),
        "requests_per_pod": round(num_requests / pods, 2),
        "cpu_ms_per_pod": round((own_cpu_s + job_cpu_s) / pods * 1e3, 2),
        "rss_mib": round(sum(measured.use[name].peak_rss_mib for name in memory_of), 1),
        "running_s": round(run_s, 2),
        "status_s": round(true_s, 2),
        "created_s": round(max(measured.created_s) - measured.began_s, 2),
        "pod_running_s": _percentiles(at_s - measured.began_s for at_s in measured.pods_running_s),
        "requests_per_s": round(num_requests / true_s, 1),
        "requests_per_pod_by_user": _per(audit.by_user(measured.requests), pods),
        "own_requests_per_pod": round(sum(own.values()) / pods, 2),
        "own_requests_per_pod_by_verb": _per(audit.by_verb(own), pods),
        "own_requests_per_s_by_verb": _per(audit.by_verb(own), true_s),
        "of_the_job_controller": {
            "requests_per_pod": round(sum(job_controller.values()) / pods, 2) if has_jobs else 0.0,
            "cpu_ms_per_pod": round(job_cpu_s / pods * 1e3, 2),
            "rss_mib": round(measured.use[JOB_CONTROLLER].peak_rss_mib, 1) if has_jobs else 0.0,
        },
        "refused": dict(sorted(measured.refused.items(), key=lambda item: -item[1])),
        "processes": {
            name: {
                "cpu_s": round(use.cpu_s, 2),
                "cpu_ms_per_pod": round(use.cpu_s / pods * 1e3, 2),
                "rss_mib": round(use.peak_rss_mib, 1),
            }
            for name, use in measured.use.items()
        },
        **measured.details,
    }


def _per(counts: Mapping[str, int], divisor: float) -> dict[str, float]:
    return {name: round(count / divisor, 3) for name, count in counts.items() if count / divisor >= 0.0005}


def _percentiles(values: Iterable[float]) -> dict[str, float]:
    kept = list(values)
    return {f"p{percent}": round(percentile(kept, percent), 2) for percent in (50, 99)}
