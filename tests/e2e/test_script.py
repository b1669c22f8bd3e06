"""An unmodified init_process_group script with its own torch.save: kill, shrink, grow; pods and containers stay."""

from __future__ import annotations

import re
from collections.abc import Callable

from cluster.kubectl import wait_until
from harness import faults
from harness.traced_job import TracedJob

_STARTED = re.compile(r"^rank (\d+) of (\d+) starts at step (\d+)$", re.MULTILINE)


def _starts(job: TracedJob, slot: int) -> list[tuple[int, int, int]]:
    """Return (rank, world size, first step) of every start in a slot's pod, oldest first."""
    return [(int(r), int(w), int(s)) for r, w, s in _STARTED.findall(job.logs(job.pod(slot)["metadata"]["name"]))]


def _wait_starts(job: TracedJob, number: int, world_size: int, slot: int = 0) -> None:
    """Wait until a slot's newest start is at least its pod's `number`-th and of this world size."""

    def there() -> bool:
        starts = _starts(job, slot)
        return len(starts) >= number and starts[-1][1] == world_size

    wait_until(there, timeout_s=60, what=f"start {number} with world size {world_size}")


def test_script_starts_again_in_the_same_pods_from_its_own_checkpoint(jobs: Callable[..., TracedJob]) -> None:
    command = ["python", "-u", "/regroup-samples/script.py", "--checkpoint", "/trace/script.pt", "--steps", "600"]
    job = jobs("script", replicas=2, elastic=(1, 3), command=command)
    job.wait(90, "the script runs", state="Running", ready="2/2")
    assert job.status()["tier"] == "Script"
    containers = job.containers()
    wait_until(lambda: (job.directory / "script.pt").exists(), timeout_s=60, what="the script's own checkpoint")

    pod = job.pod(1)
    trainer = max(faults.processes(pod["metadata"]["uid"]), key=lambda p: p.inner_pid)
    faults.kill_inner(pod["metadata"]["uid"], trainer.inner_pid)
    _wait_starts(job, 2, 2)
    _wait_starts(job, 2, 2, slot=1)
    assert job.containers() == containers, "the kill cost a pod or a container"

    job.scale(3)
    _wait_starts(job, 3, 3)
    assert job.containers().items() > containers.items(), "growth cost a pod or a container"
    job.scale(1)
    _wait_starts(job, 4, 1)

    job.wait(120, "the script finishes", state="Succeeded")
    first_steps = [step for _, _, step in _starts(job, 0)]
    assert first_steps[0] == 0
    assert first_steps == sorted(first_steps), "a start went back behind an earlier one"
    assert all(step > 0 for step in first_steps[1:]), "a start did not use the script's own checkpoint"
    survivor = "script-worker-0-0"
    assert job.containers()[survivor] == containers[survivor], "shrinking cost the survivor its pod or container"
