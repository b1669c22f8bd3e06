"""Unmodified scripts under faults, on the real controller and agent core: what is shown is true, and nothing waits for ever."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from _regroup_agent.ending import UNKILLABLE_S
from _regroup_agent.script import GRACE_S, UNOBSERVED_S, WATCHED_S
from regroup.protocol import local
from tests.builders.plan import JobBuilder, make_job
from tests.simulator.operators import WALL
from tests.simulator.world import World

ELASTIC = make_job().with_replicas(3).elastic(1, 5)
FIXED = make_job().with_replicas(3).fixed()
REPLACED_S = GRACE_S + UNKILLABLE_S + 20.0 + 5.0
"""After so long another pod stands in the place of one whose process does not die."""


def observed(world: World, group: str, *workers: int | tuple[int, int]) -> None:
    """Have the hooks in all processes of these workers (slots, or (slot, attempt)) speak."""
    for worker in workers:
        agent = world.agents[world.uid(worker) if isinstance(worker, int) else world.uid(*worker)]
        for rank, trainer in agent.trainers.items():
            agent.trainer_says(trainer, local.Observed(rank, trainer.incarnation, group))
    world.advance(0.1)


def running(tmp_path: Path, job: JobBuilder = ELASTIC, processes: int = 1) -> World:
    """Three workers whose processes have formed their group."""
    world = World(tmp_path, job, script="plain", processes=processes)
    world.advance(2.0)
    assert world.phase == "Starting"
    observed(world, "watched", 0, 1, 2)
    observed(world, "formed", 0, 1, 2)
    assert (world.phase, world.status["tier"]) == ("Running", "Script")
    return world


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("job", [ELASTIC, FIXED], ids=["elastic", "fixed"])
def test_state_follows_the_process_group(tmp_path: Path, job: JobBuilder, processes: int) -> None:
    world = running(tmp_path, job, processes)
    world.kill_process(world.uid(1), local_rank=processes - 1)
    world.advance(1.0)
    observed(world, "watched", 0, 1, 2)
    assert world.phase == "Recovering"
    world.advance(WATCHED_S - 20, 5.0)
    assert world.phase == "Recovering", "processes that import are not Running"
    observed(world, "formed", 0, 1, 2)
    assert world.phase == "Running"
    assert world.generation == 2


def test_a_change_of_size_is_starting_until_the_new_group_has_formed(tmp_path: Path) -> None:
    world = running(tmp_path)
    world.scale(2)
    world.advance(1.0)
    observed(world, "watched", 0, 1)
    assert (world.phase, world.generation) == ("Starting", 2)
    assert "0 of 2 workers passed" in world.condition("Training")["message"]
    observed(world, "formed", 0)
    assert world.phase == "Starting"
    observed(world, "formed", 1)
    assert world.phase == "Running"


def test_pod_that_was_deleted_by_force_is_recovered_from_until_the_group_has_formed_again(tmp_path: Path) -> None:
    """Its replacement comes before the others have formed their group, so a planned generation follows the forced one."""
    world = running(tmp_path)
    world.vanish(world.uid(1))
    world.advance(2.0)
    assert (world.generation, world.status["membership"]["kind"]) == (3, "planned")
    assert world.phase == "Recovering"
    world.kill_operator()
    world.start_operator()
    world.advance(25.0)
    assert world.phase == "Recovering", "the next operator says so, too"
    observed(world, "formed", 0, (1, 1), 2)
    assert world.phase == "Running"
    world.scale(2)
    world.advance(1.0)
    assert world.phase == "Starting", "a change of size afterwards is none"


def test_without_a_hook_it_is_running_and_unobserved_after_30_s(tmp_path: Path) -> None:
    world = World(tmp_path, ELASTIC, script="plain")
    world.advance(UNOBSERVED_S - 1)
    assert world.phase == "Starting"
    world.advance(2.0)
    assert (world.phase, world.condition("Training")["reason"]) == ("Running", "Unobserved")


def test_what_was_said_outlives_the_operator(tmp_path: Path) -> None:
    world = running(tmp_path)
    world.kill_operator()
    world.start_operator()
    seen = set()
    for _ in range(50):
        world.advance(0.1)
        seen.add(world.phase)
    assert seen == {"Running"}
    assert world.generation == 1


def test_rank_that_exits_0_before_the_tier_is_known_does_not_keep_it_open(tmp_path: Path) -> None:
    """Seen: the job said Starting for ever, and a change of size did nothing."""
    world = World(tmp_path, ELASTIC, script="plain")
    world.advance(5.0)
    agent = world.agents[world.uid(2)]
    agent.exited(agent.trainers[0], 0)
    world.advance(UNOBSERVED_S + 1)
    assert world.status["tier"] == "Script"
    assert (world.phase, world.status["finished"]["done"]) == ("Finishing", "2")


@pytest.mark.parametrize(("job", "went_on"), [(ELASTIC, "0-1"), (FIXED, "")], ids=["elastic", "fixed"])
def test_process_that_does_not_die_costs_its_pod_and_no_more(tmp_path: Path, job: JobBuilder, went_on: str) -> None:
    """SIGKILL does not end a process that hangs in the kernel (a dead NFS server): its pod never ends either."""
    world = running(tmp_path, job)
    stuck = world.agents[world.uid(2)]
    stuck.exited = lambda *_: None  # type: ignore[method-assign]
    ends = world.container_ended
    world.container_ended = lambda agent, code, reason="": agent.die() if agent is stuck else ends(agent, code, reason)  # type: ignore[method-assign]
    world.kill_process(world.uid(1))
    world.advance(GRACE_S + UNKILLABLE_S + 1.0, 1.0)
    if went_on:
        assert world.members == went_on, world.summary()
        assert any("Process 0 is not dead 30 s after SIGKILL" in n.note for n in world.notes)
    world.advance(REPLACED_S, 1.0)
    assert world.members == "0-1,2.1", world.summary()
    observed(world, "formed", 0, 1, (2, 1))
    assert world.phase == "Running"


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("job", "alone"), [(ELASTIC, True), (FIXED, False)], ids=["elastic goes on with two", "fixed waits for the third"]
)
@pytest.mark.parametrize("fault", ["pod", "node"])
def test_lost_pods_and_nodes(tmp_path: Path, job: JobBuilder, alone: bool, processes: int, fault: str) -> None:
    """The others start again (elastic) or wait with their pods; with the replacement all three form one group again."""
    world = running(tmp_path, job, processes)
    kept = {slot: world.uid(slot) for slot in (0, 1)}
    lost = world.uid(2)
    world.pods.pending.add(2)
    if fault == "pod":
        world.vanish(lost)
    else:
        world.power_off(lost)
        world.agents[lost].disconnect()
    world.advance(10.0, 1.0)
    if alone:
        assert world.members == "0-1", world.summary()
        observed(world, "watched", 0, 1)
        observed(world, "formed", 0, 1)
        assert world.phase == "Running"
    else:
        assert world.phase == "Waiting", world.summary()
    if fault == "node":
        world.node_not_ready(lost)
        world.advance(1.0)
    world.run_pod(world.uid(2, 1))
    world.advance(20.0, 1.0)
    assert world.members == "0-1,2.1", world.summary()
    observed(world, "formed", 0, 1, (2, 1))
    assert world.phase == "Running"
    assert {slot: world.uid(slot) for slot in (0, 1)} == kept, "a survivor lost its pod"
    assert world.status["restarts"]["processes"] == 0, "a lost pod or node counts as no failure of the script"
    assert world.generation == (3 if alone else 2)


def test_a_script_of_which_nothing_is_heard_is_seen_every_ten_seconds_and_no_more_often(tmp_path: Path) -> None:
    world = running(tmp_path)
    world.advance(60.0)
    before = world.store.num_writes
    ages = set()
    for _ in range(120):
        world.advance(1.0)
        seen = datetime.fromisoformat(world.status["observedAt"]).timestamp()
        ages.add(WALL + world.now_s - seen)
    assert max(ages) <= 12.0
    assert 10 <= world.store.num_writes - before <= 13


def test_while_no_operator_is_there_what_is_said_grows_old(tmp_path: Path) -> None:
    world = running(tmp_path)
    world.kill_operator()
    world.advance(17.0)
    assert world.phase == "Running"
    assert WALL + world.now_s - datetime.fromisoformat(world.status["observedAt"]).timestamp() >= 17.0
    world.start_operator()
    world.advance(12.0)
    assert WALL + world.now_s - datetime.fromisoformat(world.status["observedAt"]).timestamp() <= 12.0


def test_a_job_that_has_ended_is_not_written_again(tmp_path: Path) -> None:
    world = running(tmp_path)
    for slot in range(3):
        world.kill_process(world.uid(slot), code=0)
    world.advance(12.0)  # that no pod is left may be written with the next progress
    assert world.phase == "Succeeded"
    before = world.store.num_writes
    world.advance(120.0)
    assert world.store.num_writes == before


def test_member_that_returns_early_is_named_and_not_only_the_peer_that_fails_for_it(tmp_path: Path) -> None:
    """Worker 1 ended with 0 in the middle, and Failed blamed worker 0: "Connection closed by peer"."""
    world = running(tmp_path, make_job().with_replicas(3).fixed().with_recovery(maxRestarts=0))
    world.kill_process(world.uid(1), code=0)
    world.advance(1.0)
    world.kill_process(world.uid(0), code=1, last_line="RuntimeError: Connection closed by peer")
    world.until(lambda: world.phase == "Failed", limit_s=30.0)
    assert "ended with exit code 1, after the script had returned 0 in worker 1" in world.condition("Failed")["message"]
