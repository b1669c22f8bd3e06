"""How a job begins: the first generation, tiers, slow starts, what cannot start."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from regroup.protocol.state import Phase
from regroup_operator import controller
from regroup_operator.model.pace import write_every_s
from regroup_operator.model.plan import JobPlan
from regroup_operator.model.records import Settings
from regroup_operator.plan.facts.facts import Inputs
from regroup_operator.plan.job import plan_job
from tests.builders.plan import make_job
from tests.simulator.pace import Pace
from tests.simulator.world import World


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("known_session", [False, True])
def test_job_starts_with_one_generation_of_all_workers(tmp_path: Path, processes: int, known_session: bool) -> None:
    world = World(tmp_path, make_job().with_replicas(3), processes=processes, known_session=known_session)
    world.advance(0.1)
    assert (world.generation, world.members, world.phase) == (1, "0-2", "Running")
    assert world.training() == "0-0,1-0,2-0"
    world.step(5)
    world.advance(15, step_every_s=0.5)
    assert (world.generation, world.status["tier"]) == (1, "Session")
    assert world.status["progress"]["step"] > 5
    assert world.status["summary"]["ready"] == "3/3"


def test_member_that_imports_for_a_minute_is_waited_for(tmp_path: Path) -> None:
    """Two processes attach one after the other, long after the deadline of a form: they are neither late nor dead."""
    world = World(tmp_path, make_job().with_replicas(2), processes=2)
    world.slow = {("digits-worker-0-0", 1), ("digits-worker-1-0", 0), ("digits-worker-1-0", 1)}
    world.advance(20)
    agent = world.agents[world.uid(1)]
    agent.trainers[0].attach()
    world.advance(40)
    assert (world.generation, world.phase) == (1, "Starting")
    agent.trainers[1].attach()
    world.agents[world.uid(0)].trainers[1].attach()
    world.settle()
    assert (world.generation, world.phase) == (1, "Running")
    assert "restarts" not in world.status


def test_session_that_was_taken_for_a_script_trains_all_the_same(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(2))
    world.slow = {("digits-worker-0-0", 0), ("digits-worker-1-0", 0)}
    world.advance(45)
    assert (world.status["tier"], world.phase) == ("Script", "Running")
    for slot in (0, 1):
        world.agents[world.uid(slot)].trainers[0].attach()
        world.advance(3)
    world.advance(5, step_every_s=0.1)
    assert (world.status["tier"], world.phase, world.training()) == ("Session", "Running", "0-0,1-0")


def test_first_generation_waits_for_all_then_starts_smaller(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(4).elastic(2, 5), start=False)
    world.pods.pending = {3}
    world.start_operator()
    world.advance(29)
    assert world.generation == 0
    assert world.condition("Training")["reason"] == "WaitingForMore"
    world.advance(2)
    assert (world.members, world.training()) == ("0-2", "0-0,1-0,2-0")
    world.run_pod(world.uid(3))
    world.advance(2, step_every_s=0.1)
    assert (world.generation, world.members, world.status["membership"]["kind"]) == (2, "0-3", "planned")


def test_fixed_size_waits_for_all(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(3).fixed(), start=False)
    world.pods.pending = {2}
    world.start_operator()
    world.advance(100)
    assert (world.generation, world.condition("Training")["reason"]) == (0, "TooFewReady")
    world.run_pod(world.uid(2))
    world.settle()
    assert world.members == "0-2"


def test_command_that_exits_1_at_once_fails_the_job_with_its_last_words(tmp_path: Path) -> None:
    job = make_job().with_replicas(2).with_recovery(maxRestarts=3)
    world = World(tmp_path, job, script="crash")
    world.until(lambda: world.phase == "Failed", limit_s=60)
    failed = world.condition("Failed")
    assert failed["status"] == "True"
    assert "exit code 1" in failed["message"]
    assert "No module named 'nothing'" in failed["message"]
    assert "maxRestarts allows 3" in failed["message"]
    assert world.status["restarts"]["processes"] in (4, 5)  # both workers fail in the same moment
    world.advance(5)
    assert {p.phase for p in world.pods.by_uid.values()} == {"Succeeded"}
    assert len(world.status["membership"]["older"]) == 0


def test_image_that_does_not_exist_is_said_in_the_condition(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(2), start=False)
    world.pods.pending = {0, 1}
    world.start_operator()
    world.settle()
    for uid, pod in list(world.pods.by_uid.items()):
        world.pods.by_uid[uid] = replace(
            pod, waiting_reason="ErrImagePull", waiting_message='failed to pull "example/none:1": not found'
        )
    world.dirty()
    world.settle()
    ready = world.condition("PodsReady")
    assert (ready["status"], ready["reason"]) == ("False", "ErrImagePull")
    assert ready["message"].startswith("0 of 2 worker pods run; digits-worker-0-0 cannot start: failed to pull")
    assert world.phase == "Pending"


def test_container_without_hello_is_said_after_20_s(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(2))
    world.settle()
    world.scale(3)
    world.pods.pending = {2}
    world.settle()
    uid = world.uid(2)
    world.unreachable.add(uid)
    world.run_pod(uid)
    world.advance(19)
    assert world.condition("AgentsConnected")["reason"] == "Connecting"
    world.advance(2)
    said = world.condition("AgentsConnected")
    assert (said["status"], said["reason"]) == ("False", "NoHello")
    assert said["message"].startswith("1 of 3 agents has not connected to regroup.ns.svc:8443 for 20 s.")
    world.advance(100)
    assert "for 120 s. Read the log of pod digits-worker-2-0" in world.condition("AgentsConnected")["message"]


def test_process_that_dies_before_it_enters_is_waited_for_and_enters_itself(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(2).fixed())
    world.slow = {("digits-worker-1-0", 0)}
    world.settle()
    world.kill_process(world.uid(1))
    world.slow = set()
    world.advance(2)
    assert (world.phase, world.training()) == ("Running", "0-0,1-0")
    assert world.status["restarts"]["processes"] == 1


def test_steady_job_writes_nothing_but_progress(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(3))
    world.advance(30, step_every_s=0.2)
    before, status = world.store.num_writes, world.status
    world.advance(60, step_every_s=0.2)
    assert world.store.num_writes - before in range(5, 8)  # one each ten seconds
    changed = {key for key, value in world.status.items() if status[key] != value}
    assert changed == {"progress", "samples", "goodput", "observedAt", "summary"}


@pytest.mark.parametrize(
    ("factor", "write_s", "plans"),
    [pytest.param(1.0, 10.0, range(20, 31), id="few jobs"), pytest.param(10.0, 25.0, range(2, 4), id="500 jobs")],
)
def test_steady_job_is_planned_for_its_writes_and_not_for_each_report(
    tmp_path: Path, factor: float, write_s: float, plans: range
) -> None:
    """In a minute. The group would be stalled 0.6 s after each report that is due."""
    settings = Settings(progress_write_s=write_s)
    world = World(tmp_path, make_job().with_replicas(3), settings=settings, progress_factors=(factor,))
    world.wall_skew_s = 0.9  # the status has whole seconds
    world.advance(60, step_every_s=0.2)
    assert world.operator is not None
    before = world.operator.num_reconciles
    world.advance(60, step_every_s=0.2)
    assert world.operator.num_reconciles - before in plans
    world.advance(factor + 2.0)
    sessions = world.operator.registry.sessions(world.pods.by_uid.values())
    assert all(session.asked_at_s is not None for session in sessions.values()), "the stall was seen all the same"


def test_write_that_takes_as_long_as_the_pause_is_not_followed_by_the_next_at_once(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(3))
    world.advance(30, step_every_s=0.2)
    begun: list[float] = []

    def take_long(_: object) -> None:
        begun.append(world.now_s)
        world.now_s += 10.0
        world.store.before_write = take_long

    world.store.before_write = take_long
    world.advance(25, step_every_s=0.2)
    assert len(begun) >= 2
    assert min(b - (a + 10.0) for a, b in itertools.pairwise(begun)) >= 4.9


def plans_take(world: World, monkeypatch: pytest.MonkeyPatch, seconds: Iterator[float]) -> list[float]:
    """Have one plan after the other take so long; return the times at which they end."""
    planned: list[float] = []

    def slow(inputs: Inputs) -> JobPlan:
        world.now_s += next(seconds)
        planned.append(world.now_s)
        return plan_job(inputs)

    monkeypatch.setattr(controller, "plan_job", slow)
    return planned


def test_plan_that_takes_long_leaves_time_for_everything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of thousands of pods that start asks for a plan."""
    world = World(tmp_path, make_job().with_replicas(3))
    world.advance(10)
    planned = plans_take(world, monkeypatch, itertools.repeat(0.1))
    assert world.operator is not None
    began_s = world.now_s
    while world.now_s < began_s + 3.0:
        world.operator.dirty()
        world.advance(0.01)
    assert len(planned) in range(10, 13), "after the second one it is known how long a plan takes"
    assert min(b - a for a, b in itertools.pairwise(planned[1:])) == pytest.approx(0.3, abs=0.02)
    world.operator.dirty()
    world.advance(0.4)
    assert planned[-1] >= began_s + 3.0, "what was asked for in the rest comes after it"


