"""Faults of a running job: processes, pods, nodes, links. Every test is one trace of docs/design/protocol.md or a decision
of docs/design/design.md section 5; the generation that results is part of the claim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regroup_operator.model.records import Settings
from tests.builders.plan import JobBuilder, make_job
from tests.simulator.world import World


def running(tmp_path: Path, job: JobBuilder | None = None, **kwargs: Any) -> World:
    """Return a job that has trained for ten steps, under an operator that is past the first seconds of its term."""
    kwargs.setdefault("settings", Settings(term_grace_s=0.0))
    world = World(tmp_path, job or make_job().with_replicas(3).elastic(2, 5), **kwargs)
    world.advance(0.1)
    assert world.phase == "Running", world.summary()
    world.step(10)
    world.advance(2)
    return world


@pytest.mark.parametrize(("processes", "rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("slot", [0, 1])
def test_killed_process_costs_its_worker_one_generation(tmp_path: Path, processes: int, rank: int, slot: int) -> None:
    """The survivors form at once; the worker restarts in place and joins at a step boundary; its sibling stays."""
    world = running(tmp_path, processes=processes)
    agent = world.agents[world.uid(slot)]
    siblings = [t for r, t in agent.trainers.items() if r != rank]
    world.slow = {(agent.name, rank)}
    world.kill_process(agent.uid, rank, last_line="Killed")
    world.settle()
    others = ",".join(f"{s}-0" for s in range(3) if s != slot)
    assert (world.generation, world.training(), world.phase) == (2, others, "Running")
    assert world.status["membership"]["kind"] == "forced"
    world.step(3)
    agent.trainers[rank].attach()
    world.advance(3, step_every_s=0.1)
    assert (world.generation, world.members, world.status["membership"]["kind"]) == (3, "0-2", "planned")
    assert all(t.alive for t in siblings)
    assert world.names() == ["0-0", "1-0", "2-0"]
    assert world.status["restarts"] | {"recent": 0, "exits": 0} == {
        "total": 1, "processes": 1, "pods": 0, "causes": {"Signal": 1}, "generations": 2, "recent": 0, "exits": 0,
    }  # fmt: skip
    incident = world.status["incidents"][0]
    assert (incident["cause"], incident["culprit"]) == ("ProcessExited", str(slot))
    assert {"decideMs", "persistMs", "formMs", "transferMs"} <= incident.keys()


def test_killed_process_of_a_fixed_job_is_waited_for_with_the_state(tmp_path: Path) -> None:
    world = running(tmp_path, make_job().with_replicas(2).fixed())
    agent = world.agents[world.uid(0)]
    world.slow = {(agent.name, 0)}
    world.kill_process(agent.uid)
    world.advance(5)
    assert (world.generation, world.phase, world.training()) == (1, "Waiting", "")
    assert world.condition("Training")["reason"] == "TooFewMembers"
    agent.trainers[0].attach()
    world.advance(0.2)
    assert (world.generation, world.training(), world.phase) == (2, "0-0,1-0", "Running")
    world.step()  # continues from the newest state: the world checks it


def test_fixed_job_that_loses_a_process_while_it_forms_goes_on(tmp_path: Path) -> None:
    """CLIQUE must not mistake a peer that died for a broken link: two of two can never be without each other."""
    world = running(tmp_path, make_job().with_replicas(2).fixed())
    for _ in range(3):
        world.network.cut_links = {frozenset({world.uid(0), world.uid(1)})}
        world.kill_process(world.uid(1))
        world.advance(0.02)
        world.network.cut_links = set()
        world.kill_process(world.uid(1))
        world.until(lambda: world.training() == "0-0,1-0", limit_s=20)
        world.step()
    assert world.phase == "Running"


def test_rejoin_seconds_make_one_generation_of_two(tmp_path: Path) -> None:
    world = running(tmp_path, make_job().with_replicas(3).elastic(2, 5).with_recovery(rejoinSeconds=3))
    world.kill_process(world.uid(1))
    world.advance(0.1)
    assert (world.generation, world.training()) == (2, "0-0,1-0,2-0")


def test_two_faults_of_one_generation_make_one_new_one(tmp_path: Path) -> None:
    """H13 FENCE: both survivors report the same broken group, one after the other."""
    world = running(tmp_path)
    world.kill_process(world.uid(2))
    world.advance(5, step_every_s=0.1)
    kinds = [g["kind"] for g in [world.status["membership"]]]
    assert (world.generation, kinds) == (3, ["planned"])
    assert [i["cause"] for i in world.status["incidents"]] == ["ProcessExited", "Resized"]


def test_deleted_pod_is_replaced_and_its_number_is_not_used_again(tmp_path: Path) -> None:
    world = running(tmp_path)
    world.vanish(world.uid(1))
    world.settle()
    assert (world.generation, world.training()) == (2, "0-0,2-0")
    world.advance(3, step_every_s=0.1)
    assert (world.generation, world.members) == (3, "0,1.1,2")
    assert world.status["restarts"]["pods"] == 1
    assert world.status["restarts"]["processes"] == 0


def test_store_host_dies(tmp_path: Path) -> None:
    world = running(tmp_path)
    host = world.status["membership"]["store"]["slot"]
    world.vanish(world.uid(host))
    world.settle()
    assert world.status["membership"]["store"]["slot"] != host
    assert world.training() == ",".join(f"{s}-0" for s in range(3) if s != host)


def test_every_process_dies_and_the_job_says_that_it_rolled_back(tmp_path: Path) -> None:
    """If all processes of g die at once, g+1 is still needed (rule INC)."""
    world = running(tmp_path)
    for slot in range(3):
        world.kill_process(world.uid(slot))
    newest = world.ledger.num_commits
    world.ledger.committed.clear()
    world.advance(3)
    assert world.training() == "0-0,1-0,2-0"
    (note,) = (n for n in world.notes if n.reason == "RolledBack")
    assert note.note == (
        f"Generation 2 continues from step 0: no worker holds a newer state any more. The last step reported was {newest}."
    )


def test_powered_off_node_before_the_first_step_is_lost_after_seven_seconds(tmp_path: Path) -> None:
    """The stream breaks after 5 s of probes; disconnectSeconds (5) less 3 s later the worker is lost, no fault needed."""
    world = World(tmp_path, make_job().with_replicas(3).elastic(2, 5), settings=Settings(term_grace_s=0.0))
    world.advance(0.1)
    uid = world.uid(1)
    world.power_off(uid)
    world.advance(5)
    world.cut_off(uid)
    world.advance(1.9)
    assert world.generation == 1
    world.advance(0.3)
    assert (world.generation, world.training(), world.phase) == (2, "0-0,2-0", "Running")
    assert world.status["incidents"][-1]["cause"] == "Disconnected"


def test_training_that_stalls_is_told_before_the_silent_worker_is_lost(tmp_path: Path) -> None:
    """Its stream is open until the kernel's probes say otherwise: steps are overdue, and it does not answer a ping."""
    world = running(tmp_path)
    world.advance(5, step_every_s=0.1)
    world.power_off(world.uid(1))
    assert world.phase == "Running"
    world.advance(1.9)
    assert (world.generation, world.phase) == (1, "Recovering")
    world.advance(4.8)
    assert (world.generation, world.training(), world.phase) == (2, "0-0,2-0", "Running")
    incident = world.status["incidents"][-1]
    assert (incident["cause"], incident["culprit"]) == ("Unresponsive", "1")
    assert 5000 <= incident["detectMs"] <= 6700


