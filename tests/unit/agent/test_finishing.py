"""The end of a job as its agents see it (rule END): who has returned 0, who runs again, and who stays until when."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from _regroup_agent import events as ev
from _regroup_agent.statefile import Saved, StateFile
from regroup.protocol import local, wire
from regroup.protocol.document import CheckpointRef
from regroup.protocol.snapshot import SnapshotState
from regroup.protocol.state import Phase, StatePair
from tests.unit.agent.drive import Drive, document, left

LAST = 10
CHECKPOINT = CheckpointRef(3, LAST, "step-10")


def finished(processes: int = 2, *, grace_s: float = 30, number: int = 3) -> Drive:
    """A worker whose processes have committed the last step in generation 3, and wait in their loops."""
    drive = Drive(processes, grace_s=grace_s).session().trains(number, LAST)
    for rank in range(processes):
        drive.says(local.FinishedLocally(number, LAST), rank)
    return drive


def finishing(processes: int = 2, *, grace_s: float = 30) -> Drive:
    """The same worker after the operator has told it the end: its scripts run what follows their loops."""
    return finished(processes, grace_s=grace_s).finish(3, LAST)


def returned(drive: Drive, *ranks: int) -> Drive:
    for rank in ranks:
        drive.exits(0, rank)
    return drive


# --- the loop is left, in the place of the generation that has finished ---------------------------------------------------


def test_every_process_is_told_its_place_and_the_state_of_the_last_step() -> None:
    drive = finished().command(wire.Finish(3, LAST, 4, 8, CHECKPOINT))
    assert drive.told() == [
        (0, local.FinishLocally(3, LAST, 4, 8, CHECKPOINT)),
        (1, local.FinishLocally(3, LAST, 5, 8, CHECKPOINT)),
    ]
    condition = drive.report.condition
    assert (condition.phase, condition.generation, condition.step) == (Phase.FINISHING, 3, LAST)


def test_process_that_has_left_its_loop_is_no_source_any_more() -> None:
    """Its script may have changed the model. The memory snapshot is of the last step, whatever the script does."""
    drive = finishing()
    assert drive.report.seal is not None
    assert (drive.report.seal.left_up_to, drive.report.seal.state) == (3, None)
    held = SnapshotState(StatePair(3, LAST), 3, is_last=True)
    drive.says(local.Snapshotted(held.state, held.adopted, held.is_last))
    assert drive.report.seal.state == held.state


@pytest.mark.parametrize(
    ("body", "log"),
    [
        pytest.param(wire.Finish(3, LAST, 0, 2), [], id="the same end again is no news"),
        pytest.param(
            wire.Finish(3, LAST, 0, 2, CHECKPOINT), [], id="nor is the checkpoint that has become durable since"
        ),
        pytest.param(
            wire.Finish(3, LAST, 2, 4),
            ["Refused finish of generation 3: another one was told before."],
            id="another place would be a second process of its rank",
        ),
        pytest.param(
            wire.Finish(2, LAST, 0, 2),
            ["Refused finish of generation 2: another one was told before."],
            id="another generation",
        ),
    ],
)
def test_finish_that_comes_again(body: wire.Finish, log: list[str]) -> None:
    drive = finishing().command(body)
    assert [effect.text for effect in drive.of(ev.Log)] == log
    assert drive.told() == drive.of(ev.Start) == []
    drive.exits(1, 0).attach(0)
    assert [message.rank for _, message in drive.told(local.FinishLocally)] == [0], "the place that was told first"


def test_finish_of_an_operator_that_knows_less_is_refused() -> None:
    drive = finished().generation(4).command(wire.Finish(3, LAST, 0, 2), generation=3)
    assert [effect.text for effect in drive.of(ev.Log)] == ["Refused finish of generation 3: 4 has been heard."]
    assert drive.told() == []


def test_finish_after_a_generation_that_nobody_has_entered_is_obeyed() -> None:
    """The operator had announced generation 4 when all had finished 3."""
    drive = finished().generation(4).finish(3, LAST)
    assert [rank for rank, _ in drive.told(local.FinishLocally)] == [0, 1]
    assert drive.phase == Phase.FINISHING


# --- done: on disk before it is said, said again, and known after a restart -----------------------------------------------


def test_process_that_returns_0_is_on_disk_before_the_report_that_says_so() -> None:
    drive = returned(finishing(), 1)
    assert (drive.on_disk.finished, drive.on_disk.done, drive.phase) == (3, 0b10, Phase.FINISHING)
    returned(drive, 0)
    assert (drive.on_disk.finished, drive.on_disk.done, drive.phase) == (3, 0b11, Phase.DONE)
    kinds = [type(effect) for effect in drive.effects]
    assert ev.Persist in kinds
    assert ev.Send not in kinds[: kinds.index(ev.Persist)]
    assert drive.bodies(wire.Fault, ever=True) == []


@pytest.mark.parametrize(
    ("ranks", "again", "phase"),
    [
        pytest.param((), [0, 1], Phase.FINISHING, id="none had returned"),
        pytest.param((1,), [0], Phase.FINISHING, id="one of two had"),
        pytest.param((0, 1), [], Phase.DONE, id="both had"),
    ],
)
@pytest.mark.parametrize("known", [True, False], ids=["known to use the library", "not known before the welcome"])
def test_after_a_restart_of_the_container_only_those_run_that_have_not_returned_0(
    tmp_path: Path, ranks: tuple[int, ...], again: list[int], phase: str, known: bool
) -> None:
    file = StateFile(str(tmp_path))
    file.save(returned(finishing(), *ranks).on_disk)
    saved, problem = file.load()
    assert problem == ""
    drive = Drive(2, saved=saved, session=known).feed(ev.Connected())
    drive.newest = 3
    drive.command(wire.Welcome("Session")).finish(3, LAST)
    assert sorted(start.local_rank for start in drive.of(ev.Start, drive.all)) == again
    if again:
        drive.attach(*again)
    assert (drive.phase, drive.report.condition.generation) == (phase, 3)
    if again:
        assert [rank for rank, _ in drive.told(local.FinishLocally)] == again[-1:]
        assert returned(drive, *again).phase == Phase.DONE


def test_agent_whose_container_was_restarted_says_that_it_is_done_before_it_hears_anything() -> None:
    drive = Drive(2, saved=returned(finishing(), 0, 1).on_disk, session=True)
    assert (drive.phase, drive.report.condition.generation) == (Phase.DONE, 3)
    assert drive.feed(ev.Connected()).of(ev.Start) == []


def test_what_returned_0_in_an_earlier_generation_says_nothing_of_this_one() -> None:
    saved = Saved(entered=5, adopted=5, incarnation=4, finished=3, done=0b11)
    drive = Drive(2, saved=saved, session=True).feed(ev.Connected())
    assert [start.local_rank for start in drive.of(ev.Start)] == [0, 1]


@pytest.mark.parametrize("way", ["hello", "ping", "a report of something else"])
def test_done_is_in_every_report_until_the_agent_ends(way: str) -> None:
    drive = returned(finishing(), 0, 1)
    if way == "hello":
        drive.feed(ev.Disconnected()).wait(30).feed(ev.Connected())
    elif way == "ping":
        drive.command(wire.Ping())
    for _ in range(2):
        assert (drive.report.condition.phase, drive.report.condition.generation) == (Phase.DONE, 3)
    assert drive.wait(1e6).of(ev.Exit) == [], "nobody but the operator knows whether it is written"


def test_change_to_done_is_said_at_once() -> None:
    """No report of another kind has to come along."""
    drive = returned(finishing(1), 0).wait(1)
    (report,) = [effect.report for effect in drive.of(ev.Send)]
    assert (report.body, report.condition.phase) == (wire.Changed(), Phase.DONE)


# --- what is no "done" ------------------------------------------------------------------------------------------------------


def end_by(word: str) -> Callable[[Drive], Drive]:
    def told(drive: Drive) -> Drive:
        if word == "SIGTERM to the agent, at the end of its grace":
            return drive.feed(ev.Terminated()).wait(25)
        return drive.command(wire.Stop(word))

    return told


@pytest.mark.parametrize("word", ["Suspended", "Released", "Failed", "SIGTERM to the agent, at the end of its grace"])
def test_exit_with_0_after_our_signal_proves_nothing(word: str) -> None:
    drive = end_by(word)(finishing(1))
    assert drive.of(ev.Signal) == [ev.Signal(0, signal.SIGTERM)], "once"
    drive.exits(0)
    assert (drive.phase, drive.on_disk.done, drive.bodies(wire.Fault, ever=True)) == (Phase.STOPPED, 0, [])
    (end,) = drive.of(ev.Exit)
    assert end.code == (143 if word.startswith("SIGTERM") else 0)


def test_finished_process_that_is_suspended_in_its_loop_is_not_done() -> None:
    """The session exits with 0 when it is told so."""
    drive = finished(1).command(wire.Stop("Suspended"))
    assert drive.told() == [(0, local.StopLocally("Suspended"))]
    drive.exits(0)
    assert (drive.phase, drive.on_disk.done) == (Phase.STOPPED, 0)


@pytest.mark.parametrize(
    "drive",
    [
        pytest.param(lambda: Drive().session(), id="ready"),
        pytest.param(lambda: Drive().session().trains(3, 4), id="in the middle of its steps"),
        pytest.param(
            lambda: finished(1).exits(1).finish(3, LAST, repeats=False), id="started again, where no member ends alone"
        ),
    ],
)
def test_exit_with_0_before_the_end_of_the_loop_is_a_fault(drive: Callable[[], Drive]) -> None:
    got = drive().exits(0)
    (fault,) = got.bodies(wire.Fault)
    assert fault.message == "Process 0 ended (exit code 0) without finishing its steps."
    assert got.on_disk.done == 0


def test_script_that_returns_0_in_its_second_run_before_its_session_is_done() -> None:
    """It sees the model that its first run has saved."""
    drive = finishing().exits(1, 0)
    (fault,) = drive.bodies(wire.Fault)
    returned(drive, 0)
    assert (drive.on_disk.finished, drive.on_disk.done, drive.phase) == (3, 0b01, Phase.FINISHING)
    assert returned(drive, 1).phase == Phase.DONE
    assert drive.bodies(wire.Fault, ever=True) == [fault]
    assert drive.of(ev.Start) == []


def test_script_of_a_new_pod_that_returns_0_before_its_session_is_done() -> None:
    drive = Drive(session=True).feed(ev.Connected()).command(wire.Welcome("Session"), generation=3)
    drive.newest = 3
    drive.finish(3, LAST)
    assert (returned(drive, 0).phase, drive.bodies(wire.Fault, ever=True)) == (Phase.DONE, [])


def test_script_that_exits_with_0_before_its_session_after_our_signal_is_not_done() -> None:
    drive = finishing(1).exits(1).command(wire.Stop("Suspended")).exits(0)
    assert (drive.phase, drive.on_disk.done) == (Phase.STOPPED, 0)


# --- a script that fails after its loop -------------------------------------------------------------------------------------


def test_process_that_fails_after_its_loop_is_reported_and_started_again_in_its_place() -> None:
    drive = finished().command(wire.Finish(3, LAST, 4, 8, CHECKPOINT))
    returned(drive, 0).exits(1, 1, "RuntimeError: could not save the model")
    (fault,) = drive.bodies(wire.Fault)
    assert (fault.local_rank, fault.exit_code, fault.last_line) == (1, 1, "RuntimeError: could not save the model")
    assert [start.local_rank for start in drive.of(ev.Start)] == [1], "the first restart does not wait"
    drive.attach(1)
    assert drive.told() == [(1, local.FinishLocally(3, LAST, 5, 8, CHECKPOINT))]
    assert returned(drive, 1).phase == Phase.DONE


def test_script_that_keeps_failing_is_started_after_the_ordinary_delays() -> None:
    drive = finishing(1)
    waits_s = []
    for _ in range(6):
        drive.exits(1)
        began_s = drive.now_s
        while not drive.of(ev.Start):
            assert drive.core.due_s is not None
            drive.wait(drive.core.due_s - drive.now_s)
        waits_s.append(round(drive.now_s - began_s, 1))
        assert drive.phase == Phase.FINISHING
        drive.attach()
        assert len(drive.told(local.FinishLocally)) == 1
    assert waits_s == [0.0, 1.0, 2.0, 4.0, 8.0, 8.0]


def test_new_pod_gets_the_place_before_its_process_attaches() -> None:
    drive = Drive(session=True).feed(ev.Connected()).command(wire.Welcome("Session"), generation=3)
    drive.newest = 3
    assert drive.finish(3, LAST, 1).told() == []
    drive.attach()
    assert drive.told() == [(0, local.FinishLocally(3, LAST, 1, 2))]


def test_process_that_would_rehearse_is_told_at_once_that_no_step_follows() -> None:
    drive = finishing(1).exits(1)
    attach = local.Attach(1, 0, drive.incarnations[0], rehearses=True)
    assert drive.says(attach).told() == [(0, local.FinishLocally(3, LAST, 0, 1))]
    assert drive.says(replace(attach, rehearses=False)).told() == []
    assert returned(drive, 0).phase == Phase.DONE


def test_process_that_rehearses_while_the_end_is_told_hears_it_when_it_is_ready() -> None:
    drive = finished(1).exits(1)
    attach = local.Attach(1, 0, drive.incarnations[0], rehearses=True)
    assert drive.says(attach).told() == [(0, local.Answer("rehearse", 0, True, 3))]
    assert drive.finish(3, LAST).told() == []
    assert drive.says(replace(attach, rehearses=False)).told() == [(0, local.FinishLocally(3, LAST, 0, 1))]


def test_process_that_waits_for_an_assignment_of_a_generation_that_will_not_be_gets_the_end() -> None:
    drive = finished(1).generation(4, hosts_store=True, store_port=4000)
    assert drive.told(local.Assignment) == []
    drive.finish(3, LAST).command(wire.DocumentCommand(document(4)))
    assert drive.told(local.Assignment) == []


def test_script_may_take_any_time_after_its_loop() -> None:
    drive = finishing().wait(30 * 86400)
    assert drive.of(ev.Signal) == drive.of(ev.Exit) == []
    assert drive.phase == Phase.FINISHING


# --- who stays until when ---------------------------------------------------------------------------------------------------


def test_suspension_is_not_obeyed_by_a_worker_that_is_done_and_completion_is() -> None:
    drive = returned(finishing(), 0, 1).command(wire.Stop("Suspended"))
    assert drive.effects == []
    assert drive.wait(1e5).of(ev.Exit) == []
    assert drive.phase == Phase.DONE
    assert drive.command(wire.Stop("Complete")).of(ev.Exit) == [ev.Exit(0)]
    assert drive.phase == Phase.STOPPED


def test_suspension_ends_the_processes_that_still_run_and_the_others_stay_done_on_disk() -> None:
    drive = returned(finishing(), 0).command(wire.Stop("Suspended"))
    assert drive.of(ev.Signal) == [ev.Signal(1, signal.SIGTERM)]
    drive.exits(0, 1)
    assert (drive.of(ev.Exit), drive.on_disk.done) == ([ev.Exit(0)], 0b01)


@pytest.mark.parametrize(
    ("before", "code"), [pytest.param(10.0, 0, id="told in its grace"), pytest.param(None, 143, id="not told")]
)
def test_worker_that_is_done_stays_in_its_grace_until_it_is_told(before: float | None, code: int) -> None:
    drive = returned(finishing(grace_s=30), 0, 1).feed(ev.Terminated())
    assert drive.bodies(wire.Draining) == [wire.Draining(25.0)]
    if before is not None:
        assert drive.wait(before).of(ev.Exit) == []
        drive.command(wire.Stop("Complete"))
    else:
        assert drive.wait(24.9).of(ev.Exit) == []
        drive.wait(0.2)
    assert drive.of(ev.Exit) == [ev.Exit(code)]


def test_script_that_returns_0_in_its_grace_is_done_and_waits_for_the_word() -> None:
    drive = finishing(1, grace_s=30).feed(ev.Terminated()).wait(20)
    returned(drive, 0)
    assert (drive.phase, drive.on_disk.done, drive.of(ev.Exit)) == (Phase.DONE, 1, [])
    assert drive.command(wire.Stop("Suspended")).of(ev.Exit) == []
    assert drive.command(wire.Stop("Complete")).of(ev.Exit) == [ev.Exit(0)]


def test_script_that_fails_in_its_grace_is_a_fault_and_another_pod_runs_it() -> None:
    drive = finishing(1, grace_s=30).feed(ev.Terminated()).exits(1)
    assert len(drive.bodies(wire.Fault)) == 1
    assert drive.of(ev.Exit) == [ev.Exit(143)]
    assert drive.of(ev.Start) == []


@pytest.mark.parametrize("what", ["runs", "has returned 0"])
def test_end_goes_on_in_the_grace_while_the_operator_is_away(what: str) -> None:
    drive = finishing(1, grace_s=30)
    if what != "runs":
        returned(drive, 0)
    drive.feed(ev.Disconnected()).feed(ev.Terminated())
    assert drive.wait(24.9).of(ev.Signal) == drive.of(ev.Exit) == []
    assert drive.feed(ev.Connected()).bodies(wire.Draining)


def test_worker_that_is_done_ends_with_regroup_run() -> None:
    """Ctrl-C: the operator's connection closes, and nobody will ever write that it is done."""
    drive = returned(finishing(1), 0).feed(ev.Terminated(waits=False))
    assert drive.of(ev.Exit) == []
    assert drive.feed(ev.Disconnected()).of(ev.Exit) == [ev.Exit(143)]


