"""The end of a job on real pods: what follows the loop fails, is deleted, drained, suspended, and its operator is killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from cluster.kubectl import Kubectl, wait_until
from harness import faults, installation
from harness.job import JobView
from harness.traced_job import TracedJob, alive
from tests.long import only_long

STEPS = 30
GRACE_S = 30


def lines(job: TracedJob, event: str) -> list[dict[str, Any]]:
    """Return what the scripts have traced of this kind, the oldest first."""
    texts = [line for path in job.directory.glob("*.jsonl") for line in path.read_text().splitlines(keepends=True)]
    found = [json.loads(line) for line in texts if line.endswith("\n")]
    return sorted((one for one in found if one["event"] == event), key=lambda one: one["t"])


def condition(job: JobView, kind: str) -> dict[str, Any]:
    return next((c for c in job.status().get("conditions", ()) if c["type"] == kind), {})


def finished(job: JobView) -> dict[str, Any]:
    return job.status().get("finished") or {}


def go(job: TracedJob, *ranks: int) -> None:
    """Let the ends of these ranks go on."""
    for rank in ranks:
        (job.directory / f"go-{rank}").touch()


def alive_slots(job: JobView) -> set[str]:
    return {p["metadata"]["labels"]["regroup.dev/slot"] for p in job.pods() if alive(p)}


@pytest.fixture
def ending(jobs: Callable[..., TracedJob]) -> Callable[..., TracedJob]:
    """A function that starts a job of two workers and waits until both scripts have left their loops."""

    def start(name: str, **options: Any) -> TracedJob:
        job = jobs(
            name,
            replicas=2,
            elastic=(1, 3),
            script="ends.py",
            grace_s=GRACE_S,
            environment={"STEPS": STEPS},
            checkpoint={"volumeClaim": "saved", "everySeconds": 2, "keep": 2},
            **options,
        )
        installation.volume(job.kubectl, job.namespace, "saved")
        wait_until(lambda: len(lines(job, "end")) == 2, "both scripts have left their loops", timeout_s=120)
        wait_until(lambda: job.status()["phase"] == "Finishing", "the job is Finishing", timeout_s=20)
        return job

    return start


def assert_one_state(job: TracedJob) -> None:
    """Every end that has run had the state of the last step, and the place of its rank."""
    ends = lines(job, "end")
    assert len({end["parameters"] for end in ends}) == 1, ends
    assert {(end["world_size"], end["generation"]) for end in ends} == {(2, 1)}
    assert {end["rank"] for end in ends} == {0, 1}
    assert {commit["step"] for commit in lines(job, "commit")} == set(range(STEPS)), "a step was trained again"


def test_end_that_raises_and_one_whose_pod_is_deleted_run_again(ending: Callable[..., TracedJob]) -> None:
    """A script that cannot save its model is not Succeeded; a pod that is deleted meanwhile costs no restart."""
    job = ending("raises")
    said = condition(job, "Complete")
    assert (said["status"], said["reason"]) == ("False", "Finishing")
    assert "The script still runs in 2 of 2 workers (workers 0-1)" in said["message"]
    job.scale(3)  # there are no steps left for which it would grow
    (job.directory / "raise-0").touch()
    go(job, 0)
    wait_until(lambda: len(lines(job, "end")) == 3, "the end of rank 0 runs again", timeout_s=60)
    wait_until(lambda: finished(job)["done"] == "0", "the script of worker 0 has returned", timeout_s=60)
    assert job.status()["phase"] == "Finishing", "worker 1 has not returned"
    assert job.status()["restarts"]["processes"] == 1, "the failure counts"
    first = job.pod(1)["metadata"]["name"]
    job.delete_pod(first, grace_s=0)
    wait_until(lambda: len(lines(job, "end")) == 4, "the end of rank 1 runs again in a new pod", timeout_s=90)
    assert lines(job, "end")[-1]["pod"] != first
    assert lines(job, "end")[-1]["rank"] == 1
    go(job, 1)
    job.wait(60, "the job has succeeded", state="Succeeded")
    assert finished(job)["done"] == "0,1.1", finished(job)
    assert condition(job, "Complete")["status"] == "True"
    assert (job.directory / "model.pt").exists()
    assert len(lines(job, "returned")) == 2
    restarts = job.status()["restarts"]
    assert (restarts["processes"], restarts["pods"], len(restarts["recent"])) == (1, 1, 1), restarts
    assert {p["metadata"]["labels"]["regroup.dev/slot"] for p in job.pods()} == {"0", "1"}, "it has grown"
    assert_one_state(job)


@only_long("tests/trainer/test_end.py has it under `regroup run`")
def test_end_that_always_raises_fails_the_job(ending: Callable[..., TracedJob]) -> None:
    job = ending("hopeless", recovery={"maxRestarts": 0})
    (job.directory / "raise-1").touch()
    go(job, 0, 1)
    job.wait(60, "the job has failed", state="Failed")
    assert "could not save the model to the bucket" in condition(job, "Failed")["message"]
    assert condition(job, "Complete").get("status") != "True"


def test_end_is_suspended_drained_and_survives_its_operator(
    ending: Callable[..., TracedJob], operator: Kubectl
) -> None:
    job = ending("paused")
    leader = installation.leader(operator)
    assert leader is not None
    faults.kill_main(leader["metadata"]["uid"], "regroup_operator")
    go(job, 1)
    wait_until(
        lambda: finished(job)["done"] == "1", "a new operator has heard that worker 1 has returned", timeout_s=90
    )
    job.patch(runPolicy={"suspend": True})
    wait_until(lambda: job.status()["phase"] == "Suspended", "the job is suspended", timeout_s=90)
    wait_until(lambda: not alive_slots(job), "no pod is left", timeout_s=60)
    assert finished(job)["done"] == "1"
    job.patch(runPolicy={"suspend": False})
    wait_until(lambda: len(lines(job, "end")) == 3, "the end of rank 0 runs again", timeout_s=90)
    assert alive_slots(job) == {"0"}, "a script that has returned got a pod"
    assert not (job.status().get("restarts") or {}).get("total"), "a suspension counts"
    job.delete_pod(job.pod(0)["metadata"]["name"])  # its script has GRACE_S to return
    wait_until(lambda: not alive_slots(job), "the pod is asked to leave", timeout_s=20)
    go(job, 0)
    job.wait(60, "the job has succeeded", state="Succeeded")
    assert len(lines(job, "end")) == 3, "a script that returned in its grace ran again"
    assert len(lines(job, "returned")) == 2
    assert_one_state(job)