def test_operator_that_stood_still_in_one_plan_does_not_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, make_job().with_replicas(3))
    world.advance(10)
    planned = plans_take(world, monkeypatch, itertools.chain([30.0], itertools.repeat(0.0)))
    assert world.operator is not None
    for _ in range(3):
        world.operator.dirty()
        world.advance(0.01)
    assert len(planned) >= 3
    assert max(b - a for a, b in itertools.pairwise(planned)) <= 0.02


@pytest.mark.parametrize(
    ("plan_s", "rest_s"),
    [
        pytest.param(0.009, 0.0, id="so short that it is not worth it"),
        pytest.param(0.1, 0.2, id="5,000 workers"),
        pytest.param(1.0, 0.5, id="the longest"),
    ],
)
def test_rest_after_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan_s: float, rest_s: float) -> None:
    world = World(tmp_path, make_job().with_replicas(3))
    world.advance(10)
    plans_take(world, monkeypatch, itertools.repeat(plan_s))
    assert world.operator is not None
    for _ in range(2):
        world.operator.dirty()
        world.advance(0.001)
    assert world.operator.rests_until_s == (pytest.approx(world.now_s + rest_s, abs=0.01) if rest_s else 0.0)


@pytest.mark.parametrize(
    ("replicas", "is_bounded"),
    [
        pytest.param(4, False, id="few pods start at once"),
        pytest.param(8, True, id="changes of many pods are planned together"),
    ],
)
def test_plans_of_a_job_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: int, is_bounded: bool
) -> None:
    world = World(tmp_path, make_job().with_replicas(replicas))
    world.pods.pending = {0}
    world.settle()
    planned = plans_take(world, monkeypatch, itertools.repeat(0.0))
    assert world.operator is not None
    for _ in range(50):
        world.operator.dirty()
        world.advance(0.01)
    assert not world.generation
    assert (min(b - a for a, b in itertools.pairwise(planned)) >= 0.19) == is_bounded, planned
    world.pods.pending = set()
    world.run_pod(world.uid(0))
    world.until(lambda: world.generation == 1, limit_s=1)
    planned.clear()
    for _ in range(50):
        world.operator.dirty()
        world.advance(0.01)
    assert len(planned) > 20, "a job with a generation does not wait"


