"""Bad input on a real cluster: one clear sentence in the right place, and nothing else changed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from cluster.kubectl import wait_until
from harness.traced_job import TracedJob

Start = Callable[..., TracedJob]

VERDICT_S = 5.0
"""It takes well under a second; kubectl and two busy cores are in it."""


def _condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})


def _wait_condition(job: TracedJob, kind: str, status: str, timeout_s: float = 60) -> dict[str, Any]:
    wait_until(
        lambda: _condition(job.status(), kind).get("status") == status, timeout_s=timeout_s, what=f"{kind}={status}"
    )
    return _condition(job.status(), kind)


def _warning(job: TracedJob, *reasons: str) -> str:
    """Wait for a Warning about the job itself (not its pods) with one of these reasons; return its note."""
    notes: list[str] = []

    def there() -> bool:
        events = json.loads(job.kubectl.run("--namespace", job.namespace, "get", "events.events.k8s.io", "-o", "json"))
        ours = [e for e in events["items"] if e["regarding"].get("name") == job.name and e["type"] == "Warning"]
        notes[:] = [e["note"] for e in ours if e["reason"] in reasons]
        return bool(notes)

    wait_until(there, timeout_s=20, what=f"a Warning event {' or '.join(reasons)}")
    return notes[0]


def _one_line(message: str) -> bool:
    return bool(message) and "\n" not in message and "Traceback" not in message


def test_typo_inside_the_template_is_a_condition_and_an_event(jobs: Start) -> None:
    job = jobs(container={"imagePullPolcy": "Never"})
    applied = time.monotonic()
    accepted = _wait_condition(job, "Accepted", "False")
    assert time.monotonic() - applied <= VERDICT_S
    assert "imagePullPolcy" in accepted["message"]
    assert _one_line(accepted["message"])
    assert _warning(job, accepted["reason"]) == accepted["message"]
    assert job.pods() == []
    assert job.status()["summary"]["state"] == accepted["reason"]


def test_image_that_does_not_exist_is_named_in_pods_ready_and_an_event(jobs: Start) -> None:
    job = jobs(image="localhost/no-such-image:1")
    wait_until(
        lambda: "no-such-image" in _condition(job.status(), "PodsReady").get("message", ""),
        timeout_s=60,
        what="the image is named",
    )
    ready = _condition(job.status(), "PodsReady")
    assert ready["status"] == "False"
    assert ready["reason"] in ("ErrImagePull", "ImagePullBackOff")
    assert _one_line(ready["message"])
    assert job.status()["summary"]["state"] == "Pending"
    note = _warning(job, "ErrImagePull", "ImagePullBackOff")
    assert "no-such-image" in note
    assert _one_line(note)
    assert len(job.pods()) == 3, "the pods wait for their image; no others are made"


def test_command_that_exits_1_at_once_fails_the_job_with_its_last_line(jobs: Start) -> None:
    command = ["python", "-c", "import sys; sys.exit('no such dataset')"]
    job = jobs(command=command, recovery={"maxRestarts": 3, "windowSeconds": 600})
    failed = _wait_condition(job, "Failed", "True", 120)
    assert "exit code 1" in failed["message"], failed
    assert "no such dataset" in failed["message"], failed
    assert _one_line(failed["message"])
    assert _warning(job, "Failed") == failed["message"]
    assert job.status()["summary"]["state"] == "Failed"


def test_state_that_cannot_be_saved_is_refused_by_name(jobs: Start) -> None:
    job = jobs(script="unsaveable.py", recovery={"maxRestarts": 0, "windowSeconds": 600})
    failed = _wait_condition(job, "Failed", "True", 120)
    assert 'state["lock"]' in failed["message"], failed
    assert _one_line(failed["message"])
    assert _warning(job, "Failed") == failed["message"]
    assert job.status()["summary"]["state"] == "Failed"
