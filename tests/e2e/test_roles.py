"""Roles and spares on real pods: an address in the DNS, replaced without a generation, gone with the job; a role that the job waits
for; one change for a loss; and the sample with an evaluator and TensorBoard, which runs beside the other tests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ClusterError
from cluster.kubectl import Kubectl, wait_until
from harness import faults, installation, traced_job
from harness.job import JobView
from harness.traced_job import TracedJob, alive
from tests.e2e.kit import SERVES, pods_of, role
from tests.long import only_long

ASKS = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=2).read().decode())"
SAMPLE_STEPS = 1600


def status_of(job: JobView, name: str) -> dict[str, Any]:
    return next((one for one in job.status().get("roles", ()) if one["name"] == name), {})


def answer(job: JobView, url: str) -> str:
    """Return what a worker's container is told by this URL, empty: it gets no answer."""
    worker = next(p for p in job.pods() if alive(p))["metadata"]["name"]
    try:
        return job.kubectl.run(
            "--namespace", job.namespace, "exec", worker, "--container=trainer", "--", "python", "-c", ASKS, url
        )
    except ClusterError:
        return ""


def address(job: JobView, worker: dict[str, Any], host: str) -> str:
    """Return the address that a worker's container finds for a name."""
    finds = f"import socket; print(socket.gethostbyname({host!r}))"
    where = ["exec", worker["metadata"]["name"], "--container=trainer"]
    return job.kubectl.run("--namespace", job.namespace, *where, "--", "python", "-c", finds).strip()


@pytest.fixture(scope="module", autouse=True)
def sample(operator: Kubectl, shared_namespace: str) -> tuple[JobView, Path]:
    """The sample, and the file that ends its pauses. Until then it trains for minutes, beside the tests."""
    return traced_job.sample(operator, shared_namespace, traced_job.SAMPLES / "roles.yaml")


def test_roles_run_beside_the_workers_and_end_with_the_job(jobs: Callable[..., TracedJob]) -> None:
    job = jobs(
        replicas=2,
        elastic=None,
        roles=[role("board", SERVES), role("eval", "print('done')")],
        runPolicy={"cleanPodPolicy": "All"},
    )
    before = job.training(workers=2)
    wait_until(lambda: status_of(job, "board").get("ready") == 1, "the role's pod runs", timeout_s=60)
    wait_until(lambda: status_of(job, "eval").get("succeeded") == [0], "the other one has succeeded", timeout_s=60)
    url = f"http://{job.name}-board-0.{job.name}:8080/"
    wait_until(lambda: answer(job, url), "a worker reaches it by its name", timeout_s=30)
    newest = {p["metadata"]["labels"]["regroup.dev/slot"]: p for p in job.pods() if alive(p)}
    for slot, pod in newest.items():
        host = f"{pod['metadata']['name']}.{job.name}"
        assert address(job, newest["0"], host) == pod["status"]["podIP"], f"worker {slot} has no name"
    first = pods_of(job, "board")[0]["metadata"]
    job.kubectl.run("--namespace", job.namespace, "delete", "pod", first["name"], "--wait=false")

    def replaced() -> bool:
        return any(p["metadata"]["uid"] != first["uid"] and alive(p) for p in pods_of(job, "board"))

    wait_until(replaced, "the pod that was deleted is replaced", timeout_s=60)
    wait_until(lambda: answer(job, url), "its name leads to the new pod", timeout_s=60)
    generation = job.training(workers=2, steps=20).commits[-1].generation
    assert generation == before.commits[-1].generation == 1, "a role's pod changed the group"
    assert not (job.status().get("restarts") or {}).get("total")
    patch(job, {"runPolicy": {"suspend": True}})
    wait_until(
        lambda: not pods_of(job, "board") and not pods_of(job, "eval"), "suspension takes the roles", timeout_s=60
    )
    wait_until(lambda: job.status()["phase"] == "Suspended", "the job is suspended", timeout_s=60)


def test_sample_is_evaluated_while_it_trains(sample: tuple[JobView, Path]) -> None:
    job, hurry = sample
    wait_until(lambda: _evaluated(job), "a checkpoint is evaluated", timeout_s=120)
    assert 0 < _evaluated(job)[0][0] < SAMPLE_STEPS
    url = "http://roles-board-0.roles:6006/data/plugin/scalars/tags"
    wait_until(lambda: "held-out accuracy" in answer(job, url), "TensorBoard shows what was found", timeout_s=60)
    hurry.touch()  # it ends beside the tests that follow


