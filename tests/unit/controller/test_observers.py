"""Members that observe each other: a node without power is seen in two seconds, and nothing less than that loses anybody."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from regroup_operator.model.records import Settings
from tests.builders.plan import JobBuilder, make_job
from tests.simulator import hazards
from tests.simulator.pace import Pace
from tests.simulator.world import World

SEEN_S = 1.85
"""A quarter of a second between two attempts, 1.5 s of silence, and what it takes to look."""


def training(
    tmp_path: Path, job: JobBuilder | None = None, *, seed: int = 0, num_nodes: int = 3, **kwargs: Any
) -> World:
    """Return a job of three workers on three nodes that trains, and whose agents observe each other."""
    values: dict[str, Any] = {
        "settings": Settings(term_grace_s=0.0),
        "observes": True,
        "pace": Pace(random.Random(seed)),
    } | kwargs
    world = World(tmp_path, job or make_job().with_replicas(3).elastic(1, 5), num_nodes=num_nodes, **values)
    world.advance(0.1)
    world.advance(3, step_every_s=0.1)
    world.until(lambda: world.phase == "Running", step_every_s=0.1)
    return world


def cut(world: World, node: str) -> float:
    """Take a node's power; return how long it took until the others had a generation without it."""
    before = world.generation
    assert hazards.node_off(world, node, 1000.0)
    return world.until(lambda: world.generation > before, 20.0, step_every_s=0.05)


def cause(world: World) -> str:
    found: str = world.status["incidents"][-1]["cause"]
    return found


@pytest.mark.parametrize("seed", range(5))
def test_node_without_power_is_seen_within_two_seconds(tmp_path: Path, seed: int) -> None:
    """Long before its stream ends (5 s of keepalives) or disconnectSeconds (5) are over."""
    world = training(tmp_path, seed=seed)
    world.advance(seed / 7, step_every_s=0.1)
    assert 1.5 <= cut(world, "node-1") <= SEEN_S
    assert (world.training(), cause(world)) == ("0-0,2-0", "Unheard")
    incident = world.status["incidents"][-1]
    assert incident["culprit"] == "1"
    assert "worker 1 on node node-1 cannot be reached from other nodes" in incident["decision"]
    assert 1500 <= incident["detectMs"] <= 2000


@pytest.mark.parametrize("seed", range(3))
def test_lost_worker_is_not_ready_although_its_stream_is_open(tmp_path: Path, seed: int) -> None:
    """Its stream ends 5 s after the cut; nobody hears of the node before."""
    world = training(tmp_path, seed=seed)
    assert cut(world, "node-1") <= SEEN_S
    ready = set[int]()
    for _ in range(60):
        ready.add(world.status["readyReplicas"])
        world.advance(0.05, step_every_s=0.05)
    assert ready == {2}


def test_all_workers_of_the_node_are_left_out_at_once(tmp_path: Path) -> None:
    """They are silent one after the other; the generation names none of them."""
    world = training(tmp_path, make_job().with_replicas(6).elastic(1, 6))
    assert cut(world, "node-2") <= SEEN_S + 0.5
    assert world.generation == 2
    world.advance(3, step_every_s=0.1)
    assert (world.generation, world.training()) == (2, "0-0,1-0,3-0,4-0")


def test_two_workers_are_observed_by_each_other_and_the_operator(tmp_path: Path) -> None:
    world = training(tmp_path, make_job().with_replicas(2).elastic(1, 2))
    assert 1.5 <= cut(world, "node-1") <= 3.1
    assert (world.training(), cause(world)) == ("0-0", "Unheard")


def test_script_is_left_out_as_soon(tmp_path: Path) -> None:
    world = training(tmp_path, script="plain")
    assert cut(world, "node-1") <= SEEN_S
    assert cause(world) == "Unheard"


def test_job_of_fixed_size_keeps_its_state_and_waits_for_the_replacement(tmp_path: Path) -> None:
    world = training(tmp_path, make_job().with_replicas(3).fixed(), num_nodes=4)
    assert hazards.node_off(world, "node-1", 1000.0)
    world.advance(SEEN_S)
    assert world.condition("Training")["reason"] == "TooFewMembers", world.summary()
    world.until(lambda: world.training() == "0-0,1-1,2-0", 120.0, step_every_s=0.1)


def test_groups_of_workers_go_on_in_whole_groups(tmp_path: Path) -> None:
    job = make_job().with_replicas(6).with_spec(workersPerGroup=2, elasticPolicy={"minReplicas": 2, "maxReplicas": 6})
    world = training(tmp_path, job, num_nodes=6)
    node = world.pods.by_uid[world.uid(3)].node
    assert cut(world, node) <= SEEN_S
    assert world.training() == "0-0,1-0,4-0,5-0"


