"""Bad input on a real cluster: one clear sentence in the right place, and nothing else changed.

What a user reads after a failure names its cause: the field, the image, the memory, the line of the script.
"""

from __future__ import annotations

import json
import re
import shlex
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest

from cluster.kubectl import Kubectl, wait_until
from harness import installation, traced_job
from harness.traced_job import TracedJob
from tests.e2e.machine import CGROUPS

VERDICT_S = 5.0
"""It takes well under a second; kubectl and two busy cores are in it."""
HOPELESS_S = 30.0
_LIMITS = {"requests": {"cpu": "100m", "memory": "200Mi"}, "limits": {"memory": "1Gi"}}
_SMALL = {"resources": {"requests": {"cpu": "100m", "memory": "200Mi"}}}
OUT_OF_MEMORY = (
    r"\(OOMKilled: limit 1 ?Gi"
    if (CGROUPS / "cgroup.controllers").exists()
    else r"\(OOMKilled: limit 1 GiB, at most [\d.]+ [GM]iB used\)"
)
"""With cgroup v2 the kernel kills the whole container, and the kubelet tells no usage."""
JOBS: Mapping[str, dict[str, Any]] = {
    "exits": {
        "replicas": 2,
        "command": ["python", "-c", "import sys; sys.exit('no such dataset')"],
        "recovery": {"maxRestarts": 3, "windowSeconds": 600},
    },
    "unsaveable": {"replicas": 2, "script": "unsaveable.py", "recovery": {"maxRestarts": 0, "windowSeconds": 600}},
    "raises": {
        "replicas": 2,
        "elastic": None,
        "script": "raises.py",
        "recovery": {"maxRestarts": 100, "windowSeconds": 3600},
    },
    "eats": {
        "replicas": 2,
        "elastic": (1, 3),
        "environment": {"STEPS": 100_000, "EATS_AT": 20},
        "container": {"resources": _LIMITS},
    },
    "no-image": {"replicas": 3, "image": "localhost/no-such-image:1"},
    "useless": {
        "replicas": 2,
        "command": ["python", "-c", "import sys; print('no such option'); sys.exit(3)"],
        "recovery": {"maxRestarts": 100, "onExit": [{"action": "Fail", "exitCodes": {"values": [2, 3]}}]},
    },
    "no-image-rule": {
        "replicas": 2,
        "image": "localhost/no-such-image:2",
        "recovery": {"onExit": [{"action": "Fail", "reasons": ["ImagePullBackOff"]}]},
    },
}
"""They go wrong by themselves, so that they can do it all at once."""


@pytest.fixture(scope="module")
def wrong(operator: Kubectl) -> Iterator[dict[str, TracedJob]]:
    """The jobs of JOBS, started together."""
    namespace = f"train-{uuid.uuid4().hex[:8]}"
    installation.namespace(operator, namespace)
    yield {
        name: traced_job.start(operator, namespace, name, **({"container": _SMALL} | options))
        for name, options in JOBS.items()
    }
    installation.remove_namespace(operator, namespace)


@pytest.fixture(scope="module", autouse=True)
def crashing(wrong: dict[str, TracedJob]) -> Iterator[Future[dict[str, Any]]]:
    """The status of the job that raises, once it says that it crashes again and again. It may end before its test begins."""
    job = wrong["raises"]
    seen: list[dict[str, Any]] = []

    def there() -> bool:
        seen[:] = [job.status()]
        return _condition(seen[0], "Degraded").get("reason") == "Crashing"

    def watch() -> dict[str, Any]:
        wait_until(there, "Degraded: Crashing", timeout_s=120, every_s=0.5)
        return seen[0]

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(watch)


def _condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})


def _wait_condition(job: TracedJob, kind: str, status: str, timeout_s: float = 60) -> dict[str, Any]:
    wait_until(
        lambda: _condition(job.status(), kind).get("status") == status, timeout_s=timeout_s, what=f"{kind}={status}"
    )
    return _condition(job.status(), kind)


def _warning(job: TracedJob, *reasons: str, says: str = "") -> str:
    """Wait for a Warning about the job itself (not its pods) with one of these reasons that says this; return its note."""
    notes: list[str] = []

    def there() -> bool:
        events = json.loads(job.kubectl.run("--namespace", job.namespace, "get", "events.events.k8s.io", "-o", "json"))
        ours = [e for e in events["items"] if e["regarding"].get("name") == job.name and e["type"] == "Warning"]
        notes[:] = [e["note"] for e in ours if e["reason"] in reasons and says in e["note"]]
        return bool(notes)

    wait_until(there, timeout_s=20, what=f"a Warning event {' or '.join(reasons)}")
    return notes[0]


