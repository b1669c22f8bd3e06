"""kubectl drain, and a notice before it: workers leave at a step boundary, what comes runs on other nodes, no step is done again,
and no restart counts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from cluster.errors import ClusterError
from cluster.kubectl import Kubectl, wait_until
from harness import judge
from harness.job import JobView
from harness.trace import Trace
from harness.traced_job import TracedJob, alive
from tests.e2e.shared import WORKERS, SharedJobs
from tests.long import only_long

PAUSE_S = 0.5
"""As for a resize (test_resize.py)."""
GRACE_S = 60


@contextmanager
def drained(job: JobView, nodes: Collection[str]) -> Iterator[list[float]]:
    """Drain these nodes of a job's pods, all at once, and uncordon them after the block. Yield how long each took."""
    selector = f"--pod-selector=regroup.dev/job-name={job.name}"

    def drain(node: str) -> float:
        began = time.monotonic()
        job.kubectl.run(
            "drain", node, selector, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=60s", timeout_s=90
        )
        return round(time.monotonic() - began, 1)

    try:
        with ThreadPoolExecutor(len(nodes)) as pool:
            yield list(pool.map(drain, nodes))
    finally:
        job.kubectl.run("uncordon", *nodes)


def homes(job: JobView) -> dict[str, str]:
    """Return the node of each running pod."""
    return {p["metadata"]["name"]: p["spec"]["nodeName"] for p in job.pods() if alive(p)}


def causes(job: JobView, generation: int) -> set[str]:
    """Return the causes of the incidents after a generation."""
    incidents = [i for i in job.status()["incidents"] if i["generation"] > generation]
    print(json.dumps(incidents, indent=1))  # shown where a test fails
    return {i["cause"] for i in incidents}


def restarts(job: JobView) -> int:
    return int((job.status().get("restarts") or {}).get("total", 0))


def pauses_s(trace: Trace, after: int) -> list[float]:
    """Return how much longer than a step of that generation each change after it took. One may last for a single step."""
    step_s = trace.median_step_s(after)
    return [round(trace.gap_s(g) - step_s, 3) for g in trace.generations() if g > after]


def test_workers_of_two_nodes_that_are_drained_at_once(shared_jobs: SharedJobs) -> None:
    (job,) = shared_jobs.take("elastic")
    before, counted = job.training(steps=20), restarts(job)
    generation, at = before.commits[-1].generation, homes(job)
    nodes = sorted(set(at.values()))[1:]
    leaving = {pod for pod, node in at.items() if node in nodes}
    assert 1 <= len(leaving) < WORKERS, at
    with drained(job, nodes) as took_s:
        trace = job.training(steps=10, after=generation)
        assert not set(homes(job).values()) & set(nodes), "a replacement runs on a node that is drained"
    commits = [c for c in trace.judged() if c.generation >= generation]
    assert judge.whole(commits, first=None, redone=0) == []
    stay = {process for process in before.pids(generation) if process[0] not in leaving}
    assert stay <= set(trace.pids(trace.commits[-1].generation)), "a survivor lost its process"
    assert causes(job, generation) <= {"Drained", "Resized"}
    assert restarts(job) == counted
    pauses = pauses_s(trace, generation)
    print(f"kubectl drain took {took_s} s; pauses at each change, s: {pauses}")
    assert pauses[0] <= PAUSE_S


