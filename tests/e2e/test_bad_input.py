"""Bad input on a real cluster: one clear sentence in the right place, and nothing else changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.e2e.kit import wait_until
from tests.e2e.training import TracedJob

Start = Callable[..., TracedJob]


def _condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})


def _wait_condition(job: TracedJob, kind: str, status: str, timeout_s: float = 60) -> dict[str, Any]:
    wait_until(
        lambda: _condition(job.status(), kind).get("status") == status, timeout_s=timeout_s, what=f"{kind}={status}"
    )
    return _condition(job.status(), kind)


def _events(job: TracedJob) -> str:
    return job.kubectl.run(
        "--namespace", job.namespace, "get", "events.events.k8s.io", "-o", "jsonpath={.items[*].note}"
    )


def test_typo_inside_the_template_is_a_condition_and_an_event(jobs: Start) -> None:
    job = jobs(container={"imagePullPolcy": "Never"})
    accepted = _wait_condition(job, "Accepted", "False")
    assert "imagePullPolcy" in accepted["message"]
    assert "\n" not in accepted["message"]
    wait_until(lambda: "imagePullPolcy" in _events(job), timeout_s=20, what="the event")
    assert job.pods() == []
    assert job.status()["summary"]["state"] == accepted["reason"]


def test_image_that_does_not_exist_is_named_in_pods_ready(jobs: Start) -> None:
    job = jobs(image="localhost/no-such-image:1", container={"imagePullPolicy": "Never"})
    wait_until(
        lambda: "no-such-image" in _condition(job.status(), "PodsReady").get("message", ""),
        timeout_s=60,
        what="the image is named",
    )
    ready = _condition(job.status(), "PodsReady")
    assert ready["status"] == "False"
    assert job.status()["summary"]["state"] in ("Pending", "Starting")


def test_command_that_exits_1_at_once_fails_the_job_with_its_last_line(jobs: Start) -> None:
    command = ["python", "-c", "import sys; sys.exit('no such dataset')"]
    job = jobs(command=command, recovery={"maxRestarts": 3, "windowSeconds": 600})
    failed = _wait_condition(job, "Failed", "True", 120)
    assert "exit code 1" in failed["message"], failed
    assert "no such dataset" in failed["message"], failed
    assert job.status()["summary"]["state"] == "Failed"


def test_state_that_cannot_be_saved_is_refused_by_name(jobs: Start) -> None:
    job = jobs(script="unsaveable.py", recovery={"maxRestarts": 0, "windowSeconds": 600})
    failed = _wait_condition(job, "Failed", "True", 120)
    assert "lock" in failed["message"], failed