def test_script_that_takes_its_time_between_two_steps_is_running(tmp_path: Path) -> None:
    """An evaluation stalls the steps, too: every agent answers."""
    world = running(tmp_path)
    world.advance(5, step_every_s=0.1)
    world.advance(60)
    assert (world.generation, world.phase) == (1, "Running")


def test_node_not_ready_means_a_new_pod_under_another_number_and_release_later(tmp_path: Path) -> None:
    world = running(tmp_path)
    uid = world.uid(1)
    world.power_off(uid)
    world.cut_off(uid)
    world.advance(6)
    assert (world.members, world.names()) == ("0,2", ["0-0", "1-0", "2-0"])
    world.node_not_ready(uid)
    world.advance(4, step_every_s=0.1)
    assert (world.members, world.names()) == ("0,1.1,2", ["0-0", "1-0", "1-1", "2-0"])
    assert world.pods.deleted == [uid]
    assert world.status["released"] == [uid]
    assert world.pods.by_uid[uid].terminating
    world.vanish(uid)
    world.settle()
    assert world.status["released"] == []


def test_silent_worker_is_kept_while_progress_moves(tmp_path: Path) -> None:
    """Progress is proof of life: no step completes without every rank."""
    world = running(tmp_path)
    uid = world.uid(1)
    world.cut_off(uid)
    world.advance(30, step_every_s=0.5)
    assert (world.generation, world.phase) == (1, "Running")
    assert world.condition("Degraded")["reason"] == "SilentWorkers"
    world.advance(10)  # nothing moves any more
    assert world.generation == 2