def _one_line(message: str) -> bool:
    return bool(message) and "\n" not in message and "Traceback" not in message


def test_typo_inside_the_template_is_a_condition_and_an_event(jobs: Callable[..., TracedJob]) -> None:
    job = jobs(container={"imagePullPolcy": "Never"})
    applied = time.monotonic()
    accepted = _wait_condition(job, "Accepted", "False")
    assert time.monotonic() - applied <= VERDICT_S
    assert "imagePullPolcy" in accepted["message"]
    assert _one_line(accepted["message"])
    assert _warning(job, accepted["reason"]) == accepted["message"]
    assert job.pods() == []
    assert job.status()["summary"]["state"] == accepted["reason"]


def test_image_that_does_not_exist_is_named_in_pods_ready_and_an_event(wrong: dict[str, TracedJob]) -> None:
    job = wrong["no-image"]
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


def test_command_that_exits_1_at_once_fails_the_job_with_its_last_line(wrong: dict[str, TracedJob]) -> None:
    job = wrong["exits"]
    failed = _wait_condition(job, "Failed", "True", 120)
    assert "exit code 1" in failed["message"], failed
    assert "no such dataset" in failed["message"], failed
    assert _one_line(failed["message"])
    assert _warning(job, "Failed") == failed["message"]
    assert job.status()["summary"]["state"] == "Failed"


def test_exit_code_that_a_rule_names_fails_the_job_without_another_try(wrong: dict[str, TracedJob]) -> None:
    job = wrong["useless"]
    failed = _wait_condition(job, "Failed", "True", 60)
    assert (failed["reason"], _one_line(failed["message"])) == ("ExitRule", True)
    assert "exit code 3" in failed["message"], failed
    assert "spec.recovery.onExit[0]" in failed["message"], failed
    assert (job.status().get("restarts") or {}).get("processes", 0) <= 2, "each worker's process ended once"


def test_pod_that_a_rule_does_not_wait_for_fails_the_job(wrong: dict[str, TracedJob]) -> None:
    job = wrong["no-image-rule"]
    failed = _wait_condition(job, "Failed", "True", 60)
    assert failed["reason"] == "ExitRule"
    assert "no-such-image" in failed["message"], failed
    assert "spec.recovery.onExit[0]" in failed["message"], failed


def test_state_that_cannot_be_saved_is_refused_by_name(wrong: dict[str, TracedJob]) -> None:
    job = wrong["unsaveable"]
    failed = _wait_condition(job, "Failed", "True", 120)
    assert 'state["lock"]' in failed["message"], failed
    assert _one_line(failed["message"])
    assert _warning(job, "Failed") == failed["message"]
    assert job.status()["summary"]["state"] == "Failed"


def test_process_that_uses_all_memory_is_called_so(wrong: dict[str, TracedJob]) -> None:
    job = wrong["eats"]
    found = wait_until(
        lambda: [i for i in job.status().get("incidents", ()) if i.get("cause") == "OOMKilled"],
        "an incident names the memory",
        timeout_s=120,
    )
    assert found
    print(f"out of memory: {found[0]['decision']}")
    assert re.search(OUT_OF_MEMORY, found[0]["decision"]), found
    assert found[0]["decision"].startswith(f"worker {found[0]['culprit']} "), found
    note = _warning(job, "MemberLost", says=f"Generation {found[0]['generation']}: ")
    assert note.endswith(found[0]["decision"]), note
    job.training(workers=2, steps=5, after=found[0]["generation"])


def test_script_that_raises_at_once_fails_within_30_s_with_its_traceback_and_a_command_that_shows_it(
    wrong: dict[str, TracedJob], crashing: Future[dict[str, Any]]
) -> None:
    job, before_the_end = wrong["raises"], crashing.result()
    degraded = _condition(before_the_end, "Degraded")
    assert degraded["status"] == "True"
    assert "ValueError: shard 1 is empty" in degraded["message"].splitlines(), degraded
    assert _condition(before_the_end, "Failed").get("status") != "True", "it was told at the end only"
    failed = _wait_condition(job, "Failed", "True", 120)
    first, last = job.status()["incidents"][0]["at"], failed["lastTransitionTime"]
    took_s = (datetime.fromisoformat(last) - datetime.fromisoformat(first)).total_seconds()
    print(f"first crash -> Failed: {took_s:.1f} s\n{failed['message']}")
    assert failed["reason"] == "RepeatedCrash"
    assert took_s <= HOPELESS_S
    lines = failed["message"].splitlines()
    assert "ValueError: shard 1 is empty" in lines
    command = shlex.split(lines[-1])
    assert command[0] == "kubectl"
    assert "ValueError: shard 1 is empty" in job.kubectl.run(*command[1:]), "the command shows the same"