# --- a generation after all -------------------------------------------------------------------------------------------------


def test_process_that_ended_before_the_end_was_told_is_started_for_a_newer_generation() -> None:
    """One script of the group has left with 0; another worker was lost before the operator could write the end."""
    drive = returned(finished(), 1)
    drive.generation(4)
    assert [start.local_rank for start in drive.of(ev.Start)] == [1]
    assert [rank for rank, _ in drive.told(local.Assignment)] == [0]
    drive.says(left(3, LAST), 0).says(local.Entering(4), 0).attach(1).says(local.Entering(4), 1)
    assert (drive.phase, drive.on_disk.entered) == (Phase.FORMING, 4)
    assert not drive.on_disk.has_returned(1)


def test_process_that_has_returned_0_is_not_started_for_a_generation_in_a_pod_that_is_deleted() -> None:
    drive = returned(finished(), 1).feed(ev.Terminated()).generation(4)
    assert drive.of(ev.Start) == []


# --- Script tier -------------------------------------------------------------------------------------------------------------


def script(processes: int = 2) -> Drive:
    drive = Drive(processes).feed(ev.Connected()).command(wire.Welcome("Script")).generation(3)
    for rank in range(processes):
        drive.feed(ev.Spawned(rank, drive.incarnations[rank]))
    return drive


