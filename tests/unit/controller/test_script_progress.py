"""A script that says how far it is, on the real controller and agent core: what is shown, and what does not follow from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from _regroup_agent import events as ev
from _regroup_agent.script import GRACE_S
from _regroup_agent.script_progress import Words
from regroup.protocol import local
from regroup.protocol.wire import LOGGED, REPORTED
from tests.builders.plan import make_job
from tests.simulator.world import World
from tests.unit.controller.test_script import ELASTIC, observed, running


def says(world: World, worker: int, way: str = REPORTED, **words: object) -> None:
    agent = world.agents[world.uid(worker)]
    for rank, trainer in agent.trainers.items():
        agent.handle(ev.Told(rank, trainer.incarnation, way, Words(**words)))  # type: ignore[arg-type]
    world.settle()


def columns(world: World) -> tuple[str, ...]:
    return tuple(world.status["summary"][name] for name in ("step", "progress", "loss", "eta"))


def trains(world: World, first: int, last: int, total: int = 9000, every_s: float = 2.0) -> None:
    for step in range(first, last + 1):
        says(world, 0, step=step, total=total, loss=1.0 / step)
        world.advance(every_s)


def test_step_progress_loss_and_time_left_are_shown(tmp_path: Path) -> None:
    world = running(tmp_path)
    trains(world, 4496, 4500)
    world.advance(12.0)
    assert columns(world) == ("4500", "50%", "0.0002222", "2h30m")
    assert "samples" not in world.status
    assert "checkpoint" not in world.status


def test_program_without_a_process_group_is_running_once_it_gets_further(tmp_path: Path) -> None:
    """Several processes with a hook that is never called are Starting for two minutes."""
    world = World(tmp_path, ELASTIC, script="plain")
    world.advance(2.0)
    observed(world, "watched", 0, 1, 2)
    world.advance(40.0, 1.0)
    assert (world.phase, world.status["tier"]) == ("Starting", "Script")
    says(world, 0, step=5000)
    world.advance(2.0)
    assert world.phase == "Starting", "the first word may be a line about a checkpoint"
    says(world, 0, step=5001)
    world.advance(2.0)
    assert (world.phase, world.condition("Training")["reason"]) == ("Running", "Running")
    world.kill_process(world.uid(1))
    world.advance(5.0)
    assert world.phase == "Recovering"


def test_only_process_of_a_job_is_running_once_it_gets_further(tmp_path: Path) -> None:
    """Without words it is after 30 s."""
    world = World(tmp_path, make_job().with_replicas(1), script="plain")
    world.advance(4.0)
    says(world, 0, step=5000)
    world.advance(2.0)
    assert world.phase == "Starting"
    says(world, 0, step=5001)
    world.advance(2.0)
    assert (world.phase, world.status["tier"]) == ("Running", "Script")


def test_pattern_that_is_given_up_starts_no_clock_and_ends_the_one_that_runs(tmp_path: Path) -> None:
    """The last word of a healthy program would count as a hang, again and again."""
    world = running(tmp_path, make_job().with_replicas(3).elastic(1, 5).with_recovery(hangSeconds=60))
    for step in range(1, 6):
        says(world, 0, LOGGED, step=step)
        world.advance(2.0)
    world.agents[world.uid(0)].handle(ev.PatternGivenUp())
    world.advance(600.0, 5.0)
    assert (world.generation, world.phase) == (1, "Running")
    assert columns(world)[0] == "", "the last step is an old one"
    says(world, 0, step=5400)
    world.advance(12.0)
    assert columns(world)[0] == "5400"


def test_pattern_that_is_given_up_before_new_processes_speak_restarts_none(tmp_path: Path) -> None:
    job = make_job().with_replicas(3).elastic(1, 5).with_recovery(hangSeconds=60)
    world = running(tmp_path, job)
    for step in range(1, 6):
        says(world, 0, LOGGED, step=step)
        world.advance(2.0)
    world.kill_process(world.uid(1))
    world.advance(3.0)
    observed(world, "watched", 0, 1, 2)
    observed(world, "formed", 0, 1, 2)
    world.agents[world.uid(0)].handle(ev.PatternGivenUp())
    world.advance(1900.0, 20.0)
    assert (world.generation, world.phase) == (2, "Running")


def test_program_without_a_process_group_trains_on_without_its_pattern(tmp_path: Path) -> None:
    world = World(tmp_path, ELASTIC, script="plain")
    world.advance(2.0)
    observed(world, "watched", 0, 1, 2)
    world.advance(40.0, 1.0)
    for step in range(1, 6):
        says(world, 0, LOGGED, step=step)
        world.advance(2.0)
    assert world.phase == "Running"
    world.agents[world.uid(0)].handle(ev.PatternGivenUp())
    world.advance(20.0, 1.0)
    assert world.phase == "Running"


def test_lower_step_after_a_restart_is_shown_and_one_of_the_processes_before_is_not(tmp_path: Path) -> None:
    world = running(tmp_path)
    trains(world, 496, 500)
    world.kill_process(world.uid(1))
    world.advance(3.0)
    observed(world, "watched", 0, 1, 2)
    observed(world, "formed", 0, 1, 2)
    assert (world.generation, world.status["progress"]["step"]) == (2, 500), (
        "the last word stays until there is another"
    )
    trains(world, 401, 403)
    world.advance(12.0)
    assert world.status["progress"]["step"] == 403


def test_counted_steps_are_not_taken_for_the_scripts_own(tmp_path: Path) -> None:
    world = running(tmp_path)
    for slot in range(3):
        agent = world.agents[world.uid(slot)]
        (trainer,) = agent.trainers.values()
        agent.trainer_says(trainer, local.Stepped(0, trainer.incarnation, 12, 0.5))
    world.advance(12.0)
    assert columns(world) == ("+12", "", "", "")
    assert "step" not in world.status["progress"]
    says(world, 2, LOGGED, step=5012)
    world.advance(12.0)
    assert columns(world)[0] == "5012"


def test_words_keep_no_silent_worker_and_reset_no_count_of_crashes(tmp_path: Path) -> None:
    """A session's progress does both."""
    world = running(tmp_path, make_job().with_replicas(3).elastic(1, 5).with_recovery(maxRestarts=10))
    for _ in range(10):
        trains(world, 1, 3, every_s=0.5)
        world.kill_process(world.uid(1), code=1, last_line="ValueError: always the same")
        world.advance(GRACE_S, 1.0)
        observed(world, "watched", 0, 1, 2)
        if world.phase == "Failed":
            break
    assert world.condition("Failed")["reason"] == "RepeatedCrash"


