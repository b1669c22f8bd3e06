"""Where every process is, asked when no step is committed any more; and the end of one that the operator names."""

from __future__ import annotations

import json
import signal

from _regroup_agent import events as ev
from _regroup_agent import kernel_view
from _regroup_agent.hangs import ANSWER_S, PROBE_S
from regroup.protocol import local, wire
from regroup.protocol.codec import to_json
from regroup.protocol.state import Busy, Phase, StatePair
from regroup.protocol.wire import ProcessStack
from tests.unit.agent.drive import Drive, committed
from tests.unit.agent.test_script import starts

LOAD = local.Stack(
    "outside", None, "load (train.py:4)", "load (train.py:4) < main (train.py:9)", "thread MainThread:\n  x"
)
EXCHANGE = local.Stack(
    "collective", 61.5, "main (train.py:9)", "wait (groups.py:1) < main (train.py:9)", "thread MainThread:"
)


def test_stacks_of_all_processes_go_to_the_log_and_shortened_to_the_operator() -> None:
    drive = Drive(2).session().trains(1, 3).command(wire.DumpStacks())
    assert [rank for rank, _ in drive.told(local.DumpStacksLocally)] == [0, 1]
    drive.says(EXCHANGE, 0)
    assert drive.bodies() == [], "a report before every process has answered"
    drive.says(LOAD, 1)
    (stacks,) = drive.bodies(wire.Stacks)
    assert [(p.local_rank, p.place, p.where, p.place_s) for p in stacks.processes] == [
        (0, "collective", "main (train.py:9)", 61.5),
        (1, "outside", "load (train.py:4)", None),
    ]
    assert [p.incarnation for p in stacks.processes] == drive.incarnations
    logged = [log.text for log in drive.of(ev.Log)]
    assert logged == [
        "No step is committed. Process 1 is in no collective: load (train.py:4)",
        "thread MainThread:",
        "  x",
    ]


def test_process_that_does_not_answer_is_probed_and_named_with_what_the_kernel_says() -> None:
    drive = Drive(2).session().trains(1, 3).command(wire.DumpStacks()).says(EXCHANGE, 0)
    assert drive.wait(ANSWER_S - 0.1).of(ev.Probe) == []
    assert drive.wait(0.1).of(ev.Probe) == [ev.Probe(1, drive.incarnations[1], attached=True)]
    drive.feed(ev.Probed(1, drive.incarnations[1], "stopped", "stopped by a signal (state T)", "process 7: state T"))
    (stacks,) = drive.bodies(wire.Stacks)
    assert (stacks.processes[1].place, stacks.processes[1].where) == ("stopped", "stopped by a signal (state T)")


def test_log_of_a_script_that_stands_still_speaks_of_its_progress() -> None:
    """It commits no steps."""
    drive = starts(1).command(wire.DumpStacks())
    drive.wait(ANSWER_S)
    drive.feed(ev.Probed(0, drive.incarnations[0], "silent", "sleeping (state S)", "process 7: state S"))
    logged = [log.text for log in drive.of(ev.Log)]
    assert logged[0] == "The script's progress has not changed. Process 0 is silent: sleeping (state S)"


def test_report_goes_without_a_process_of_which_nothing_can_be_learned() -> None:
    drive = Drive(2).session().trains(1, 3).command(wire.DumpStacks()).says(EXCHANGE, 0).wait(ANSWER_S + PROBE_S)
    (stacks,) = drive.bodies(wire.Stacks)
    assert stacks.processes[1].place == ProcessStack.SILENT
    assert drive.core.due_s is None


def test_process_that_ends_while_it_is_asked_is_not_waited_for() -> None:
    drive = Drive(2).session().trains(1, 3).command(wire.DumpStacks()).says(EXCHANGE, 0).exits(-9, 1)
    (stacks,) = drive.bodies(wire.Stacks)
    assert [p.local_rank for p in stacks.processes] == [0]


def test_second_question_while_one_is_open_is_one() -> None:
    drive = Drive().session().trains(1, 3).command(wire.DumpStacks())
    assert drive.command(wire.DumpStacks()).told() == []
    assert len(drive.says(LOAD).bodies(wire.Stacks)) == 1
    assert len(drive.command(wire.DumpStacks()).told(local.DumpStacksLocally)) == 1


def test_report_of_many_processes_fits() -> None:
    drive = Drive(256).session().trains(1, 3).command(wire.DumpStacks())
    long = local.Stack("outside", 1.0, "f" * 5000, "c" * 5000, "")
    for rank in range(256):
        drive.says(long, rank)
    (sent,) = [e.report for e in drive.of(ev.Send) if isinstance(e.report.body, wire.Stacks)]
    assert len(json.dumps(to_json(sent))) < 64 * 1024