def test_silent_worker_that_stops_is_lost_though_its_last_step_is_said_again_and_again(tmp_path: Path) -> None:
    """FENCE: the answer to `progress?` with the step of before is no sign of life."""
    world = running(tmp_path)
    world.cut_off(world.uid(1))
    world.step(5)
    world.advance(1.5)
    assert world.generation == 1
    world.advance(8)
    assert (world.generation, world.members) == (2, "0,2")


def test_closed_stream_and_a_peers_fault_are_a_loss_at_once(tmp_path: Path) -> None:
    world = running(tmp_path)
    uid = world.uid(1)
    agent = world.agents[uid]
    world.cut_off(uid)
    for trainer in agent.trainers.values():
        trainer.alive = False
        trainer.drop()
    world.advance(0.5)
    assert (world.generation, world.training()) == (2, "0-0,2-0")


def test_silent_worker_that_returns_joins_again(tmp_path: Path) -> None:
    world = running(tmp_path)
    uid = world.uid(1)
    world.cut_off(uid)
    world.advance(10)
    assert (world.generation, world.training()) == (2, "0-0,2-0")
    world.step(2)
    world.reach_again(uid)
    world.advance(3, step_every_s=0.1)
    assert (world.generation, world.members, world.names()) == (3, "0-2", ["0-0", "1-0", "2-0"])


def test_broken_link_is_not_announced_again(tmp_path: Path) -> None:
    """H12 CLIQUE: both reach the operator, not each other. The youngest goes, and is not asked back at once."""
    world = running(tmp_path)
    world.network.cut_links = {frozenset({world.uid(0), world.uid(2)})}
    world.kill_process(world.uid(1))
    world.until(lambda: world.training() != "", limit_s=20)
    world.advance(10, step_every_s=0.2)
    assert world.training() in ("0-0,1-0", "1-0,2-0")
    generation = world.generation
    world.advance(30, step_every_s=0.5)
    assert world.generation == generation
    world.network.cut_links = set()
    world.advance(40, step_every_s=0.5)
    assert world.training() == "0-0,1-0,2-0"


def test_form_that_does_not_come_about_backs_off(tmp_path: Path) -> None:
    """Two of two over a broken link: the same set, another store, fewer and fewer attempts; and the status stays small."""
    world = running(tmp_path, make_job().with_replicas(2).fixed())
    world.network.cut_links = {frozenset({world.uid(0), world.uid(1)})}
    world.kill_process(world.uid(1))
    world.advance(50)
    assert world.generation in range(10, 25)
    assert len(world.status["membership"]["older"]) <= 1
    world.network.cut_links = set()
    world.until(lambda: world.training() == "0-0,1-0", limit_s=10)
    world.step()


def test_agent_that_restarts_in_its_pod_is_heard(tmp_path: Path) -> None:
    """A new boot with the same incarnation, that has heard less: its hello must not be taken for a delayed message."""
    world = running(tmp_path)
    agent = world.agents[world.uid(1)]
    world.container_ended(agent, 137)
    world.advance(4, step_every_s=0.1)
    assert (world.members, world.training()) == ("0-2", "0-0,1-0,2-0")
    assert world.status["restarts"]["processes"] == 1


