"""What a user reads after a failure names its cause: the memory, the line of the script."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from typing import Any

from cluster.kubectl import wait_until
from harness.traced_job import TracedJob

Start = Callable[..., TracedJob]

HOPELESS_S = 30.0


def _condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})


def test_process_that_uses_all_memory_is_called_so(jobs: Start) -> None:
    limits = {"requests": {"cpu": "400m", "memory": "200Mi"}, "limits": {"memory": "1Gi"}}
    job = jobs(elastic=(1, 3), environment={"STEPS": 100000, "EATS_AT": 20}, container={"resources": limits})
    found = wait_until(
        lambda: [i for i in job.status().get("incidents", ()) if i.get("cause") == "OOMKilled"],
        "an incident names the memory",
        timeout_s=120,
    )
    assert found
    print(f"out of memory: {found[0]['decision']}")
    assert "OOMKilled: limit 1" in found[0]["decision"], found
    job.training(workers=3, steps=5, after=found[0]["generation"])


def test_script_that_raises_at_once_fails_within_30_s_with_its_traceback_and_a_command_that_shows_it(
    jobs: Start,
) -> None:
    job = jobs(script="raises.py", replicas=2, elastic=None, recovery={"maxRestarts": 100, "windowSeconds": 3600})
    wait_until(lambda: (job.status().get("restarts") or {}).get("processes", 0) >= 1, "the first crash", timeout_s=120)
    first_s = time.monotonic()
    wait_until(lambda: _condition(job.status(), "Failed").get("status") == "True", "the job fails", timeout_s=60)
    took_s = time.monotonic() - first_s
    failed = _condition(job.status(), "Failed")
    print(f"first crash -> Failed: {took_s:.1f} s\n{failed['message']}")
    assert failed["reason"] == "RepeatedCrash"
    assert took_s <= HOPELESS_S
    lines = failed["message"].splitlines()
    assert "ValueError: shard 1 is empty" in lines
    command = shlex.split(lines[-1])
    assert command[0] == "kubectl"
    assert "ValueError: shard 1 is empty" in job.kubectl.run(*command[1:]), "the command shows the same"
