"""A job that has ended leaves nothing running; what it ran keeps its logs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from regroup_operator.plan.pods.wanted import LOGS_S
from tests.builders.plan import make_job
from tests.simulator.world import World


@pytest.mark.parametrize("sidecar", [False, True], ids=["trainer only", "with a sidecar that runs on"])
def test_pods_of_a_complete_job(tmp_path: Path, sidecar: bool) -> None:
    world = World(tmp_path, make_job().with_replicas(2), total_steps=5)
    world.sidecar = sidecar
    world.until(lambda: world.phase == "Succeeded", step_every_s=0.5)
    pods = set(world.pods.by_uid)
    world.advance(10)
    assert set(world.pods.by_uid) == pods
    world.advance(15)
    assert set(world.pods.by_uid) == (set() if sidecar else pods)
    assert {pod.phase for pod in world.pods.by_uid.values()} <= {"Succeeded"}


def test_container_that_crashes_for_ever_does_not_outlive_its_job(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(2).with_recovery(maxRestarts=0))
    world.until(lambda: world.phase == "Running", step_every_s=0.5)
    crashing, other = sorted(world.pods.by_uid)
    world.agents[crashing].die()
    pod = world.pods.by_uid[crashing]
    world.pods.by_uid[crashing] = replace(
        pod, running_since_s=None, container_restarts=1, last_exit_code=137, waiting_reason="CrashLoopBackOff"
    )
    world.dirty()
    world.until(lambda: world.phase == "Failed")
    world.advance(25)
    assert set(world.pods.by_uid) == {other}
    assert world.pods.by_uid[other].phase == "Succeeded"


@pytest.mark.parametrize("suspends", [True, False])
def test_agent_that_is_frozen_with_an_open_stream_does_not_outlive_its_job(tmp_path: Path, suspends: bool) -> None:
    """It answers nothing, and its node's kernel keeps the connection: nothing else would end it."""
    job = make_job().with_replicas(2).with_spec(runPolicy={"activeDeadlineSeconds": 600})
    world = World(tmp_path, job, num_nodes=2)
    world.until(lambda: world.phase == "Running", step_every_s=0.5)
    frozen = sorted(world.pods.by_uid)[0]
    world.advance(590.0 - (world.now_s - 1000.0), step_every_s=5.0)
    world.agents[frozen].stop()
    if suspends:
        world.suspend(True)
        world.advance(70.0, step_every_s=5.0)
        assert f"have not stopped yet ({world.pods.by_uid[frozen].name}" in world.condition("Suspended")["message"]
    world.until(lambda: world.phase == ("Suspended" if suspends else "Failed"), limit_s=430.0)
    world.advance(0.0 if suspends else 430.0)
    assert not any(pod.alive for pod in world.pods.by_uid.values())


def test_agent_that_cannot_be_reached_does_not_outlive_its_job(tmp_path: Path) -> None:
    """Nobody can tell it to stop; the kubelet can. It holds a state, and trains on until its grace is nearly over."""
    world = World(tmp_path, make_job().with_replicas(2).with_recovery(maxRestarts=0))
    world.until(lambda: world.phase == "Running", step_every_s=0.5)
    cut, other = sorted(world.pods.by_uid)
    world.cut_off(cut)
    world.kill_process(other)
    world.until(lambda: world.phase == "Failed")
    world.advance(25)
    assert world.status["exitCode"] == 137, "of the process that was killed; it stays"
    assert world.pods.by_uid[cut].terminating
    world.advance(25)
    assert set(world.pods.by_uid) == {other}


@pytest.mark.parametrize("again", [None, "another-uid"], ids=["deleted", "deleted and applied again"])
def test_pods_of_a_deleted_job_end_at_once(tmp_path: Path, again: str | None) -> None:
    """Not at the end of their grace: nobody will take their place, and they hold GPUs."""
    world = World(tmp_path, make_job().with_replicas(2))
    world.until(lambda: world.phase == "Running", step_every_s=0.5)
    old = set(world.pods.by_uid)
    world.store.delete(applied_again_as=again)
    world.ledger.generations.clear()  # the new job's begin at 1 again
    for uid in old:
        world.terminate(uid)
    world.advance(2)
    assert not old & set(world.pods.by_uid)


def test_pods_of_a_deleted_job_that_nobody_deletes_train_on(tmp_path: Path) -> None:
    """`kubectl delete --cascade=orphan`."""
    world = World(tmp_path, make_job().with_replicas(2))
    world.until(lambda: world.phase == "Running", step_every_s=0.5)
    pods = dict(world.pods.by_uid)
    world.store.delete()
    world.dirty()
    world.advance(20)
    assert world.pods.by_uid == pods


@pytest.mark.parametrize("policy", ["None", "Running"])
def test_pod_that_a_failure_names_stays_for_its_log_although_its_sidecar_runs_on(tmp_path: Path, policy: str) -> None:
    """It was deleted after 20 s, and the command in the message found nothing."""
    job = make_job().with_replicas(2).with_recovery(maxRestarts=0).with_spec(runPolicy={"cleanPodPolicy": policy})
    world = World(tmp_path, job)
    world.sidecar = True
    world.until(lambda: world.phase == "Running", step_every_s=0.5)
    world.kill_process(world.uid(1), code=1, last_line="digits-worker-0-0 has closed the connection")
    world.until(lambda: world.phase == "Failed")
    said = world.condition("Failed")["message"]
    assert "digits-worker-1-0" in said
    assert "digits-worker-0-0" in said, "in the script's own words"
    assert world.status["failedPod"] == "digits-worker-1-0"
    named = {world.uid(1)} if policy == "None" else set()
    world.advance(60)
    assert set(world.pods.by_uid) == named, "the other one gives its GPUs back"
    world.kill_operator()
    world.start_operator()
    world.advance(LOGS_S - 120)
    assert set(world.pods.by_uid) == named
    world.advance(120)
    assert set(world.pods.by_uid) == set()


@pytest.mark.parametrize("fails", [False, True], ids=["succeeded", "failed"])
def test_scaling_a_job_that_has_ended_is_said_to_have_no_effect(tmp_path: Path, fails: bool) -> None:
    job = make_job().with_replicas(3).elastic(1, 4).with_spec(runPolicy={"activeDeadlineSeconds": 60 if fails else 600})
    world = World(tmp_path, job, total_steps=1000 if fails else 5)
    world.until(lambda: world.phase == ("Failed" if fails else "Succeeded"), step_every_s=0.5)
    assert world.condition("Accepted")["message"] == "The job can run as written."
    ran = world.status["acceptedSpec"]
    world.scale(2)
    world.advance(5.0)
    said = world.condition("Accepted")
    assert (said["status"], said["message"]) == (
        "True",
        "The job has ended, so the change of spec.replicas has no effect. Submit it again under another name.",
    )
    assert (world.status["acceptedSpec"], world.status["replicas"]) == (ran, 0)
    world.scale(3)
    world.advance(5.0)
    assert world.condition("Accepted")["message"] == "The job can run as written."