def test_agents_of_an_earlier_release_are_lost_as_before(tmp_path: Path) -> None:
    world = training(tmp_path, observes=False)
    assert cut(world, "node-1") >= 5.0
    assert cause(world) in ("Disconnected", "Unresponsive")


@pytest.mark.parametrize("seed", range(8))
def test_pause_of_a_second_loses_nobody(tmp_path: Path, seed: int) -> None:
    """Of one node after the other, and of all at once."""
    world, rng = training(tmp_path, seed=seed), random.Random(seed)
    for _ in range(10):
        slots = rng.choice([[0], [1], [2], [0, 1], [0, 1, 2]])
        world.network.pause([world.uid(slot) for slot in slots], 1.0)
        world.advance(1.0)
        world.advance(rng.uniform(0.5, 1.5), step_every_s=0.1)
    assert (world.generation, world.ledger.num_unheard, world.phase) == (1, 0, "Running")


def test_pause_of_two_seconds_is_a_loss(tmp_path: Path) -> None:
    """Its worker comes back with the next planned generation: a false loss costs a recovery, and no step."""
    world = training(tmp_path)
    world.network.pause([world.uid(1)], 2.2)
    world.advance(2.1)
    assert (world.generation, world.training(), cause(world)) == (2, "0-0,2-0", "Unheard")
    world.until(lambda: world.training() == "0-0,1-0,2-0", 30.0, step_every_s=0.1)
    assert world.ledger.rolled_back == 0


@pytest.mark.parametrize("way", [("node-0", "node-1"), ("node-1", "node-0")])
def test_way_that_is_cut_between_two_nodes_is_no_loss_of_either(tmp_path: Path, way: tuple[str, str]) -> None:
    """One observer hears nothing, the other does; and the suspect answers the operator. No step is committed meanwhile."""
    world = training(tmp_path)
    world.network.deaf_nodes.add(way)
    world.network.watch_out()
    world.advance(4.0)
    assert world.ledger.num_unheard == 0
    world.network.deaf_nodes.discard(way)
    world.advance(3.0, step_every_s=0.1)
    assert (world.generation, world.phase) == (1, "Running")


def test_worker_that_nobody_but_the_operator_hears_is_not_lost_by_its_observers(tmp_path: Path) -> None:
    """The script may use another network, and its agent answers; steps are long."""
    world = training(tmp_path)
    world.network.deaf_nodes |= {("node-0", "node-1"), ("node-2", "node-1")}
    world.network.watch_out()
    world.advance(10.0)
    assert (world.generation, world.ledger.num_unheard) == (1, 0)
    assert world.now_s - world.operators[0].registry.sessions(world.pods.by_uid.values())[world.uid(1)].heard_at_s < 1.5


@pytest.mark.parametrize("factor", [1.0, 10.0])
def test_steps_prove_that_a_worker_lives_whose_node_only_its_group_reaches(tmp_path: Path, factor: float) -> None:
    """Neither its observers nor the operator hear of it; training has a network of its own, and progress may be reported seldom."""
    world = training(tmp_path, progress_factors=(factor,))
    world.advance(25.0, step_every_s=0.1)
    world.network.deaf_nodes |= {("node-0", "node-1"), ("node-2", "node-1")}
    agent = world.agents[world.uid(1)]
    agent.muted = True
    world.network.watch_out()
    world.advance(4.0, step_every_s=0.1)
    assert (world.generation, world.ledger.num_unheard) == (1, 0)
    world.network.deaf_nodes.clear()
    agent.unmute()
    world.network.watch_out()
    world.advance(3.0, step_every_s=0.1)
    assert (world.generation, world.phase) == (1, "Running")


def test_new_operator_hears_again_what_observers_have_not_heard(tmp_path: Path) -> None:
    """It has never spoken to the agent on the dead node, which is called lost as before; it does not lose another one."""
    world = training(tmp_path, settings=Settings())
    assert hazards.node_off(world, "node-1", 1000.0)
    world.advance(1.0)
    world.kill_operator()
    world.start_operator()
    world.advance(0.5)
    sessions = world.operators[0].registry.sessions(world.pods.by_uid.values())
    assert {uid: [one.pod_uid for one in s.unheard] for uid, s in sessions.items()} == {
        world.uid(0): [world.uid(1)], world.uid(2): [world.uid(1)],
    }  # fmt: skip
    world.until(lambda: world.training() == "0-0,2-0", 30.0, step_every_s=0.1)
