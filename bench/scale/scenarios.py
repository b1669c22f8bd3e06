"""What is asked of Regroup at scale, each as a function that returns plain numbers.

`many`: jobs to Running with a true status, for the last two where there are none. `large`: one job of thousands of workers, of
which one per cent is killed at once. `steady`: what jobs that only train cost. `fail_over`: all agents reconnect after the leader
was killed. They run on a started operator.Regroup. All times are monotonic seconds.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

from _regroup_agent import progress
from bench.scale.api import Api
from bench.scale.load import Watched
from bench.scale.meter import Meter, Use
from bench.scale.operator import Reading, Regroup, job_body
from bench.scale.system import NAMESPACE
from bench.trials import BenchError
from harness.polling import until
from regroup_operator.api import GROUP, PLURAL, VERSION
from regroup_operator.model.pace import progress_factor, write_every_s

JOBS = f"/apis/{GROUP}/{VERSION}/namespaces/{NAMESPACE}/{PLURAL}"
TIMEOUT_S = 540.0
WORKERS = 8
SUBMITTERS = 8
"""Requests at once that create jobs."""
LARGE = "large"
WRITE_S, WRITES_PER_S = 10.0, 20.0
"""The chart's settings: a job's progress is written so often, that of all jobs at most so many times a second."""


def many(system: Regroup, jobs: int, workers: int = WORKERS) -> dict[str, Any]:
    """Create so many jobs at once; return what it took until the status of all of them said, truly, that they run."""
    api = Api(system.kubeconfig)
    names = [f"job-{i}" for i in range(jobs)]
    with closing(Api(system.kubeconfig)) as watching:
        watched = Watched(watching, JOBS, system.is_running)
        run = _Run(system)
        with ThreadPoolExecutor(SUBMITTERS) as threads:
            for _ in threads.map(lambda name: api.post(JOBS, job_body(name, workers)), names):
                pass
        submitted_s = time.monotonic()
        _until(lambda: all(name in watched.running_s for name in names), f"{jobs} jobs run", lambda: _states(watched))
    ended_s = max(watched.running_s[name] for name in names)
    _check_true(system, api, names, workers)
    pods = jobs * workers
    seconds = ended_s - run.started_s
    return {
        "jobs": jobs,
        "pods": pods,
        "seconds": seconds,
        "submit_s": submitted_s - run.started_s,
        "pods_per_s": pods / seconds,
        "status_writes_per_job": sum(watched.num_changes[name] for name in names) / jobs,
        **run.numbers(pods),
    }


def large(system: Regroup, workers: int = 5000, killed: int = 50) -> dict[str, Any]:
    """Run one job, kill some of its pods at once; return the times until it runs, until the last survivor was told, until the
    survivors train, and until those that were lost are replaced."""
    api, fleet = Api(system.kubeconfig), system.agents()
    with closing(Api(system.kubeconfig)) as watching:
        watched = Watched(watching, JOBS, lambda item: _is_running(item, workers))
        run = _Run(system)
        api.post(JOBS, job_body(LARGE, workers, max(1, workers // 2)))
        _until(lambda: LARGE in watched.running_s, f"{workers} workers run", lambda: _states(watched))
    start = {"workers": workers, "seconds": watched.running_s[LARGE] - run.started_s, **run.numbers(workers)}
    start["pods_per_s"] = workers / start["seconds"]

    _settle(system, 1)
    survivors = workers - killed
    before = fleet.ask("groups", job=LARGE)[-1]["number"]
    run = _Run(system)
    fault = fleet.ask("kill", job=LARGE, number=killed)

    def group(ready: Callable[[Mapping[str, Any]], bool], what: str) -> Mapping[str, Any]:
        def found() -> Mapping[str, Any] | None:
            groups = fleet.ask("groups", job=LARGE)
            return next((g for g in groups if g["number"] > before and ready(g)), None)

        group: Mapping[str, Any] = _until(found, what, lambda: str(fleet.ask("groups", job=LARGE)), every_s=0.1)
        return group

    told = group(lambda g: g["world_size"] == survivors and g["adopted"] >= survivors, "all survivors train")
    recovery = {
        "killed": killed,
        "all_told_s": told["last_told_s"] - fault["at_s"],
        "all_train_s": told["last_adopted_s"] - fault["at_s"],
        "delete_calls_s": fault["deleted_s"] - fault["at_s"],
        "generations": told["number"] - before,
    }
    whole = group(lambda g: g["world_size"] == workers and g["adopted"] >= workers, "those lost are replaced")
    recovery["replaced_s"] = whole["last_adopted_s"] - fault["at_s"]
    return {"start": start, "recovery": {**recovery, **run.numbers(killed)}}


def steady(system: Regroup, jobs: int, seconds: float = 60.0) -> dict[str, Any]:
    """Return what jobs that train cost in `seconds`."""
    _has_jobs(system, jobs)
    _settle(system, jobs)
    run = _Run(system)
    reports = system.agents().ask("counts")["reports"]
    time.sleep(seconds)  # the measurement itself
    numbers = run.numbers(jobs * WORKERS)
    per_s = {key: round(count / numbers["wall_s"], 2) for key, count in numbers["requests"].items()}
    counts = system.agents().ask("counts")
    return {
        "jobs": jobs,
        "streams": counts["up"],
        "requests_per_s": numbers["num_requests"] / numbers["wall_s"],
        "requests_per_s_by_verb": per_s,
        "cores": sum(numbers["cpu_s"].values()) / numbers["wall_s"],
        "reports_per_s": (counts["reports"] - reports) / numbers["wall_s"],
        "reconciles_per_s": numbers["num_reconciles"] / numbers["wall_s"],
        **numbers,
    }


def fail_over(system: Regroup, jobs: int = 500) -> dict[str, Any]:
    """Kill the leader; return the times until another one leads and until the last agent is back, and what was lost."""
    _has_jobs(system, jobs)
    _settle(system, jobs)
    fleet, api = system.agents(), Api(system.kubeconfig)
    agents = jobs * WORKERS
    before, pods = fleet.ask("counts"), _pod_uids(api)
    generations = _generations(api)
    old = system.leader
    standby = next(r for r in system.replicas if r is not old and r.process.poll() is None)
    meter = Meter({standby.name: standby.process.pid})
    cpu_s = system.agents_cpu_s()
    at_s = time.monotonic()
    old.process.send_signal(signal.SIGKILL)
    old.process.wait(10)
    _until(standby.leads, "the standby leads", every_s=0.1)
    leads_s = time.monotonic()

    def back() -> Mapping[str, Any] | None:
        counts: Mapping[str, Any] = fleet.ask("counts")
        return counts if counts["up"] >= agents and counts["ups"] - before["ups"] >= agents else None

    counts = _until(back, f"{agents} agents are back", lambda: str(fleet.ask("counts")), every_s=0.25)
    back_s = counts["last_up_s"]
    read = system.read(standby)
    time.sleep(45.0)  # a worker that counts as lost would be acted upon: the grace of a term is 20 s, and admission
    after = _generations(api)
    use = meter.read()[standby.name]
    return {
        "agents": agents,
        "leads_s": leads_s - at_s,
        "back_s": back_s - at_s,
        "back_after_lead_s": back_s - leads_s,
        "new_generations": sum(after[name] != number for name, number in generations.items()),
        "replaced_pods": len(pods - _pod_uids(api)),
        "new_pods": len(_pod_uids(api) - pods),
        "not_running": sum(_state(item) != "Running" for item in api.get(JOBS)["items"]),
        "dials": counts["dials"] - before["dials"],
        "troubles": _more(counts["troubles"], before["troubles"]),
        "refusals": _more(counts["refusals"], before["refusals"]),
        "requests_until_back": {k: int(v) for k, v in sorted(read.requests.items())},
        "cpu_s": use.cpu_s,
        "peak_rss_mib": use.peak_rss_mib,
        "agents_cpu_s": system.agents_cpu_s() - cpu_s,
    }


class _Run:
    """From its making on: what the operators used, and what the leader did."""

    def __init__(self, system: Regroup) -> None:
        self._system = system
        self._meter = Meter(system.pids())
        self._agents_cpu_s = system.agents_cpu_s()
        self._leader = system.leader
        self._before: Reading = system.read(self._leader)
        self.started_s = time.monotonic()

    def numbers(self, pods: int) -> dict[str, Any]:
        """Return what was used until now; `pods`: what requests are divided by."""
        read = self._system.read(self._leader)
        use: dict[str, Use] = self._meter.read()
        found = read.since(self._before)
        return {
            "wall_s": time.monotonic() - self.started_s,
            "requests_per_pod": found["num_requests"] / pods,
            **found,
            "cpu_s": {name: one.cpu_s for name, one in use.items()},
            "peak_rss_mib": {name: one.peak_rss_mib for name, one in use.items()},
            "agents_cpu_s": self._system.agents_cpu_s() - self._agents_cpu_s,
        }


def _has_jobs(system: Regroup, jobs: int) -> None:
    there = len(Api(system.kubeconfig).get(JOBS).get("items") or [])
    if not there:
        many(system, jobs)
    elif there != jobs:
        raise BenchError(f"{there} jobs are there, {jobs} are wanted. Start with an empty control plane.")


def _settle(system: Regroup, jobs: int) -> None:
    """Wait until what a start leaves to do is done: the last events, the second report of each worker, a write of each status."""
    until(lambda: system.read().values["regroup_queue_depth"] < 1, "the queue is empty", timeout_s=TIMEOUT_S)
    factor = progress_factor(jobs)
    time.sleep(2.0 + max(progress.OTHERS_S * factor, write_every_s(WRITE_S, jobs, WRITES_PER_S)))


def _check_true(system: Regroup, api: Api, names: list[str], workers: int) -> None:
    """Raise if a status says more than is so: pods that run, agents that are connected, one generation and no restart."""
    items = {item["metadata"]["name"]: item for item in api.get(JOBS)["items"]}
    wrong = [name for name in names if not system.is_running(items[name]) or items[name]["status"].get("incidents")]
    pods = api.get(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
    running = sum(pod["status"].get("phase") == "Running" for pod in pods)
    counts = system.agents().ask("counts")
    newest = system.agents().ask("newest")
    wanted = len(names) * workers
    if wrong or running != wanted or counts["up"] != wanted or set(newest) != {"1"}:
        raise BenchError(
            f"The status is not true: {len(wrong)} jobs of {len(names)} (say {wrong[:3]}), {running} of {wanted} pods run, "
            f"{counts['up']} agents are connected, newest generations {newest}, agents' troubles {counts['troubles']}."
        )


def _is_running(item: Mapping[str, Any], workers: int) -> bool:
    membership = (item.get("status") or {}).get("membership") or {}
    return _state(item) == "Running" and membership.get("worldSize") == workers


def _state(item: Mapping[str, Any]) -> str:
    return str(((item.get("status") or {}).get("summary") or {}).get("state") or "")


def _generations(api: Api) -> dict[str, int]:
    items = api.get(JOBS)["items"]
    return {i["metadata"]["name"]: (i["status"].get("membership") or {}).get("generation", 0) for i in items}


def _pod_uids(api: Api) -> set[str]:
    pods = api.get(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
    return {pod["metadata"]["uid"] for pod in pods}


def _states(watched: Watched) -> str:
    found: dict[str, int] = {}
    for item in watched.newest.values():
        key = f"{_state(item)} {((item.get('status') or {}).get('summary') or {}).get('ready')}"
        found[key] = found.get(key, 0) + 1
    return str(found)


def _more(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {key: count - before.get(key, 0) for key, count in now.items() if count > before.get(key, 0)}


def _until(condition: Callable[[], Any], what: str, details: Callable[[], str] = str, *, every_s: float = 0.05) -> Any:
    return until(condition, what, timeout_s=TIMEOUT_S, every_s=every_s, details=details, error=BenchError)
