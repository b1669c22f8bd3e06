"""Hangs, from the last commit to the next one: the real policy, agent cores and protocol; only the stacks are played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regroup_operator.model.records import Settings
from regroup_operator.plan.failures.hangs import ALONE
from regroup_operator.plan.generation.trouble import KILL_S
from tests.builders.plan import JobBuilder, make_job
from tests.simulator.trainers import Trainer
from tests.simulator.world import World

HANG_S = 20


def running(tmp_path: Path, job: JobBuilder | None = None, spares: int = 0, **kwargs: Any) -> World:
    kwargs.setdefault("settings", Settings(term_grace_s=0.0, first_step_s=40.0))
    job = (job or make_job().with_replicas(3).elastic(2, 5)).with_recovery(hangSeconds=HANG_S, spares=spares)
    world = World(tmp_path, job, **kwargs)
    world.advance(0.1)
    world.step(10)
    world.advance(2)
    assert world.phase == "Running", world.summary()
    return world


def hang(world: World, slot: int, rank: int = 0, place: str = "outside") -> Trainer:
    trainer = world.agents[world.uid(slot)].trainers[rank]
    if place == "stopped":
        trainer.stop()
    else:
        trainer.frozen = True
    return trainer


def incarnations(world: World) -> dict[str, list[int]]:
    return {agent.name: [t.incarnation for t in agent.trainers.values()] for agent in world.agents.values()}


@pytest.mark.parametrize("place", ["outside", "stopped"])
@pytest.mark.parametrize(("processes", "rank"), [(1, 0), (2, 1)])
def test_hung_process_is_restarted_and_the_others_keep_theirs(
    tmp_path: Path, place: str, processes: int, rank: int
) -> None:
    world = running(tmp_path, processes=processes)
    before = incarnations(world)
    hang(world, 1, rank, place)
    took_s = world.until(lambda: world.generation > 1)
    assert HANG_S - 3 < took_s < HANG_S + 5
    world.until(lambda: world.members == "0-2" and world.phase == "Running", step_every_s=0.1)
    world.step(3)
    after = incarnations(world)
    changed = [(name, r) for name, was in before.items() for r, i in enumerate(was) if after[name][r] != i]
    assert changed == [("digits-worker-1-0", rank)]
    incident = world.status["incidents"][0]
    assert (incident["cause"], incident["culprit"]) == ("Hung", "1")
    place_of = {"outside": "load (train.py:4)", "stopped": "stopped by a signal"}[place]
    assert place_of in incident["decision"]
    assert len(incident["stacks"]) == 3 * processes
    assert incident["stacks"][0].startswith(f"rank {processes + rank} (1): {place}: ")
    assert world.status["restarts"]["processes"] == 1
    events = [n.note for n in world.notes if n.reason == "Hung"]
    assert len(events) == 1
    assert f"rank {processes + rank} (worker 1, process {rank})" in events[0]


def test_hung_process_of_a_fixed_job_rejoins_in_the_next_generation(tmp_path: Path) -> None:
    world = running(tmp_path, make_job().with_replicas(2).fixed())
    hang(world, 0)
    world.until(lambda: world.generation == 2 and world.phase == "Running", step_every_s=0.1)
    assert world.members == "0-1"
    assert world.status["incidents"][0]["cause"] == "Hung"


def test_two_that_hang_are_both_restarted(tmp_path: Path) -> None:
    world = running(tmp_path, make_job().with_replicas(3).fixed())
    hang(world, 0)
    hang(world, 2, place="stopped")
    world.until(lambda: world.generation >= 2 and world.phase == "Running" and world.training() != "", step_every_s=0.1)
    assert world.status["restarts"]["processes"] == 2
    assert not any(t.frozen or t.stopped for agent in world.agents.values() for t in agent.trainers.values())


def stop_steps(world: World) -> None:
    """Every rank is in a collective, and none ends."""
    world.until(lambda: world.condition("Degraded")["reason"] == "NoProgress" or world.generation > 1)


def test_ranks_that_are_all_in_collectives_keep_their_processes_and_get_new_groups(tmp_path: Path) -> None:
    world = running(tmp_path)
    before = incarnations(world)
    world.until(lambda: world.generation == 2)
    world.step(2)
    assert (world.members, world.phase, incarnations(world)) == ("0-2", "Running", before)
    incident = world.status["incidents"][0]
    assert (incident["cause"], incident.get("culprit")) == ("Hung", None)
    assert "every rank is in a collective: rank 0 in main (train.py:9)" in incident["decision"]
    assert world.status["restarts"]["processes"] == 0


def test_third_hang_in_collectives_at_one_step_fails_the_job(tmp_path: Path) -> None:
    world = running(tmp_path)
    took_s = world.until(lambda: world.phase == "Failed", limit_s=6 * HANG_S)
    assert took_s < 4 * HANG_S
    assert world.generation == 3
    failed = world.condition("Failed")["message"]
    assert "This is hang 3 in a row without a committed step in between" in failed
    assert "ranks that run different collectives" in failed


def test_rank_that_hangs_at_one_step_again_and_again_fails_the_job(tmp_path: Path) -> None:
    world = running(tmp_path, make_job().with_replicas(2).fixed())

    def again() -> bool:
        trainer = world.agents[world.uid(1)].trainers[0]
        trainer.frozen = trainer.group is not None and bool(trainer.group.adopted)
        return world.phase == "Failed"

    world.until(again, limit_s=10 * HANG_S)
    assert "rank 1 (worker 1, process 0) hangs in load (train.py:4)" in world.condition("Failed")["message"]
    assert world.status["restarts"]["processes"] == 2


def test_only_process_is_given_three_times_as_long_and_then_restarted(tmp_path: Path) -> None:
    world = running(tmp_path, make_job().with_replicas(1).elastic(1, 4))
    hang(world, 0)
    world.advance(ALONE * HANG_S - 5)
    assert (world.generation, world.condition("Degraded")["reason"]) == (1, "NoProgress")
    assert "no rank waits for another" in world.condition("Degraded")["message"]
    world.until(lambda: world.generation == 2)
    assert world.status["incidents"][0]["cause"] == "Hung"


def test_process_that_was_left_with_the_state_and_never_goes_on_is_restarted_when_a_spare_has_its_place(
    tmp_path: Path,
) -> None:
    """Both processes stand for ever. The operator spares one of them, and nobody else can say which state it holds."""
    world = running(tmp_path, make_job().with_replicas(1).elastic(1, 4), spares=1, processes=2)
    world.slow_start_s = 5.0
    member = world.uid(int(world.members))
    for trainer in world.agents[member].trainers.values():
        trainer.stop()
    world.until(lambda: world.generation > 1, limit_s=ALONE * HANG_S + 30)
    assert world.uid(int(world.members)) != member
    world.until(lambda: world.phase == "Running", limit_s=240.0, step_every_s=1.0)
    world.step(2)


def test_hang_is_found_by_the_next_operator(tmp_path: Path) -> None:
    world = running(tmp_path)
    hang(world, 0, place="stopped")
    world.advance(HANG_S - 5)
    world.kill_operator()
    world.advance(3)
    world.start_operator()
    for agent in world.agents.values():
        agent.connect()
    took_s = world.until(lambda: bool(world.status.get("incidents")))
    assert took_s < 10, "the last commit was told with its age"
    assert world.status["incidents"][0]["cause"] == "Hung"


def test_kill_that_an_operator_did_not_live_to_see_is_done_by_the_next(tmp_path: Path) -> None:
    world = running(tmp_path)
    hung = hang(world, 1)
    world.immortal = {(hung.agent.name, 0)}
    world.until(lambda: world.condition("Training")["reason"] == "Hung")
    world.kill_operator()
    world.immortal = set()
    world.start_operator()
    for agent in world.agents.values():
        agent.connect()
    world.until(lambda: world.generation > 1)
    assert not hung.alive


def test_others_go_on_without_a_process_that_no_signal_ends(tmp_path: Path) -> None:
    world = running(tmp_path)
    hung = hang(world, 1)
    world.immortal = {(hung.agent.name, 0)}
    world.until(lambda: world.condition("Training")["reason"] == "Hung", limit_s=HANG_S + 5)
    took_s = world.until(lambda: world.generation > 1)
    assert took_s <= KILL_S + 1
    world.step(2)
    assert (world.members, world.phase) == ("0,2", "Running")
    world.immortal = set()
    world.kill_process(hung.agent.uid)
    world.until(lambda: world.members == "0-2" and world.phase == "Running", step_every_s=0.1)


def test_process_that_hangs_in_its_first_step_is_found_after_the_bound_for_that(tmp_path: Path) -> None:
    world = World(
        tmp_path,
        make_job().with_replicas(2).fixed().with_recovery(hangSeconds=HANG_S),
        settings=Settings(term_grace_s=0.0, first_step_s=100.0),
    )
    world.advance(0.1)
    hang(world, 1)
    world.advance(95)
    assert (world.generation, world.condition("Degraded")["status"]) == (1, "False")
    world.until(lambda: world.generation == 2, limit_s=20)
    assert world.status["incidents"][0]["cause"] == "Hung"


def test_slow_step_is_no_incident(tmp_path: Path) -> None:
    world = running(tmp_path)
    world.advance(HANG_S - 5)
    world.step(1)
    world.advance(HANG_S - 5)
    world.step(1)
    assert (world.generation, world.condition("Degraded")["reason"]) == (1, "AsWanted")


def test_incidents_say_the_sizes_before_and_after(tmp_path: Path) -> None:
    world = running(tmp_path)
    hang(world, 1)
    world.until(lambda: world.members == "0-2" and world.generation > 2, step_every_s=0.1)
    sizes = [(one["workersBefore"], one["workers"]) for one in world.status["incidents"]]
    assert sizes == [(3, 2), (2, 3)]
