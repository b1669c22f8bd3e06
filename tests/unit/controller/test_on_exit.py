"""spec.recovery.onExit on the real controller and agent core: an operator that restarts, loops, and success elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.builders.plan import JobBuilder, make_job
from tests.simulator.world import World
from tests.unit.controller.test_operator import Killed, die_before_write
from tests.unit.controller.test_script import observed

FAIL_2_IGNORE_3 = [
    {"action": "Fail", "exitCodes": {"operator": "In", "values": [2]}},
    {"action": "Ignore", "exitCodes": {"operator": "In", "values": [3]}},
]


def ruled(**recovery: Any) -> JobBuilder:
    return make_job().with_replicas(3).elastic(2, 5).with_recovery(onExit=FAIL_2_IGNORE_3, **recovery)


def running(tmp_path: Path, job: JobBuilder, **given: Any) -> World:
    world = World(tmp_path, job, **given)
    world.advance(5, step_every_s=0.5)
    return world


@pytest.mark.parametrize("away", [False, True], ids=["seen at once", "while no operator runs"])
def test_rule_fails_the_job(tmp_path: Path, away: bool) -> None:
    world = running(tmp_path, ruled())
    if away:
        world.kill_operator()
    world.kill_process(world.uid(1), code=2)
    if away:
        world.advance(10)
        world.start_operator()
    world.until(lambda: world.phase == "Failed", limit_s=30.0)
    assert world.condition("Failed")["reason"] == "ExitRule"
    assert "Worker 1 " in world.condition("Failed")["message"]
    world.kill_operator()
    world.start_operator()
    world.advance(20)
    assert world.condition("Failed")["reason"] == "ExitRule"


def test_end_of_a_container_is_judged_by_the_next_operator_if_the_first_one_dies_before_its_write(
    tmp_path: Path,
) -> None:
    world = running(tmp_path, ruled())
    die_before_write(world)
    world.container_ended(world.agents[world.uid(1)], 2)
    with pytest.raises(Killed):
        world.advance(3)
    assert world.phase == "Running"
    world.start_operator()
    world.until(lambda: world.phase == "Failed", limit_s=30.0)
    assert world.condition("Failed")["reason"] == "ExitRule"
    assert world.status["restarts"]["judged"]["ends"] == {"digits-worker-1-0": 1}


def test_next_operator_knows_that_the_generation_has_had_its_first_failure(tmp_path: Path) -> None:
    """Two processes fail at once. The operator judges the first, and dies; the next one is told of the other."""
    world = running(tmp_path, ruled())
    world.cut_off(world.uid(2))
    world.kill_process(world.uid(1), code=3)
    world.kill_process(world.uid(2), code=2)
    world.settle()
    assert world.status["restarts"]["judged"]["failed"] == {"1": 1}
    world.kill_operator()
    world.reach_again(world.uid(2))
    world.start_operator()
    world.advance(20, step_every_s=0.5)
    assert world.phase == "Running"
    assert (world.status["restarts"]["ignored"], world.status["restarts"]["processes"]) == (1, 1), "told, and counted"


def test_failure_that_is_ignored_for_ever_is_told_and_does_not_spin(tmp_path: Path) -> None:
    """The script ends a moment after each start: the agent's own delay keeps it from spinning, and maxRestarts is not touched."""
    world = running(tmp_path, make_job().with_replicas(2).fixed().with_recovery(onExit=FAIL_2_IGNORE_3, maxRestarts=0))
    for _ in range(60):
        if any(a.trainers for a in [world.agents[world.uid(1)]]):
            world.kill_process(world.uid(1), code=3)
        world.advance(1.0)
    restarts = world.status["restarts"]
    assert 5 < restarts["ignored"] < 15
    assert (restarts["total"], restarts["recent"]) == (0, [])
    assert world.condition("Degraded")["reason"] == "FailuresIgnored"
    world.advance(30, step_every_s=0.5)
    assert world.phase == "Running"
    assert world.condition("Degraded")["status"] == "False"


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["success first", "failure first"])
@pytest.mark.parametrize("fails", [False, True], ids=["without a rule", "by a rule"])
def test_script_that_fails_in_one_worker_and_ends_well_in_another_has_not_succeeded(
    tmp_path: Path, elastic: bool, order: tuple[int, int], fails: bool
) -> None:
    rules = [{"action": "Fail" if fails else "Restart", "exitCodes": {"operator": "In", "values": [1]}}]
    job = make_job().with_replicas(2).with_recovery(onExit=rules)
    world = World(tmp_path, job.elastic(1, 2) if elastic else job.fixed(), script="plain")
    world.advance(2.0)
    observed(world, "formed", 0, 1)
    for slot in order:
        world.kill_process(world.uid(slot), code=slot)
        if slot != order[-1]:
            world.settle()
    world.advance(3.0)
    if fails:
        assert world.condition("Failed")["reason"] == "ExitRule"
        return
    assert not world.has_ended
    assert (world.generation, world.members) == (2, "0-1"), "both begin again"
    for slot in order:
        world.kill_process(world.uid(slot), code=0)
    world.until(lambda: world.phase == "Succeeded", limit_s=30.0)


@pytest.mark.parametrize("rule", [True, False], ids=["by a rule", "by maxRestarts"])
def test_init_container_that_always_fails_has_an_end(tmp_path: Path, rule: bool) -> None:
    """The job was Pending for half an hour."""
    rules = [{"action": "Fail", "exitCodes": {"operator": "In", "values": [3]}}] if rule else []
    world = running(tmp_path, make_job().with_replicas(2).fixed().with_recovery(onExit=rules, maxRestarts=4))
    world.vanish(world.uid(1))
    world.settle()
    uid = world.uid(1, 1)
    for failures in range(1, 6):
        world.pods.by_uid[uid] = replace(
            world.pods.by_uid[uid], phase="Pending", init_failed="setup", init_failures=failures, init_exit_code=3
        )
        world.dirty()
        world.advance(10.0)
        if rule or failures == 5:
            break
        assert not world.has_ended
        assert world.condition("PodsReady")["reason"] == "InitContainerFailed"
    failed = world.condition("Failed")
    assert failed["reason"] == ("ExitRule" if rule else "TooManyRestarts")
    assert "Init container setup of worker 1.1 (pod digits-worker-1-1) ended with exit code 3" in failed["message"]
    assert "--container=setup" in failed["message"]