def test_idle_job_writes_only_that_it_is_seen(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(3))
    world.advance(20)
    before, status = world.store.num_writes, world.status
    world.advance(700)
    assert world.store.num_writes - before in range(63, 71)  # at most one each ten seconds
    assert {key for key, value in world.status.items() if status[key] != value} == {"observedAt"}


def test_progress_of_all_jobs_together_is_written_so_often_and_nothing_else_waits_for_it(tmp_path: Path) -> None:
    settings = Settings(progress_write_s=0.0)
    world = World(tmp_path, make_job().with_replicas(3), settings=settings, progress_writes_per_s=0.5)
    world.advance(10, step_every_s=0.2)
    before = world.store.num_writes
    world.advance(20, step_every_s=0.2)
    assert world.store.num_writes - before in range(8, 12)
    world.kill_process(world.uid(1))
    world.settle()
    assert world.generation >= 2  # the third one comes when the restarted process is back, at once in this world


@pytest.mark.parametrize(
    ("num_jobs", "every_s"), [pytest.param(200, 10.0, id="within the budget"), pytest.param(500, 25.0, id="beyond it")]
)
def test_progress_is_written_less_often_where_all_jobs_could_not_be_every_ten_seconds(
    num_jobs: int, every_s: float
) -> None:
    assert write_every_s(10.0, num_jobs, writes_per_s=20.0) == every_s


