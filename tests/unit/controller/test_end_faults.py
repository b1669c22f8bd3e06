"""What goes wrong while a job is Finishing, through the controller (rule END)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from regroup.checkpoint.selection import name_of
from regroup.protocol.state import StatePair
from regroup_operator.model.records import Settings
from tests.builders.plan import make_job
from tests.simulator.disk import Checkpoint
from tests.simulator.pace import Pace
from tests.simulator.world import World

CHECKPOINT = {"volumeClaim": "digits"}
GROUPS = {"minReplicas": 2, "maxReplicas": 8}


def near_its_end(replicas: int = 2, *, spares: int = 0, spec: dict[str, Any] | None = None, **given: Any) -> World:
    """Return a job that has one step to commit. Its scripts return when a test says so."""
    job = make_job().with_replicas(replicas).elastic(1, 8).with_recovery(spares=spares).with_spec(**spec or {})
    world = World(None, job, **{"known_session": True, "total_steps": 10, "end_s": 1e6, "num_nodes": 5} | given)
    while not world.ledger.committed or world.ledger.committed[-1][1] < world.total_steps - 1:
        world.advance(0.5)
        world.step()
    return world


def finishing(replicas: int = 2, **given: Any) -> World:
    world = near_its_end(replicas, **given)
    world.until(lambda: world.phase == "Finishing", step_every_s=0.5)
    world.advance(1.0)
    return world


def end_process(world: World, slot: int, code: int = 0, last_line: str = "", attempt: int = 0) -> None:
    world.kill_process(world.uid(slot, attempt), code=code, last_line=last_line)


def test_script_that_returns_while_the_word_to_suspend_is_on_its_way_holds_up_no_suspension() -> None:
    """Its agent ignores that word. Told nothing else, it stayed until its pod was deleted six minutes later."""
    world = finishing()
    agent = world.agents[world.uid(0)]
    agent.stop()
    world.suspend(True)
    world.settle()
    end_process(world, 0)
    agent.go_on()
    world.until(lambda: world.phase == "Suspended", 30.0)
    assert world.status["finished"]["done"] == "0"
    assert world.names() == []


def test_spare_that_fails_with_the_last_step_fails_nothing() -> None:
    """There is neither checkpoint nor snapshot: the end of a member could not run again. The operator hears of both at once."""
    world = near_its_end(spares=1)
    assert world.operator is not None
    world.operator.paused = True
    world.step()
    end_process(world, 2, code=1, last_line="no space left")
    world.advance(1.0)
    world.operator.paused = False
    for agent in world.agents.values():
        agent.flush()
    world.dirty()
    world.advance(2.0)
    assert (world.phase, world.generation) == ("Finishing", 1)


@pytest.mark.parametrize("spec", [{}, {"checkpoint": CHECKPOINT}], ids=["no checkpoints", "the last one given up"])
def test_advice_to_set_a_checkpoint_is_for_a_job_that_has_none(spec: dict[str, Any]) -> None:
    world = finishing(spec=spec)
    end_process(world, 0, code=1)
    world.until(lambda: world.phase == "Failed", 10.0)
    assert world.condition("Failed")["reason"] == "EndFailed"
    assert ("Set spec.checkpoint" in world.condition("Failed")["message"]) == (not spec)


def test_end_that_a_rule_ignores_cannot_run_again_without_its_state() -> None:
    """It does not count, and would fail again and again for want of the state."""
    rule = {"action": "Ignore", "exitCodes": {"operator": "In", "values": [1]}}
    world = finishing(spec={"recovery": {"onExit": [rule]}})
    end_process(world, 0, code=1)
    world.until(lambda: world.phase == "Failed", 10.0)
    assert world.condition("Failed")["reason"] == "EndFailed"


def with_checkpoint(world: World) -> World:
    """Have the last state in a checkpoint, so that an end can run again anywhere."""
    finished = world.status["finished"]
    name = name_of(finished["generation"], finished["step"], world.status["membership"]["uid"])
    world.disk.checkpoints.append(Checkpoint(name, StatePair(finished["generation"], finished["step"])))
    kept = {"directory": name.directory, "at": finished["at"], "kept": [name.directory]}
    named = {"generation": finished["generation"], "step": finished["step"], **kept}
    world.store.replace_status({**world.status, "checkpoint": named})
    world.advance(1.0)
    return world


@pytest.mark.parametrize("scaled", [False, True], ids=["as it was", "after spec.replicas has become less"])
def test_pods_of_an_end_that_are_preempted_are_held_back(scaled: bool) -> None:
    world = with_checkpoint(finishing(4, spec={"checkpoint": CHECKPOINT}))
    if scaled:
        world.scale(2)
        world.advance(1.0)
    made: list[int] = []
    world.pods.on_create = made.append
    for _ in range(6):
        for pod in [pod for pod in world.pods.by_uid.values() if pod.slot == 3]:
            world.pods.by_uid[pod.uid] = replace(pod, disruption="PreemptionByScheduler", terminating=True)
            world.dirty()
            world.advance(0.5)
            world.vanish(pod.uid)
        world.advance(3.0)
    assert made == [3, 3]
    said = world.condition("PodsReady")
    assert (said["reason"], said["message"][:20]) == ("Disrupted", "3 of 4 worker pods r")


def test_failed_pods_of_an_end_do_not_pile_up() -> None:
    world = with_checkpoint(finishing(spec={"checkpoint": CHECKPOINT}))
    for node in world.pods.nodes.values():
        node.refuses = True
    world.vanish(world.uid(1))
    world.advance(120.0)
    failed = [pod for pod in world.pods.by_uid.values() if pod.phase == "Failed"]
    assert [pod.attempt for pod in failed] == [max(pod.attempt for pod in failed)], "the newest stays, for its status"


def test_end_that_waits_for_a_node_says_so() -> None:
    """It waits as long as it takes: a pod that is given back would not make another script return."""
    elastic = {"minReplicas": 1, "maxReplicas": 8, "pendingTimeoutSeconds": 30}
    world = with_checkpoint(finishing(spec={"checkpoint": CHECKPOINT, "elasticPolicy": elastic}, num_nodes=0))
    assert world.condition("PodsReady")["reason"] == "Finishing"
    world.pods.pending.add(1)
    world.vanish(world.uid(1))
    world.advance(1.0)
    uid = world.uid(1, 1)
    lacks: dict[str, Any] = {
        "unschedulable": "0/3 nodes are available",
        "unscheduled_reason": "Unschedulable",
        "node": "",
    }
    world.pods.by_uid[uid] = replace(world.pods.by_uid[uid], **lacks)
    world.dirty()
    world.advance(120.0)
    said = world.condition("PodsReady")
    assert (said["reason"], said["message"]) == (
        "Unschedulable",
        "1 of 2 worker pods run; digits-worker-1-1: 0/3 nodes are available",
    )
    assert "1-1" in world.names()
    assert "PodGivenBack" not in [note.reason for note in world.notes]


def test_worker_on_a_node_that_is_cut_off_keeps_its_place_until_its_pod_is_gone() -> None:
    """Kubernetes has its pod deleted after five minutes, which ends nothing there: another one would save beside it as rank 0. A
    re-run of its rank beside it is what the ledger does not allow."""
    world = with_checkpoint(finishing(spec={"checkpoint": CHECKPOINT}))
    uid = world.uid(0)
    world.cut_off(uid)
    world.node_not_ready(uid)
    world.pods.by_uid[uid] = replace(world.pods.by_uid[uid], terminating=True)
    world.dirty()
    world.advance(300.0)
    assert world.names() == ["0-0", "1-0"]
    said = world.condition("Complete")["message"]
    assert said.endswith("kubectl delete pod --force --namespace=default digits-worker-0-0")
    world.vanish(uid)
    world.until(lambda: world.names() == ["0-1", "1-0"], 5.0)


def test_suspended_job_whose_ends_all_run_again_does_not_say_that_scripts_still_run() -> None:
    """The model is split over the members: those that have returned 0 run again, too."""
    world = with_checkpoint(
        finishing(4, spec={"checkpoint": CHECKPOINT, "workersPerGroup": 2, "elasticPolicy": GROUPS})
    )
    end_process(world, 0)
    world.until(lambda: world.status["finished"]["done"] == "0", 10.0)
    world.suspend(True)
    world.until(lambda: world.phase == "Suspended", 60.0)
    assert "finished" not in world.status
    assert world.condition("Complete") == {}
    assert world.condition("Suspended")["message"].endswith("the job continues from its newest checkpoint.")
    world.suspend(False)
    world.until(lambda: world.phase == "Finishing", 60.0)
    assert (world.generation, world.status["finished"]["done"]) == (2, "")


def test_members_of_a_model_group_all_run_their_end_again_in_the_next_generation() -> None:
    """Those that have returned 0 have stayed for that, and nobody is called lost because its process starts again."""
    spec = {"checkpoint": CHECKPOINT, "workersPerGroup": 2, "elasticPolicy": {"minReplicas": 4, "maxReplicas": 8}}
    world = with_checkpoint(finishing(4, spec=spec, pace=Pace(start_s=(2.0, 2.0))))
    end_process(world, 0)
    world.until(lambda: world.status["finished"]["done"] == "0", 10.0)
    world.advance(30.0)
    assert world.agents[world.uid(0)].alive, "it may have to run again"
    end_process(world, 1, code=1)
    world.until(lambda: world.generation == 2 and world.phase == "Finishing", 60.0)
    assert (world.names(), world.status["finished"]["done"]) == (["0-0", "1-0", "2-0", "3-0"], "")
    assert (world.status["restarts"]["processes"], world.status["restarts"]["pods"]) == (1, 0)
    world.advance(5.0)
    world.end_s = 1.0  # of those that leave their loops from now on
    end_process(world, 2, code=1)
    world.until(lambda: world.phase == "Succeeded", 60.0)
    assert (world.status["finished"]["done"], world.generation) == ("0-3", 3)


@pytest.mark.parametrize("pod", ["fails", "is gone"])
def test_deadline_limits_an_end_of_model_groups_whose_workers_are_missing(pod: str) -> None:
    """It counted only while all workers were there."""
    policy = {"runPolicy": {"finishSeconds": 60}}
    spec = {"checkpoint": CHECKPOINT, "workersPerGroup": 2, "elasticPolicy": {"minReplicas": 4, "maxReplicas": 8}}
    world = with_checkpoint(finishing(4, spec=spec | policy, num_nodes=0))
    began = world.status["finished"]["at"]
    if pod == "fails":
        end_process(world, 1, code=1)
        world.until(lambda: world.generation == 2 and world.phase == "Finishing", 60.0)
        assert world.status["finished"]["at"] == began, "no step was trained again"
    world.pods.pending.add(1)
    world.vanish(world.uid(1))
    world.until(lambda: world.phase == "Waiting", 60.0)
    assert "once enough are, the script starts again in all workers" in world.condition("Training")["message"]
    assert world.status["endTakenBack"]["at"] == began
    world.advance(60.0)
    assert world.phase == "Failed"
    assert world.condition("Failed")["reason"] == "FinishDeadlineExceeded"


def test_elastic_job_of_model_groups_ends_with_the_groups_that_are_whole() -> None:
    """The generation in which all run their end again is an ordinary one: it does not wait for a process that starts again."""
    spec = {"checkpoint": CHECKPOINT, "workersPerGroup": 2, "elasticPolicy": GROUPS}
    world = with_checkpoint(finishing(4, spec=spec, pace=Pace(start_s=(6.0, 9.0))))
    world.end_s = 1.0  # of those that leave their loops from now on
    end_process(world, 1, code=1)
    world.until(lambda: world.phase == "Succeeded", 60.0)
    assert (world.status["finished"]["members"], world.generation) == ("2-3", 2)
    assert len(world.status["incidents"]) == 1, "nobody is called lost because its process starts again for that"


def test_script_that_comes_to_its_end_does_not_grow() -> None:
    world = near_its_end(script="plain", known_session=False, settings=Settings(term_grace_s=0.0))
    world.advance(60.0)
    world.step()
    end_process(world, 0)
    world.until(lambda: world.phase == "Finishing", 10.0)
    world.scale(4)
    world.advance(30.0)
    assert (world.phase, world.names()) == ("Finishing", ["0-0", "1-0"])
    end_process(world, 1)
    world.until(lambda: world.phase == "Succeeded", 10.0)


def test_deadline_of_a_script_does_not_speak_of_steps() -> None:
    given: dict[str, Any] = {"script": "plain", "known_session": False, "settings": Settings(term_grace_s=0.0)}
    world = near_its_end(spec={"runPolicy": {"finishSeconds": 60}}, **given)
    world.advance(60.0)
    world.step()
    end_process(world, 0)
    world.until(lambda: world.phase == "Failed", 100.0)
    message = (
        "The script has returned in some workers, and not in every worker within spec.runPolicy.finishSeconds (60)."
    )
    assert world.condition("Failed")["message"].startswith(message)