def test_only_worker_is_drained_and_its_successor_goes_on_with_the_next_step(jobs: Callable[..., TracedJob]) -> None:
    """A disruption budget that forbids it is kept: nothing happens before it is taken away."""
    job = jobs("alone", replicas=1, elastic=None, grace_s=GRACE_S, environment={"STEPS": 100_000, "STEP_SECONDS": 0.05})
    before = job.training(workers=1)
    generation, ((pod, node),) = before.commits[-1].generation, homes(job).items()
    forbid(job.kubectl, job.namespace, job.name)
    with pytest.raises(ClusterError, match="disruption budget"):
        evict(job, pod)
    assert (homes(job), job.status()["membership"]["generation"]) == ({pod: node}, generation)
    job.kubectl.run("--namespace", job.namespace, "delete", "poddisruptionbudget", job.name)
    with drained(job, [node]) as took_s:
        trace = job.training(workers=1, steps=5, after=generation)
        ((successor, home),) = homes(job).items()
    assert successor != pod
    assert home != node
    assert judge.whole(trace.judged(), redone=0) == []
    assert {p for p, _ in trace.pids(trace.commits[-1].generation)} == {successor}
    assert causes(job, generation) == {"Drained"}
    assert restarts(job) == 0
    longest_s = max(trace.intervals_s(since=before.commits[-1].t))
    print(f"kubectl drain took {took_s} s of {GRACE_S}; longest time between two steps: {longest_s:.2f} s")
    assert max(took_s) < GRACE_S
    assert longest_s <= 2.0, "training stood while the successor started"


NOTICE = "aws-node-termination-handler/spot-itn"


@only_long("tests/api/test_operator.py has notices, and the drains above hand over")
def test_worker_hands_over_when_its_node_gets_a_notice_and_nobody_deletes_its_pod(
    jobs: Callable[..., TracedJob],
) -> None:
    """What a termination handler does first. The node is tainted, nothing is evicted."""
    job = jobs(
        "notice", replicas=2, elastic=None, grace_s=GRACE_S, environment={"STEPS": 100_000, "STEP_SECONDS": 0.05}
    )
    before = job.training(workers=2)
    generation, at = before.commits[-1].generation, homes(job)
    node = sorted(at.values())[-1]
    leaving = {pod for pod, home in at.items() if home == node}
    job.kubectl.run("taint", "node", node, f"{NOTICE}=now:NoSchedule")
    try:
        began = time.monotonic()
        trace = job.training(workers=2, steps=10, after=generation)
        wait_until(lambda: not leaving & homes(job).keys(), "the pods that left are gone", timeout_s=60)
        took_s = time.monotonic() - began
        now = homes(job)
    finally:
        job.kubectl.run("taint", "node", node, f"{NOTICE}-")
    assert node not in now.values(), "a successor runs on the node that ends"
    assert {pod: home for pod, home in now.items() if pod in at} == {p: n for p, n in at.items() if p not in leaving}
    assert judge.whole(trace.judged(), redone=0) == []
    assert causes(job, generation) == {"Drained"}
    assert restarts(job) == 0
    assert f"its node {node} has taint {NOTICE}" in job.status()["incidents"][-1]["decision"]
    pauses = pauses_s(trace, generation)
    print(
        f"{len(leaving)} worker(s) had handed over {took_s:.1f} s after the notice; pauses at each change, s: {pauses}"
    )
    assert max(pauses) <= PAUSE_S


def forbid(k: Kubectl, namespace: str, job: str) -> None:
    """Make a disruption budget that allows no eviction of a job's pods, and wait until it is in force."""
    selector = {"matchLabels": {"regroup.dev/job-name": job}}
    budget: dict[str, Any] = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget"}
    metadata = {"name": job, "namespace": namespace}
    k.apply(budget | {"metadata": metadata, "spec": {"maxUnavailable": 0, "selector": selector}})

    def is_in_force() -> bool:
        status = k.get("--namespace", namespace, "poddisruptionbudget", job)["status"]
        return bool(status.get("expectedPods") == 1 and status.get("disruptionsAllowed") == 0)

    wait_until(is_in_force, "the disruption budget is in force", timeout_s=30)


def evict(job: JobView, pod: str) -> None:
    """Ask for the eviction of a pod once."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": job.namespace}}
    path = f"/api/v1/namespaces/{job.namespace}/pods/{pod}/eviction"
    job.kubectl.run("create", "--raw", path, "--filename=-", text=json.dumps(body))
