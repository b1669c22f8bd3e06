"""A pod is asked to leave: its state is with others before it goes, no committed step is done again, and nobody counts it.

However it is asked: by a deletion, an eviction (which is one), only by the kubelet's SIGTERM, or by a notice before both; in the
middle of what else happens, and where there is nowhere to go. The scale-down is in test_change.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from _regroup_agent import events as ev
from regroup_operator.model.records import Settings
from tests.builders.plan import make_job
from tests.simulator import hazards
from tests.simulator.pace import Pace
from tests.simulator.world import World

START_S = 5.0
"""A pod takes as long to start, and its grace period is six times that."""
STEP_S = 0.5

Asks = Callable[[World, str], None]


def delete(world: World, uid: str) -> None:
    """kubectl delete pod, or the Eviction API: the pod is marked, the kubelet sends SIGTERM."""
    world.terminate(uid)


def sigterm(world: World, uid: str) -> None:
    """The kubelet's own eviction, or its node's graceful shutdown: SIGTERM to the container of a pod that nobody deletes."""
    world.agents[uid].handle(ev.Terminated())


def delete_twice(world: World, uid: str) -> None:
    delete(world, uid)
    sigterm(world, uid)


def taint(world: World, uid: str) -> None:
    """A termination handler taints the node; nobody deletes the pod, and no agent hears of it."""
    pod = world.pods.by_uid[uid]
    world.pods.by_uid[uid] = replace(pod, drain_taint="team/ends")
    world.pods.nodes[pod.node].is_cordoned = True
    world.dirty()


def disrupt(world: World, uid: str) -> None:
    """Somebody says that the pod will be ended, and has not done it yet."""
    world.pods.by_uid[uid] = replace(world.pods.by_uid[uid], disruption="EvictionByEvictionAPI")
    world.dirty()


WAYS = [
    pytest.param(delete, id="deleted"),
    pytest.param(sigterm, id="SIGTERM only"),
    pytest.param(delete_twice, id="a second SIGTERM"),
    pytest.param(taint, id="a taint of its node"),
    pytest.param(disrupt, id="condition DisruptionTarget"),
]


def training(
    replicas: int,
    *,
    minimum: int = 1,
    fixed: bool = False,
    start_s: float = START_S,
    step_s: float = STEP_S,
    **given: Any,
) -> World:
    """Return a world in which all workers train."""
    job = make_job().with_replicas(replicas)
    job = job.fixed() if fixed else job.elastic(minimum, 5)
    job = job.with_spec(checkpoint={"volumeClaim": "digits"}) if given.get("checkpoint_every") else job
    pace = Pace(random.Random(1), start_s=(start_s - 1.0, start_s - 1.0), container_s=(1.0, 1.0))
    world = World(None, job, known_session=True, settings=Settings(term_grace_s=0.0), pace=pace, num_nodes=3, **given)
    world.until(lambda: num_training(world) == replicas, step_every_s=step_s)
    world.advance(4 * step_s, step_s)
    return world


def num_training(world: World) -> int:
    return world.training().count("-")


def causes(world: World) -> list[str]:
    return [incident["cause"] for incident in world.status.get("incidents", ())]


def assert_nothing_lost(world: World, *, restarts: int = 0) -> None:
    """Every step was committed once (the world checks that), none again, and the status does not count what happened."""
    assert world.ledger.rolled_back == 0
    assert world.ledger.num_commits == len(world.ledger.committed) == world.ledger.committed[-1][1]
    assert world.status["restarts"]["total"] == restarts
    assert "RolledBack" not in [note.reason for note in world.notes]


def longest_pause_s(world: World, seconds: float, step_s: float = STEP_S) -> float:
    """Let time pass, and return the longest time without a commit in it."""
    longest_s, end_s = 0.0, world.now_s + seconds
    while world.now_s < end_s:
        world.advance(step_s, step_s)
        longest_s = max(longest_s, world.now_s - world.ledger.last_commit_s)
    return longest_s


@pytest.mark.parametrize("ask", WAYS)
@pytest.mark.parametrize(
    ("replicas", "fixed", "changes", "generations"),
    [
        pytest.param(1, False, "0-1", 2, id="replicas 1: the successor is in beside it, then it goes"),
        pytest.param(3, False, "0-0,1-1,2-0", 2, id="elastic: it goes, its successor comes"),
        pytest.param(3, True, "0-0,1-1,2-0", 1, id="fixed size: both at once"),
    ],
)
def test_worker_that_is_asked_to_leave_hands_over(
    ask: Asks, replicas: int, fixed: bool, changes: str, generations: int
) -> None:
    world = training(replicas, fixed=fixed)
    leaves = world.uid(replicas // 2)
    survivors = [t for uid, a in world.agents.items() if uid != leaves for t in a.trainers.values()]
    ask(world, leaves)
    assert longest_pause_s(world, 40.0) <= STEP_S
    assert world.training() == changes
    assert leaves not in world.pods.by_uid
    assert all(trainer.alive for trainer in survivors)
    # Who only has a notice does not go before its successor has come.
    assert len(causes(world)) == (1 if ask in (taint, disrupt) and replicas > 1 else generations)
    assert set(causes(world)) <= {"Drained", "Resized"}
    assert {note.kind for note in world.notes} == {"Normal"}
    assert_nothing_lost(world)


@pytest.mark.parametrize("ask", WAYS)
def test_every_worker_of_a_node_is_asked_at_once(ask: Asks) -> None:
    """kubectl drain: what comes goes to the other nodes."""
    world = training(4)
    node = world.pods.by_uid[world.uid(0)].node
    leave = [pod.uid for pod in world.pods.on_node(node)]
    assert len(leave) == 2
    world.pods.nodes[node].is_ready = False  # cordoned: the scheduler takes another one
    for uid in leave:
        ask(world, uid)
    assert longest_pause_s(world, 40.0) <= STEP_S
    assert num_training(world) == 4
    assert world.pods.on_node(node) == ()
    assert_nothing_lost(world)


def test_two_that_leave_in_one_long_step_leave_together() -> None:
    """The second change waited for the first: two steps of 12 s each are more than the 20 s that a grace period of 30 s leaves."""
    world = training(3, step_s=12.0)
    for slot in (1, 2):
        delete(world, world.uid(slot))
        world.advance(1.0)
    world.advance(12.0, 10.0)
    assert world.training() == "0-0"
    assert longest_pause_s(world, 60.0, 12.0) <= 12.0
    assert (world.training(), set(causes(world))) == ("0-0,1-1,2-1", {"Drained", "Resized"})
    assert_nothing_lost(world)


def test_who_leaves_does_not_wait_for_a_joiner_that_hangs() -> None:
    world = training(2)
    world.on_moment = lambda moment, _: moment == "entered" and world.generation == 2
    world.scale(3)
    world.advance(20.0, STEP_S)
    world.on_moment = None
    world.agents[world.uid(2)].trainers[0].stop()
    leaves = world.uid(1)
    delete(world, leaves)
    assert longest_pause_s(world, 5.0) <= STEP_S
    assert (world.training(), leaves in world.agents) == ("0-0", False)
    assert longest_pause_s(world, 20.0) <= STEP_S
    assert world.training() == "0-0,1-1"
    assert_nothing_lost(world)


def test_drain_before_the_first_generation_costs_a_start() -> None:
    job = make_job().with_replicas(2).fixed()
    world = World(None, job, known_session=True, settings=Settings(term_grace_s=0.0), pace=Pace(start_s=(4.0, 4.0)))
    world.advance(2.0)
    delete(world, world.uid(1))
    world.until(lambda: world.training() == "0-0,1-1", limit_s=15.0, step_every_s=STEP_S)
    assert (world.generation, "restarts" in world.status) == (1, False)


def test_crash_of_the_other_worker_does_not_lose_the_state_of_the_one_that_leaves() -> None:
    """Fixed size: the crashed one is back in time, the successor is not. It was waited for, and the state was gone with the pod."""
    world = training(2, fixed=True, start_s=3.0)
    world.pods.pending = {1}
    world.pods.nodes.clear()
    delete(world, world.uid(1))
    world.advance(1.0, STEP_S)
    world.kill_process(world.uid(0))
    world.until(lambda: world.training() == "0-0,1-0", 10.0, STEP_S)
    world.advance(30.0, STEP_S)
    world.pods.pending.clear()
    world.run_pod(world.uid(1, 1))
    world.until(lambda: world.training() == "0-0,1-1", 60.0, STEP_S)
    assert_nothing_lost(world, restarts=1)


def test_crash_of_the_successor_does_not_hold_up_the_one_that_leaves() -> None:
    world = training(1)
    until_told(world, 2, lambda: delete(world, world.uid(0)))
    world.kill_process(world.uid(0, 1))
    assert longest_pause_s(world, 2.0) <= STEP_S
    world.until(lambda: world.training() == "0-1", 15.0, STEP_S)
    assert_nothing_lost(world, restarts=1)


def test_only_one_of_the_successors_comes_and_has_the_state() -> None:
    """Fixed size, all leave, and the cluster has a place for one: it took nobody in before all had come, and the state was lost."""
    world = training(3, fixed=True)
    world.pods.pending = {1, 2}
    world.pods.nodes.clear()
    for slot in range(3):
        delete(world, world.uid(slot))
    world.advance(40.0, STEP_S)
    assert (world.training(), world.condition("Training")["reason"]) == ("", "TooFewMembers")
    world.pods.pending.clear()
    for slot in (1, 2):
        world.run_pod(world.uid(slot, 1))
    world.until(lambda: world.training() == "0-1,1-1,2-1", 20.0, STEP_S)
    assert_nothing_lost(world)


@pytest.mark.parametrize("away_s", [5.0, 12.0, 17.0])
@pytest.mark.parametrize("replicas", [1, 3])
def test_drain_while_the_operator_is_away(replicas: int, away_s: float) -> None:
    """It trains on in its grace period: another operator has the lease after 15 s (OperatorSettings.lease_duration_s)."""
    world = training(replicas, start_s=2.0)
    world.kill_operator()
    delete(world, world.uid(0))
    assert longest_pause_s(world, away_s) <= STEP_S
    world.start_operator()
    world.advance(30.0, STEP_S)
    assert num_training(world) == replicas
    assert_nothing_lost(world)


def until_told(world: World, generation: int, act: Callable[[], None]) -> None:
    """Act, and let time pass until somebody has heard of this generation: those that train have not."""
    world.on_moment = lambda moment, _: moment == "heard" and world.generation == generation
    act()
    for _ in range(20):
        world.advance(1.0, STEP_S)
        if world.generation == generation:
            break
    world.on_moment = None
    assert world.generation == generation


def test_operator_restarts_in_the_middle_of_a_hand_over() -> None:
    world = training(1)
    until_told(world, 2, lambda: delete(world, world.uid(0)))
    world.kill_operator()
    assert longest_pause_s(world, 3.0) <= STEP_S
    world.start_operator()
    assert longest_pause_s(world, 30.0) <= STEP_S
    assert world.training() == "0-1"
    assert_nothing_lost(world)


def test_successor_that_is_drained_before_it_has_the_state_is_left_out() -> None:
    world = training(1)
    until_told(world, 2, lambda: delete(world, world.uid(0)))
    delete(world, world.uid(0, 1))
    assert longest_pause_s(world, 40.0) <= STEP_S
    assert world.training() == "0-2"
    assert_nothing_lost(world)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("checkpoint_every", [0, 1000], ids=["no checkpoints", "none was due"])
def test_drain_with_nowhere_to_go_costs_what_is_on_no_volume(replicas: int, checkpoint_every: int) -> None:
    """Every node is cordoned. At the end of the grace period the newest step is saved, where there are checkpoints."""
    world = training(replicas, checkpoint_every=checkpoint_every)
    for node in world.pods.nodes.values():
        node.is_cordoned = True
    for slot in range(replicas):
        delete(world, world.uid(slot))
    assert longest_pause_s(world, 18.0) <= STEP_S
    assert world.condition("PodsReady")["reason"] == "Unschedulable"
    assert world.condition("Degraded")["reason"] == "Leaving"
    costs = "the checkpoint that is written at its end" if checkpoint_every else "step 0"
    assert f"training continues from {costs}" in world.condition("Degraded")["message"]
    world.advance(20.0, STEP_S)
    committed = world.ledger.num_commits
    assert committed >= 36
    for node in world.pods.nodes.values():
        node.is_cordoned = False
    world.pods.schedule_all()
    world.until(lambda: num_training(world) == replicas, 30.0, STEP_S)
    if checkpoint_every:
        assert_nothing_lost(world)
    else:
        assert world.ledger.rolled_back == committed
        assert "RolledBack" in [note.reason for note in world.notes]
        assert world.status["restarts"]["total"] == 0


def test_notice_says_why_a_worker_leaves() -> None:
    world = training(2, fixed=True, start_s=10.0)
    node = world.pods.by_uid[world.uid(1)].node
    taint(world, world.uid(1))
    world.advance(2.0, STEP_S)
    why = f"its node {node} has taint team/ends"
    assert world.condition("Degraded")["reason"] == "Leaving"
    assert f"Worker 1 is asked to leave ({why}) and trains on" in world.condition("Degraded")["message"]
    assert [n.note for n in world.notes if n.reason == "WorkerLeaving"] == [f"Worker 1 is asked to leave: {why}."]
    world.until(lambda: world.training() == "0-0,1-1", 30.0, STEP_S)
    assert f"({why})" in world.status["incidents"][-1]["decision"]
    assert world.pods.by_uid[world.uid(1, 1)].node != node
    assert node in world.pods._avoided[world.uid(1, 1)]
    assert_nothing_lost(world)


@pytest.mark.parametrize("way", [taint, disrupt])
def test_notice_that_is_taken_back_before_the_hand_over_changes_nothing(way: Asks) -> None:
    world = training(2, fixed=True, start_s=10.0)
    uid = world.uid(1)
    way(world, uid)
    world.advance(3.0, STEP_S)
    assert world.names() == ["0-0", "1-0", "1-1"], "its successor starts"
    world.pods.by_uid[uid] = replace(world.pods.by_uid[uid], drain_taint="", disruption="")
    world.dirty()
    assert longest_pause_s(world, 40.0) <= STEP_S
    assert (world.training(), world.names(), world.generation) == ("0-0,1-0", ["0-0", "1-0"], 1)
    assert [n.reason for n in world.notes][-1:] == ["WorkerStays"]
    assert world.condition("Degraded")["status"] == "False"
    assert not world.status.get("restarts", {}).get("total")


@pytest.mark.parametrize("replicas", [1, 3])
def test_notice_with_nowhere_to_go_ends_nothing(replicas: int) -> None:
    """Every node is tainted: it trains on for as long as its pods are there, and makes no further pods."""
    world = training(replicas)
    for slot in range(replicas):
        taint(world, world.uid(slot))
    for node in world.pods.nodes.values():
        node.is_cordoned = True
    assert longest_pause_s(world, 300.0) <= STEP_S
    assert world.training() == ",".join(f"{slot}-0" for slot in range(replicas))
    assert len(world.names()) == 2 * replicas
    assert world.condition("Degraded")["reason"] == "Leaving"
    for node in world.pods.nodes.values():
        node.is_cordoned = False
    world.pods._avoided = dict.fromkeys(world.pods._avoided, ())
    world.pods.schedule_all()
    world.until(lambda: world.training() == ",".join(f"{slot}-1" for slot in range(replicas)), 60.0, STEP_S)
    assert_nothing_lost(world)


def test_deletion_after_the_hand_over_finds_nothing_to_end() -> None:
    """The notice came two minutes before: nobody waits for anything when the pod would have been ended."""
    world = training(3)
    leaves = world.uid(1)
    disrupt(world, leaves)
    assert longest_pause_s(world, 40.0) <= STEP_S
    delete(world, leaves)
    assert longest_pause_s(world, 10.0) <= STEP_S
    assert (world.training(), causes(world)) == ("0-0,1-1,2-0", ["Drained"])


def test_operator_restarts_after_a_notice() -> None:
    world = training(3, fixed=True)
    taint(world, world.uid(1))
    world.advance(1.0, STEP_S)
    world.kill_operator()
    world.start_operator()
    assert longest_pause_s(world, 40.0) <= STEP_S
    assert (world.training(), causes(world)) == ("0-0,1-1,2-0", ["Drained"])
    assert_nothing_lost(world)


def test_deleted_pod_of_a_node_that_is_off_was_lost_and_counts() -> None:
    """It hands over nothing, whatever the API calls it."""
    world = training(3)
    uid = world.uid(1)
    hazards.node_off(world, world.pods.by_uid[uid].node, for_s=600.0)
    world.until(lambda: num_training(world) == 2, 20.0, STEP_S)
    delete(world, uid)
    world.until(lambda: world.training() == "0-0,1-1,2-0", 30.0, STEP_S)
    assert world.status["restarts"]["total"] == 1
