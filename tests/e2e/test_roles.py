"""Roles and spares on real pods: an address in the DNS, replaced without a generation, gone with the job; a role that the job waits
for; one change for a loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from cluster.kubectl import Kubectl, wait_until
from harness import faults, installation
from harness.traced_job import IMAGE, TracedJob, alive

SERVES = "import http.server as h; h.ThreadingHTTPServer(('', 8080), h.SimpleHTTPRequestHandler).serve_forever()"
ASKS = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=2).status)"
_SECURE = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def role(name: str, *command: str, **pod: Any) -> dict[str, Any]:
    container = {
        "name": "main", "image": IMAGE, "imagePullPolicy": "Never", "command": ["python", "-c", *command],
        "workingDir": "/tmp", "securityContext": _SECURE,
    }  # fmt: skip
    context = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {"securityContext": context, "terminationGracePeriodSeconds": 1, "containers": [container], **pod}
    return {"name": name, "template": {"spec": spec}}


def pods_of(job: TracedJob, name: str) -> list[dict[str, Any]]:
    selector = f"--selector=regroup.dev/job-name={job.name},regroup.dev/role={name}"
    found: list[dict[str, Any]] = json.loads(
        job.kubectl.run("--namespace", job.namespace, "get", "pods", selector, "-o", "json")
    )["items"]
    return found


def status_of(job: TracedJob, name: str) -> dict[str, Any]:
    return next((one for one in job.status().get("roles", ()) if one["name"] == name), {})


def answers(job: TracedJob, url: str) -> bool:
    """Ask from a worker's container."""
    worker = next(p for p in job.pods() if alive(p))["metadata"]["name"]
    try:
        said = job.kubectl.run(
            "--namespace", job.namespace, "exec", worker, "--container=trainer", "--", "python", "-c", ASKS, url
        )
    except Exception:
        return False
    return said.strip() == "200"


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
    wait_until(lambda: answers(job, url), "a worker reaches it by its name", timeout_s=30)
    first = pods_of(job, "board")[0]["metadata"]
    job.kubectl.run("--namespace", job.namespace, "delete", "pod", first["name"], "--wait=false")

    def replaced() -> bool:
        return any(p["metadata"]["uid"] != first["uid"] and alive(p) for p in pods_of(job, "board"))

    wait_until(replaced, "the pod that was deleted is replaced", timeout_s=60)
    wait_until(lambda: answers(job, url), "its name leads to the new pod", timeout_s=60)
    generation = job.training(workers=2, steps=20).commits[-1].generation
    assert generation == before.commits[-1].generation == 1, "a role's pod changed the group"
    assert not (job.status().get("restarts") or {}).get("total")
    patch(job, {"runPolicy": {"suspend": True}})
    wait_until(
        lambda: not pods_of(job, "board") and not pods_of(job, "eval"), "suspension takes the roles", timeout_s=60
    )
    wait_until(lambda: job.status()["phase"] == "Suspended", "the job is suspended", timeout_s=60)


WAITS = "import os, time\nwhile not os.path.exists('/tmp/go'): time.sleep(0.2)"


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


def patch(job: TracedJob, spec: dict[str, Any]) -> None:
    merge = f"--patch={json.dumps({'spec': spec})}"
    job.kubectl.run("--namespace", job.namespace, "patch", "trainingjob", job.name, "--type=merge", merge)


def _pods_ready(job: TracedJob) -> str:
    said = {c["type"]: c["message"] for c in job.status().get("conditions", ())}
    return str(said.get("PodsReady", ""))