def test_script_that_has_returned_0_in_all_processes_is_done_after_a_restart_of_the_container_too() -> None:
    drive = returned(script(), 0, 1)
    assert (drive.phase, drive.on_disk.finished, drive.on_disk.done) == (Phase.DONE, 3, 0b11)
    again = Drive(2, saved=drive.on_disk).feed(ev.Connected()).command(wire.Welcome("Script"), generation=3)
    assert (again.phase, again.report.condition.generation, again.of(ev.Start)) == (Phase.DONE, 3, [])
    assert again.command(wire.Stop("Suspended"), generation=3).of(ev.Exit) == []
    assert again.command(wire.Stop("Complete"), generation=3).of(ev.Exit) == [ev.Exit(0)]


def test_newer_generation_runs_a_script_again_that_was_done() -> None:
    drive = returned(script(), 0, 1).generation(4)
    assert [start.local_rank for start in drive.of(ev.Start)] == [0, 1]
    assert drive.phase == Phase.STARTING
    assert not replace(drive.on_disk, entered=4).has_returned(0)


def test_script_that_exits_0_while_it_is_replaced_is_not_done() -> None:
    drive = script(1).generation(4).exits(0)
    assert drive.on_disk.done == 0
    assert [start.generation.number for start in drive.of(ev.Start) if start.generation] == [4]