@pytest.mark.parametrize("known_session", [False, True])
@pytest.mark.parametrize("replicas", [1, 8, 32])
def test_start_within_seconds_costs_three_writes(tmp_path: Path, replicas: int, known_session: bool) -> None:
    """One says that the job is accepted, one names the generation, one says that it runs."""
    pace = Pace(random.Random(1), start_s=(1.0, 3.0), container_s=(0.5, 3.0), form_s=(0.05, 0.3), adopt_s=(0.05, 0.3))
    job = make_job().with_replicas(replicas).elastic(1, 32)
    world = World(tmp_path, job, start=False, pace=pace, num_nodes=replicas, known_session=known_session)
    world.start_operator()
    world.until(lambda: world.phase == "Running", limit_s=20.0)
    assert (world.store.num_writes, world.generation) == (3, 1)
    assert (world.status["tier"], world.status["lineage"]) == ("Session", [{"generation": 1, "startStep": 0}])
    world.advance(2.0)
    assert world.store.num_writes <= 4, "the last numbers of the start"
    assert world.status["summary"]["ready"] == f"{replicas}/{replicas}"


def test_slow_start_costs_a_write_every_five_seconds_and_its_number_is_no_older(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(32).fixed(), start=False, known_session=True)
    world.pods.pending = set(range(32))
    registry = world.start_operator().registry
    world.advance(1.0)
    ready: list[int] = []
    for tenth in range(620):
        if tenth % 20 == 0 and tenth // 20 < 31:
            world.run_pod(world.uid(tenth // 20))
        world.advance(0.1)
        sessions = registry.sessions(world.pods.by_uid.values()).values()
        ready.append(sum(session.condition.phase == Phase.READY for session in sessions))
        known = world.status.get("readyReplicas", 0)
        assert known >= ([0] * 52 + ready)[-52], "the number is more than five seconds old"
    assert ready[-1] == 31
    assert world.store.num_writes in range(10, 14), "one to begin, and one in five seconds after each change"
    world.run_pod(world.uid(31))
    world.advance(1.0)
    assert (world.phase, world.generation) == ("Running", 1), "what a decision depends on waits for nothing"


def test_change_of_size_is_written_as_it_goes_and_no_oftener(tmp_path: Path) -> None:
    """A generation, its start step, its adoption; until that the generation before trains, and the conditions say so."""
    pace = Pace(random.Random(1), form_s=(0.05, 0.3), adopt_s=(0.05, 0.3))
    world = World(tmp_path, make_job().with_replicas(3).elastic(1, 5), pace=pace, known_session=True)
    world.advance(15.0, step_every_s=0.25)
    world.scale(4)
    world.until(lambda: world.generation == 2, step_every_s=0.05)
    before = world.store.num_writes
    assert (world.status["membership"]["adopted"], world.condition("Degraded")["status"]) == (False, "True")
    assert world.condition("Training")["message"] == "Generation 1 trains with 3 workers."
    world.until(lambda: world.status["membership"]["adopted"], step_every_s=0.05)
    assert world.store.num_writes - before == 2
    assert world.condition("Training")["message"] == "Generation 2 trains with 4 workers."
    assert world.condition("Degraded")["message"] == "4 of 4 workers train."