def test_script_that_stands_still_is_said_to_and_goes_on(tmp_path: Path) -> None:
    world = running(tmp_path)
    trains(world, 1, 5)
    world.advance(300.0, 5.0)
    assert world.condition("Degraded")["reason"] == "AsWanted"
    world.advance(40.0, 1.0)
    said = world.condition("Degraded")
    assert (said["status"], said["reason"]) == ("True", "NoProgress")
    assert "To have the script restarted, set spec.recovery.hangSeconds." in said["message"]
    assert [note.reason for note in world.notes].count("Hung") == 1
    world.advance(600.0, 5.0)
    assert [note.reason for note in world.notes].count("Hung") == 1
    trains(world, 6, 8)
    assert world.condition("Degraded")["reason"] == "AsWanted"
    assert (world.generation, world.status.get("restarts")) == (1, None)


def test_new_processes_that_hang_before_their_first_word_are_restarted(tmp_path: Path) -> None:
    world = running(tmp_path, make_job().with_replicas(3).elastic(1, 5).with_recovery(hangSeconds=60))
    trains(world, 1, 5)
    world.kill_process(world.uid(1))
    world.advance(10.0)
    observed(world, "watched", 0, 1, 2)
    observed(world, "formed", 0, 1, 2)
    before = world.generation
    world.advance(1500.0, 10.0)
    assert world.generation == before, "a start may take long"
    world.advance(400.0, 2.0)
    assert world.generation > before
    assert [one["cause"] for one in world.status["incidents"]] == ["ProcessExited", "Hung"]


def test_script_whose_pattern_never_matches_is_named_and_not_restarted(tmp_path: Path) -> None:
    job = make_job().with_replicas(3).elastic(1, 5).with_recovery(hangSeconds=60)
    world = running(tmp_path, job.with_spec(progress={"log": r"step (?P<step>\d+)"}))
    world.advance(1700.0, 10.0)
    assert world.condition("Degraded")["status"] == "False"
    world.advance(2000.0, 10.0)
    said = world.condition("Degraded")
    assert (world.generation, said["reason"]) == (1, "NoProgress")
    assert "the pattern of spec.progress.log may be wrong" in said["message"]
    says(world, 0, LOGGED, step=7)
    world.advance(20.0, 2.0)
    assert world.condition("Degraded")["reason"] == "AsWanted"


@pytest.mark.parametrize("processes", [1, 2])
def test_script_that_hangs_is_restarted_as_a_whole_and_counts_once(tmp_path: Path, processes: int) -> None:
    """The agent ends the siblings of the process that is killed."""
    job = (
        make_job().with_replicas(3).elastic(1, 5).with_recovery(hangSeconds=60).with_spec(processesPerWorker=processes)
    )
    world = running(tmp_path, job, processes=processes)
    before = {slot: world.agents[world.uid(slot)].trainers[0].incarnation for slot in range(3)}
    trains(world, 1, 5)
    world.advance(60.0, 5.0)
    assert world.generation == 1
    world.until(lambda: world.generation == 2, limit_s=60.0)
    world.advance(GRACE_S + 5.0, 1.0)
    observed(world, "watched", 0, 1, 2)
    observed(world, "formed", 0, 1, 2)
    assert world.phase == "Running", world.summary()
    after = {slot: world.agents[world.uid(slot)].trainers[0].incarnation for slot in range(3)}
    assert all(after[slot] > before[slot] for slot in range(3))
    assert (world.status["restarts"]["processes"], world.status["incidents"][-1]["cause"]) == (1, "Hung")
    assert "The script's progress has not changed for 70 s" in world.status["incidents"][-1]["decision"]
    world.advance(600.0, 5.0)
    assert world.generation == 2, "nothing was said yet: the start may take long"


def test_last_word_is_shown_once_the_job_has_ended(tmp_path: Path) -> None:
    world = running(tmp_path, ELASTIC)
    trains(world, 1, 5, total=10)
    says(world, 0, step=10, total=10)
    for slot in range(3):
        world.kill_process(world.uid(slot), code=0)
    world.advance(12.0)
    assert world.phase == "Succeeded"
    assert columns(world)[:2] == ("10", "100%")
