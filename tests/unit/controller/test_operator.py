"""The operator itself dies, is double, or is late: rules PERSIST, RESAY, RELEASE, and what a restart must not disturb."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from _regroup_agent.faults import Faults
from regroup_operator.api import ConflictError
from regroup_operator.model.records import Settings
from tests.builders.plan import JobBuilder, make_job
from tests.simulator.operators import Operator
from tests.simulator.world import World


class Killed(Exception):
    """The operator is gone in the middle of what it did."""


def running(tmp_path: Path, job: JobBuilder | None = None, **kwargs: Any) -> World:
    world = World(tmp_path, job or make_job().with_replicas(3).elastic(2, 5), **kwargs)
    world.advance(0.1)
    world.step(10)
    return world


def die_before_write(world: World) -> None:
    """Have the operator die at its next write of the status."""

    def die(_: object) -> None:
        world.kill_operator()
        raise Killed

    world.store.before_write = die


def test_operator_that_dies_before_its_write_has_announced_nothing(tmp_path: Path) -> None:
    """H1 PERSIST, first half: generation 2 was decided, not written, and nobody heard of it."""
    world = running(tmp_path)
    die_before_write(world)
    world.kill_process(world.uid(2))
    with pytest.raises(Killed):
        world.settle()
    assert world.generation == 1
    assert {a.core.report(None, world.now_s).condition.heard for a in world.agents.values()} == {1}
    world.start_operator()
    world.advance(10, step_every_s=0.2)
    assert world.training() == "0-0,1-0,2-0"
    assert set(world.ledger.generations) == set(range(1, world.generation + 1))


def test_operator_that_dies_between_write_and_announcement_wastes_the_number(tmp_path: Path) -> None:
    """H1 PERSIST, second half: generation 2 stands in the status, nobody has heard of it, its document is lost with the
    operator. The next operator takes the next number, and waits for those that are still on their way to it."""
    world = running(tmp_path)
    operator = world.operator
    assert operator is not None

    def die(*_: object) -> None:
        world.kill_operator()
        raise Killed

    operator.registry.tell = die  # type: ignore[method-assign, assignment]
    world.kill_process(world.uid(2))
    with pytest.raises(Killed):
        world.settle()
    assert world.generation == 2
    late = world.uid(1)
    world.unreachable.add(late)
    world.start_operator()
    world.advance(2)
    assert world.generation == 2
    assert world.condition("Training")["reason"] == "Reconnecting"
    world.reach_again(late)
    world.advance(0.1)
    assert world.generation == 3
    assert "1-0" in world.training()
    assert world.training() != ""


def test_two_leaders_never_give_one_number_to_two_lists(tmp_path: Path) -> None:
    """H1 with a leader that is paused past its lease in the middle of its write, and goes on afterwards."""
    world = running(tmp_path)
    stale = world.operator
    assert stale is not None
    seen: list[int] = []

    def another_leads(_: object) -> None:
        world.kill_operator()
        world.start_operator()
        world.vanish(world.uid(1))
        world.settle()
        seen.append(world.generation)

    world.store.before_write = another_leads
    world.kill_process(world.uid(2))
    world.reconcile(stale)
    assert seen == [2]
    world.advance(10, step_every_s=0.2)
    assert world.training() in ("0-0,1-1,2-0", "0-0,1-0,2-0")
    # `Ledger.saw_generation` holds every number against every written and every told uid.
    assert len(world.ledger.generations) == world.generation


def test_stale_leader_deletes_nobody_who_was_taken_back(tmp_path: Path) -> None:
    """H9 RELEASE: scaled to 2, the leader is about to release worker 2 and sleeps past its lease; with the next leader the
    worker is a member again when the first wakes up."""
    world = running(tmp_path, settings=Settings(join_quiet_s=0.0))
    woke: list[str] = []

    def sleeps(status: dict[str, Any]) -> None:
        if not status.get("released"):
            world.store.before_write = sleeps
            return
        world.kill_operator()
        world.start_operator()
        world.scale(3)
        world.advance(2, step_every_s=0.1)
        woke.append(world.members)

    world.store.before_write = sleeps
    world.scale(2)
    world.until(lambda: bool(woke), step_every_s=0.1)
    world.advance(2, step_every_s=0.1)
    assert woke == ["0-2"]
    assert world.pods.deleted == []
    assert world.training() == "0-0,1-0,2-0"


def test_both_faults_are_reported_and_the_operator_dies_before_it_acts(tmp_path: Path) -> None:
    """H6 RESAY: the next operator derives what to do from the conditions that are said again."""
    world = running(tmp_path, make_job().with_replicas(2).fixed())
    die_before_write(world)
    world.slow = {("digits-worker-1-0", 0)}
    world.kill_process(world.uid(1))
    with pytest.raises(Killed):
        world.settle()
    for agent in world.agents.values():
        agent.faults = Faults()  # no fault is sent again: the conditions have to be enough
    world.start_operator()
    world.advance(1)
    world.agents[world.uid(1)].trainers[0].attach()
    world.advance(1)
    assert world.training() == "0-0,1-0"
    assert world.generation == 2
    world.step(3)


@pytest.mark.parametrize("written", [False, True], ids=["before its write", "after it"])
@pytest.mark.parametrize("processes", [1, 2])
def test_exits_count_once_whenever_the_operator_dies(tmp_path: Path, processes: int, written: bool) -> None:
    """It had answered each report: the next one is told again, and finds in the status what has been counted."""
    world = running(tmp_path, processes=processes, settings=Settings(term_grace_s=0.0))
    world.advance(2)
    operator = world.operator
    assert operator is not None

    def die(*_: object) -> None:
        world.kill_operator()
        raise Killed

    if written:
        operator.registry.tell = die  # type: ignore[method-assign, assignment]
    else:
        die_before_write(world)
    for rank in range(processes):
        world.kill_process(world.uid(2), rank)
    with pytest.raises(Killed):
        world.settle()
    assert world.status.get("restarts", {}).get("processes", 0) == (processes if written else 0)
    for _ in range(3):
        world.start_operator()
        world.advance(10, step_every_s=0.2)
        assert world.status["restarts"]["processes"] == processes
        assert world.training() == "0-0,1-0,2-0"
        world.kill_operator()
    incident = world.status["incidents"][0]
    assert (incident["cause"], incident["culprit"]) == ("ProcessExited", "2")
    assert "worker 2 lost a process (signal 9)" in incident["decision"]


def test_operator_restart_disturbs_nobody(tmp_path: Path) -> None:
    """In the 20 s after it no generation is issued; when it is back, the status is true and was never worse."""
    world = running(tmp_path)
    world.advance(15, step_every_s=0.2)
    world.kill_operator()
    world.advance(20, step_every_s=0.2)
    before = world.status
    world.start_operator()
    seen = []
    for _ in range(40):
        world.advance(0.5, step_every_s=0.25)
        seen.append((world.phase, world.status["summary"]["ready"], world.generation))
    assert set(seen) == {("Running", "3/3", 1)}
    assert world.status["progress"]["step"] > before["progress"]["step"]
    assert {c["type"]: c["status"] for c in world.status["conditions"]} == {
        c["type"]: c["status"] for c in before["conditions"]
    }


def test_operator_restart_while_agents_return_one_by_one_keeps_ready_true(tmp_path: Path) -> None:
    world = running(tmp_path)
    world.advance(1)
    uids = [world.uid(slot) for slot in range(3)]
    world.unreachable.update(uids)
    world.kill_operator()
    world.start_operator()
    seen = set()
    for uid in uids:
        world.advance(1, step_every_s=0.25)
        seen.add((world.phase, world.status["summary"]["ready"], world.generation))
        world.reach_again(uid)
    world.advance(1, step_every_s=0.25)
    assert seen == {("Running", "3/3", 1)}
    assert world.phase == "Running"


def test_operator_restart_with_a_dead_worker_keeps_the_others_places(tmp_path: Path) -> None:
    """The pod is gone at the first look of the term; the survivors have not called yet. A generation of the first caller
    alone would cost the others their places."""
    world = running(tmp_path, make_job().with_replicas(4).elastic(1, 5))
    uids = [world.uid(slot) for slot in (1, 2)]
    world.unreachable.update(uids)
    world.kill_operator()
    world.vanish(world.uid(3))
    world.start_operator()
    world.advance(1)
    for uid in uids:
        world.reach_again(uid)
    world.advance(0.1)
    assert (world.generation, world.training()) == (2, "0-0,1-0,2-0,3-1")  # the new pod was ready in that second, too


def test_operator_restart_in_mid_generation_takes_the_next_number_for_who_has_not_heard(tmp_path: Path) -> None:
    world = running(tmp_path)
    deaf = world.uid(1)
    agent = world.agents[deaf]
    world.kill_process(world.uid(2))
    # Everybody hears of generation 2 but worker 1, whose stream breaks with the command in it.
    for _ in range(200):
        if world.generation == 2:
            break
        world._turn()
    world.kill_operator()
    assert world.generation == 2
    assert agent.core.report(None, world.now_s).condition.heard == 1
    world.start_operator()
    world.advance(5, step_every_s=0.1)
    assert world.training() == "0-0,1-0,2-0"
    assert world.generation > 2


def test_write_that_was_refused_is_counted_once(tmp_path: Path) -> None:
    """A plan that lost its race has counted nothing: the exit stands once in the status."""
    world = running(tmp_path)
    for _ in range(3):

        def touch(_: object) -> None:
            world.store.change_spec(lambda spec: spec.update(replicas=3))

        world.store.before_write = touch
        world.kill_process(world.uid(2))
        world.advance(5, step_every_s=0.1)
    assert world.status["restarts"]["processes"] == 3


def test_job_that_changes_at_every_read_is_left_to_the_back_off(tmp_path: Path) -> None:
    world = running(tmp_path)
    operator = world.operator
    assert operator is not None

    def touch(_: object) -> None:
        world.store.change_spec(lambda spec: spec.update(replicas=3))
        world.store.before_write = touch

    world.store.before_write = touch
    world.kill_process(world.uid(2))
    with pytest.raises(ConflictError, match="5 times"):
        world.settle()
    assert world.generation == 1


def test_operator_that_leads_no_more_does_not_plan_again(tmp_path: Path) -> None:
    """It would count by what its agents told it; the next leader may have counted the same end by the pod."""
    world = running(tmp_path)
    deposed = world.operator
    assert deposed is not None

    def depose(_: object) -> None:
        deposing.append(world.start_operator())
        world.store.change_spec(lambda spec: spec.update(replicas=3))

    deposing: list[Operator] = []
    world.store.before_write = depose
    world.kill_process(world.uid(2))
    writes = world.store.num_writes
    deposed.reconcile()
    assert deposing, "it wrote, and somebody else was faster"
    assert world.store.num_writes == writes


def test_job_that_is_being_deleted_is_left_alone(tmp_path: Path) -> None:
    world = running(tmp_path)
    raw = world.store.read()
    raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.store._bump(raw)
    world.vanish(world.uid(1))
    writes = world.store.num_writes
    world.advance(5)
    assert (world.store.num_writes, world.names()) == (writes, ["0-0", "2-0"])


def test_two_controllers_that_see_the_same_fault_write_one_generation(tmp_path: Path) -> None:
    """Whichever write is first: there is one generation 2, and the loser plans again from it."""
    world = running(tmp_path, settings=Settings(term_grace_s=0.0))
    first, second = world.operator, Operator(world, world.settings)
    assert first is not None
    second.registry._sessions = dict(first.registry._sessions)
    first.controller._leads = second.controller._leads = lambda: True
    world.vanish(world.uid(0))
    writes = world.store.num_writes

    def overtake(_: object) -> None:
        world.reconcile(second)
        overtaken.append(world.store.num_writes - writes)

    overtaken: list[int] = []
    world.store.before_write = overtake
    world.reconcile(first)
    assert overtaken == [1], "the second one was faster"
    assert world.status["restarts"]["generations"] == world.generation - 1
    assert len(world.ledger.generations) == world.generation


def test_pods_lost_while_the_operator_was_away(tmp_path: Path) -> None:
    world = running(tmp_path)
    world.kill_operator()
    uid = world.uid(2)
    world.vanish(uid)
    world.advance(5)
    world.start_operator()
    world.advance(10, step_every_s=0.2)
    assert world.training() == "0-0,1-0,2-1"
    assert replace(world.pods.by_uid[world.uid(2, 1)]).attempt == 1