def _evaluated(job: JobView) -> list[tuple[int, str]]:
    """Return step and accuracy of what the evaluator has tested so far."""
    log = job.kubectl.run("--namespace", job.namespace, "logs", f"{job.name}-eval-0-0")
    return [(int(step), found) for step, found in re.findall(r"^step (\d+)  held-out accuracy ([\d.]+)$", log, re.M)]


def _printed(job: JobView) -> str:
    """Return the accuracy that the first rank has printed at its end."""
    (found,) = re.findall(
        r"^held-out accuracy ([\d.]+) ", "".join(job.logs(pod["metadata"]["name"]) for pod in job.pods()), re.M
    )
    return str(found)


WAITS = "import os, time\nwhile not os.path.exists('/tmp/go'): time.sleep(0.2)"


@only_long("tests/api/test_operator.py has it, and the sample waits for its evaluator")
def test_job_waits_for_its_evaluator_without_its_workers(jobs: Callable[..., TracedJob], operator: Kubectl) -> None:
    """The operator is killed meanwhile: the next one does not start the workers again."""
    job = jobs(
        replicas=2,
        elastic=None,
        environment={"STEPS": 60},
        roles=[role("eval", WAITS) | {"requiredForCompletion": True}, role("board", SERVES)],
    )
    job.wait(180, "the workers have finished", state="Completing")
    wait_until(lambda: not any(alive(p) for p in job.pods()), "the workers' pods have ended", timeout_s=60)
    steps = len(job.trace().commits)
    leader = installation.leader(operator)
    assert leader is not None
    faults.kill_main(leader["metadata"]["uid"], "regroup_operator")
    before = job.status()["observedAt"]
    wait_until(lambda: job.status()["observedAt"] > before, "an operator has looked at it again", timeout_s=60)
    status = job.status()
    assert (status["phase"], status["replicas"], status["roles"][0]["awaited"]) == ("Completing", 0, 1)
    assert {p["status"]["phase"] for p in job.pods()} == {"Succeeded"}
    assert alive(pods_of(job, "board")[0]), "the other roles run on"
    job.kubectl.run("--namespace", job.namespace, "exec", f"{job.name}-eval-0-0", "--", "touch", "/tmp/go")
    job.wait(60, "the evaluator has succeeded", state="Succeeded")
    said = {c["type"]: c for c in job.status()["conditions"]}["Complete"]
    assert (said["status"], said["reason"]) == ("True", "Finished")
    assert said["message"].endswith("and all pods of role eval have succeeded.")
    wait_until(lambda: not pods_of(job, "board"), "the other roles end with the job", timeout_s=30)
    assert (len(job.pods()), len(job.trace().commits)) == (2, steps), "a worker was started again"


def test_spare_takes_the_place_of_a_killed_process_in_one_generation(jobs: Callable[..., TracedJob]) -> None:
    job = jobs(replicas=3, elastic=(1, 3), recovery={"maxRestarts": 100})
    job.training(workers=3)
    patch(job, {"replicas": 2, "recovery": {"spares": 1}})
    before = job.training(workers=2, after=1)
    generation = before.commits[-1].generation
    assert "2 of 2 worker pods run, 1 of 1 spares" in _pods_ready(job)
    job.kill_rank(1)
    after = job.training(workers=2, after=generation)
    assert after.commits[-1].generation == generation + 1, "one change of the group"
    assert {pod.rsplit("-", 2)[1] for pod, _ in after.pids(generation + 1)} == {"0", "2"}, "the spare is in it"
    assert job.training(workers=2, steps=100).commits[-1].generation == generation + 1, "and no second change"
    assert len([p for p in job.pods() if alive(p)]) == 3
    assert job.status()["replicas"] == 2


def test_sample_ends_with_the_evaluation_of_its_last_step(sample: tuple[JobView, Path]) -> None:
    """It may come to its last step as the test above kills the operator: what the script prints after it is there in any case."""
    job, hurry = sample
    hurry.touch()
    status = job.wait(120, "the sample ends", state="Succeeded")
    evaluated = _evaluated(job)
    print(f"evaluated (step, accuracy): {evaluated}")
    assert evaluated[-1] == (SAMPLE_STEPS, _printed(job)), (
        "the evaluator has another model than the workers at their end"
    )
    said = next(c["message"] for c in status["conditions"] if c["type"] == "Complete")
    assert said.endswith("and all pods of role eval have succeeded.")


def patch(job: TracedJob, spec: dict[str, Any]) -> None:
    merge = f"--patch={json.dumps({'spec': spec})}"
    job.kubectl.run("--namespace", job.namespace, "patch", "trainingjob", job.name, "--type=merge", merge)


def _pods_ready(job: TracedJob) -> str:
    said = {c["type"]: c["message"] for c in job.status().get("conditions", ())}
    return str(said.get("PodsReady", ""))
