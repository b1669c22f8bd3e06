"""Hangs in the cluster: a trainer on the leader's node is stopped, and the leading operator is killed meanwhile."""

from __future__ import annotations

import signal

from cluster.kubectl import Kubectl
from harness import faults, installation
from harness.traced_job import leader_node
from tests.e2e.kit import kubectl_regroup
from tests.e2e.shared import WORKERS, SharedJobs, worker_of

HANG_S = 15
TAKEOVER_S = 25
"""The next operator's lease and the agents' calls; the clock of the hang goes on meanwhile."""


def test_stopped_trainer_is_named_and_restarted_in_place_by_the_next_operator(
    shared_jobs: SharedJobs, operator: Kubectl
) -> None:
    (job,) = shared_jobs.take("elastic")
    job.patch(recovery={"hangSeconds": HANG_S})
    before = job.training(steps=20)
    generation = before.commits[-1].generation
    containers, pids = job.containers(), before.pids(generation)
    node = leader_node(operator)
    on_node = {p["metadata"]["name"]: p for p in job.pods() if p["spec"]["nodeName"] == node}
    pod, pid = min((key for key in pids if key[0] in on_node), default=min(pids))
    uid = next(p["metadata"]["uid"] for p in job.pods() if p["metadata"]["name"] == pod)
    stopped = faults.signal_inner(uid, pid, signal.SIGSTOP)
    leader = installation.leader(operator)
    assert leader is not None
    faults.kill_main(leader["metadata"]["uid"], "regroup_operator")
    # One generation without the process, and one with it again unless it is back before the new operator decides. An agent that
    # finds the new operator late misses the first.
    after = job.changed(
        before,
        lambda p: p == (pod, pid),
        workers=WORKERS,
        survivors=WORKERS - 1,
        generations=(1, 3),
        pausing=lambda _: True,
    )
    took_s = after.first_of(generation + 1).t - stopped
    print(f"SIGSTOP -> next committed step with hangSeconds {HANG_S} and a new operator: {took_s:.1f} s")
    job.patch(recovery={"hangSeconds": None})
    assert job.containers() == containers, "a pod or container was restarted"
    incident = next(i for i in job.status()["incidents"] if i["generation"] > generation)
    assert incident["cause"] == "Hung", incident
    rank, worker = pids[pod, pid], worker_of(pod)
    assert incident["culprit"] == worker, incident
    assert f"rank {rank} (worker {worker}, process 0) is stopped by a signal" in incident["decision"]
    assert len(incident["stacks"]) == 3
    shown = kubectl_regroup(job.namespace, "stacks", job.name).splitlines()
    assert shown[1:] == incident["stacks"]
    assert shown[0].startswith(f"{incident['at']}, before generation {incident['generation']}: ")
    assert took_s <= HANG_S + TAKEOVER_S, took_s
