"""The number of workers: spares, growth, and workers for which there is no room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from _regroup_agent import events as ev
from tests.builders.plan import JobBuilder, make_job
from tests.simulator import hazards
from tests.simulator.world import FOREVER, World


def elastic(replicas: int, **policy: Any) -> JobBuilder:
    return make_job().with_replicas(replicas).with_spec(elasticPolicy={"minReplicas": 1, "maxReplicas": 8, **policy})


def running(tmp_path: Path, job: JobBuilder) -> World:
    world = World(tmp_path, job, known_session=True, num_nodes=4)
    world.advance(10.0, step_every_s=0.5)
    return world


def slots(world: World) -> list[int]:
    return sorted(p.slot for p in world.pods.by_uid.values() if p.usable)


def test_spare_waits_and_takes_the_place_of_a_lost_worker_in_one_generation(tmp_path: Path) -> None:
    world = running(tmp_path, make_job().with_replicas(3).fixed().with_recovery(spares=1))
    assert (world.generation, world.training(), slots(world)) == (1, "0-0,1-0,2-0", [0, 1, 2, 3])
    assert (world.status["summary"]["ready"], world.status["replicas"]) == ("3/3", 3)
    assert world.condition("PodsReady")["message"] == "3 of 3 worker pods run, 1 of 1 spares."
    world.vanish(world.uid(1))
    world.until(lambda: world.training() == "0-0,2-0,3-0", limit_s=3.0, step_every_s=0.5)
    world.advance(60.0, step_every_s=0.5)
    assert (world.generation, world.training(), slots(world)) == (2, "0-0,2-0,3-0", [0, 1, 2, 3])
    assert world.condition("Degraded")["status"] == "False"
    world.vanish(world.uid(3))
    world.until(lambda: world.training() == "0-0,1-1,2-0", limit_s=3.0, step_every_s=0.5)


def test_drained_worker_is_replaced_by_a_spare_in_one_generation(tmp_path: Path) -> None:
    world = running(tmp_path, elastic(2).with_recovery(spares=1))
    world.terminate(world.uid(0))
    world.until(lambda: world.training() == "1-0,2-0", limit_s=5.0, step_every_s=0.5)
    world.advance(60.0, step_every_s=0.5)
    assert (world.generation, world.status["membership"]["kind"]) == (2, "planned")
    assert slots(world) == [0, 1, 2]


def test_growth_uses_the_spare_and_shrinking_makes_one(tmp_path: Path) -> None:
    world = running(tmp_path, elastic(2).with_recovery(spares=1))
    world.scale(3)
    world.until(lambda: world.training() == "0-0,1-0,2-0", limit_s=5.0, step_every_s=0.5)
    world.until(lambda: slots(world) == [0, 1, 2, 3])
    world.scale(1)
    world.until(lambda: slots(world) == [0, 1], limit_s=30.0, step_every_s=0.5)
    assert world.training() == "0-0"


def test_spares_that_are_taken_away_leave(tmp_path: Path) -> None:
    world = running(tmp_path, elastic(2).with_recovery(spares=2))
    assert slots(world) == [0, 1, 2, 3]
    world.store.change_spec(lambda spec: spec["recovery"].update(spares=0))
    world.dirty()
    world.until(lambda: slots(world) == [0, 1], limit_s=30.0, step_every_s=0.5)
    assert world.generation == 1


def test_spare_that_does_not_come_keeps_no_job_from_training(tmp_path: Path) -> None:
    world = World(
        tmp_path, make_job().with_replicas(2).fixed().with_recovery(spares=1), known_session=True, start=False
    )
    world.pods.pending = {2}
    world.start_operator()
    world.advance(5.0, step_every_s=0.5)
    assert world.training() == "0-0,1-0"
    assert (world.condition("PodsReady")["status"], world.condition("Degraded")["status"]) == ("True", "False")
    assert world.condition("PodsReady")["message"] == "2 of 2 worker pods run, 0 of 1 spares."


def test_growth_waits_for_the_end_of_its_time_and_a_replacement_does_not(tmp_path: Path) -> None:
    world = running(tmp_path, elastic(2, growthCooldownSeconds=60))
    world.scale(3)
    world.until(lambda: world.training() == "0-0,1-0,2-0", limit_s=10.0, step_every_s=0.5)
    world.scale(5)
    world.vanish(world.uid(2))
    world.until(lambda: world.training() == "0-0,1-0,2-1", limit_s=20.0, step_every_s=0.5)
    assert slots(world) == [0, 1, 2]
    pods = world.condition("PodsReady")
    assert (pods["status"], pods["reason"]) == ("False", "HeldBack")
    assert "grows from 3 to 5 workers at" in pods["message"]
    assert world.condition("Degraded")["status"] == "False"
    world.kill_operator()
    world.start_operator()
    world.advance(20.0, step_every_s=0.5)
    assert slots(world) == [0, 1, 2]
    world.until(lambda: world.training().count(",") == 4, limit_s=60.0, step_every_s=0.5)
    world.scale(1)
    world.until(lambda: world.training() == "0-0", limit_s=5.0, step_every_s=0.5)


def test_worker_without_room_is_given_back_and_tried_again(tmp_path: Path) -> None:
    world = running(tmp_path, elastic(2, pendingTimeoutSeconds=20))
    for node in world.pods.nodes.values():
        node.is_cordoned = True
    world.scale(3)
    world.advance(10.0, step_every_s=0.5)
    assert slots(world) == [0, 1, 2]
    assert world.condition("PodsReady")["reason"] == "Unschedulable"
    world.until(lambda: slots(world) == [0, 1], limit_s=20.0, step_every_s=0.5)
    world.advance(2.0, step_every_s=0.5)
    assert world.condition("PodsReady")["reason"] == "HeldBack"
    assert [note.reason for note in world.notes].count("PodGivenBack") == 1
    assert world.training() == "0-0,1-0"
    for node in world.pods.nodes.values():
        node.is_cordoned = False
    world.pods.schedule_all()
    world.until(lambda: world.training() == "0-0,1-0,2-1", limit_s=70.0, step_every_s=0.5)
    assert "pods" not in world.status.get("restarts", {}) or world.status["restarts"]["pods"] == 0


def test_replacement_that_is_not_needed_gives_its_room_to_one_that_is(tmp_path: Path) -> None:
    """Three nodes with room for one pod each. The worker of a node without power is back before its replacement has a node; a node
    that becomes free gets the replacement, and the pod that the job stands still for has none."""
    world = World(tmp_path, make_job().with_replicas(3).fixed(), known_session=True, num_nodes=3)
    world.pods.per_node = 1
    world.advance(10.0, step_every_s=0.5)
    hazards.node_off(world, "node-2", 200.0)
    world.until(lambda: "2-1" in world.names(), limit_s=90.0, step_every_s=0.5)
    world.vanish(world.uid(0))
    world.until(lambda: "0-1" in world.names(), limit_s=30.0, step_every_s=0.5)
    pods = {p.name.removeprefix("digits-worker-"): p.node for p in world.pods.by_uid.values()}
    assert pods == {"0-1": "", "1-0": "node-1", "2-0": "node-2", "2-1": "node-0"}
    assert world.condition("PodsReady")["message"].startswith("2 of 3 worker pods run")
    world.until(lambda: world.training() == "0-1,1-0,2-0", limit_s=250.0, step_every_s=0.5)


def test_workers_that_are_lost_count_as_no_room_that_others_have(tmp_path: Path) -> None:
    """Fewer than minReplicas are left: pods that wait for a node are not given back, although those of the dead nodes are there."""
    world = World(tmp_path, elastic(3, minReplicas=2, pendingTimeoutSeconds=20), known_session=True, num_nodes=3)
    world.advance(10.0, step_every_s=0.5)
    for node in world.pods.nodes.values():
        node.is_cordoned = True
    for name in ("node-1", "node-2"):
        hazards.node_off(world, name, FOREVER)
    world.until(lambda: len(world.pods.by_uid) == 5, limit_s=120.0, step_every_s=0.5)
    world.advance(600.0)
    assert [p.unscheduled_reason for p in world.pods.by_uid.values() if not p.node] == ["Unschedulable"] * 2
    for node in world.pods.nodes.values():
        node.is_cordoned = False
    world.pods.schedule_all()
    world.until(lambda: world.training() != "", limit_s=5.0, step_every_s=0.5)
    assert world.status["restarts"]["pods"] == 2


def test_room_for_one_group_goes_to_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler takes the pods of a job in any order; workers of one position alone could not train."""
    job = make_job().with_replicas(4).with_spec(workersPerGroup=2, elasticPolicy={"minReplicas": 2, "maxReplicas": 4})
    world = World(tmp_path, job, known_session=True, num_nodes=2, start=False)
    world.pods.per_node = 1
    place = world.pods.schedule

    def place_all() -> None:
        for pod in sorted(world.pods.by_uid.values(), key=lambda pod: (pod.slot % 2, pod.slot)):
            place(pod.uid)

    monkeypatch.setattr(world.pods, "schedule", lambda _: world.after(0.1, place_all))
    world.start_operator()
    world.until(lambda: world.training() == "0-0,1-0", limit_s=60.0, step_every_s=0.5)
    assert slots(world) == [0, 1, 2, 3]


