"""Fields of the resource that no other test here uses, on real pods: deadlines, expiry, managedBy, growth, room, groups of workers.

The jobs of JOBS take their course by themselves, so that they do it all at once.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

import pytest

from chaos.cluster_job import SCRIPTS
from cluster.kubectl import Kubectl, wait_until
from harness import installation, traced_job
from harness.job import RESOURCE
from harness.traced_job import TracedJob

COOLDOWN_S = 20
_SMALL = {"resources": {"requests": {"cpu": "50m", "memory": "200Mi"}}}
_WAITS = ["python", "-c", "import time; time.sleep(600)"]


def _one_a_node(name: str) -> dict[str, Any]:
    selector = {"matchLabels": {"regroup.dev/job-name": name}}
    term = {"labelSelector": selector, "topologyKey": "kubernetes.io/hostname"}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


JOBS: Mapping[str, dict[str, Any]] = {
    "deadline": {"replicas": 2, "command": _WAITS, "runPolicy": {"activeDeadlineSeconds": 5}},
    "expires": {
        "replicas": 1,
        "elastic": None,
        "command": ["python", "-c", "print('done')"],
        "runPolicy": {"ttlSecondsAfterFinished": 2, "cleanPodPolicy": "None"},
    },
    "late": {"replicas": 2, "command": _WAITS, "runPolicy": {"startDeadlineSeconds": 5}},
    "foreign": {"replicas": 1, "elastic": None, "command": _WAITS, "runPolicy": {"managedBy": "example.com/another"}},
    "crowded": {
        "replicas": 2,
        "elastic": None,
        "environment": {"STEPS": 100_000},
        "elasticPolicy": {"minReplicas": 1, "maxReplicas": 2, "pendingTimeoutSeconds": 3},
    },
}
_PODS: Mapping[str, dict[str, Any]] = {
    "late": {"nodeSelector": {"example.com/no-such-node": "yes"}},
    "crowded": {"nodeSelector": {"kubernetes.io/hostname": "n1"}, "affinity": _one_a_node("crowded")},
}
"""What is added to the pods' templates: where they may run."""


@pytest.fixture(scope="module")
def started(operator: Kubectl) -> Iterator[dict[str, TracedJob]]:
    """The jobs of JOBS, started together."""
    namespace = f"train-{uuid.uuid4().hex[:8]}"
    installation.namespace(operator, namespace)
    yield {
        name: traced_job.start(operator, namespace, name, container=_SMALL, pod=_PODS.get(name), **options)
        for name, options in JOBS.items()
    }
    installation.remove_namespace(operator, namespace)


def _condition(job: TracedJob, kind: str) -> dict[str, Any]:
    return next((c for c in job.status().get("conditions", ()) if c["type"] == kind), {})


def _exists(job: TracedJob) -> bool:
    found = job.kubectl.run("--namespace", job.namespace, "get", RESOURCE, "--output=name")
    return f"{RESOURCE}/{job.name}" in found.split()


def _failed(job: TracedJob, reason: str) -> dict[str, Any]:
    """Wait until the job has failed for this reason and its pods have ended; return the condition."""
    wait_until(lambda: _condition(job, "Failed").get("reason") == reason, f"{job.name} ends: {reason}", timeout_s=90)
    wait_until(lambda: not _holding(job), f"the pods of {job.name} have ended", timeout_s=60)
    return _condition(job, "Failed")


def _holding(job: TracedJob) -> list[str]:
    """Return the pods that hold resources. One that has ended stays for its log."""
    return [p["metadata"]["name"] for p in job.pods() if p["status"].get("phase") not in ("Succeeded", "Failed")]


def test_job_that_runs_past_its_deadline_fails_and_gives_its_pods_back(started: dict[str, TracedJob]) -> None:
    job = started["deadline"]
    failed = _failed(job, "DeadlineExceeded")
    assert "spec.runPolicy.activeDeadlineSeconds (5)" in failed["message"]
    status = job.status()
    ran_s = (_time(status["completionTime"]) - _time(status["startTime"])).total_seconds()
    assert 5 <= ran_s <= 15, f"it ran {ran_s:.0f} s"