def test_script_that_is_stopped_gets_sigterm_once() -> None:
    drive = script(1).command(wire.Stop("Failed")).wait(0.1)
    assert [e.signum for e in drive.of(ev.Signal)] == [signal.SIGTERM, signal.SIGCONT]
    assert drive.wait(4.9).of(ev.Signal) == []
    assert drive.wait(0.2).of(ev.Signal) == [ev.Signal(0, signal.SIGKILL)]


# --- a model group: no member runs its end alone ---------------------------------------------------------------------------


def of_group() -> Drive:
    """A worker of two processes whose operator has said that all members run their end again where one fails."""
    return finished().finish(3, LAST, repeats=False)


def test_process_that_fails_takes_its_worker_out_of_the_end() -> None:
    """Its sibling is killed, which is no failure, and both wait for the generation in which all run again."""
    drive = of_group().exits(1, 0)
    assert drive.of(ev.Signal) == [ev.Signal(1, signal.SIGKILL)]
    assert [effect.local_rank for effect in drive.of(ev.Start)] == [0], "the first failure waits for nothing"
    assert drive.phase == Phase.STARTING
    drive.exits(-9, 1)
    assert [effect.local_rank for effect in drive.of(ev.Start)] == [1]
    assert [fault.local_rank for fault in drive.bodies(wire.Fault, ever=True)] == [0]
    drive.attach()
    assert (drive.phase, drive.told(local.FinishLocally)) == (Phase.READY, [])


