"""A node's power is cut: the survivors step again without waiting for a collective's timeout or Kubernetes' eviction."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from cluster import addresses, nodes
from cluster.kubectl import Kubectl
from demo import faults, installation
from tests.e2e.kit import wait_until
from tests.e2e.training import TracedJob

TRIALS = 10
USUALLY_S, NEVER_AFTER_S, WITH_LEADER_S = 10.0, 15.0, 60.0


def test_survivors_of_a_power_cut_step_again_within_ten_seconds(
    jobs: Callable[..., TracedJob], operator: Kubectl
) -> None:
    job = jobs(elastic=(1, 3), environment={"STEPS": 100000})
    waits, leader = [], _leader_node(operator)
    for _ in range(TRIALS):
        before = job.training(workers=3, steps=10)
        generation = before.commits[-1].generation
        node, lost = _node_with_workers(job, leader)
        cut = faults.power_off(node)
        try:
            trace = job.wait_trace(
                lambda t, g=generation: t.commits[-1].generation > g,  # type: ignore[misc]
                60,
                "the survivors do not train after the power cut",
            )
            waits.append(trace.first_of(generation + 1).t - cut)
            survivors = {key for key in before.pids(generation) if key[0] not in lost}
            after = job.training(workers=3, steps=5)
            assert set(after.pids(after.first_of(generation + 1).generation)) == survivors
            assert survivors <= set(after.pids(after.commits[-1].generation)), "a survivor lost its process"
            homes = {p["metadata"]["name"]: p["spec"].get("nodeName") for p in job.pods() if _alive(p)}
            assert node not in homes.values(), "the worker is rebuilt on another node"
            assert after.missing() == []
        finally:
            faults.power_on(node)
        print(f"power cut -> survivors' next committed step, s: {[round(w, 2) for w in waits]}", flush=True)
    assert sum(w <= USUALLY_S for w in waits) >= 8, waits
    assert max(waits) <= NEVER_AFTER_S, waits


def test_power_cut_of_the_leaders_node_is_survived_within_a_minute(
    jobs: Callable[..., TracedJob], operator: Kubectl
) -> None:
    job = jobs(elastic=(2, 3), environment={"STEPS": 100000})
    before = job.training(workers=3, steps=10)
    generation = before.commits[-1].generation
    node = _leader_node(operator)
    lost = {p["metadata"]["name"] for p in job.pods() if p["spec"]["nodeName"] == node}
    assert len(lost) == 1, "one worker a node"
    cut = faults.power_off(node)
    try:
        trace = job.wait_trace(lambda t: t.commits[-1].generation > generation, 90, "nobody trains after the power cut")
        wait = trace.first_of(generation + 1).t - cut
        print(f"power cut with the leader -> survivors' next committed step: {wait:.1f} s")
        assert wait <= WITH_LEADER_S
        survivors = {key for key in before.pids(generation) if key[0] not in lost}
        after = job.training(workers=3, steps=5)
        assert survivors <= set(after.pids(after.commits[-1].generation)), "a survivor lost its process"
    finally:
        faults.power_on(node)


def _leader_node(k: Kubectl) -> str:
    wait_until(lambda: installation.leader(k) is not None, timeout_s=60, what="an operator leads")
    pod = installation.leader(k)
    assert pod is not None
    return str(pod["spec"]["nodeName"])


def _node_with_workers(job: TracedJob, leader: str) -> tuple[str, set[str]]:
    """Return a node that holds workers but neither the leader nor all workers, and the pods on it."""
    by_node: dict[str, set[str]] = {}
    for pod in job.pods():
        if _alive(pod):
            by_node.setdefault(pod["spec"]["nodeName"], set()).add(pod["metadata"]["name"])
    fitting = {
        node: pods for node, pods in by_node.items() if node != leader and len(pods) < sum(map(len, by_node.values()))
    }
    assert fitting, f"no node has some workers and not the leader: {by_node}, leader on {leader}"
    node = min(fitting, key=lambda n: (len(fitting[n]), n))
    return node, fitting[node]


def _alive(pod: dict[str, Any]) -> bool:
    return "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") == "Running"


def test_all_nodes_are_on_afterwards(operator: Kubectl) -> None:
    ready = nodes.ready(operator)
    assert all(ready.get(addresses.parse_node(n).name) for n in ("n1", "n2", "n3")), json.dumps(ready)
