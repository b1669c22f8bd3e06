"""Random walks: faults of every kind in any order, then peace. The world's own invariants hold at every turn (one list of
members for a number; a group continues from the newest committed step unless the job said that it rolled back), and after
peace the job trains with all the workers that are wanted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from regroup_operator.model.members import parse_members
from regroup_operator.model.records import Settings
from tests.builders.plan import make_job
from tests.simulator.world import World

WALKS = 9
MOVES = 12


def walk(tmp_path: Path, seed: int, moves: int = MOVES, script: str = "session") -> World:
    """Return the world after a walk and peace."""
    rng = random.Random(seed)
    job = make_job().with_replicas(3).with_recovery(maxRestarts=10_000)
    job = job.fixed() if rng.random() < 0.3 else job.elastic(rng.choice([1, 2]), 5)
    elastic = job.build().elastic
    world = World(
        tmp_path,
        job,
        processes=rng.choice([1, 1, 2]),
        script=script,
        known_session=script == "session" and rng.random() < 0.5,
        settings=Settings(term_grace_s=rng.choice([0.0, 20.0])),
    )
    world.advance(rng.choice([0.0, 0.1, 1.0]) if script == "session" else 40.0, step_every_s=0.1)
    dark: set[str] = set()

    def some_agent() -> str | None:
        alive = [uid for uid, agent in world.agents.items() if agent.alive and uid not in dark]
        return rng.choice(sorted(alive)) if alive else None

    def kill() -> None:
        uid = some_agent()
        if uid:
            trainers = [r for r, t in world.agents[uid].trainers.items() if t.alive]
            if trainers:
                world.kill_process(uid, rng.choice(trainers))

    def move(name: str) -> None:
        uid = some_agent()
        if name == "kill":
            kill()
        elif name == "kill two":
            kill()
            kill()
        elif name == "container" and uid:
            world.container_ended(world.agents[uid], 137)
        elif name == "vanish" and uid:
            world.vanish(uid)
        elif name == "delete" and uid:
            world.terminate(uid)
        elif name == "cut off" and uid:
            world.cut_off(uid)
        elif name == "power off" and uid:
            dark.add(uid)
            world.power_off(uid)
            world.cut_off(uid)
        elif name == "reach" and world.unreachable - dark:
            world.reach_again(rng.choice(sorted(world.unreachable - dark)))
        elif name == "link" and len(world.agents) > 1:
            world.cut_links.add(frozenset(rng.sample(sorted(world.agents), 2)))
        elif name == "heal":
            world.cut_links.clear()
        elif name == "operator":
            if world.operator is None:
                world.start_operator()
            else:
                world.kill_operator()
        elif name == "scale" and elastic:
            world.scale(rng.choice([2, 3, 4, 5]))

    names = ["kill", "kill", "kill two", "container", "vanish", "delete", "cut off", "power off", "reach", "reach", "link",
             "heal", "operator", "operator", "scale", "scale"]  # fmt: skip
    for _ in range(moves):
        name = rng.choice(names)
        world.trace.append(name)
        move(name)
        for _ in range(rng.choice([0, 0, 1, 5])):
            world._turn()  # the next move comes in the middle of what this one has set off
        world.advance(rng.choice([0.0, 0.02, 0.3, 2.0, 6.0]), step_every_s=0.1)
    world.trace.append("peace")
    world.cut_links.clear()
    for uid in sorted(dark):
        world.vanish(uid)
    for uid in sorted(world.unreachable):
        world.reach_again(uid)
    if world.operator is None:
        world.start_operator()
    return world


@pytest.mark.parametrize("seed", range(WALKS))
def test_job_survives_a_walk_through_faults(tmp_path: Path, seed: int) -> None:
    world = walk(tmp_path, seed)
    replicas = world.store.read()["spec"]["replicas"]
    world.until(lambda: len(set(world.training().split(","))) == replicas, limit_s=200, step_every_s=0.5)
    assert world.phase == "Running"
    assert world.status["summary"]["ready"] == f"{replicas}/{replicas}"


@pytest.mark.parametrize("seed", range(3))
def test_script_survives_a_walk_through_faults(tmp_path: Path, seed: int) -> None:
    world = walk(tmp_path, seed, script="plain")
    replicas = world.store.read()["spec"]["replicas"]
    world.until(lambda: world.status["summary"]["ready"] == f"{replicas}/{replicas}" and world.phase == "Running", 200)
    world.advance(40)
    assert len(parse_members(world.members)) == replicas
    assert (world.phase, len(world.names())) == ("Running", replicas)
    assert all(t.alive for a in world.agents.values() for t in a.trainers.values())