EVEN = {"minReplicas": 2, "sizes": [2, 4, 8]}


@pytest.mark.parametrize(("replicas", "size"), [(4, 4), (5, 4), (7, 4), (3, 2), (8, 8)])
def test_number_between_two_sizes_trains_at_the_smaller_one(tmp_path: Path, replicas: int, size: int) -> None:
    """An autoscaler writes any number. Nothing is missing then, and no pod waits."""
    world = running(tmp_path, elastic(2, **EVEN))
    world.scale(replicas)
    world.until(lambda: world.training().count(",") + 1 == size, limit_s=20.0, step_every_s=0.5)
    world.advance(30.0, step_every_s=0.5)
    assert (slots(world), world.status["replicas"]) == (list(range(size)), size)
    assert world.status["summary"]["ready"] == f"{size}/{size}"
    assert (world.condition("PodsReady")["status"], world.condition("Degraded")["status"]) == ("True", "False")
    said = f"{size} is the largest size of spec.elasticPolicy.sizes up to spec.replicas ({replicas})."
    assert world.condition("Training")["message"].endswith(said) == (replicas != size)


@pytest.mark.parametrize("script", ["session", "plain"])
def test_loss_goes_on_at_the_next_size_and_grows_back(tmp_path: Path, script: str) -> None:
    policy = {"minReplicas": 2, "sizeMultipleOf": 2, "maxReplicas": 8}
    world = World(tmp_path, elastic(4, **policy), script=script, known_session=script == "session")
    world.advance(40.0, step_every_s=0.5)
    assert world.members == "0-3"
    world.pods.pending.add(1)
    world.vanish(world.uid(1))
    world.until(lambda: world.members == "0,2", limit_s=30.0, step_every_s=0.5)
    world.advance(10.0, step_every_s=0.5)
    assert slots(world) == [0, 1, 2, 3], "the third worker waits for the fourth"
    if script == "session":
        said = world.condition("Degraded")
        assert (said["status"], said["reason"]) == ("True", "FewerMembers")
        assert said["message"] == (
            "2 of 4 workers train. 1 more worker is ready and waits: the next size of spec.elasticPolicy is 4."
        )
    world.run_pod(world.uid(1, 1))
    world.until(lambda: world.members == "0,1.1,2-3", limit_s=30.0, step_every_s=0.5)


