"""Planned changes: growth, shrinking, drains, and the end of a job. Rules CUTALL, LINGER, RELEASE, FINISH."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regroup.protocol.state import StatePair
from regroup_operator.model.records import Settings
from tests.builders.plan import JobBuilder, make_job
from tests.simulator.world import World


def running(tmp_path: Path, job: JobBuilder | None = None, **kwargs: Any) -> World:
    kwargs.setdefault("settings", Settings(term_grace_s=0.0))
    world = World(tmp_path, job or make_job().with_replicas(3).elastic(2, 5), **kwargs)
    world.advance(0.1)
    world.step(5)
    return world


@pytest.mark.parametrize("processes", [1, 2])
def test_three_to_five_to_two_keeps_the_survivors_processes(tmp_path: Path, processes: int) -> None:
    world = running(tmp_path, processes=processes)
    survivors = [t for slot in (0, 1) for t in world.agents[world.uid(slot)].trainers.values()]
    world.scale(5)
    world.until(lambda: world.training() == "0-0,1-0,2-0,3-0,4-0", limit_s=10, step_every_s=0.1)
    assert (world.generation, world.status["membership"]["kind"]) == (2, "planned")
    world.scale(2)
    world.until(lambda: world.names() == ["0-0", "1-0"], limit_s=60, step_every_s=0.1)
    assert (world.generation, world.training()) == (3, "0-0,1-0")
    assert all(t.alive for t in survivors)
    assert world.status["restarts"] == {
        "total": 0, "processes": 0, "pods": 0, "generations": 2, "recent": [],
    }  # fmt: skip
    assert [i["cause"] for i in world.status["incidents"]] == ["Resized", "Resized"]


def test_joiners_that_come_one_by_one_come_together(tmp_path: Path) -> None:
    world = running(tmp_path)
    world.slow = {(f"digits-worker-{slot}-0", 0) for slot in (3, 4)}
    world.scale(5)
    world.advance(2, step_every_s=0.1)
    world.agents[world.uid(3)].trainers[0].attach()
    world.advance(0.5, step_every_s=0.1)
    world.agents[world.uid(4)].trainers[0].attach()
    world.advance(1, step_every_s=0.1)
    assert (world.generation, world.members) == (2, "0-4")


def test_planned_change_leaves_nobody_before_all_know(tmp_path: Path) -> None:
    """H11 CUTALL: worker 0 is cut off and trains on; a joiner is ready. The group stays whole while it is silent."""
    world = running(tmp_path)
    world.cut_off(world.uid(0))
    world.scale(4)
    world.advance(10, step_every_s=0.1)
    assert (world.generation, world.status["membership"]["kind"], world.phase) == (2, "planned", "Running")
    assert world.training() == "0-0,1-0,2-0"
    world.reach_again(world.uid(0))
    world.advance(1, step_every_s=0.1)
    assert world.training() == "0-0,1-0,2-0,3-0"


def test_planned_change_that_somebody_never_hears_of_becomes_a_forced_one(tmp_path: Path) -> None:
    """PLANNED: dropped for a forced one after a time; those who heard and train on are not thrown out with the silent."""
    world = running(tmp_path)
    world.cut_off(world.uid(0))
    world.scale(4)
    world.advance(40, step_every_s=0.1)
    assert world.generation >= 3
    assert world.training().removeprefix("0-1,") == "1-0,2-0,3-0"  # another pod takes its place after some time
    forced = next(i for i in world.status["incidents"] if i["generation"] == 3)
    assert forced["culprit"] == "0"


def test_planned_change_is_dropped_for_a_forced_one_when_a_worker_is_lost(tmp_path: Path) -> None:
    world = running(tmp_path)
    world.scale(4)
    world.until(lambda: world.generation == 2)  # nobody steps: the cut does not come
    world.vanish(world.uid(1))
    world.settle()
    assert world.generation == 3
    assert world.status["membership"]["kind"] == "forced"
    assert world.training() == "0-0,2-0,3-0"


def test_joiner_that_dies_before_it_enters_is_done_without(tmp_path: Path) -> None:
    world = running(tmp_path)
    world.scale(4)
    world.until(lambda: world.generation == 2)
    joiner = world.agents[world.uid(3)]
    if joiner.trainers[0].group is None:
        world.slow = {(joiner.name, 0)}
    world.slow = {(joiner.name, 0)}
    world.kill_process(joiner.uid)
    world.advance(1, step_every_s=0.1)
    assert world.training() == "0-0,1-0,2-0"
    joiner.trainers[0].attach()
    world.advance(5, step_every_s=0.1)
    assert world.training() == "0-0,1-0,2-0,3-0"


def test_nobody_stops_before_all_have_adopted(tmp_path: Path) -> None:
    """H9 LINGER: worker 2 is scaled away; until both others have adopted it keeps process, pod and state."""
    world = running(tmp_path)
    leaving = world.uid(2)
    world.scale(2)
    world.until(lambda: world.generation == 2)
    world.advance(5)  # the cut needs a step
    assert world.ledger.released == []
    assert world.agents[leaving].trainers[0].alive
    world.step()
    assert world.ledger.released == [leaving]
    assert world.status["membership"]["adopted"]
    assert leaving in world.pods.deleted
    world.advance(20, step_every_s=0.5)
    assert world.names() == ["0-0", "1-0"]
    assert world.status["released"] == []


def test_released_worker_is_never_a_member_again(tmp_path: Path) -> None:
    world = running(tmp_path)
    world.scale(2)
    world.until(lambda: world.ledger.released != [], step_every_s=0.1)
    gone = world.ledger.released[0]
    world.scale(3)
    world.until(lambda: world.training().startswith("0-0,1-0,2-"), step_every_s=0.1)
    trains = {t.agent.uid for g in world.groups.values() if g.trains for t in g.ranks.values()}
    assert len(trains) == 3
    assert gone not in trains


def test_holder_that_leaves_last_is_still_there_when_the_others_fail(tmp_path: Path) -> None:
    """H9: worker 2 lingers outside of generation 2 when a member of it dies before it has adopted: it is taken back."""
    world = running(tmp_path)
    world.scale(2)
    world.until(lambda: world.generation == 2)
    world.vanish(world.uid(0))
    world.advance(0.1)
    assert world.training() == "1-0,2-0"
    world.advance(5, step_every_s=0.1)
    assert world.training() == "0-1,1-0"


def test_drained_worker_is_replaced_before_it_goes(tmp_path: Path) -> None:
    world = running(tmp_path, make_job().with_replicas(2).fixed())
    drained = world.uid(1)
    world.terminate(drained)
    world.advance(8, step_every_s=0.1)
    assert world.training() == "0-0,1-1"
    assert world.status["incidents"][-1]["cause"] == "Drained"
    assert world.status["restarts"]["processes"] == 0
    assert drained not in world.pods.by_uid


def test_all_workers_drained_at_once_lose_nothing(tmp_path: Path) -> None:
    """kubectl delete pods --all with its grace: somebody who holds the state stays until others have it."""
    world = running(tmp_path, make_job().with_replicas(3).elastic(1, 5))
    for slot in range(3):
        world.terminate(world.uid(slot))
    world.advance(12, step_every_s=0.1)
    assert world.training() == "0-1,1-1,2-1"
    assert not any(n.reason == "RolledBack" for n in world.notes)


def test_job_ends_when_all_members_said_so(tmp_path: Path) -> None:
    """H10 FINISH: stop only when every member of one generation is finished."""
    world = running(tmp_path, total_steps=8)
    world.step(3)
    world.advance(1)
    assert (world.phase, world.status["progress"]["step"], world.status["summary"]["state"]) == (
        "Succeeded",
        8,
        "Succeeded",
    )
    assert world.condition("Complete")["status"] == "True"
    world.advance(12)  # that no pod is left may be written with the next progress
    assert {p.phase for p in world.pods.by_uid.values()} == {"Succeeded"}
    assert [n.reason for n in world.notes].count("Succeeded") == 1
    writes = world.store.num_writes
    world.advance(100)
    assert world.store.num_writes == writes
    world.kill_operator()
    world.start_operator()
    world.advance(30)
    assert (world.phase, world.names()) == ("Succeeded", ["0-0", "1-0", "2-0"])


def test_member_that_is_lost_when_others_have_finished_makes_another_generation(tmp_path: Path) -> None:
    """H10 FINISH, the other half: worker 1 committed the last step and waits; worker 0, one all-reduce behind, dies."""
    world = running(tmp_path, make_job().with_replicas(2).elastic(1, 5), total_steps=6)
    group = next(g for g in world.groups.values() if g.trains)
    behind, done = group.ranks[0], group.ranks[1]
    group.step = 6
    world.ledger.in_part.add(StatePair(1, 6))
    done.committed(group, StatePair(1, 6))
    world.settle()
    assert world.phase != "Succeeded"
    assert done.alive
    world.slow = {(behind.agent.name, 0)}
    world.kill_process(behind.agent.uid)
    world.advance(2)
    assert world.status["membership"]["generation"] == 2
    assert world.phase == "Succeeded"
    assert (world.status["finished"]["generation"], world.status["finished"]["step"]) == (2, 6)
    assert world.ledger.committed[-1] == (1, 6), "nobody commits the last step again: it came from who had it"


def test_finished_member_that_loses_its_stream_counts_as_finished(tmp_path: Path) -> None:
    world = running(tmp_path, make_job().with_replicas(2).elastic(1, 5), total_steps=6)
    group = next(g for g in world.groups.values() if g.trains)
    group.step = 6
    group.ranks[1].committed(group, StatePair(1, 6))
    world.settle()
    world.cut_off(world.uid(1))
    world.advance(0.1)
    group.ranks[0].committed(group, StatePair(1, 6))
    world.ledger.group_committed((1, 6))
    world.advance(0.1)
    assert (world.phase, world.generation) == ("Finishing", 1)
    world.advance(2.0)
    assert (world.status["finished"]["members"], world.status["finished"]["done"]) == ("0-1", "0"), "1 has not heard it"
    world.advance(60.0)
    assert (world.phase, world.names()) == ("Finishing", ["0-0", "1-0"]), "its script may run: no other one starts"
    world.reach_again(world.uid(1))
    world.advance(1.0)
    assert (world.phase, world.generation) == ("Succeeded", 1)


def test_growth_near_the_end_does_not_disturb_who_has_finished(tmp_path: Path) -> None:
    """CUTALL: a finished rank ignores planned generations."""
    world = running(tmp_path, total_steps=6)
    group = next(g for g in world.groups.values() if g.trains)
    group.step = 6
    group.ranks[1].committed(group, StatePair(1, 6))
    world.settle()
    world.scale(4)
    world.advance(10)
    assert world.generation == 1
    for rank in (0, 2):
        group.ranks[rank].committed(group, StatePair(1, 6))
    world.ledger.group_committed((1, 6))
    world.advance(1)
    assert world.phase == "Succeeded"


def test_pod_that_never_started_does_not_outlive_its_job(tmp_path: Path) -> None:
    world = running(tmp_path, total_steps=8)
    world.pods.pending = {3}
    world.scale(4)
    world.step(3)
    world.advance(2)
    assert (world.phase, world.names()) == ("Succeeded", ["0-0", "1-0", "2-0"]), "it is no member, and given back"


# --- scripts -------------------------------------------------------------------------------------------------------


def script(tmp_path: Path, job: JobBuilder | None = None) -> World:
    world = World(
        tmp_path, job or make_job().with_replicas(2).elastic(1, 4), script="plain", settings=Settings(term_grace_s=0.0)
    )
    world.advance(32)
    assert (world.status["tier"], world.phase, world.generation) == ("Script", "Running", 1)
    return world


def test_script_that_loses_a_process_starts_again_in_the_same_pods(tmp_path: Path) -> None:
    world = script(tmp_path)
    world.kill_process(world.uid(1))
    world.advance(1)
    assert (world.generation, world.members, world.phase) == (2, "0-1", "Recovering")
    assert world.names() == ["0-0", "1-0"]
    assert world.status["restarts"]["processes"] == 1
    assert world.status["incidents"][-1]["startMs"] >= 0.0, "what regroup_recovery_seconds counts where no step is seen"
    assert all(len(a.trainers) == 1 and a.trainers[0].alive for a in world.agents.values())


def test_script_that_is_silent_is_lost_by_its_stream_alone(tmp_path: Path) -> None:
    world = script(tmp_path)
    world.power_off(world.uid(1))
    world.cut_off(world.uid(1))
    world.advance(2.5)
    assert (world.generation, world.members) == (2, "0")


def test_script_agent_that_restarts_gets_a_new_generation(tmp_path: Path) -> None:
    """The new boot has heard of nothing and starts nothing by itself: only another number brings it back."""
    world = script(tmp_path)
    world.container_ended(world.agents[world.uid(1)], 137)
    world.advance(1)
    assert (world.generation, world.members, world.phase) == (2, "0-1", "Recovering")


def test_script_grows_and_shrinks(tmp_path: Path) -> None:
    world = script(tmp_path)
    world.scale(3)
    world.advance(4)
    assert (world.members, world.phase) == ("0-2", "Starting")
    world.scale(1)
    world.advance(20)
    assert (world.members, world.phase, world.names()) == ("0", "Starting", ["0-0"])
    world.advance(30)
    assert (world.members, world.phase) == ("0", "Running")


def test_script_ends_when_all_exit_0(tmp_path: Path) -> None:
    world = script(tmp_path)
    world.kill_process(world.uid(0), code=0)
    world.advance(1)
    assert (world.phase, world.condition("Complete")["reason"]) == ("Finishing", "Finishing")
    assert world.status["finished"] | {"at": ""} == {
        "generation": 1, "workers": 2, "step": 0, "members": "0-1", "done": "0", "at": "",
    }  # fmt: skip
    world.kill_process(world.uid(1), code=0)
    world.advance(1)
    assert world.phase == "Succeeded"
    assert world.generation == 1


def test_script_member_that_is_lost_when_another_has_finished(tmp_path: Path) -> None:
    world = script(tmp_path)
    world.kill_process(world.uid(0), code=0)
    world.advance(1)
    assert world.status["finished"]["done"] == "0"
    world.kill_process(world.uid(1), code=1)
    world.advance(1)
    assert (world.generation, world.members, world.phase) == (2, "0-1", "Recovering")
    assert "finished" not in world.status, "both run again"
    assert "Complete" not in [condition["type"] for condition in world.status["conditions"]]
    assert [len(agent.trainers) for agent in world.agents.values()] == [1, 1]
    assert all(agent.trainers[0].alive for agent in world.agents.values())


@pytest.mark.parametrize("what", ["process", "agent"])
def test_joiner_that_freezes_after_it_was_ready_stops_nobody_for_long(tmp_path: Path, what: str) -> None:
    """JOIN: those that train hear of a planned generation once the joiner has arrived at its store."""
    world = running(tmp_path, known_session=True)
    world.scale(4)

    def freeze(moment: str, uid: str) -> bool:
        if (moment, uid, world.generation) == ("heard", world.uid(3), 2):
            agent = world.agents[uid]
            agent.stop() if what == "agent" else agent.trainers[0].stop()
        return False

    world.on_moment = freeze
    pauses: list[float] = []
    before = world.now_s
    while world.now_s < before + 120.0:
        last = world.ledger.last_commit_s
        world.advance(0.1, step_every_s=0.1)
        pauses.append(world.now_s - last)
    assert world.generation > 2, "nobody was left out"
    assert max(pauses) < 1.0