def test_named_process_is_killed_and_its_end_is_reported_as_a_hang_and_it_starts_again() -> None:
    drive = Drive(2).session().trains(1, 3)
    victim = drive.incarnations[1]
    drive.command(wire.Kill((victim,), "rank 1 hangs in load (train.py:4) for 61 s"))
    assert drive.of(ev.Signal) == [ev.Signal(1, signal.SIGKILL)]
    drive.exits(-9, 1, "last words")
    (fault,) = drive.bodies(wire.Fault)
    assert (fault.cause, fault.exit_code, fault.message) == ("hung", -9, "rank 1 hangs in load (train.py:4) for 61 s")
    assert [start.local_rank for start in drive.of(ev.Start)] == [1]
    assert drive.phase == Phase.STARTING


def test_kill_that_is_said_again_does_not_kill_the_new_process() -> None:
    drive = Drive().session().trains(1, 3)
    victim = drive.incarnations[0]
    again = wire.Kill((victim,), "hangs")
    drive.command(again).exits(-9).wait(0.1).attach()
    assert drive.incarnations[0] > victim
    assert drive.command(again).of(ev.Signal) == []


# --- what may take longer than a step ------------------------------------------------------------------------------


def busy(drive: Drive) -> list[tuple[str, str, float]]:
    return [(b.kind, b.name, b.age_s) for b in drive.report.condition.busy]


def test_first_step_of_a_process_is_said_until_it_has_committed() -> None:
    drive = Drive().session().trains(1)
    assert busy(drive) == [("firstStep", "", 0.0)]
    drive.wait(5.0).command(wire.Ping())
    assert busy(drive) == [("firstStep", "", 5.0)]
    drive.says(committed(1, 1))
    assert busy(drive) == []
    drive.generation(2).says(local.Entering(2)).says(local.AdoptedLocally(2, 1, "self", StatePair(1, 1), 1.0))
    assert busy(drive) == [], "a survivor's first step in a generation is a step like any other"


def test_process_that_had_an_empty_share_has_its_first_step_before_it() -> None:
    """The successor in a hand-over may have nothing to do; it compiles in the next generation, where it is alone."""
    drive = Drive().session().trains(1)
    drive.wait(5.0).says(committed(1, 1, empty=True))
    assert busy(drive) == [], "it commits, and a step that it waits in may not take longer than others"
    drive.generation(2).says(local.Entering(2)).says(local.AdoptedLocally(2, 1, "self", StatePair(1, 1), 1.0))
    assert busy(drive) == [("firstStep", "", 0.0)]
    drive.says(committed(2, 2))
    assert busy(drive) == []


def test_pause_is_in_the_condition_at_once_and_its_end_too() -> None:
    drive = Drive().session().trains(1, 3)
    drive.says(local.BusyLocally(Busy.PAUSE, "eval", 1800.0)).wait(0.1)
    assert [r.condition.busy for r in [e.report for e in drive.of(ev.Send)]] == [(Busy("pause", "eval", 1800.0, 0.01),)]
    drive.says(local.BusyLocally()).wait(0.1)
    assert [r.condition.busy for r in [e.report for e in drive.of(ev.Send)]] == [()]


def test_equal_pauses_of_several_processes_are_one_as_old_as_the_youngest() -> None:
    drive = Drive(2).session().trains(1, 3)
    drive.says(local.BusyLocally(Busy.PAUSE, "eval", 60.0), 0)
    drive.now_s += 2.0
    drive.says(local.BusyLocally(Busy.PAUSE, "eval", 60.0), 1)
    assert busy(drive) == [("pause", "eval", 0.0)]


def test_pause_ends_with_its_process() -> None:
    drive = Drive().session().trains(1, 3).says(local.BusyLocally(Busy.PAUSE, "eval", 60.0)).exits(-9)
    assert busy(drive) == []


# --- the kernel's view ---------------------------------------------------------------------------------------------

DUMP = """some output
Thread 0x00007f (most recent call first):
  File "/lib/threading.py", line 10 in wait

Current thread 0x00007e (most recent call first):
  File "/app/train.py", line 4 in load
  File "/app/train.py", line 9 in <module>
"""


def test_calls_of_the_main_thread_are_read_from_what_faulthandler_wrote() -> None:
    assert kernel_view.calls_in(DUMP) == "load (train.py:4) < <module> (train.py:9)"
    assert kernel_view.calls_in("nothing of that kind\n") == ""