@pytest.mark.parametrize("done", [(), (1,), (0, 1)])
def test_newer_generation_starts_every_process_again(done: tuple[int, ...]) -> None:
    drive = returned(of_group(), *done).generation(4)
    running = {0, 1} - {*done}
    assert {signal.local_rank for signal in drive.of(ev.Signal)} == running
    started = [effect.local_rank for effect in drive.of(ev.Start)]
    for rank in sorted(running):
        started += [effect.local_rank for effect in drive.exits(-9, rank).of(ev.Start)]
    assert sorted(started) == [0, 1]
    assert drive.bodies(wire.Fault, ever=True) == []
    drive.attach()
    assert [rank for rank, _ in drive.told(local.Assignment)] == [1], "the last one that attached"
    assert drive.phase != Phase.DONE


def test_generation_is_refused_where_each_member_ends_alone() -> None:
    """An operator that has lost its lease may still tell one that it had announced."""
    drive = finishing().generation(4)
    assert [effect.text for effect in drive.of(ev.Log)] == ["Refused generation 4: the steps are over (generation 3)."]
    assert (drive.of(ev.Signal), drive.told(), drive.phase) == ([], [], Phase.FINISHING)


def test_generation_that_the_operator_knew_at_the_end_is_not_entered_after_it() -> None:
    """It had announced 4, which nobody entered, and says so with the end; its word of 4 comes late, from an older stream."""
    drive = finished()
    drive.command(wire.Finish(3, LAST, 0, 2, repeats=False), generation=4)
    drive.generation(4)
    assert [effect.text for effect in drive.of(ev.Log)] == ["Refused generation 4: 4 has been heard."]
    assert (drive.of(ev.Signal), drive.phase) == ([], Phase.FINISHING)
