"""An outage at minReplicas is dated by its begin, by the operator that saw it and by one that did not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regroup_operator.model.plan import seconds_of
from tests.builders.plan import make_job
from tests.simulator.operators import WALL
from tests.simulator.world import World

OUTAGE_S = 34.0


def lost(world: World, how: str) -> float:
    """Have a member lost, with no node for another pod. Returns when the group stood still."""
    world.until(lambda: world.phase == "Running")
    world.advance(20.0, step_every_s=0.5)
    world.pods.pending.add(1)
    stood_s = world.now_s
    if how == "its pod vanishes":
        world.vanish(world.uid(1))
    else:
        world.power_off(world.uid(1))
        world.advance(15.0)
        world.vanish(world.uid(1))
    return stood_s


def incident_after(world: World) -> dict[str, Any]:
    """Have another pod run; return what the status says of the outage."""
    before = world.generation
    world.pods.pending.clear()
    world.run_pod(world.uid(1, 1))
    world.until(lambda: world.generation > before, step_every_s=0.5)
    world.advance(3.0, step_every_s=0.5)
    incident: dict[str, Any] = world.status["incidents"][-1]
    return incident


@pytest.mark.parametrize("how", ["its pod vanishes", "its node loses power, and its pod vanishes later"])
@pytest.mark.parametrize("another", [False, True], ids=["the same operator", "another operator"])
def test_outage_begins_when_training_stood_still(tmp_path: Path, how: str, another: bool) -> None:
    world = World(tmp_path, make_job().with_replicas(2).fixed(), known_session=True)
    stood_s = lost(world, how)
    world.advance(2.0)
    if another:
        world.kill_operator()
        world.advance(5.0)
        world.start_operator()
    world.advance(OUTAGE_S)
    ended_s = world.now_s
    incident = incident_after(world)
    at_s = seconds_of(incident["at"]) - WALL
    allowed_s = 12.0 if "power" in how else 2.0  # a silent worker counts as lost after disconnectSeconds
    assert stood_s - (11.0 if another else 2.0) <= at_s <= stood_s + allowed_s, "a status tells progress every 10 s"
    assert incident["decideMs"] / 1000 >= ended_s - at_s - 1.0


def test_outage_that_only_the_next_operator_sees_begins_when_training_stood_still(tmp_path: Path) -> None:
    """The members that are left go on at once, so one plan both finds the loss and announces."""
    world = World(tmp_path, make_job().with_replicas(3).elastic(2, 3), known_session=True)
    world.until(lambda: world.phase == "Running")
    world.advance(20.0, step_every_s=0.5)
    stood_s, before = world.now_s, world.generation
    world.pods.pending.add(1)
    world.power_off(world.uid(1))
    world.kill_operator()
    world.advance(5.0)
    world.start_operator()
    world.until(lambda: world.generation > before)
    announced_s = world.now_s
    world.advance(3.0, step_every_s=0.5)
    incident = world.status["incidents"][-1]
    at_s = seconds_of(incident["at"]) - WALL
    assert incident["cause"] == "NeverConnected"
    assert stood_s - 11.0 <= at_s <= stood_s + 2.0, "a status tells progress every 10 s"
    assert incident["decideMs"] / 1000 >= announced_s - at_s - 1.0
