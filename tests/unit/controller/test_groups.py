"""A whole job whose workers are groups of two: who trains, who is a spare, and what a document says of positions."""

from __future__ import annotations

import random

from regroup.protocol.document import Document
from regroup_operator.model.records import Settings
from tests.builders.plan import make_job
from tests.simulator.pace import Pace
from tests.simulator.world import World

START_S = 5.0
STEP_S = 0.5


def training(replicas: int = 6, minimum: int = 2) -> World:
    """Return a world in which all workers train, in groups of neighbours."""
    job = make_job().with_replicas(replicas).elastic(minimum, 8).with_spec(workersPerGroup=2)
    pace = Pace(random.Random(1), start_s=(START_S, START_S))
    world = World(None, job, processes=2, known_session=True, settings=Settings(term_grace_s=0.0), pace=pace)
    world.until(lambda: num_training(world) == replicas, step_every_s=STEP_S)
    assert world.members == f"0-{replicas - 1}"
    return world


def num_training(world: World) -> int:
    return world.training().count("-")


def document(world: World) -> Document:
    """Return the document of the newest generation."""
    found = [group.document for (number, _), group in world.groups.items() if number == world.generation]
    assert found[0] is not None
    return found[0]


def commits(world: World) -> None:
    """Let the job commit once more."""
    before = world.ledger.num_commits
    world.until(lambda: world.ledger.num_commits > before, limit_s=20.0, step_every_s=STEP_S)


def test_partner_of_a_lost_worker_is_a_spare_until_a_replacement_is_there() -> None:
    world = training()
    spare = world.uid(0)
    (kept,) = {t for t in world.agents[spare].trainers.values() if t.local_rank == 0}
    world.vanish(world.uid(1))
    commits(world)
    assert world.members == "2-5"
    degraded = world.condition("Degraded")
    assert (degraded["reason"], degraded["message"]) == (
        "FewerMembers", "4 of 6 workers train. Worker 0 is a spare: its group of 2 workers is not whole."
    )  # fmt: skip
    assert world.pods.by_uid[spare].alive
    world.until(lambda: num_training(world) == 6, step_every_s=STEP_S)
    assert world.members == "0,1.1,2-5"
    assert kept.alive
    assert spare not in world.status.get("released", ())
    assert world.ledger.rolled_back == 0


def test_survivors_of_two_groups_train_together_and_stay_together() -> None:
    world = training()
    world.vanish(world.uid(1))
    world.vanish(world.uid(4))
    commits(world)
    assert world.members == "0,5,2-3"
    got = document(world)
    assert [(m.slot, got.rank_offset(m.pod_uid)) for m in got.members] == [(0, 0), (5, 2), (2, 4), (3, 6)]
    world.until(lambda: num_training(world) == 6, step_every_s=STEP_S)
    assert world.members == "0,5,2-3,4.1,1.1"
    assert world.ledger.rolled_back == 0


def test_another_operator_reads_groups_and_positions_from_the_status() -> None:
    """The second one has no document of the groups that the first one put together."""
    world = training()
    world.vanish(world.uid(1))
    world.vanish(world.uid(4))
    commits(world)
    world.kill_operator()
    world.start_operator()
    world.advance(2.0, STEP_S)
    number = world.generation
    world.vanish(world.uid(2))
    world.until(lambda: world.generation > number, step_every_s=STEP_S)
    (older,) = document(world).older
    assert world.members == "0,5"
    assert [(uid, older.position(uid)) for uid in older.pod_uids] == [
        (world.uid(0), 0), (world.uid(5), 1), ("gone/2.0", 0), (world.uid(3), 1)
    ]  # fmt: skip


def test_scale_down_keeps_the_low_slots_of_two_groups() -> None:
    world = training(4)
    world.vanish(world.uid(1))
    world.vanish(world.uid(2))
    world.until(lambda: num_training(world) == 4, step_every_s=STEP_S)
    assert world.members == "0,3,2.1,1.1"
    world.scale(2)
    world.until(lambda: world.training() == "0-0,1-1", step_every_s=STEP_S)
    world.advance(40.0, STEP_S)
    assert world.names() == ["0-0", "1-1"]
    assert world.ledger.rolled_back == 0


def test_job_waits_for_a_whole_group_and_says_so() -> None:
    world = training(4, 4)
    world.vanish(world.uid(1))
    world.advance(2.0, STEP_S)
    said = world.condition("Training")
    assert (said["status"], said["reason"]) == ("False", "TooFewMembers")
    assert said["message"].startswith("2 workers ready in whole groups of 2 and 1 without one, 4 needed: ")
    world.until(lambda: num_training(world) == 4, step_every_s=STEP_S)
    assert world.ledger.rolled_back == 0


def test_job_of_one_group_whose_workers_all_leave_hands_over_to_another_group() -> None:
    world = training(2)
    for slot in (0, 1):
        world.terminate(world.uid(slot))
    world.until(lambda: world.training() == "0-1,1-1", step_every_s=STEP_S)
    assert world.ledger.rolled_back == 0
    assert world.ledger.num_commits == len(world.ledger.committed)