def test_surplus_workers_of_a_smaller_size_leave(tmp_path: Path) -> None:
    world = running(tmp_path, elastic(4, **EVEN))
    world.scale(3)
    world.until(lambda: slots(world) == [0, 1], limit_s=60.0, step_every_s=0.5)
    assert world.training() == "0-0,1-0"


def test_spares_come_beyond_the_size_and_not_beyond_replicas(tmp_path: Path) -> None:
    world = running(tmp_path, elastic(5, **EVEN).with_recovery(spares=1))
    assert (slots(world), world.status["replicas"]) == ([0, 1, 2, 3, 4], 4)


def test_script_grows_at_its_next_checkpoint_and_goes_on_after_a_loss_at_once(tmp_path: Path) -> None:
    policy = {"minReplicas": 1, "maxReplicas": 8, "growAt": "Checkpoint"}
    job = elastic(2, **policy).with_spec(checkpoint={"volumeClaim": "digits"})
    world = World(tmp_path, job, script="plain", num_nodes=4)
    world.advance(40.0, 1.0)
    assert world.members == "0-1"
    world.agents[world.uid(0)].handle(ev.Saved())
    world.advance(10.0, 1.0)
    world.scale(3)
    world.advance(60.0, 1.0)
    assert (world.members, slots(world)) == ("0-1", [0, 1, 2]), "the worker is ready and waits"
    said = world.condition("Degraded")
    assert (said["status"], said["reason"]) == ("True", "WaitingForCheckpoint")
    assert said["message"] == (
        "2 of 3 workers train. 1 more worker is ready and joins after the script's next checkpoint (spec.elasticPolicy.growAt)."
    )
    world.kill_operator()
    world.start_operator()
    world.advance(60.0, 1.0)
    assert world.members == "0-1", "an operator that takes over does not take the old one for new"
    world.agents[world.uid(1)].handle(ev.Saved())
    world.until(lambda: world.members == "0-2", limit_s=3.0)
    world.advance(30.0, 1.0)
    world.vanish(world.uid(2))
    world.until(lambda: world.members == "0-1", limit_s=10.0)
    world.advance(60.0, 1.0)
    assert world.members == "0-1"
    world.store.change_spec(lambda spec: spec["elasticPolicy"].update(growAt="Now"))
    world.dirty()
    world.until(lambda: world.members == "0-1,2.1", limit_s=10.0)


def test_workers_too_few_for_the_next_size_do_not_wait_for_a_checkpoint(tmp_path: Path) -> None:
    job = elastic(4, minReplicas=2, maxReplicas=8, sizes=[2, 4], growAt="Checkpoint")
    world = World(tmp_path, job.with_spec(checkpoint={"volumeClaim": "digits"}), script="plain", num_nodes=4)
    world.advance(40.0, 1.0)
    for node in world.pods.nodes.values():
        node.is_cordoned = True
    world.vanish(world.uid(3))
    world.until(lambda: world.members == "0-1", limit_s=30.0)
    world.advance(90.0, 1.0)
    assert world.members == "0-1"
    assert world.condition("Degraded")["message"].startswith(
        "2 of 4 workers train. 1 more worker is ready and waits: the next size of spec.elasticPolicy is 4."
    )
