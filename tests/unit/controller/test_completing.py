"""Roles that the job waits for, through the controller: the workers' pods end, and no operator starts them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.builders.jobs import role
from tests.builders.plan import make_job
from tests.simulator.world import World

EVAL = role("eval") | {"requiredForCompletion": True}


def completing(tmp_path: Path, *roles: dict[str, Any], **given: Any) -> World:
    """Return a job whose two workers have finished."""
    job = make_job().with_replicas(2).with_spec(roles=list(roles or (EVAL, role("board"))))
    world = World(tmp_path, job, **{"known_session": True, "total_steps": 10} | given)
    world.until(lambda: world.phase == "Completing", step_every_s=0.5)
    return world


def running(world: World) -> list[str]:
    return sorted(p.name for p in (*world.pods.by_uid.values(), *world.pods.of_roles.values()) if p.alive)


def test_workers_end_while_the_job_waits(tmp_path: Path) -> None:
    world = completing(tmp_path)
    world.until(lambda: running(world) == ["digits-board-0-0", "digits-eval-0-0"], 30.0)
    world.advance(120.0)
    assert (world.phase, world.status["replicas"], world.generation) == ("Completing", 0, 1)
    assert running(world) == ["digits-board-0-0", "digits-eval-0-0"]
    world.pods.end_role("digits-eval-0-0", phase="Succeeded")
    world.until(lambda: world.phase == "Succeeded")
    world.advance(1.0)
    assert running(world) == []
    assert [n.reason for n in world.notes if n.reason in ("Completing", "Succeeded")] == ["Completing", "Succeeded"]
    assert world.status["roles"][0] == {"name": "eval", "replicas": 1, "ready": 0, "succeeded": [0], "awaited": 0}


@pytest.mark.parametrize("moment", ["before the write", "after the write", "later"])
def test_operator_that_dies_starts_no_worker_again(tmp_path: Path, moment: str) -> None:
    """Before the write nobody is told to stop: the next operator hears that they have finished. After it the status says so."""
    job = make_job().with_replicas(2).with_spec(roles=[EVAL])
    world = World(tmp_path, job, known_session=True, total_steps=10, backs_off=True)
    world.advance(2.0, step_every_s=0.5)

    def die(status: dict[str, Any]) -> None:
        if "finished" in status:
            world.kill_operator()
            world.store.is_down = moment == "before the write"
            world.after(3.0, back)
        else:
            world.store.before_write = die

    def back() -> None:
        world.store.is_down = False
        world.start_operator()

    if moment == "later":
        world.until(lambda: world.phase == "Completing", step_every_s=0.5)
        world.advance(5.0)
        world.kill_operator()
        world.start_operator()
    else:
        world.store.before_write = die
        world.until(lambda: len(world.operators) == 0, step_every_s=0.5)
        assert ("finished" in world.status) == (moment == "after the write")
    world.until(lambda: world.phase == "Completing", 60.0, step_every_s=0.5)
    world.advance(60.0)
    assert running(world) == ["digits-eval-0-0"]
    assert world.names() == ["0-0", "1-0"], "no worker was made"
    world.pods.end_role("digits-eval-0-0", phase="Succeeded")
    world.until(lambda: world.phase == "Succeeded")


@pytest.mark.parametrize("roles", [(), (EVAL,)], ids=["ended", "completing"])
def test_next_operator_lets_workers_end_by_themselves(tmp_path: Path, roles: tuple[dict[str, Any], ...]) -> None:
    """The operator dies before it has told them to stop, and their agents call the next one a moment after its first look. The
    script has yet to do what comes after its last step, and its log must stay."""
    job = make_job().with_replicas(2).with_spec(roles=list(roles))
    world = World(tmp_path, job, known_session=True, total_steps=60, backs_off=True)

    def die(status: dict[str, Any]) -> None:
        if status["phase"] not in ("Completing", "Succeeded"):
            world.store.before_write = die
            return
        world.kill_operator()
        for uid in world.pods.by_uid:
            world.cut_off(uid)
        world.after(3.0, look)

    def look() -> None:
        world.start_operator()
        world.after(1.0, call)

    def call() -> None:
        for uid in world.pods.by_uid:
            world.reach_again(uid)

    world.store.before_write = die
    world.until(lambda: len(world.operators) == 0, 120.0, step_every_s=1.0)  # longer than agents are waited for
    world.until(lambda: running(world) == [f"digits-{role['name']}-0-0" for role in roles], 60.0)
    assert world.pods.deleted == []
    assert [pod.phase for pod in world.pods.by_uid.values()] == ["Succeeded"] * 2


def test_operator_without_an_answer_to_the_write_goes_on(tmp_path: Path) -> None:
    job = make_job().with_replicas(2).with_spec(roles=[EVAL])
    world = World(tmp_path, job, known_session=True, total_steps=10, backs_off=True)
    world.advance(2.0, step_every_s=0.5)

    def lose(status: dict[str, Any]) -> None:
        if "finished" in status:
            world.store.loses_answers = True
            world.after(2.0, lambda: setattr(world.store, "is_down", False))
        else:
            world.store.before_write = lose

    world.store.before_write = lose
    world.until(lambda: world.phase == "Completing", step_every_s=0.5)
    world.until(lambda: running(world) == ["digits-eval-0-0"], 30.0)
    assert [n.reason for n in world.notes].count("Completing") == 1


def test_workers_that_vanish_meanwhile_are_not_replaced_and_scaling_does_nothing(tmp_path: Path) -> None:
    world = completing(tmp_path, EVAL)
    world.advance(1.0)
    for uid in list(world.pods.by_uid):
        world.vanish(uid)
    world.scale(4)
    world.advance(60.0)
    assert (world.names(), world.phase, world.generation) == ([], "Completing", 1)


def test_worker_whose_pod_does_not_end_is_deleted(tmp_path: Path) -> None:
    job = make_job().with_replicas(2).with_spec(roles=[EVAL])
    world = World(tmp_path, job, known_session=True, total_steps=10)
    world.sidecar = True  # its container runs on when the agent has exited
    world.until(lambda: world.phase == "Completing", step_every_s=0.5)
    world.until(lambda: running(world) == ["digits-eval-0-0"], 60.0)


def test_role_that_fails_is_replaced_until_it_succeeds(tmp_path: Path) -> None:
    world = completing(tmp_path, EVAL)
    for attempt in range(2):
        world.pods.end_role(f"digits-eval-0-{attempt}", last_exit_code=1)
        world.until(lambda name=f"digits-eval-0-{attempt + 1}": name in running(world), 60.0)  # type: ignore[misc]
    world.pods.end_role("digits-eval-0-2", phase="Succeeded")
    world.until(lambda: world.phase == "Succeeded")


def test_suspension_and_resumption_while_it_waits(tmp_path: Path) -> None:
    world = completing(tmp_path, EVAL, role("board"))
    world.suspend(True)
    world.until(lambda: world.phase == "Suspended")
    assert (world.names(), running(world)) == ([], [])
    world.kill_operator()
    world.start_operator()
    world.advance(5.0)
    world.suspend(False)
    world.until(lambda: world.phase == "Completing")
    world.advance(30.0)
    assert running(world) == ["digits-board-0-0", "digits-eval-0-0"]
    world.pods.end_role("digits-eval-0-0", phase="Succeeded")
    world.until(lambda: world.phase == "Succeeded")


def test_several_roles_are_all_waited_for(tmp_path: Path) -> None:
    world = completing(tmp_path, EVAL | {"replicas": 2}, role("report") | {"requiredForCompletion": True})
    for name in ("digits-eval-1-0", "digits-report-0-0"):
        world.pods.end_role(name, phase="Succeeded")
        world.advance(3.0)
        assert world.phase == "Completing"
    world.pods.end_role("digits-eval-0-0", phase="Succeeded")
    world.until(lambda: world.phase == "Succeeded")


def test_script_without_the_library_completes_too(tmp_path: Path) -> None:
    world = completing(tmp_path, EVAL, script="plain", known_session=False)
    world.until(lambda: running(world) == ["digits-eval-0-0"], 60.0)
    world.pods.end_role("digits-eval-0-0", phase="Succeeded")
    world.until(lambda: world.phase == "Succeeded")
