"""A planned change of a script: when its processes get SIGTERM, by what they have said and by the files that they write."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from _regroup_agent import events as ev
from _regroup_agent.ending import Terms
from _regroup_agent.planned_end import ARRIVE_S, FORCED_IDLE_S, FORCED_S, FROZEN_S, GAP_S, KILLED_S
from _regroup_agent.script import GRACE_S
from _regroup_agent.writers import IDLE_S, LOG_S, SAVED_BYTES, Look, Writers, may_be_saved
from regroup.protocol import local, wire
from regroup.protocol.state import Busy, Group, Phase
from tests.unit.agent.drive import Drive

STOP, CONT, TERM, KILL = signal.SIGSTOP, signal.SIGCONT, signal.SIGTERM, signal.SIGKILL
EARLIER = SAVED_BYTES
"""The processes have saved before."""
NOTHING = Look({}, {1: EARLIER})
"""No file is open."""


def runs(processes: int = 1, *, steps: bool = True, **changed: object) -> Drive:
    """A script trains in generation 1. `steps`: its hooks report optimizer steps."""
    drive = Drive(processes, **changed).feed(ev.Connected()).command(wire.Welcome("Script"))  # type: ignore[arg-type]
    drive.generation(1)
    for rank in range(processes):
        drive.feed(ev.Spawned(rank, drive.incarnations[rank]))
    if steps:
        stepped(drive, *range(processes))
    return drive


def stepped(drive: Drive, *ranks: int, step_s: float = 0.1) -> Drive:
    for rank in ranks:
        drive.says(local.Stepped(rank, drive.incarnations[rank], 10, step_s), rank)
    return drive


def held(drive: Drive, *ranks: int) -> Drive:
    for rank in ranks:
        drive.says(local.Held(rank, drive.incarnations[rank]), rank)
    return drive


def planned(drive: Drive) -> Drive:
    return drive.generation(2, kind="planned")


def file(position: int, *, waits: bool = False) -> Look:
    return Look({(1, 5, "/ckpt/last.pt"): position}, {1: EARLIER}, waits)


def steps_number(t: float) -> Look:
    """Return a look at a process that replaces a small file with each of its twenty steps a second. Some looks see it open."""
    number = round(t * 10)
    files = {(1, 9, f"/ckpt/{number}.tmp"): 20} if number % 7 == 0 else {}
    return Look(files, {1: EARLIER + int(t * 20) * 8192})


def ended_after(drive: Drive, within_s: float = 100.0) -> float:
    """Let time pass until SIGTERM, and return how long that took."""
    began_s = drive.now_s
    while not any(signum == TERM for _, signum in signals(drive)):
        assert drive.now_s < began_s + within_s, "no SIGTERM"
        due_s = drive.core.due_s
        assert due_s is not None
        drive.wait(max(0.001, due_s - drive.now_s))
    return round(drive.now_s - began_s, 2)


def signals(drive: Drive) -> list[tuple[int, int]]:
    """Return (local rank, signal) of the last event."""
    return [(e.local_rank, e.signum) for e in drive.of(ev.Signal)]


# --- what is waited for --------------------------------------------------------------------------------------------


def test_processes_that_hold_and_write_nothing_are_ended_at_once() -> None:
    drive = planned(runs(2))
    assert [rank for rank, _ in drive.told(local.Hold)] == [0, 1]
    assert signals(held(drive, 0).wait(0.1)) == []
    assert ended_after(held(drive, 1)) <= 0.1
    assert signals(drive) == [(0, TERM), (1, TERM)]
    assert [rank for rank, _ in drive.told(local.Go)] == [0, 1], "a handler of the script could not end it"
    assert drive.exits(-15, 0).of(ev.Start) == []
    assert [s.generation.number for s in drive.exits(-15, 1).of(ev.Start)] == [2, 2]


def test_processes_that_are_ended_and_fail_are_no_fault() -> None:
    drive = held(planned(runs(2)), 0).exits(1, 1)
    assert drive.bodies(wire.Fault, ever=True) == []
    assert ended_after(drive) <= 0.2
    assert drive.exits(-15, 0).of(ev.Start)


@pytest.mark.parametrize(
    ("drive", "look", "wants_s"),
    [
        pytest.param(lambda: held(planned(runs()), 0), lambda t: file(0) if t < 10 else NOTHING, IDLE_S + 0.1,
                     id="a file stays open and nothing is written: a log"),
        pytest.param(lambda: held(planned(runs()), 0), lambda t: file(int(t * 1e6)) if t < 8 else NOTHING, 8 + GAP_S,
                     id="a thread saves for 8 s"),
        pytest.param(lambda: held(planned(runs()), 0), lambda t: file(int(t * 1e6)), 60.0,
                     id="a thread writes for ever: the bound"),
        pytest.param(lambda: held(planned(runs()), 0), lambda t: file(0, waits=t < 9), 9 + GAP_S,
                     id="the disk stalls in the middle of a save"),
        pytest.param(lambda: held(planned(runs()), 0), lambda t: Look({}, {1: EARLIER + int(min(t, 5.0) * 1e6)}), 5 + GAP_S,
                     id="files are opened and closed between two looks"),
        pytest.param(lambda: planned(runs(steps=False)), steps_number, LOG_S, id="it writes the number of each step to a file"),
        pytest.param(lambda: planned(runs(steps=False)),
                     lambda t: steps_number(t) if t < 4 else file(int(t * 1e6)) if t < 9 else NOTHING,
                     9 + GAP_S, id="the same, then a save"),
        pytest.param(lambda: planned(runs()), lambda _: NOTHING, ARRIVE_S,
                     id="it waits in a collective for a process that holds"),
        pytest.param(lambda: planned(stepped(runs(), 0, step_s=4.0)), lambda _: NOTHING, 12.0,
                     id="the same where a step takes 4 s"),
        pytest.param(lambda: planned(runs()), lambda t: file(int(t * 1e6)) if t < 20 else NOTHING, 20 + ARRIVE_S,
                     id="it saves for 20 s, then waits in a collective"),
        pytest.param(lambda: planned(runs(steps=False)), lambda _: Look(), FROZEN_S, id="it makes no steps and has saved nothing"),
        pytest.param(lambda: planned(runs(steps=False)), lambda _: NOTHING, GAP_S, id="it makes no steps, may be saving"),
        pytest.param(lambda: held(planned(runs(2)), 0), lambda _: NOTHING, ARRIVE_S, id="one of two holds"),
        pytest.param(lambda: held(planned(runs(terms=Terms(3.0))), 0), lambda t: file(int(t * 1e6)), 3.0, id="the user's bound"),
    ],
)  # fmt: skip
def test_time_until_sigterm(drive: Callable[[], Drive], look: Callable[[float], Look], wants_s: float) -> None:
    driven = drive()
    began_s = driven.now_s
    driven.look = lambda now_s: look(now_s - began_s)
    assert wants_s <= ended_after(driven) <= wants_s + 0.35


@pytest.mark.parametrize(
    ("look", "wants_s"),
    [
        pytest.param(lambda _: Look({}, {1: 100}), 0.0, id="nothing was ever saved"),
        pytest.param(lambda _: NOTHING, GAP_S, id="a thread saves now and then"),
        pytest.param(lambda t: file(int(t * 1e6)) if 1.5 < t < 4 else NOTHING, 4 + GAP_S, id="between two files of one save"),
    ],
)  # fmt: skip
def test_time_until_sigterm_of_a_process_that_holds_at_once(look: Callable[[float], Look], wants_s: float) -> None:
    drive = runs()
    began_s = drive.now_s
    drive.look = lambda now_s: look(now_s - began_s)
    assert wants_s <= ended_after(held(planned(drive), 0)) <= wants_s + 0.35


def test_process_that_begins_to_save_as_it_is_stopped_goes_on() -> None:
    drive = planned(runs(steps=False))
    began_s = drive.now_s
    assert signals(drive) == [(0, STOP)]
    drive.look = file(0)  # it has just been opened
    assert signals(drive.wait(FROZEN_S)) == [(0, CONT)]
    drive.look = lambda now_s: file(int((now_s - began_s) * 1e6)) if now_s < began_s + 3 else NOTHING
    assert ended_after(drive) >= 3 + GAP_S
    assert signals(drive)[-2:] == [(0, TERM), (0, CONT)], "a stopped process does not take SIGTERM"


def test_process_that_answers_as_it_is_stopped_goes_on_with_the_others() -> None:
    drive = planned(runs(2))
    while not signals(drive):
        drive.wait(0.1)
    assert signals(drive) == [(0, STOP), (1, STOP)]
    assert ended_after(held(drive, 1)) <= FROZEN_S
    assert signals(drive) == [(0, TERM), (1, TERM), (0, CONT), (1, CONT)]


def test_process_that_answers_as_it_is_stopped_goes_on_if_another_one_saves() -> None:
    drive = planned(runs(2))
    while not signals(drive):
        drive.wait(0.1)
    held(drive, 1).look = file(0)
    assert signals(drive.wait(FROZEN_S)) == [(0, CONT), (1, CONT)]


def test_process_that_makes_its_first_step_meanwhile_is_asked_to_hold() -> None:
    drive = runs(steps=False)
    drive.look = NOTHING
    planned(drive)
    assert drive.told(local.Hold) == []
    assert stepped(drive, 0).told(local.Hold) == [(0, local.Hold())]
    assert stepped(drive, 0).told(local.Hold) == []
    assert GAP_S <= ended_after(held(drive, 0)) <= GAP_S + 0.2


@pytest.mark.parametrize("said_held", [False, True])
def test_hook_that_loses_its_connection_is_asked_again(said_held: bool) -> None:
    drive = planned(runs(2))
    if said_held:
        held(drive, 0)
    drive.look = file(0)
    drive.feed(ev.Unhooked(0, drive.incarnations[0]))
    held(drive, 1).look = NOTHING
    assert not signals(drive.wait(GAP_S - 0.5)), "it goes on, and may save"
    assert stepped(drive, 0).told(local.Hold) == [(0, local.Hold())]
    assert ended_after(held(drive, 0)) <= 1.0


def test_file_that_is_waited_for_is_named_in_the_log_once() -> None:
    drive = held(planned(runs()), 0)
    drive.look = lambda now_s: file(int(now_s * 1e6))
    drive.wait(59)
    assert [log.text for log in drive.of(ev.Log)] == [
        "Waiting for /ckpt/last.pt, which is being written, before the processes are ended."
    ]
    (late,) = [log.text for log in drive.wait(2).of(ev.Log)]
    assert late == (
        "/ckpt/last.pt was still being written after 60 s; its process is ended. Raise spec.recovery.gracefulStop.seconds."
    )


def test_process_that_sigterm_does_not_end_is_killed_after_its_grace() -> None:
    drive = held(planned(runs()), 0).wait(0.2)
    assert drive.wait(GRACE_S - 0.3).of(ev.Signal) == []
    assert signals(drive.wait(0.3)) == [(0, KILL)]


def test_operator_is_told_how_long_the_end_may_take() -> None:
    drive = planned(runs()).wait(2.0)
    condition = drive.report.condition
    assert (condition.phase, condition.busy) == (Phase.STARTING, (Busy(Busy.PARTING, max_s=75.0, age_s=2.0),))
    assert Busy.PARTING in [b.kind for b in ended_and_waits(drive).report.condition.busy], "SIGTERM does not end it"
    assert drive.exits(-15).report.condition.busy == ()


def test_group_of_the_processes_counts_until_they_end() -> None:
    """The operator calls the job Running for as long as its script trains."""
    drive = runs()
    planned(drive.says(local.Observed(0, drive.incarnations[0], "formed"))).wait(2.0)
    assert drive.report.condition.group == Group.FORMED
    assert drive.exits(-15).report.condition.group == Group.WAITING


def ended_and_waits(drive: Drive) -> Drive:
    ended_after(held(drive, 0))
    return drive


# --- forced changes ------------------------------------------------------------------------------------------------


def test_forced_change_ends_the_processes_at_once() -> None:
    drive = runs(2).generation(2)
    assert signals(drive) == [(0, TERM), (1, TERM)]
    assert drive.told(local.Hold) == []


@pytest.mark.parametrize(
    ("look", "wants_s"),
    [
        pytest.param(lambda _: Look(), 0.0, id="nothing is open"),
        pytest.param(lambda _: NOTHING, 0.0, id="it has saved before"),
        pytest.param(lambda t: file(int(t * 1e6)) if t < 3 else NOTHING, 3 + FORCED_IDLE_S, id="a save in the middle"),
        pytest.param(lambda t: file(int(t * 1e6)) if (t + 0.5) % 1 > 0.3 and t < 3 else NOTHING, 3 + FORCED_IDLE_S,
                     id="a save of several files"),
        pytest.param(lambda t: file(int(t * 1e6)) if t < 3 else file(3_000_000), 3 + FORCED_IDLE_S, id="a file that stays open"),
        pytest.param(lambda _: file(0), FORCED_IDLE_S, id="an open log"),
        pytest.param(lambda t: file(int(t * 1e6)), FORCED_S, id="a thread writes for ever: the bound"),
        pytest.param(lambda _: file(0, waits=True), FORCED_S, id="a dead volume: the bound"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("way", ["a newer generation", "a sibling that failed", "in the middle of a planned end"])
def test_time_until_sigterm_of_a_forced_change(
    look: Callable[[float], Look], wants_s: float, steps: bool, way: str
) -> None:
    drive = runs(2, steps=steps)
    if way == "in the middle of a planned end":
        drive.look = lambda now_s: file(int(now_s * 1e6))
        planned(drive).wait(1.0)
    began_s = drive.now_s
    drive.look = lambda now_s: look(now_s - began_s)
    if way == "a sibling that failed":
        drive.exits(1, 1)
    else:
        drive.generation(3)
    assert wants_s <= ended_after(drive) <= wants_s + 0.25


def test_process_whose_save_a_forced_change_waits_for_begins_no_other() -> None:
    drive = runs(2)
    drive.look = lambda now_s: file(int(now_s * 1e6))
    assert [rank for rank, _ in drive.generation(2).told(local.Hold)] == [0, 1]
    drive.look = NOTHING
    ended_after(drive)
    assert [rank for rank, _ in drive.told(local.Go)] == [0, 1]


def test_forced_change_has_the_users_bound_if_that_is_shorter() -> None:
    drive = runs(terms=Terms(3.0))
    drive.look = lambda now_s: file(int(now_s * 1e6))
    assert 3.0 <= ended_after(drive.generation(2)) <= 3.2


def test_operator_gives_a_forced_generation_time_only_where_a_file_is_waited_for() -> None:
    drive = runs()
    assert drive.generation(2).report.condition.busy == ()
    saving = runs()
    saving.look = lambda now_s: file(int(now_s * 1e6))
    (busy,) = saving.generation(2).wait(0.5).report.condition.busy
    assert (busy.kind, busy.max_s) == ("parting", FORCED_S + KILLED_S)


def test_forced_change_in_the_middle_of_a_planned_one_does_not_wait() -> None:
    drive = held(planned(runs(2)), 0).generation(3)
    assert signals(drive) == [(0, TERM), (1, TERM)]
    assert [rank for rank, _ in drive.told(local.Go)] == [0, 1]
    assert [s.generation.number for s in drive.exits(-15, 0).exits(-15, 1).of(ev.Start)] == [3, 3]


def test_planned_change_after_sigterm_does_not_begin_anew() -> None:
    drive = runs().generation(2)
    planned(drive.wait(1)).generation(3, kind="planned")
    assert drive.told(local.Hold) == []
    assert [s.generation.number for s in drive.exits(-15).of(ev.Start)] == [3]


# --- ends of the worker --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["Released", "Suspended", "Failed"])
def test_stop_waits_for_the_file_that_is_written(outcome: str) -> None:
    drive = runs()
    drive.look = lambda now_s: file(int(now_s * 1e6)) if now_s < 108 else NOTHING
    drive.command(wire.Stop(outcome))
    assert [kind for _, kind in drive.told()] == [local.Hold()]
    assert 8 + GAP_S <= ended_after(held(drive, 0)) <= 8.5 + GAP_S
    assert drive.exits(-15).of(ev.Exit) == [ev.Exit(0)]


def test_stop_during_a_planned_change_keeps_its_bound() -> None:
    drive = held(planned(runs()), 0)
    drive.look = lambda now_s: file(int(now_s * 1e6))
    drive.wait(50).command(wire.Stop("Released"))
    assert ended_after(drive) == pytest.approx(10, abs=0.2)


def test_stopped_script_that_ignores_sigterm_is_killed() -> None:
    drive = held(runs().command(wire.Stop("Released")), 0)
    ended_after(drive)
    assert signals(drive.wait(5.1)) == [(0, KILL)]


def test_deleted_pod_leaves_a_part_of_its_grace_to_the_save() -> None:
    drive = runs(grace_s=25.0).feed(ev.Terminated())
    assert drive.told(local.Hold) == []
    assert drive.wait(9.9).told(local.Hold) == []
    assert drive.wait(0.1).told(local.Hold) == [(0, local.Hold())]
    drive.look = lambda now_s: file(int(now_s * 1e6))
    assert ended_after(held(drive, 0)) == pytest.approx(12, abs=0.2)
    assert signals(drive.wait(2.7)) == []
    assert signals(drive.wait(0.31)) == [(0, KILL)]


def test_script_in_a_deleted_pod_that_wants_to_be_told_gets_the_same_time() -> None:
    drive = runs(terms=TOLD, grace_s=25.0).feed(ev.Terminated()).wait(10)
    assert drive.of(ev.Signal) == [ev.Signal(0, signal.SIGUSR1, alone=True)]
    assert ended_after(drive) == pytest.approx(12, abs=0.2)
    assert signals(drive.wait(3.01)) == [(0, KILL)]


def test_deleted_pod_that_the_next_generation_leaves_out_ends_with_the_others() -> None:
    drive = runs(grace_s=60.0).feed(ev.Terminated()).wait(2)
    drive.generation(2, kind="planned", member=False)
    assert drive.told(local.Hold) == [(0, local.Hold())]
    assert ended_after(held(drive, 0)) <= 0.2
    assert drive.exits(-15).of(ev.Exit) == [ev.Exit(143)]


def test_interrupted_local_run_waits_for_the_file_that_is_written() -> None:
    drive = runs().feed(ev.Terminated(waits=False)).feed(ev.Disconnected())
    assert drive.told(local.Hold) == [(0, local.Hold())]
    drive.look = lambda now_s: file(int(now_s * 1e6)) if now_s < 104 else NOTHING
    assert 4 + GAP_S <= ended_after(held(drive, 0)) <= 4.5 + GAP_S
    assert drive.exits(-15).of(ev.Exit) == [ev.Exit(143)]


# --- scripts that want to be told ----------------------------------------------------------------------------------

TOLD = Terms(30.0, int(signal.SIGUSR1))


def test_script_that_wants_to_be_told_gets_its_signal_and_its_time() -> None:
    drive = planned(runs(2, terms=TOLD))
    assert drive.of(ev.Signal) == [ev.Signal(rank, signal.SIGUSR1, alone=True) for rank in (0, 1)]
    assert drive.told(local.Hold) == []
    drive.exits(0, 0).exits(7, 1)
    assert drive.bodies(wire.Fault, ever=True) == drive.bodies(wire.Finished, ever=True) == []
    assert [s.generation.number for s in drive.of(ev.Start)] == [2, 2]


def test_script_that_was_told_and_goes_on_gets_sigterm_and_sigkill() -> None:
    drive = planned(runs(terms=TOLD))
    assert ended_after(drive) == 30.0
    assert signals(drive.wait(GRACE_S)) == [(0, KILL)]


def test_script_that_is_told_by_the_drain_of_its_pod() -> None:
    drive = runs(terms=TOLD, grace_s=60.0).feed(ev.Terminated()).wait(30)
    assert drive.of(ev.Signal) == [ev.Signal(0, signal.SIGUSR1, alone=True)]
    assert drive.exits(0).of(ev.Exit) == [ev.Exit(143)]


@pytest.mark.parametrize(
    ("environ", "want"),
    [
        ({}, Terms(60.0, None)),
        ({"REGROUP_STOP_SECONDS": "120"}, Terms(120.0, None)),
        ({"REGROUP_STOP_SECONDS": "5", "REGROUP_STOP_SIGNAL": "SIGUSR1"}, Terms(5.0, 10)),
        ({"REGROUP_STOP_SECONDS": "soon", "REGROUP_STOP_SIGNAL": "SIGNOTHING"}, Terms(60.0, None)),
    ],
)
def test_terms_of_the_environment(environ: dict[str, str], want: Terms) -> None:
    assert Terms.of(environ) == want


# --- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fd", "flags", "path", "want"),
    [
        pytest.param(5, os.O_WRONLY, "/ckpt/last.pt", True, id="a checkpoint"),
        pytest.param(5, os.O_RDWR, "/ckpt/last.h5", True, id="a file that is read, too"),
        pytest.param(5, os.O_RDONLY, "/data/train.bin", False, id="data"),
        pytest.param(5, os.O_WRONLY | os.O_APPEND, "/out/train.log", False, id="a log"),
        pytest.param(1, os.O_WRONLY, "/out/stdout", False, id="the output, which a shell has redirected"),
        pytest.param(5, os.O_RDWR, "socket:[77]", False, id="a socket"),
        pytest.param(5, os.O_WRONLY, "pipe:[77]", False, id="a pipe"),
        pytest.param(5, os.O_RDWR, "/dev/shm/torch_1_2_3", False, id="memory that data loaders share"),
        pytest.param(5, os.O_RDWR, "/dev/nvidia0", False, id="a device"),
        pytest.param(5, os.O_RDWR, "/memfd:x (deleted)", False, id="anonymous memory"),
        pytest.param(5, os.O_RDWR, "/tmp/tmpx (deleted)", False, id="a temporary file without a name"),
    ],
)
def test_file_that_may_be_a_checkpoint(fd: int, flags: int, path: str, want: bool) -> None:
    assert may_be_saved(fd, flags, path) is want


def test_log_that_grows_slowly_is_not_being_saved() -> None:
    writers = Writers()
    for tenth in range(100):
        writers.take(file(tenth * 100), tenth / 10)
    assert not writers.is_active
    assert writers.wrote_s is None


@pytest.mark.parametrize(
    ("looks", "wants_s"),
    [
        pytest.param(lambda t: file(int(t * 6000)), 7.0, id="6 KB/s"),
        pytest.param(lambda t: Look(file(int(t * 3e4)).files, {1: EARLIER + int(t * 3e4) // 4096 * 4096}), 7.0, id="30 KB/s"),
        pytest.param(lambda t: file(int(t * 1e5)) if t < 25 else NOTHING, 25 + GAP_S, id="100 KB/s are a save"),
        pytest.param(lambda t: file(int(max(6e3 * t, 1e6 * (t - 6)))) if t < 25 else NOTHING, 25 + GAP_S, id="slow, then fast"),
    ],
)  # fmt: skip
def test_log_that_says_much_is_no_save(looks: Callable[[float], Look], wants_s: float) -> None:
    drive = runs()
    began_s = drive.now_s
    drive.look = lambda now_s: looks(now_s - began_s)
    assert wants_s <= ended_after(held(planned(drive), 0)) <= wants_s + 0.35


def test_child_that_writes_shows_beside_one_that_has_ended() -> None:
    writers = Writers()
    writers.take(Look({}, {1: EARLIER, 2: 10**9}), 0.0)
    writers.take(Look({}, {1: EARLIER}), 1.0)
    assert writers.wrote_s is None
    writers.take(Look({}, {1: EARLIER, 3: 10**5}), 2.0)
    assert writers.wrote_s == 2.0


def test_file_that_is_written_again_from_its_beginning_is_being_saved() -> None:
    writers = Writers()
    writers.take(file(10**6), 0.0)
    writers.take(file(10**6), IDLE_S)
    assert not writers.is_active
    writers.take(file(10), IDLE_S + 0.1)
    assert writers.is_active
