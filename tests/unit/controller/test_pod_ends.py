"""Pods that end again and again, on the real controller and agent core."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from regroup_operator.model.records import Pod
from tests.builders.plan import make_job
from tests.simulator.world import World

LIVES_S = 6.0


def deadline_is_over(world: World, *pods: Pod) -> None:
    """The kubelet ends pods at their activeDeadlineSeconds."""
    for pod in pods:
        world.agents.pop(pod.uid).die()
        world.pods.by_uid[pod.uid] = replace(
            pod, phase="Failed", status_reason="DeadlineExceeded", last_exit_code=137, running_since_s=None
        )
    world.dirty()


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
def test_job_whose_pods_all_end_again_and_again_fails(tmp_path: Path, elastic: bool) -> None:
    """Nine pods a slot in seven minutes, and each time the job began at step 0: it never failed."""
    job = make_job().with_replicas(2)
    world = World(tmp_path, job.elastic(1, 2) if elastic else job.fixed())
    for _ in range(9):
        if world.phase == "Failed":
            break
        world.advance(LIVES_S, step_every_s=1.0)
        deadline_is_over(world, *[p for p in world.pods.by_uid.values() if p.usable])
        world.advance(2.0)
    assert world.phase == "Failed"
    failed = world.condition("Failed")
    assert failed["reason"] == "PodsEndAgain"
    assert "which ended with DeadlineExceeded" in failed["message"]


def test_job_that_gets_further_in_between_goes_on(tmp_path: Path) -> None:
    """Worker after worker loses its pod, and the other one has the state."""
    world = World(tmp_path, make_job().with_replicas(2).fixed())
    world.advance(5, step_every_s=0.5)
    for i in range(20):
        pod = next(p for p in world.pods.by_uid.values() if p.usable and p.slot == i % 2)
        deadline_is_over(world, pod)
        world.until(lambda: world.phase != "Running")
        world.until(lambda: world.phase == "Running", step_every_s=1.0)
        world.advance(3.0, step_every_s=0.5)
    assert world.phase == "Running"
