"""State Finishing through the controller: scripts that take their time after the last step, with what may happen meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regroup_operator.api.members import parse_members
from tests.builders.plan import JobBuilder, make_job
from tests.simulator.world import World

LONG_S = 1e6


def job(**spec: Any) -> JobBuilder:
    return make_job().with_replicas(2).elastic(1, 4).with_spec(**{"checkpoint": {"volumeClaim": "ckpt"}} | spec)


def finishing(tmp_path: Path, builder: JobBuilder | None = None, **given: Any) -> World:
    """Return a job whose two scripts run on after the last step, until the test lets them return."""
    values: dict[str, Any] = {
        "known_session": True,
        "total_steps": 10,
        "checkpoint_every": 5,
        "backs_off": True,
        "num_nodes": 4,
    }
    world = World(tmp_path, builder or job(), end_s=LONG_S, **values | given)
    world.until(lambda: world.phase == "Finishing", step_every_s=0.5)
    world.advance(2.0)
    return world


def returns(world: World, rank: int) -> None:
    """The script of a rank that runs its end returns 0."""
    finished = world.finished
    assert finished is not None
    member = finished.members[rank]
    uid = next(uid for uid, pod in world.pods.by_uid.items() if pod.id == member)
    world.agents[uid].trainers[0].return_zero((finished.generation, rank))


def done(world: World) -> list[tuple[int, ...]]:
    return [tuple(member) for member in parse_members(world.status["finished"]["done"])]


def test_job_ends_with_its_scripts(tmp_path: Path) -> None:
    world = finishing(tmp_path)
    world.advance(3600.0)
    assert (world.phase, world.generation, world.names()) == ("Finishing", 1, ["0-0", "1-0"])
    returns(world, 1)
    world.advance(5.0)
    assert (world.phase, done(world)) == ("Finishing", [(1, 0)])
    assert not any(agent.alive for agent in world.agents.values() if agent.name.endswith("1-0")), "it was told to exit"
    returns(world, 0)
    world.until(lambda: world.phase == "Succeeded", 5.0)
    world.advance(60.0)
    assert (world.names(), world.pods.deleted) == (["0-0", "1-0"], []), "the pods stay for their logs"


def test_script_that_fails_and_pods_that_go_run_their_end_again(tmp_path: Path) -> None:
    world = finishing(tmp_path)
    world.kill_process(world.uid(0))
    world.advance(2.0)
    assert (world.phase, world.generation, world.status["restarts"]["processes"]) == ("Finishing", 1, 1)
    world.vanish(world.uid(1))
    world.advance(2.0)
    assert (world.names(), world.status["finished"]["members"]) == (["0-0", "1-1"], "0,1.1")
    world.terminate(world.uid(0))
    world.advance(60.0)
    assert world.names() == ["0-1", "1-1"]
    assert (world.status["restarts"]["processes"], len(world.status["restarts"]["recent"])) == (1, 1), (
        "pods do not count"
    )
    for rank in (0, 1):
        returns(world, rank)
    world.until(lambda: world.phase == "Succeeded", 5.0)
    assert (world.generation, done(world)) == (1, [(0, 1), (1, 1)])


def test_size_does_nothing_and_a_slot_that_is_done_needs_no_pod(tmp_path: Path) -> None:
    world = finishing(tmp_path)
    returns(world, 0)
    world.advance(2.0)
    world.vanish(next(uid for uid, pod in world.pods.by_uid.items() if pod.slot == 0))
    for replicas in (4, 1):
        world.scale(replicas)
        world.advance(30.0)
        assert (world.phase, world.generation, world.names()) == ("Finishing", 1, ["1-0"])
    returns(world, 1)
    world.until(lambda: world.phase == "Succeeded", 5.0)


@pytest.mark.parametrize("moment", ["scripts run", "one is done", "one has returned and is not written"])
def test_new_operator_reads_all_of_it_from_the_status(tmp_path: Path, moment: str) -> None:
    world = finishing(tmp_path)
    if moment != "scripts run":
        returns(world, 0)
    if moment == "one is done":
        world.advance(5.0)
    world.kill_operator()
    world.advance(2.0)
    world.start_operator()
    world.advance(60.0)
    assert (world.phase, world.generation, world.pods.deleted) == ("Finishing", 1, [])
    assert done(world) == ([] if moment == "scripts run" else [(0, 0)])
    assert world.ledger.returned == (set() if moment == "scripts run" else {(1, 0)}), "nothing runs twice"
    for rank in {0, 1} - {rank for _, rank in world.ledger.returned}:
        returns(world, rank)
    world.until(lambda: world.phase == "Succeeded", 5.0)


def test_suspension_keeps_what_is_done_and_runs_the_rest_once_resumed(tmp_path: Path) -> None:
    world = finishing(tmp_path)
    returns(world, 0)
    world.advance(2.0)
    world.suspend(True)
    world.until(lambda: world.phase == "Suspended")
    assert (world.names(), done(world), world.status.get("restarts", {}).get("processes", 0)) == ([], [(0, 0)], 0)
    world.kill_operator()
    world.start_operator()
    world.advance(30.0)
    world.suspend(False)
    world.until(lambda: world.phase == "Finishing")
    world.advance(5.0)
    assert (world.names(), world.generation, world.status["finished"]["members"]) == (["1-1"], 1, "0,1.1")
    assert (world.status.get("restarts") or {}).get("pods", 0) == 0, (
        "a pod that is made after a suspension replaces none"
    )
    returns(world, 1)
    world.until(lambda: world.phase == "Succeeded", 5.0)


def test_script_that_returns_as_the_job_is_suspended_does_not_run_again(tmp_path: Path) -> None:
    """The word that it is done and the stop that suspends it pass each other."""
    world = finishing(tmp_path)
    agent = world.agents[world.uid(0)]

    def cross(status: dict[str, Any]) -> None:
        if status["phase"] != "Suspending":
            world.store.before_write = cross
            return
        agent.mute()
        returns(world, 0)
        world.after(1.0, agent.unmute)

    world.store.before_write = cross
    world.suspend(True)
    world.until(lambda: world.phase == "Suspended", 60.0)
    assert done(world) == [(0, 0)]
    world.suspend(False)
    world.until(lambda: world.phase == "Finishing")
    world.advance(5.0)
    assert world.names() == ["1-1"]


def test_resumed_job_without_a_checkpoint_fails(tmp_path: Path) -> None:
    world = finishing(tmp_path, make_job().with_replicas(2).elastic(1, 4), checkpoint_every=0)
    world.suspend(True)
    world.until(lambda: world.phase == "Suspended")
    world.suspend(False)
    world.until(lambda: world.phase == "Failed", 10.0)
    assert world.condition("Failed")["reason"] == "EndFailed"


def test_script_tier_member_that_has_returned_is_not_lost_with_its_pod(tmp_path: Path) -> None:
    """Seen: rank 1 had exited with 0, rank 0 still saved; its pod went, and all trained again from the beginning."""
    world = World(tmp_path, make_job().with_replicas(2).elastic(1, 4), script="plain")
    world.until(lambda: world.phase == "Running", 60.0)
    world.kill_process(world.uid(1), code=0)
    world.until(lambda: world.phase == "Finishing", 5.0)
    world.advance(2.0)
    saves = world.agents[world.uid(0)].trainers[0]
    world.vanish(world.uid(1))
    world.advance(60.0)
    assert (world.phase, world.generation, world.names(), saves.alive) == ("Finishing", 1, ["0-0"], True)
    world.kill_process(world.uid(0), code=0)
    world.until(lambda: world.phase == "Succeeded", 5.0)


def test_deadline_of_the_end(tmp_path: Path) -> None:
    world = finishing(tmp_path, job(runPolicy={"finishSeconds": 60}))
    world.until(lambda: world.phase == "Failed", 61.0)
    assert world.condition("Failed")["reason"] == "FinishDeadlineExceeded"
    assert (world.condition("Complete")["status"], world.condition("Complete")["reason"]) == ("False", "Failed")