def test_job_that_does_not_start_in_time_fails_and_gives_its_pods_back(started: dict[str, TracedJob]) -> None:
    message = _failed(started["late"], "StartDeadlineExceeded")["message"]
    assert "0 of the 2 workers" in message
    assert "spec.runPolicy.startDeadlineSeconds (5)" in message


def test_job_and_its_pods_are_deleted_some_time_after_its_end(started: dict[str, TracedJob]) -> None:
    job = started["expires"]
    wait_until(lambda: not _exists(job), "the job that has ended is deleted", timeout_s=90)
    wait_until(lambda: not job.pods(), "its pods go with it", timeout_s=60)
    said = json.loads(job.kubectl.run("--namespace", job.namespace, "get", "events.events.k8s.io", "-o", "json"))
    reasons = {event["reason"] for event in said["items"] if event["regarding"].get("name") == job.name}
    assert "Succeeded" in reasons, f"it was deleted before it had ended: {reasons}"


def test_pod_that_no_node_has_room_for_is_given_back_and_the_job_trains_without_it(
    started: dict[str, TracedJob],
) -> None:
    job = started["crowded"]
    wait_until(lambda: _condition(job, "PodsReady").get("reason") == "HeldBack", "a pod is given back", timeout_s=90)
    wait_until(lambda: len(job.pods()) == 1, "one pod is left", timeout_s=60)
    job.wait(90, "it trains with one worker", state="Running", adopted=True, world_size=1)
    assert not (job.status().get("restarts") or {}).get("total")


def test_job_of_another_controller_is_left_alone(started: dict[str, TracedJob]) -> None:
    """By now the operator has brought the jobs that were made with it to their ends."""
    assert _condition(started["deadline"], "Failed"), "the operator has not looked at the others yet"
    job = started["foreign"]
    assert job.status().get("conditions") is None
    assert job.pods() == []


def test_growth_waits_for_the_pause_after_the_last_change(jobs: Callable[..., TracedJob]) -> None:
    policy = {"minReplicas": 1, "maxReplicas": 3, "growthCooldownSeconds": COOLDOWN_S}
    job = jobs(replicas=1, elastic=None, elasticPolicy=policy, container=_SMALL, environment={"STEPS": 100_000})
    job.training(workers=1)
    job.scale(2)
    wait_until(lambda: len(job.pods()) == 2, "the first growth has begun", timeout_s=COOLDOWN_S)
    job.scale(3)
    wait_until(lambda: _condition(job, "PodsReady").get("reason") == "HeldBack", "the next is held back", timeout_s=10)
    assert len(job.pods()) == 2, "a pod waits for the end of the pause"
    generation = job.training(workers=3).commits[-1].generation
    made = {p["metadata"]["labels"]["regroup.dev/slot"]: _time(p["metadata"]["creationTimestamp"]) for p in job.pods()}
    assert (made["2"] - made["1"]).total_seconds() >= COOLDOWN_S - 1, "creation times are whole seconds"
    job.scale(1)
    job.training(workers=1, after=generation, timeout_s=COOLDOWN_S)  # shrinking does not wait


def test_model_that_is_split_over_two_workers_goes_on_after_a_kill(jobs: Callable[..., TracedJob]) -> None:
    job = jobs(
        replicas=4,
        elastic=(2, 4),
        workersPerGroup=2,
        script="split.py",
        scripts=SCRIPTS,
        container=_SMALL,
        environment={"CHAOS_TRACE": "/trace", "CHAOS_STEPS": 100_000, "CHAOS_MESH": "shard=2"},
        recovery={"maxRestarts": 100},
    )
    before = job.training(workers=4)
    victim, pid = job.victim(3)
    lost = (victim["metadata"]["name"], pid)
    job.kill_rank(3)
    partner = job.pod(2)["metadata"]["name"]  # slots 2 and 3 hold one copy: it waits until the copy is whole again
    job.changed(
        before,
        lambda process: process == lost,
        workers=4,
        survivors=3,
        generations=(1, 2),
        pausing=lambda process: process[0] == partner,
    )


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
