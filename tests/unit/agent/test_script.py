"""Tier Script: how the agent starts, replaces and ends an unmodified script's processes, what it says of their group, and how it
gives up on what does not die."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from _regroup_agent import events as ev
from _regroup_agent.ending import UNKILLABLE_S
from _regroup_agent.script import GRACE_S, UNOBSERVED_S, WATCHED_S
from regroup.protocol import local, wire
from regroup.protocol.state import Group, Phase, StatePair
from tests.unit.agent.drive import Drive


def starts(processes: int = 2, world_size: int | None = None, tier: str = "Script") -> Drive:
    """All processes of generation 1 run; their hooks have said nothing yet."""
    drive = Drive(processes).feed(ev.Connected()).command(wire.Welcome(tier))
    drive.generation(1, world_size=world_size or processes)
    for rank in range(processes):
        drive.feed(ev.Spawned(rank, drive.incarnations[rank]))
    return drive


def says(drive: Drive, group: str, *ranks: int) -> Drive:
    for rank in ranks or range(drive.processes):
        drive.says(local.Observed(rank, drive.incarnations[rank], group), rank)
    return drive


GROUPS: dict[str, tuple[Callable[[], Drive], str]] = {
    "processes that run have formed nothing": (lambda: starts(), Group.WAITING),
    "with every process past init_process_group": (lambda: says(starts(), "formed"), Group.FORMED),
    "with one of two past it": (lambda: says(says(starts(), "watched"), "formed", 0).wait(WATCHED_S), Group.WAITING),
    "with one of two past it and the other exited 0": (lambda: says(starts(), "formed", 0).exits(0, 1), Group.FORMED),
    "without a hook, before 30 s": (lambda: starts().wait(UNOBSERVED_S - 0.1), Group.WAITING),
    "without a hook, after 30 s": (lambda: starts().wait(UNOBSERVED_S), Group.UNOBSERVED),
    "imports that take long": (lambda: says(starts(), "watched").wait(WATCHED_S - 0.1), Group.WAITING),
    "a hook that is never called": (lambda: says(starts(), "watched").wait(WATCHED_S), Group.UNOBSERVED),
    "a process alone that needs no group": (lambda: says(starts(1), "watched").wait(UNOBSERVED_S), Group.UNOBSERVED),
    "one process of a larger world": (lambda: says(starts(1, 3), "watched").wait(UNOBSERVED_S), Group.WAITING),
    "a call that does not return": (lambda: says(starts(), "entered").wait(1800), Group.WAITING),
    "a call that comes late": (lambda: says(starts().wait(UNOBSERVED_S), "formed"), Group.FORMED),
    "while the tier is not known": (lambda: says(starts(tier="Unknown"), "formed"), Group.FORMED),
    "processes that are replaced": (lambda: says(starts(), "formed").generation(2), Group.WAITING),
    "a sibling that crashed": (lambda: says(starts(), "formed").exits(1), Group.WAITING),
    "their successors": (
        lambda: says(starts(), "formed").generation(2).exits(-15, 0).exits(-15, 1).wait(UNOBSERVED_S - 1),
        Group.WAITING,
    ),
}


@pytest.mark.parametrize(("drive", "want"), GROUPS.values(), ids=GROUPS)
def test_what_is_said_of_the_process_group(drive: Callable[[], Drive], want: str) -> None:
    assert drive().report.condition.group == want


def test_a_group_that_has_formed_is_reported_without_being_asked() -> None:
    drive = says(starts(), "formed").wait(0.1)
    (said,) = [e.report.condition.group for e in drive.of(ev.Send)]
    assert said == Group.FORMED


def test_old_process_that_speaks_late_says_nothing_of_its_successor() -> None:
    drive = starts(1, 2)
    old = drive.incarnations[0]
    drive.generation(2, world_size=2).exits(-15).feed(ev.Spawned(0, drive.incarnations[0]))
    drive.feed(ev.FromTrainer(0, old, local.Observed(0, old, "formed")))
    assert drive.report.condition.group == Group.WAITING


def test_session_has_no_word_for_it() -> None:
    assert Drive().session().report.condition.group is None


# --- the preload ---------------------------------------------------------------------------------------------------


def test_script_worker_is_ready_once_the_zygote_has_imported() -> None:
    drive = Drive(preloading=True).feed(ev.Connected()).command(wire.Welcome("Script"))
    assert drive.phase == Phase.IDLE
    drive.feed(ev.Preloaded()).wait(0.1)
    (said,) = [e.report.condition.phase for e in drive.of(ev.Send)]
    assert said == Phase.READY


def test_generation_that_comes_before_the_preload_is_over_starts_its_processes() -> None:
    drive = Drive(preloading=True).feed(ev.Connected()).command(wire.Welcome("Script")).generation(1)
    assert drive.of(ev.Start)
    assert drive.phase == Phase.STARTING


# --- processes that do not die -------------------------------------------------------------------------------------


def test_script_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    drive = starts(1).generation(2)
    assert drive.of(ev.Signal) == [ev.Signal(0, signal.SIGTERM)]
    assert drive.wait(GRACE_S).of(ev.Signal) == [ev.Signal(0, signal.SIGKILL)]
    assert [s.generation.number for s in drive.exits(-9).of(ev.Start)] == [2]


def test_process_that_sigkill_does_not_end_ends_its_agent_with_a_sentence() -> None:
    drive = starts().generation(2).exits(-15, 0).wait(GRACE_S)
    assert drive.of(ev.Signal) == [ev.Signal(1, signal.SIGKILL)]
    assert drive.wait(UNKILLABLE_S - 0.1).of(ev.Exit) == []
    assert drive.wait(0.1).of(ev.Exit) == [ev.Exit(1)]
    (log,) = drive.of(ev.Log)
    assert "Process 1 is not dead 30 s after SIGKILL: it hangs in the kernel" in log.text
    condition = drive.report.condition
    assert (condition.phase, condition.cause) == (Phase.STOPPED, log.text)
    assert drive.wait(600).effects == []


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        pytest.param(lambda d: d.command(wire.Stop("Complete")), 0, id="the job has ended"),
        pytest.param(lambda d: d.feed(ev.Terminated()), 143, id="the pod is deleted"),
    ],
)
def test_agent_that_has_to_exit_does_so_without_a_process_that_does_not_die(
    ends: Callable[[Drive], Drive], code: int
) -> None:
    drive = starts(1)
    ends(drive).wait(30)  # the pod's grace, if there is one, is over
    assert drive.of(ev.Exit) == []
    assert drive.wait(UNKILLABLE_S).of(ev.Exit) == [ev.Exit(code)]
    assert drive.wait(600).effects == []


def test_process_that_dies_late_is_replaced_as_ever_and_the_next_gets_its_own_time() -> None:
    drive = starts(1).generation(2).wait(GRACE_S + UNKILLABLE_S - 1).exits(-9)
    drive.feed(ev.Spawned(0, drive.incarnations[0])).generation(3).wait(GRACE_S)
    assert drive.of(ev.Signal) == [ev.Signal(0, signal.SIGKILL)]
    assert drive.wait(UNKILLABLE_S - 1).of(ev.Exit) == []


# --- starts and ends -----------------------------------------------------------------------------------------------


def test_agent_of_an_unknown_tier_is_ready_without_processes() -> None:
    drive = Drive().feed(ev.Connected()).command(wire.Welcome("Unknown"))
    assert (drive.phase, drive.of(ev.Start)) == (Phase.READY, [])


def test_script_starts_with_the_generation_and_frees_the_stores_port() -> None:
    drive = Drive(2).feed(ev.Connected()).generation(1, hosts_store=True)
    assert [type(e).__name__ for e in drive.effects] == ["YieldStore", "Persist", "Start", "Start"]
    assert drive.on_disk.started == 1
    condition = drive.report.condition
    assert (condition.phase, condition.generation, condition.entered) == (Phase.STARTING, 1, 0)


def test_script_adopts_when_all_its_processes_run() -> None:
    drive = starts(2)
    assert drive.bodies(wire.Adopted, ever=True) == [wire.Adopted(0, "self")]
    assert (drive.on_disk.entered, drive.on_disk.adopted, drive.phase) == (1, 1, Phase.TRAINING)
    assert drive.report.seal is None


def test_tier_script_that_becomes_known_later_adopts_what_runs() -> None:
    drive = starts(1, tier="Unknown")
    assert drive.phase == Phase.STARTING
    assert drive.command(wire.Welcome("Script")).bodies(wire.Adopted)


def test_script_is_replaced_for_a_newer_generation_and_its_end_is_no_fault() -> None:
    drive = starts(2).generation(2)
    assert drive.of(ev.Signal) == [ev.Signal(0, signal.SIGTERM), ev.Signal(1, signal.SIGTERM)]
    assert drive.wait(10).of(ev.Signal) == [ev.Signal(0, signal.SIGKILL), ev.Signal(1, signal.SIGKILL)]
    assert drive.exits(-9, 0).of(ev.Start) == []
    started = drive.exits(-9, 1).of(ev.Start)
    assert [(s.local_rank, s.generation.number, s.restarts) for s in started] == [(0, 2, 1), (1, 2, 1)]
    assert drive.bodies(wire.Fault, ever=True) == []


def test_newest_generation_wins_while_a_script_is_replaced() -> None:
    drive = starts(1).generation(2).generation(3).exits(0)
    assert [s.generation.number for s in drive.of(ev.Start)] == [3]


def test_excluded_script_is_ended_and_ready() -> None:
    drive = starts(1).generation(2, member=False).exits(0)
    assert drive.of(ev.Start) == []
    assert drive.phase == Phase.READY


def test_script_that_fails_is_one_fault_and_its_siblings_are_ended() -> None:
    drive = starts(2).exits(3, 1, "boom")
    assert [(f.exit_code, f.local_rank, f.last_line) for f in drive.bodies(wire.Fault)] == [(3, 1, "boom")]
    assert drive.of(ev.Signal) == [ev.Signal(0, signal.SIGTERM)]
    assert drive.phase == Phase.BROKEN
    drive.exits(-15, 0)
    assert len(drive.bodies(wire.Fault, ever=True)) == 1
    condition = drive.report.condition
    assert (condition.phase, condition.entered, condition.cause) == (
        Phase.READY, 1, "Process 1 ended with exit code 3.",
    )  # fmt: skip
    assert [s.generation.number for s in drive.generation(2).of(ev.Start)] == [2, 2]


def test_script_that_crashes_again_waits_before_it_starts() -> None:
    drive = starts(1).exits(1).generation(2)
    assert drive.of(ev.Start)
    drive.exits(1).generation(3)
    assert drive.of(ev.Start) == []
    assert drive.wait(1).of(ev.Start)


def test_script_of_a_generation_starts_once_across_container_restarts_h7() -> None:
    drive = starts(1, tier="Unknown")
    again = Drive(saved=drive.on_disk).feed(ev.Connected()).command(wire.Welcome("Unknown"), generation=1)
    assert (again.report.condition.entered, again.report.condition.heard) == (1, 1)
    assert again.generation(1).of(ev.Start) == []
    assert again.generation(2).of(ev.Start)


def test_script_is_done_when_all_have_exited_0() -> None:
    drive = starts(2).exits(0, 0)
    assert drive.phase == Phase.TRAINING
    drive.exits(0, 1)
    assert drive.bodies() == [wire.Finished(0)]
    assert (drive.phase, drive.report.condition.generation) == (Phase.DONE, 1)
    assert drive.generation(2).of(ev.Start)


def test_session_that_attaches_after_a_scripts_start_joins_its_generation() -> None:
    drive = starts(1, tier="Unknown")
    ((_, assignment),) = drive.attach().told(local.Assignment)
    assert assignment.number == 1
    assert drive.says(local.Entering(1)).told(local.Answer)[0][1].ok
    drive.says(local.AdoptedLocally(1, 0, "nothing", StatePair(1, 0), 0.0))
    assert drive.bodies(wire.Adopted)
    drive.exits(1)
    assert [s.generation for s in drive.of(ev.Start)] == [None]


def test_session_that_attaches_while_it_is_being_replaced_is_no_fault() -> None:
    drive = starts(1, tier="Unknown").generation(2).attach().exits(-15)
    assert drive.bodies(wire.Fault, ever=True) == []
    assert [s.generation for s in drive.of(ev.Start)] == [None]


def test_script_that_nobody_can_tell_gets_sigterm_once() -> None:
    drive = starts(1).feed(ev.Terminated()).wait(20)
    assert [e.signum for e in drive.of(ev.Signal)] == [signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT]
    assert drive.wait(4.9).of(ev.Signal) == []
    assert drive.wait(0.2).of(ev.Signal) == [ev.Signal(0, signal.SIGKILL)]