def test_no_witness_waits_and_resumes_when_the_holder_returns(tmp_path: Path) -> None:
    """H4 WITNESS: only members without the newest state can be reached; the job says so and waits."""
    world = running(tmp_path, make_job().with_replicas(2).elastic(1, 5))
    holder, other = world.uid(0), world.uid(1)
    world.slow = {("digits-worker-1-0", 0)}
    world.kill_process(other)
    world.advance(0.5)
    assert world.training() == "0-0"
    world.step(3)
    world.agents[other].trainers[0].state = None
    world.cut_off(holder)
    world.agents[holder].trainers[0].frozen = True
    world.agents[other].trainers[0].attach()
    world.until(lambda: world.condition("Training")["reason"] == "NoWitness", limit_s=30)
    assert world.phase == "Waiting"
    generation = world.generation
    world.advance(60)
    assert world.generation <= generation + 3  # another pod comes for the one that cannot be reached, and holds nothing
    assert "If they are gone for good, delete their pods" in world.condition("Training")["message"]
    world.agents[holder].trainers[0].frozen = False
    world.reach_again(holder)
    world.until(lambda: "0-0" in world.training(), limit_s=10)
    world.advance(5, step_every_s=0.2)
    assert world.training() == "0-0,1-0"


def test_no_witness_resumes_when_the_holders_pod_is_deleted(tmp_path: Path) -> None:
    world = running(tmp_path, make_job().with_replicas(2).elastic(1, 5))
    holder, other = world.uid(0), world.uid(1)
    world.slow = {("digits-worker-1-0", 0)}
    world.kill_process(other)
    world.advance(0.5)
    world.step(3)
    world.power_off(holder)
    world.cut_off(holder)
    world.agents[other].trainers[0].attach()
    world.until(lambda: world.condition("Training")["reason"] == "NoWitness", limit_s=30)
    world.ledger.committed.clear()
    world.vanish(holder)
    world.until(lambda: "1-0" in world.training(), limit_s=10)
    assert any(n.reason == "RolledBack" for n in world.notes)


def test_fresh_operator_waits_before_it_calls_silence_a_loss(tmp_path: Path) -> None:
    """In the first 20 s of a term a missing stream is unknown, not lost; and as long as steps are committed."""
    world = running(tmp_path, settings=Settings())
    world.unreachable.add(world.uid(1))
    world.kill_operator()
    world.start_operator()
    world.advance(19, step_every_s=0.5)
    assert (world.generation, world.phase) == (1, "Running")
    world.advance(10, step_every_s=0.5)
    assert (world.generation, world.phase) == (1, "Running")
    world.advance(8)
    assert world.generation == 2


def test_short_settings_are_obeyed(tmp_path: Path) -> None:
    world = running(tmp_path, settings=Settings(join_quiet_s=0.0))
    world.scale(4)
    world.advance(0.2, step_every_s=0.05)
    assert world.members == "0-3"


@pytest.mark.parametrize("script", ["session", "plain"])
def test_node_that_restarts_again_and_again_fails_no_job(tmp_path: Path, script: str) -> None:
    """Containers come back with exit code 255, which nobody saw: the job may fail no process, and does not end."""
    job = make_job().with_replicas(2).elastic(1, 2).with_recovery(maxRestarts=0)
    world = World(tmp_path, job, script=script, settings=Settings(term_grace_s=0.0))
    world.advance(32, step_every_s=0.5)
    for _ in range(4):
        world.container_ended(world.agents[world.uid(1)], 255)
        world.until(lambda: world.phase == "Running" and world.members == "0-1", 60, step_every_s=0.5)
        world.advance(1, step_every_s=0.5)
    restarts = world.status["restarts"]
    assert (restarts["processes"], restarts["pods"], restarts["total"]) == (0, 0, 0)
    said = [i["decision"] for i in world.status["incidents"] if i.get("culprit") == "1"]
    assert said
    assert all("worker 1 on node " in text for text in said), said
