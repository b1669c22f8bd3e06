"""Roles through the controller: beside the workers, and never in their way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.builders.jobs import role
from tests.builders.plan import make_job
from tests.simulator.world import World


def running(tmp_path: Path, *roles: dict[str, Any], **given: Any) -> World:
    job = make_job().with_replicas(2).with_spec(roles=list(roles))
    world = World(tmp_path, job, **{"known_session": True} | given)
    world.advance(5.0, step_every_s=0.5)
    return world


def names(world: World) -> list[str]:
    return sorted(p.name for p in world.pods.of_roles.values())


def test_pods_of_roles_run_beside_the_workers_and_are_replaced(tmp_path: Path) -> None:
    world = running(tmp_path, role("ps") | {"replicas": 2}, role("board"))
    assert names(world) == ["digits-board-0-0", "digits-ps-0-0", "digits-ps-1-0"]
    assert (world.status["summary"]["ready"], world.status["replicas"]) == ("2/2", 2)
    world.pods.end_role("digits-ps-1-0", last_exit_code=1)
    world.advance(5.0, step_every_s=0.5)
    assert names(world) == ["digits-board-0-0", "digits-ps-0-0", "digits-ps-1-1"]
    assert world.status["roles"] == [
        {"name": "ps", "replicas": 2, "ready": 2},
        {"name": "board", "replicas": 1, "ready": 1},
    ]
    assert (world.generation, world.training()) == (1, "0-0,1-0")
    assert "restarts" not in world.status
    assert [note.reason for note in world.notes].count("RolePodFailed") == 1


def test_pods_of_roles_end_with_the_job(tmp_path: Path) -> None:
    world = running(tmp_path, role("board"), total_steps=20)
    world.until(lambda: world.phase == "Succeeded", step_every_s=0.5)
    world.advance(1.0)
    assert names(world) == []


def test_suspension_takes_them_and_resumption_makes_them_again(tmp_path: Path) -> None:
    world = running(tmp_path, role("board"))
    world.suspend(True)
    world.until(lambda: world.phase == "Suspended", step_every_s=0.5)
    assert names(world) == []
    world.suspend(False)
    world.until(lambda: world.training() != "", step_every_s=0.5)
    assert len(names(world)) == 1


def test_suspension_waits_for_them_and_a_replacement_for_the_pod_before(tmp_path: Path) -> None:
    world = running(tmp_path, role("ps"))
    world.pods.roles_linger = True
    world.suspend(True)
    world.until(lambda: not world.pods.by_uid, step_every_s=0.5)
    world.advance(5.0)
    assert (world.phase, names(world)) == ("Suspending", ["digits-ps-0-0"])
    world.pods.of_roles.clear()
    world.reconcile(world.operators[0])
    world.until(lambda: world.phase == "Suspended")


def test_pod_that_is_being_deleted_keeps_its_place(tmp_path: Path) -> None:
    world = running(tmp_path, role("ps"))
    (uid,) = world.pods.of_roles
    world.pods.of_roles[uid] = replace(world.pods.of_roles[uid], terminating=True)
    world.advance(30.0, step_every_s=0.5)
    assert names(world) == ["digits-ps-0-0"]
    world.pods.of_roles.clear()
    world.dirty()
    world.until(lambda: names(world) != [], step_every_s=0.5)


def test_role_that_must_not_fail_fails_the_job(tmp_path: Path) -> None:
    world = running(tmp_path, role("eval", restartPolicy="Never"))
    world.pods.end_role("digits-eval-0-0", last_exit_code=3)
    world.until(lambda: world.phase == "Failed", step_every_s=0.5)
    assert world.condition("Failed")["reason"] == "RoleFailed"


def test_pod_that_has_succeeded_is_not_made_again_by_another_operator(tmp_path: Path) -> None:
    world = running(tmp_path, role("eval"))
    world.pods.end_role("digits-eval-0-0", phase="Succeeded")
    world.advance(3.0, step_every_s=0.5)
    world.pods.of_roles.clear()
    world.kill_operator()
    world.start_operator()
    world.advance(10.0, step_every_s=0.5)
    assert names(world) == []
    assert world.status["roles"] == [{"name": "eval", "replicas": 1, "ready": 0, "succeeded": [0]}]
