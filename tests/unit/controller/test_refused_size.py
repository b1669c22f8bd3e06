"""A size that a script refuses is not the end: the job goes back to the size with which it trained."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from _regroup_agent import events as ev
from _regroup_agent.script_progress import Words
from regroup.protocol import local
from regroup.protocol.wire import COUNTED, REPORTED
from regroup_operator.api.members import parse_members
from regroup_operator.plan.failures.crashes import STEADY_S
from regroup_operator.plan.failures.refused_size import HOLD_S, SETTLE_S
from tests.builders.plan import JobBuilder, make_job
from tests.simulator.trainers import Trainer
from tests.simulator.world import World

LINE = "AssertionError"


def elastic(replicas: int, **policy: Any) -> JobBuilder:
    return make_job().with_replicas(replicas).with_spec(elasticPolicy={"minReplicas": 1, "maxReplicas": 8, **policy})


def formed(world: World) -> None:
    """All processes that run pass init_process_group."""
    world.advance(2.0)
    for agent in world.agents.values():
        for rank, trainer in agent.trainers.items():
            if agent.alive and trainer.runs:
                agent.trainer_says(trainer, local.Observed(rank, trainer.incarnation, "formed"))
    world.advance(0.2)


def raises(world: World, *slots: int, line: str = LINE) -> None:
    """The script raises in these workers."""
    for slot in slots:
        world.kill_process(world.uid(slot), code=1, last_line=line)
    world.advance(0.2)


def trained(tmp_path: Path, replicas: int = 2, **policy: Any) -> World:
    """A script that has trained with this size."""
    world = World(tmp_path, elastic(replicas, **policy), script="plain")
    formed(world)
    assert world.phase == "Running"
    world.advance(STEADY_S + 2.0, 1.0)
    assert world.status["lastGoodSize"] == replicas
    return world


def grown(world: World, replicas: int) -> None:
    world.scale(replicas)
    world.until(lambda: world.members == f"0-{replicas - 1}", limit_s=20.0)
    world.advance(1.0)


def refused_when_smaller(world: World) -> None:
    """The job shrinks to 3 workers by a loss, and the script raises in all of them, twice."""
    world.until(lambda: world.members == "0-2", limit_s=30.0)
    world.advance(1.0)
    again(world, 0, 1, 2)
    again(world, 0, 1, 2)
    world.advance(30.0, 1.0)


def again(world: World, *slots: int, line: str = LINE) -> None:
    """The script raises in these workers, and they start again if the size is not refused."""
    generation = world.generation
    raises(world, *slots, line=line)
    for _ in range(20):
        if world.generation > generation:
            break
        world.advance(1.0)
    world.advance(1.0)


def says(world: World) -> tuple[str, str]:
    said = world.condition("Degraded")
    return said["status"], said["reason"]


@pytest.mark.parametrize("moment", ["before", "formed"])
def test_growth_that_the_script_refuses_goes_back_and_counts_nothing(tmp_path: Path, moment: str) -> None:
    """nanoGPT raises after init_process_group."""
    world = trained(tmp_path)
    grown(world, 3)
    if moment == "formed":
        formed(world)
        assert world.phase == "Running"
    generation = world.generation
    raises(world, 0)
    world.advance(SETTLE_S / 2)
    assert world.generation == generation, "the others are waited for"
    raises(world, 1, 2)
    world.until(lambda: world.members == "0-1", limit_s=10.0)
    formed(world)
    assert world.phase == "Running"
    assert says(world) == ("True", "SizeRefused")
    assert world.condition("Degraded")["message"].startswith(
        "The script refuses 3 workers: it failed in every one of them before it had trained with them (AssertionError). "
        "Until spec.replicas changes, the job trains with 2 workers, as it did before. It tries 3 workers again after a suspension."
    )
    assert [n.reason for n in world.notes].count("SizeRefused") == 1
    world.advance(2 * HOLD_S, 1.0)
    restarts = world.status["restarts"]
    assert (restarts["total"], restarts.get("recent", [])) == (0, [])
    assert (world.members, world.status["summary"]["ready"]) == ("0-1", "2/2")
    assert sorted(p.slot for p in world.pods.by_uid.values() if p.usable) == [0, 1]


def test_size_is_tried_again_after_an_edit_and_not_for_the_same_number(tmp_path: Path) -> None:
    world = trained(tmp_path)
    grown(world, 3)
    raises(world, 0, 1, 2)
    world.until(lambda: world.members == "0-1", limit_s=10.0)
    formed(world)
    generation = world.generation
    for _ in range(20):  # an autoscaler writes the same number
        world.scale(3)
        world.advance(15.0, 1.0)
    assert world.generation == generation
    world.scale(4)
    world.until(lambda: world.members == "0-3", limit_s=20.0)
    formed(world)
    assert "refusedSize" not in world.status
    assert says(world) == ("False", "AsWanted")
    world.advance(STEADY_S + 2.0, 1.0)
    assert world.status["lastGoodSize"] == 4


def test_autoscaler_that_alternates_starts_a_refused_size_once(tmp_path: Path) -> None:
    world = trained(tmp_path)
    grown(world, 3)
    raises(world, 0, 1, 2)
    world.until(lambda: world.members == "0-1", limit_s=10.0)
    world.scale(4)
    world.until(lambda: world.members == "0-3", limit_s=20.0)
    formed(world)
    world.advance(STEADY_S + 2.0, 1.0)
    generation, events = world.generation, [note.reason for note in world.notes].count("SizeRefused")
    for _ in range(5):
        world.scale(3)
        world.advance(30.0, 1.0)
        assert says(world) == ("True", "SizeRefused")
        at = world.status["refusedSizes"][0]["at"]
        assert world.condition("Degraded")["message"].startswith(
            f"The script refused 3 workers at {at}. Until spec.replicas changes, the job trains with 4 workers, as it did before."
        )
        world.kill_operator()
        world.start_operator()
        world.scale(4)
        world.advance(30.0, 1.0)
        assert says(world) == ("False", "AsWanted")
    assert (world.generation, world.members) == (generation, "0-3")
    assert [note.reason for note in world.notes].count("SizeRefused") == events
    assert [one["workers"] for one in world.status["refusedSizes"]] == [3]


def test_loss_passes_over_a_size_that_was_refused_before(tmp_path: Path) -> None:
    world = trained(tmp_path)
    grown(world, 3)
    raises(world, 0, 1, 2)
    world.until(lambda: world.members == "0-1", limit_s=10.0)
    grown(world, 4)
    formed(world)
    world.advance(STEADY_S + 2.0, 1.0)
    world.pods.pending.add(3)
    world.vanish(world.uid(3))
    world.until(lambda: world.members == "0-1", limit_s=30.0)
    formed(world)
    assert world.phase == "Running"
    world.run_pod(world.uid(3, 1))
    world.until(lambda: world.members == "0-2,3.1", limit_s=30.0)


def test_suspension_has_refused_sizes_tried_again(tmp_path: Path) -> None:
    world = trained(tmp_path)
    grown(world, 3)
    raises(world, 0, 1, 2)
    world.until(lambda: world.members == "0-1", limit_s=10.0)
    formed(world)
    for suspends in (True, False):
        world.suspend(suspends)
        world.advance(60.0, 1.0)
    world.until(lambda: len(parse_members(world.members)) == 3, limit_s=60.0)
    assert "refusedSizes" not in world.status


def test_next_operator_knows_what_was_refused(tmp_path: Path) -> None:
    world = trained(tmp_path)
    grown(world, 3)
    raises(world, 0, 1)
    world.kill_operator()
    raises(world, 2)
    world.start_operator()
    world.until(lambda: world.members == "0-1", limit_s=60.0)
    formed(world)
    assert says(world) == ("True", "SizeRefused")
    generation = world.generation
    world.kill_operator()
    world.start_operator()
    world.advance(60.0, 1.0)
    assert (world.generation, world.members) == (generation, "0-1")
    assert world.status["restarts"]["total"] == 0


@pytest.mark.parametrize("pod_is_there", [True, False])
def test_smaller_size_that_the_script_refuses(tmp_path: Path, pod_is_there: bool) -> None:
    """The worker that was scaled away keeps its pod for a while. Later it gets another one."""
    world = trained(tmp_path, 4)
    grown(world, 3)
    world.advance(HOLD_S - 10.0 if pod_is_there else HOLD_S + 5.0, 1.0)  # it starts, and does not form
    kept = [0, 1, 2, 3] if pod_is_there else [0, 1, 2]
    assert sorted(p.slot for p in world.pods.by_uid.values() if p.usable) == kept
    raises(world, 0, 1, 2)
    world.until(lambda: world.members == "0-3", limit_s=20.0)
    formed(world)
    assert (world.phase, *says(world)) == ("Running", "True", "SizeRefused")


def test_smaller_size_after_a_loss_waits_for_the_lost_worker(tmp_path: Path) -> None:
    world = trained(tmp_path, 3)
    world.pods.pending.add(2)
    world.vanish(world.uid(2))
    world.until(lambda: world.members == "0-1", limit_s=30.0)
    world.advance(1.0)
    again(world, 0, 1)
    again(world, 0, 1)
    world.advance(60.0, 1.0)
    assert (world.phase, world.condition("Training")["reason"]) == ("Waiting", "TooFewMembers")
    message = world.condition("Training")["message"]
    assert message.startswith("2 workers ready, 3 needed")
    assert "The script refuses 2 workers" in message
    world.run_pod(world.uid(2, 1))
    world.until(lambda: world.members == "0-1,2.1", limit_s=30.0)
    formed(world)
    assert world.phase == "Running"


@pytest.mark.parametrize(
    "edit",
    [{"replicas": 2}, {"sizes": [1, 2, 4]}, {"sizeMultipleOf": 2, "minReplicas": 2}],
    ids=["replicas", "sizes", "multiple"],
)
def test_edit_while_the_job_waits_trains_with_the_new_size(tmp_path: Path, edit: dict[str, Any]) -> None:
    """The same exits, which the agents repeat, are not judged once more."""
    world = trained(tmp_path, 4)
    world.pods.pending.add(3)
    world.vanish(world.uid(3))
    refused_when_smaller(world)
    assert world.phase == "Waiting"
    num_restarts = world.status["restarts"]["total"]
    num_events = [note.reason for note in world.notes].count("SizeRefused")
    if "replicas" in edit:
        world.scale(edit["replicas"])
    else:
        world.store.change_spec(lambda spec: spec["elasticPolicy"].update(edit))
        world.dirty()
    world.until(lambda: world.members == "0-1", limit_s=20.0)
    formed(world)
    assert world.phase == "Running"
    assert [note.reason for note in world.notes].count("SizeRefused") == num_events
    assert world.status["restarts"]["total"] == num_restarts
    assert "refusedSize" not in world.status


@pytest.mark.parametrize(
    ("line", "num_failures"),
    [
        ("OSError: [Errno 5] Input/output error: '/data/train.bin'", 1),
        ("RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory", 2),
    ],
    ids=["passes", "torn file"],
)
def test_failure_that_is_not_about_the_size_does_not_stop_a_job_after_a_loss(
    tmp_path: Path, line: str, num_failures: int
) -> None:
    world = trained(tmp_path, 4)
    world.pods.pending.add(3)
    world.vanish(world.uid(3))
    world.until(lambda: world.members == "0-2", limit_s=30.0)
    world.advance(1.0)
    for _ in range(num_failures):
        again(world, 0, 1, 2, line=line)
    formed(world)
    assert (world.phase, world.members) == ("Running", "0-2")
    assert "refusedSize" not in world.status


def test_pod_that_the_job_waits_for_is_not_given_back(tmp_path: Path) -> None:
    """While the script refuses 3 workers the job needs 4, although minReplicas is less."""
    world = World(tmp_path, elastic(4, pendingTimeoutSeconds=20), script="plain", num_nodes=4)
    formed(world)
    world.advance(STEADY_S + 2.0, 1.0)
    for node in world.pods.nodes.values():
        node.is_cordoned = True
    world.vanish(world.uid(3))
    refused_when_smaller(world)
    world.advance(600.0, 5.0)
    assert "PodGivenBack" not in [note.reason for note in world.notes]


def test_first_size_fails_as_ever(tmp_path: Path) -> None:
    world = World(tmp_path, elastic(3), script="plain", num_nodes=4)
    formed(world)
    for _ in range(20):
        if world.has_ended:
            break
        raises(world, *(slot for slot in range(3) if world.agents[world.uid(slot)].trainers))
        world.advance(9.0, 1.0)
    assert world.phase == "Failed"
    assert "refusedSize" not in world.status


def test_failure_of_one_worker_counts_and_its_size_is_kept(tmp_path: Path) -> None:
    world = trained(tmp_path)
    grown(world, 3)
    formed(world)
    raises(world, 1)
    raises(world, 0, 2, line="RuntimeError: Connection closed by peer")
    world.until(lambda: world.generation == 3, limit_s=10.0)
    world.advance(2.0)
    assert world.members == "0-2"
    assert world.status["restarts"]["total"] == 1
    raises(world, 1)
    world.until(lambda: world.members == "0-1", limit_s=10.0)
    assert world.status["restarts"]["total"] == 1, "the second failure at the same place is a refusal"


def test_failure_after_it_has_trained_is_no_refusal(tmp_path: Path) -> None:
    world = trained(tmp_path)
    grown(world, 3)
    formed(world)
    world.advance(STEADY_S + 2.0, 1.0)
    assert world.status["lastGoodSize"] == 3
    raises(world, 0, 1, 2)
    world.advance(20.0, 1.0)
    assert (world.members, world.status["restarts"]["total"]) == ("0-2", 1)


@pytest.mark.parametrize(("way", "steps"), [(COUNTED, [1, 2]), (REPORTED, [7, 8])])
def test_failure_after_reported_steps_is_no_refusal(tmp_path: Path, way: str, steps: list[int]) -> None:
    """The first word may be the step of the checkpoint from which the script continues: it proves nothing."""
    world = trained(tmp_path)
    grown(world, 3)
    for step in steps:
        assert world.status["lastGoodSize"] == 2
        agent = world.agents[world.uid(0)]
        agent.handle(ev.Told(0, agent.trainers[0].incarnation, way, Words(step=step)))
        world.advance(3.0)
    assert world.status["lastGoodSize"] == 3
    raises(world, 0, 1, 2)
    world.advance(5.0)
    assert (world.members, world.status["restarts"]["total"]) == ("0-2", 1)


def test_session_has_no_such_sizes(tmp_path: Path) -> None:
    world = World(tmp_path, elastic(2), known_session=True, num_nodes=4)
    world.advance(STEADY_S + 5.0, step_every_s=0.5)
    assert "lastGoodSize" not in world.status


def test_loss_that_leads_to_a_refused_size_does_not_take_a_growth_back(tmp_path: Path) -> None:
    world = trained(tmp_path)
    grown(world, 4)
    formed(world)
    world.pods.pending.add(3)
    world.vanish(world.uid(3))
    world.until(lambda: world.members == "0-2", limit_s=30.0)
    world.advance(1.0)
    raises(world, 0, 1, 2)
    world.until(lambda: world.members == "0-1", limit_s=10.0)
    formed(world)
    assert says(world) == ("True", "SizeRefused")
    assert world.condition("Degraded")["message"].endswith(
        "Until spec.replicas changes, the job trains with 2 or 4 workers only. It tries 3 workers again after a suspension. "
        "2 of 4 workers train."
    )
    world.run_pod(world.uid(3, 1))
    world.until(lambda: world.members == "0-2,3.1", limit_s=30.0)
    formed(world)
    assert (world.phase, *says(world)) == ("Running", "False", "AsWanted")


@pytest.mark.parametrize("seed", range(25))
def test_script_that_refuses_odd_sizes_never_fails_and_trains_again(tmp_path: Path, seed: int) -> None:
    """Sizes, losses, and operators at random. All workers raise at an odd size; else they train."""
    rng = random.Random(seed)
    world = trained(tmp_path, 4)
    began = set[Trainer]()

    def live(seconds: float) -> None:
        for _ in range(round(seconds)):
            world.advance(1.0)
            news = [t for agent in world.agents.values() if agent.alive for t in agent.trainers.values() if t.runs]
            for trainer in (t for t in news if t not in began and t.launched == world.generation):
                began.add(trainer)
                if len(parse_members(world.members)) % 2:
                    trainer.agent.exited(trainer, 1, LINE)
                else:
                    message = local.Observed(trainer.local_rank, trainer.incarnation, "formed")
                    trainer.agent.trainer_says(trainer, message)

    for _ in range(12):
        event = rng.choice(["scale", "scale", "vanish", "operator"])
        if event == "scale":
            world.scale(rng.randint(1, 6))
        elif event == "vanish":
            world.vanish(rng.choice(sorted(uid for uid, pod in world.pods.by_uid.items() if pod.usable)))
        else:
            world.kill_operator()
            world.start_operator()
        live(rng.choice([1.0, 5.0, 20.0, 50.0]))
    live(150.0)
    assert not world.has_ended, world.condition("Failed")
    assert len(parse_members(world.members)) == world.wanted, world.summary()
    assert world.wanted % 2 == 0
    assert world.phase == "Running", world.summary()
