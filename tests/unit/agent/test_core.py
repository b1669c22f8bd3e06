"""The agent's decisions, rule by rule (docs/design/protocol.md)."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from _regroup_agent import ending
from _regroup_agent import events as ev
from _regroup_agent.observing import MANY, Watch
from _regroup_agent.statefile import UNKNOWN, Saved
from regroup.protocol import RELEASE, local, wire
from regroup.protocol.snapshot import SnapshotState
from regroup.protocol.state import Busy, Phase, Seal, StatePair, Times
from tests.unit.agent.drive import PORT, Drive, committed, document, generation, left

# --- FENCE ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "changed", "refused"),
    [
        pytest.param(generation(4), {}, "Refused generation 4: 5 has been heard.", id="an older generation"),
        pytest.param(
            replace(generation(5), uid="other"), {}, "Refused generation 5: 5 has been heard.", id="the same number again"
        ),
        pytest.param(generation(5), {}, None, id="the same generation said again is no news"),
        pytest.param(
            wire.Stop("Complete"), {"generation": 4}, "Refused stop of generation 4: 5 has been heard.", id="an old stop"
        ),
        pytest.param(
            wire.Ping(), {"pod_uid": "x"}, "Refused ping: it is for job job, pod x, not for this worker.", id="another pod"
        ),
        pytest.param(
            generation(6), {"job_uid": "x"}, "Refused generation: it is for job x, pod pod, not for this worker.", id="another job"
        ),
        pytest.param(
            wire.DocumentCommand(document(4)),
            {},
            "Refused the document of generation 4: the newest heard (5) has another.",
            id="the document of another generation",
        ),
    ],
)  # fmt: skip
def test_command_that_is_fenced_changes_nothing(body: object, changed: dict[str, str], refused: str | None) -> None:
    drive = Drive().session().trains(5, 3)
    before = drive.report
    drive.command(body, **changed)
    assert [log.text for log in drive.of(ev.Log)] == ([refused] if refused else [])
    assert drive.told() == drive.bodies() == drive.of(ev.Start) == []
    assert drive.report == before


def forming(drive: Drive) -> Drive:
    return drive.session().generation(1).says(local.Entering(1))


PINGED = {
    "not welcomed yet": (lambda d: d.feed(ev.Connected()), Phase.READY),
    "between a script's processes": (
        lambda d: d.feed(ev.Connected()).generation(1).command(wire.Welcome("Script")).exits(1),
        Phase.READY,
    ),
    "starting": (lambda d: d.feed(ev.Connected()).command(wire.Welcome("Session")), Phase.STARTING),
    "ready": (lambda d: d.session(), Phase.READY),
    "forming": (forming, Phase.FORMING),
    "adopting": (lambda d: forming(d).says(local.FormedLocally(1, 1.0)), Phase.ADOPTING),
    "training": (lambda d: d.session().trains(1, 3), Phase.TRAINING),
    "broken": (lambda d: d.session().trains(1, 3).says(left(1, 3, cause="collective")), Phase.BROKEN),
    "finished": (lambda d: d.session().trains(1, 3).says(local.FinishedLocally(1, 3)), Phase.FINISHED),
    "finishing": (lambda d: d.session().trains(1, 3).finish(1, 3), Phase.FINISHING),
    "done": (lambda d: d.session().trains(1, 3).finish(1, 3).exits(0), Phase.DONE),
    "draining": (lambda d: d.session().trains(1, 3).feed(ev.Terminated()), Phase.TRAINING),
}


@pytest.mark.parametrize(("prepare", "phase"), PINGED.values(), ids=PINGED)
def test_ping_is_answered_at_once_in_every_phase(prepare: Callable[[Drive], Drive], phase: str) -> None:
    """Who does not answer within half a second is taken for silent."""
    drive = prepare(Drive())
    assert drive.phase == phase
    drive.command(wire.Ping())
    assert drive.bodies() == [wire.Changed()]


def test_message_of_a_process_that_was_replaced_is_dropped() -> None:
    drive = Drive().session().trains(1, 2)
    old = drive.incarnations[0]
    drive.exits(-9)
    assert drive.incarnations[0] == old + 1
    assert drive.feed(ev.FromTrainer(0, old, local.Entering(1))).effects == []
    assert drive.feed(ev.Exited(0, old, 1)).effects == []


# --- INC -----------------------------------------------------------------------------------------------------------


def test_entering_is_on_disk_before_it_is_answered() -> None:
    drive = Drive().session().generation(3).says(local.Entering(3))
    persist, tell = drive.effects
    assert isinstance(persist, ev.Persist)
    assert persist.saved.entered == 3
    assert isinstance(tell, ev.Tell)
    assert tell.message == local.Answer("entering", 3, True, 0)


def test_restarted_process_never_forms_the_generation_that_was_entered_h7() -> None:
    drive = Drive().session().trains(1, 7).exits(-9).attach()
    assert drive.told(local.Assignment) == []
    ((_, answer),) = drive.says(local.Entering(1)).told(local.Answer)
    assert not answer.ok
    assert answer.adopted == 1
    ((_, assignment),) = drive.generation(2).told(local.Assignment)
    assert assignment.number == 2
    assert drive.says(local.Entering(2)).told(local.Answer)[0][1].ok


def test_restarted_process_gets_the_generation_that_nobody_here_has_entered() -> None:
    drive = Drive().session().trains(1, 7).exits(-9).generation(2)
    assert drive.told() == []
    ((rank, assignment),) = drive.attach().told(local.Assignment)
    assert (rank, assignment.number) == (0, 2)


def test_process_enters_a_generation_once() -> None:
    drive = Drive().session().generation(1).says(local.Entering(1)).says(left(1, cause="collective"))
    assert not drive.says(local.Entering(1)).told(local.Answer)[0][1].ok


def test_generation_that_a_seal_gave_up_is_not_entered() -> None:
    drive = Drive(2).session().generation(1)
    drive.says(local.Entering(1), 0).says(left(1, cause="error"), 0)
    assert drive.report.seal == Seal(1, None, 0)
    assert not drive.says(local.Entering(1), 1).told(local.Answer)[0][1].ok


def test_generation_that_is_not_the_newest_is_not_entered() -> None:
    drive = Drive().session().generation(1).generation(2)
    assert not drive.says(local.Entering(1)).told(local.Answer)[0][1].ok
    assert drive.on_disk.entered == 0


def test_process_that_rehearses_is_of_a_session_that_starts_and_gets_no_generation() -> None:
    drive = Drive().feed(ev.Connected()).command(wire.Welcome("Session"))
    drive.says(local.Attach(1, 0, 1, rehearses=True)).generation(1)
    assert drive.told() == []
    condition = drive.wait(5.0).command(wire.Ping()).report.condition
    assert (condition.phase, condition.session, condition.entered) == (Phase.STARTING, True, 0)
    assert condition.busy == (Busy(Busy.FIRST_STEP, age_s=5.0),), "which may take as long as a first step"
    drive.says(local.Attach(1, 0, 1))
    assert [message.number for _, message in drive.told(local.Assignment)] == [1]
    assert (drive.phase, drive.report.condition.busy) == (Phase.READY, ())


def test_rehearsal_that_takes_too_long_or_is_not_needed_is_ended() -> None:
    def rehearses() -> Drive:
        drive = Drive(2).session().trains(1, 3).exits(-9, 1).wait(0.1)
        return drive.says(local.Attach(1, 1, drive.incarnations[1], rehearses=True), 1)

    restart = rehearses().command(wire.Restart("its start has not come to an end"))
    assert restart.of(ev.Signal) == [ev.Signal(1, signal.SIGKILL)]
    stop = rehearses().command(wire.Stop("Released"))
    assert (stop.of(ev.Signal), [rank for rank, _ in stop.told(local.StopLocally)]) == (
        [ev.Signal(1, signal.SIGTERM)],
        [0],
    )


def test_incarnation_rises_with_every_start_across_container_restarts() -> None:
    drive = Drive(2).session()
    assert drive.incarnations == [1, 2]
    drive.exits(1, 1)
    assert drive.incarnations == [1, 3]
    again = Drive(2, saved=drive.on_disk).session()
    assert again.incarnations == [4, 5]


# --- MAD -----------------------------------------------------------------------------------------------------------


def test_adoption_is_on_disk_before_it_is_answered_and_told_once_for_all_processes() -> None:
    drive = Drive(2).session().generation(1)
    drive.says(local.Entering(1), 0).says(local.Entering(1), 1)
    drive.says(local.AdoptedLocally(1, 4, "pod-b", StatePair(0, 4), 3.0), 0)
    persist, tell = drive.effects
    assert isinstance(persist, ev.Persist)
    assert persist.saved.adopted == 1
    assert tell == ev.Tell(0, local.Answer("adopted", 1, True, 1))
    drive.says(local.AdoptedLocally(1, 4, "self", StatePair(0, 4), 5.0), 1)
    assert drive.of(ev.Persist) == []
    assert drive.bodies(wire.Adopted, ever=True) == [wire.Adopted(4, "pod-b", StatePair(0, 4), 5.0, form_ms=0.0)]
    assert drive.phase == Phase.TRAINING


def test_adoption_of_a_generation_that_was_left_is_refused() -> None:
    drive = Drive().session().generation(1).says(local.Entering(1)).says(left(1))
    ((_, answer),) = drive.says(local.AdoptedLocally(1, 0, "self", StatePair(1, 0), 0.0)).told()
    assert not answer.ok
    assert drive.on_disk.adopted == 0


def test_lost_state_file_adopts_the_newest_generation_of_the_welcome() -> None:
    drive = Drive(saved=Saved(UNKNOWN, UNKNOWN, 1000, 0)).feed(ev.Connected())
    hello = drive.report
    assert (hello.condition.adopted, hello.seal, hello.condition.incarnation) == (UNKNOWN, None, 1000)
    drive.command(wire.Welcome("Session"), generation=6).attach()
    assert (drive.on_disk.entered, drive.on_disk.adopted) == (6, 6)
    assert drive.report.seal == Seal(6, None, 6)
    assert drive.report.condition.incarnation == 1002
    drive.newest = 6
    assert drive.generation(6).of(ev.Log)
    assert drive.generation(7).told(local.Assignment)


# --- handing generations to processes ------------------------------------------------------------------------------


def test_ranks_follow_the_offset_and_only_local_rank_0_hosts_the_store() -> None:
    drive = Drive(2).session()
    ((rank, one),) = drive.generation(1, rank_offset=4, world_size=8, hosts_store=True).told(local.Assignment)
    assert (rank, one.rank, one.world_size, one.local_world_size, one.hosts_store) == (1, 5, 8, 2, False)
    ((rank, zero),) = drive.command(wire.DocumentCommand(document(1, 2))).told(local.Assignment)
    assert (rank, zero.rank, zero.hosts_store, zero.document) == (0, 4, True, document(1, 2))
    assert drive.command(wire.DocumentCommand(document(1, 2))).told() == []


def test_excluded_worker_leaves_keeps_its_state_and_is_ready() -> None:
    drive = Drive().session().trains(1, 9)
    ((_, assignment),) = drive.generation(2, member=False).told(local.Assignment)
    assert (assignment.member, assignment.rank) == (False, -1)
    drive.says(left(2, None, state=StatePair(1, 9), state_adopted=1))
    assert drive.phase == Phase.READY
    assert drive.report.seal == Seal(2, StatePair(1, 9), 1, 1)


def test_broken_worker_that_is_excluded_is_ready() -> None:
    drive = Drive().session().trains(1, 9).says(left(1, 9, cause="collective", message="Rank 2 is gone."))
    assert (drive.phase, drive.report.condition.cause) == (Phase.BROKEN, "Rank 2 is gone.")
    drive.generation(2, member=False)
    assert drive.phase == Phase.READY


@pytest.mark.parametrize(
    ("number", "changed", "gives"),
    [
        pytest.param(1, {"hosts_store": True}, True, id="the store is here, on the fresh socket"),
        pytest.param(1, {"hosts_store": True, "store_port": PORT + 1}, False, id="the store has another port"),
        pytest.param(1, {}, False, id="the store is elsewhere"),
        pytest.param(2, {"hosts_store": True}, False, id="another generation asks"),
    ],
)
def test_fresh_socket_is_given_to_the_store_it_was_named_for(number: int, changed: dict[str, int], gives: bool) -> None:
    drive = Drive().session().generation(1, **changed)
    assert drive.core.gives_store(number) is gives


# --- faults and restarts -------------------------------------------------------------------------------------------


def test_exit_is_reported_before_the_next_process_starts() -> None:
    drive = Drive().session().trains(1, 7).exits(-9, last_line="Killed")
    assert [type(e).__name__ for e in drive.effects] == ["Send", "Persist", "Start"]
    (report,) = (e.report for e in drive.of(ev.Send))
    said = wire.Fault(
        "exit", "Process 0 was ended by SIGKILL.", 7, 0, -9, "Killed", ended=1, generation=1, incarnation=1
    )
    assert report.body == said
    assert (report.condition.phase, report.condition.incarnation, report.condition.entered) == (Phase.STARTING, 1, 1)
    assert report.seal == Seal(1, None, 1)


def test_exits_are_numbered_for_as_long_as_the_pod_lives() -> None:
    """Two processes of a worker of two, in any order, and one more in the next container."""
    drive = Drive(2).session().trains(1, 3)
    numbers = []
    for rank in (1, 0, 0, 1):
        drive.exits(-9, rank)
        numbers += [fault.ended for fault in drive.bodies(wire.Fault)]
        drive.wait(10)
    drive.exits(-9, 0).exits(-9, 1)  # the second one while the first is not there again
    numbers += [fault.ended for fault in drive.bodies(wire.Fault, ever=True)][-2:]
    assert numbers == [1, 2, 3, 4, 5, 6]
    after = Drive(2, saved=drive.on_disk).session().trains(2, 4).exits(1)
    assert [fault.ended > 6 for fault in after.bodies(wire.Fault)] == [True]


def test_fault_names_the_generation_in_which_it_was() -> None:
    """It may be said again in a later one."""
    drive = Drive(2).session().trains(3, 7)
    drive.says(local.Left(3, S7, 3, 7, "collective", "Connection closed by peer"), 0)
    (fault,) = drive.bodies(wire.Fault)
    assert (fault.generation, fault.incarnation) == (3, 2)


def test_restart_delay_doubles_until_a_step_is_committed() -> None:
    drive = Drive().session()
    delays = []
    for _ in range(8):
        began_s = drive.now_s
        drive.exits(1)
        while not drive.of(ev.Start):
            assert drive.core.due_s is not None
            drive.wait(drive.core.due_s - drive.now_s)
        delays.append(drive.now_s - began_s)
        drive.attach()
    assert delays == [0, 1, 2, 4, 8, 8, 8, 8], "below what a generation waits for its members"
    assert ending.restart_delay_s(100_000) == ending.MAX_RESTART_DELAY_S, "a power of two that is no float"
    drive.trains(1, 1).exits(1)
    assert drive.of(ev.Start)


def test_end_without_finishing_is_a_fault_even_with_exit_code_0() -> None:
    drive = Drive().session().trains(1, 7).exits(0)
    assert drive.bodies(wire.Fault)[0].message == "Process 0 ended (exit code 0) without finishing its steps."
    assert drive.of(ev.Start)


def test_sibling_of_a_crashed_process_keeps_its_state_in_the_seal() -> None:
    drive = Drive(2).session().trains(1, 7).exits(-9, 1)
    assert (drive.phase, drive.report.seal) == (Phase.STARTING, None)
    assert [e.local_rank for e in drive.of(ev.Start)] == [1]
    drive.attach(1)
    condition = drive.report.condition
    assert (condition.phase, condition.generation) == (Phase.BROKEN, 1)
    drive.says(left(1, 7, cause="collective"), 0)
    assert drive.phase == Phase.READY
    assert drive.report.seal == Seal(1, StatePair(1, 7), 1, 1)


def test_broken_collective_is_reported_at_once_with_the_peer() -> None:
    drive = Drive().session().generation(1, hosts_store=True).command(wire.DocumentCommand(document(1)))
    drive.says(local.Entering(1)).says(local.AdoptedLocally(1, 0, "nothing", StatePair(1, 0), 0.0))
    drive.says(left(1, 4, cause="collective", message="Lost.", step=4, peer_rank=0))
    (fault,) = drive.bodies(wire.Fault)
    assert (fault.cause, fault.step, fault.peer, fault.peer_rank, fault.exit_code) == ("collective", 4, "pod", 0, None)
    sent = drive.effects[0]
    assert isinstance(sent, ev.Send)
    assert sent.report.seal == Seal(1, StatePair(1, 4), 1, 1)


def test_broken_collective_of_a_generation_that_is_fenced_is_no_fault_h13() -> None:
    drive = Drive(2).session().trains(1, 4).generation(2)
    drive.says(left(1, 4), 0).says(local.Entering(2), 0)
    drive.says(left(1, 4, cause="collective", message="Lost."), 1)
    assert drive.bodies(wire.Fault, ever=True) == []
    assert (drive.phase, drive.report.condition.cause) == (Phase.FORMING, None)


# --- RESAY ---------------------------------------------------------------------------------------------------------


def test_reconnect_says_again_what_the_operator_may_have_forgotten_h6() -> None:
    drive = Drive().session().trains(1, 7)
    drive.feed(ev.Disconnected()).feed(ev.Connected())
    adopted, progress = drive.bodies()
    assert adopted == wire.Adopted(7, "self", StatePair(1, 7), form_ms=1.0, transfer_ms=1.0)
    assert (progress.step, progress.digest) == (7, "d7")
    broken = drive.says(left(1, 7, cause="collective", message="Lost.")).report
    assert (broken.condition.phase, broken.condition.cause, broken.condition.heard) == (Phase.BROKEN, "Lost.", 1)


def test_reconnect_says_the_newest_commit_of_a_generation_that_the_worker_has_left() -> None:
    """The step and the checkpoint would be lost if the operator ended before it stored them."""
    drive = Drive().session().trains(1, 7)
    drive.feed(ev.Disconnected()).exits(-9).feed(ev.Connected())
    assert drive.report.condition.generation == 0
    assert [(said.step, said.generation) for said in drive.bodies(wire.Progress)] == [(7, 1)]


@pytest.mark.parametrize(
    ("down_s", "lost_after_s", "away_s", "again"),
    [
        pytest.param(0.0, 1.0, 300.0, True, id="said, but perhaps not written"),
        pytest.param(0.0, 61.0, 1.0, False, id="written long ago"),
        pytest.param(1.0, 0.0, 300.0, True, id="while nobody heard it"),
    ],
)
def test_what_is_said_once_in_a_generation_reaches_the_next_operator(
    down_s: float, lost_after_s: float, away_s: float, again: bool
) -> None:
    """The incident lacks its times else. Agents that have trained for long do not say it again, each of thousands."""
    drive = Drive().session()
    if down_s:
        drive.feed(ev.Disconnected()).wait(down_s)
    drive.trains(1).says(committed(1, 1, first_step_ms=1234.0, steps_redone=1))
    drive.says(committed(1, 2)).wait(lost_after_s)
    if not down_s:
        drive.feed(ev.Disconnected())
    for step in range(3, 6):
        drive.says(committed(1, step)).wait(away_s)
    drive.feed(ev.Connected())
    (progress,) = drive.bodies(wire.Progress)
    assert (progress.step, progress.first_step_ms, progress.steps_redone) == ((5, 1234.0, 1) if again else (5, None, 0))
    assert drive.wait(60).bodies() == []


def test_changed_condition_that_nothing_else_told_is_told_soon() -> None:
    drive = Drive().session()
    assert drive.bodies() == []
    assert drive.wait(0.02).bodies() == [wire.Changed()]
    assert drive.wait(60).bodies() == []


def forms(number: int, **changed: Any) -> Drive:
    """A worker that trains in one generation less, whose process goes into this one and arrives at its store."""
    drive = Drive().session().trains(number - 1, 7).wait(1)
    drive.generation(number, **changed).says(left(number - 1, 7)).says(local.Entering(number))
    return drive.wait(0.1).says(local.Arrived(number))


@pytest.mark.parametrize("kind", ["forced", "planned"])
def test_arrived_formed_and_adopted_travel_together(kind: str) -> None:
    drive = forms(2, kind=kind)
    said = len(drive.bodies(ever=True))
    drive.wait(0.1).says(local.FormedLocally(2, 30.0)).wait(0.1)
    drive.says(local.AdoptedLocally(2, 7, "self", StatePair(1, 7), 2.0))
    adopted = wire.Adopted(7, "self", StatePair(1, 7), form_ms=30.0, transfer_ms=2.0)
    assert drive.bodies(ever=True)[said:] == [adopted]
    assert drive.wait(60).bodies() == []


def test_way_into_a_generation_that_takes_long_is_said() -> None:
    """Who does not come, and what the others wait for, is judged by it (rule DEADLINE)."""
    drive = forms(2)
    assert drive.wait(0.5).bodies() == [wire.Changed()]
    assert drive.phase == Phase.ARRIVED
    drive.says(local.FormedLocally(2, 600.0))
    assert drive.wait(0.5).bodies() == [wire.Changed()]
    assert drive.phase == Phase.ADOPTING


@pytest.mark.parametrize(
    ("kind", "soon"),
    [
        pytest.param("planned", True, id="the others train until it has arrived"),
        pytest.param("forced", False, id="the others form"),
    ],
)
def test_arrival_of_a_worker_that_joins_is_said_at_once_where_others_wait_for_it(kind: str, soon: bool) -> None:
    drive = Drive().session().wait(1).generation(2, kind=kind).says(local.Entering(2)).wait(0.1)
    assert drive.bodies() == [], "that it forms is nothing that anybody waits for"
    drive.says(local.Arrived(2))
    assert drive.wait(0.02).bodies() == ([wire.Changed()] if soon else [])


def test_arrival_of_a_worker_that_has_not_trained_yet_is_said_at_once_in_the_next_generation_too() -> None:
    drive = Drive().session().generation(2, kind="planned").says(local.Entering(2)).says(local.Arrived(2)).wait(1)
    drive.generation(3, kind="planned").says(local.Left(2, None, 0, 0)).says(local.Entering(3)).wait(0.1)
    drive.says(local.Arrived(3))
    assert drive.wait(0.02).bodies() == [wire.Changed()]


def test_silence_that_is_observed_on_the_way_into_a_generation_is_said_soon() -> None:
    drive = forms(2)
    observed = wire.Observed("other", "10.0.0.2", 6001)
    watch = Watch(observed)
    watch.begin(drive.now_s)
    watch.answered()
    for _ in range(MANY):
        watch.failed()
    drive.feed(ev.Watched((watch,)))
    assert drive.wait(0.02).bodies() == [wire.Changed()]


@pytest.mark.parametrize(
    ("happens", "said"),
    [
        pytest.param(lambda d: d.attach(), [wire.Changed()], id="its process attaches"),
        pytest.param(lambda d: d.wait(5), [], id="nothing"),
    ],
)
def test_change_between_hello_and_the_open_stream_is_said_once_it_is_open(
    happens: Callable[[Drive], Drive], said: list[object]
) -> None:
    """Else the operator takes it for one that starts, and has it restarted by and by. Agents with no news say nothing: thousands
    come back at once."""
    drive = Drive().feed(ev.Connected()).command(wire.Welcome("Session")).feed(ev.Disconnected())
    hello = drive.report
    assert hello.condition.phase == Phase.STARTING
    happens(drive).wait(1)
    drive.feed(ev.Connected()).wait(0.02)
    assert drive.bodies() == said
    assert drive.wait(60).bodies() == []


def test_hello_says_how_old_something_is_now() -> None:
    drive = Drive().session().feed(ev.Disconnected())
    drive.says(local.BusyLocally("pause", "eval", 1800.0))
    drive.now_s += 600.0
    assert drive.report.condition.busy == (Busy("pause", "eval", 1800.0, age_s=600.0),)


# --- memory snapshots (rule BACKUP) --------------------------------------------------------------------------------

S5, S7, S9 = StatePair(1, 5), StatePair(1, 7), StatePair(1, 9)


@pytest.mark.parametrize("way", ["said by the process", "read from the directory"])
@pytest.mark.parametrize("is_last", [False, True], ids=["taken while it trained", "taken as it ended"])
def test_snapshot_is_what_the_worker_holds_once_its_processes_have_ended(way: str, is_last: bool) -> None:
    drive = Drive(2).session().trains(1, 7)
    if way == "said by the process":
        drive.says(local.Snapshotted(S7, 1, is_last))
    drive.exits(-9, 0).exits(-9, 1)
    if way == "read from the directory":
        drive.feed(ev.Held(0, SnapshotState(S7, 1, is_last)))
    seal = Seal(1, S7, 1, 1, is_backup=not is_last)
    assert (drive.report.seal, drive.report.condition.step) == (seal, 7)
    assert drive.wait(1).attach().report.seal == seal, "those that are started next have none of their own"


def test_snapshot_says_where_its_state_was_adopted() -> None:
    drive = Drive().session().trains(1, 7).generation(2).says(local.Entering(2)).says(local.Snapshotted(S7, 1))
    drive.says(local.AdoptedLocally(2, 7, "self", S7, 1.0)).exits(-9)
    assert drive.report.seal == Seal(2, S7, 2, 1, is_backup=True)


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(ev.Held(0, None), id="the directory is empty"),
        pytest.param(local.Snapshotted(None), id="the process has discarded it"),
    ],
)
def test_snapshot_that_is_gone_is_forgotten(message: ev.Held | local.Snapshotted) -> None:
    drive = Drive(snapshot=SnapshotState(S5, 1, False), saved=Saved(entered=1, adopted=1))
    drive.newest = 1
    assert drive.session().phase == Phase.READY
    assert drive.report.seal == Seal(1, S5, 1, 1, is_backup=True), "of an earlier container of the pod"
    drive = drive.feed(message) if isinstance(message, ev.Held) else drive.says(message)
    assert drive.report.seal == Seal(1, None, 1)


def test_what_is_read_after_the_end_replaces_what_was_said() -> None:
    """The last message may be lost in the socket."""
    drive = Drive().session().trains(1, 9).says(local.Snapshotted(S7, 1)).exits(1)
    assert drive.report.seal == Seal(1, S7, 1, 1, is_backup=True)
    assert drive.feed(ev.Held(0, SnapshotState(S9, 1, True))).report.seal == Seal(1, S9, 1, 1)


def test_report_says_what_was_said_of_snapshots_last_in_this_generation() -> None:
    """Not every message speaks of them; what an older generation covered says nothing of this one."""

    def newest() -> tuple[int | None, str | None]:
        (body,) = drive.command(wire.ProgressRequest()).bodies(wire.Progress)
        assert (body.checkpoints_late, body.snapshots_late) == (late, body.snapshot_problem)
        return body.snapshot_step, body.snapshot_problem

    late = None

    drive = (
        Drive()
        .session()
        .trains(1)
        .says(committed(1, 2, snapshot_step=1, snapshot_problem="full", snapshots_late="full"))
    )
    assert newest() == (1, "full")
    drive.says(committed(1, 3))
    assert newest() == (1, "full")
    drive.says(committed(1, 3, snapshot_step=3))
    assert newest() == (3, "full"), "the same step again"
    drive.says(committed(1, 3, snapshot_problem="", snapshots_late=""))
    assert newest() == (3, "")
    late = "seldom"
    drive.says(committed(1, 3, checkpoints_late="seldom"))
    drive.says(committed(1, 4))
    assert newest() == (3, "")
    late = None
    drive.trains(2).says(committed(2, 4))
    assert newest() == (None, None)


# --- progress ------------------------------------------------------------------------------------------------------


def test_progress_comes_as_often_as_the_operator_wants_it_and_sooner_at_once() -> None:
    drive = Drive().session().trains(1, step=7)  # the first is reported at once
    drive.feed(ev.Paced(10.0)).says(committed(1, 8))
    assert drive.wait(9.0).bodies(wire.Progress) == []
    drive.feed(ev.Paced(1.0))  # another operator answers
    assert [body.step for body in drive.bodies(wire.Progress)] == [8]
    drive.feed(ev.Paced(10.0)).says(committed(1, 9))
    assert [body.step for body in drive.wait(10.0).bodies(wire.Progress)] == [9]


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_step_times_are_those_of_the_process_for_which_others_wait(slow_rank: int) -> None:
    drive = Drive(2).session().trains(1, 7)
    for rank in range(2):
        waits = 0.0 if rank == slow_rank else 0.5
        drive.says(committed(1, 8, times=Times(0.5 - waits, 0.1, 0.1, 0.0, 0.0, waits, 0.0, 0.0)), rank)
    progress = drive.wait(2.0).bodies(wire.Progress)[-1]
    assert (progress.step, progress.times) == (8, Times(0.5, 0.1, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0))


def test_checkpoint_of_a_stop_is_told_although_the_workers_other_process_has_ended() -> None:
    """The process of rank 0 saves. The others of its worker end at once, and the worker is in no generation then."""
    drive = Drive(2).session().trains(1, 7).feed(ev.Detached(1, 2)).feed(ev.Exited(1, 2, 0))
    saved = {"generation": 1, "step": 7, "directory": "step-7"}
    drive.says(committed(1, 7, checkpoint=saved), 0).feed(ev.Exited(0, 1, 0))
    (told,) = drive.bodies(wire.Progress)
    assert (told.generation, told.checkpoint) == (1, saved)


def test_noise_scale_is_passed_on() -> None:
    drive = Drive().session().trains(1).says(committed(1, 1, noise_scale=512.0))
    assert [body.noise_scale for body in drive.bodies(wire.Progress)] == [512.0]


def test_first_commit_is_told_at_once_and_then_one_a_second() -> None:
    drive = Drive().session().trains(1)
    drive.says(committed(1, 1, first_step_ms=3.5, steps_redone=1))
    assert [(b.step, b.first_step_ms, b.steps_redone) for b in drive.bodies()] == [(1, 3.5, 1)]
    for step in range(2, 20):
        assert drive.says(committed(1, step)).bodies() == []
    assert [(b.step, b.first_step_ms) for b in drive.wait(1.5).bodies()] == [(19, None)]
    drive.says(committed(1, 20))
    assert [b.step for b in drive.command(wire.ProgressRequest()).bodies()] == [20]


SAVED = {"generation": 1, "step": 9, "directory": "g1-s9"}


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param(lambda d: d.feed(ev.Detached(0, d.incarnations[0])), id="the process leaves"),
        pytest.param(lambda d: d.exits(-9), id="it is killed"),
    ],
)
@pytest.mark.parametrize("stopped", [True, False], ids=["after a stop", "by itself"])
def test_last_commit_is_told_before_the_end_of_its_process(ends: Callable[[Drive], Drive], stopped: bool) -> None:
    """It may name the checkpoint that a suspended job goes on from. Later reports are of no generation."""
    drive = Drive().session().trains(1, step=7).wait(1)
    drive.says(committed(1, 8))
    drive.says(committed(1, 9, checkpoint=SAVED))
    if stopped:
        drive.command(wire.Stop("Suspended"))
    ends(drive)
    (told,) = drive.bodies(wire.Progress)
    assert (told.step, told.checkpoint) == (9, SAVED)
    assert drive.of(ev.Send)[0].report.condition.generation == 1
    drive.wait(60)
    assert [body.step for body in drive.bodies(wire.Progress, ever=True)] == [7, 8, 9]


def test_only_reportable_steps_are_reported_ack() -> None:
    drive = Drive().session().trains(1).says(committed(1, 9, reportable_step=6))
    assert drive.bodies(wire.Progress)[0].step == 6
    assert drive.report.condition.step == 6


# --- FINISH --------------------------------------------------------------------------------------------------------


def test_finished_is_told_when_all_processes_have_with_the_last_step() -> None:
    drive = Drive(2).session().trains(1, 9)
    for rank in (0, 1):
        drive.says(committed(1, 10), rank)
    assert drive.says(local.FinishedLocally(1, 10), 0).bodies() == []
    drive.says(local.FinishedLocally(1, 10), 1)
    assert [type(b).__name__ for b in drive.bodies()] == ["Progress", "Finished"]
    assert drive.bodies(wire.Progress)[0].step == 10
    assert (drive.phase, drive.report.seal) == (Phase.FINISHED, None)


def test_finished_process_that_joins_a_newer_generation_is_not_finished_any_more() -> None:
    drive = Drive().session().trains(1, 10).says(local.FinishedLocally(1, 10)).generation(2)
    drive.says(left(1, 10)).says(local.Entering(2))
    assert drive.phase == Phase.FORMING


def test_finished_process_that_exits_0_is_done_before_the_end_is_told() -> None:
    """The session waits to be told; a script may also exit by itself, with `os._exit(0)` in a thread."""
    drive = Drive().session().trains(1, 10).says(local.FinishedLocally(1, 10)).exits(0)
    assert (drive.phase, drive.report.condition.generation) == (Phase.DONE, 1)
    assert drive.of(ev.Start) == drive.bodies(wire.Fault) == []
    assert drive.finish(1, 10).told() == drive.of(ev.Start) == []
    assert drive.phase == Phase.DONE


# --- the end -------------------------------------------------------------------------------------------------------


def test_stop_is_told_then_forced_then_reported() -> None:
    drive = Drive().session().trains(1, 3).command(wire.Stop("Failed"))
    assert drive.told() == [(0, local.StopLocally("Failed"))]
    assert drive.wait(9).of(ev.Signal) == []
    assert drive.wait(2).of(ev.Signal) == [ev.Signal(0, signal.SIGTERM)]
    assert drive.wait(6).of(ev.Signal) == [ev.Signal(0, signal.SIGKILL)]
    drive.exits(-9)
    assert [type(e).__name__ for e in drive.effects] == ["Send", "Exit"]
    (report,) = (e.report for e in drive.of(ev.Send))
    assert report.condition.phase == Phase.STOPPED
    assert drive.effects[1] == ev.Exit(0)


def test_stop_of_a_suspended_job_leaves_time_for_the_step_and_its_checkpoint() -> None:
    drive = Drive().session().trains(1, 3).command(wire.Stop("Suspended"))
    assert drive.told() == [(0, local.StopLocally(local.SUSPENDED))]
    assert drive.wait(290).of(ev.Signal) == []
    assert drive.wait(11).of(ev.Signal) == [ev.Signal(0, signal.SIGTERM)]
    assert drive.exits(0).of(ev.Exit) == [ev.Exit(0)]


def test_stop_without_processes_ends_the_agent() -> None:
    assert Drive().feed(ev.Connected()).command(wire.Stop("Released")).of(ev.Exit) == [ev.Exit(0)]


def test_stop_cancels_a_restart() -> None:
    drive = Drive().session().exits(1).exits(1)
    assert drive.core.due_s is not None
    assert drive.command(wire.Stop("Failed")).of(ev.Exit) == [ev.Exit(0)]
    assert drive.wait(60).of(ev.Start) == []


@pytest.mark.parametrize("connected", [True, False])
def test_deleted_pod_trains_on_only_where_somebody_can_release_it(connected: bool) -> None:
    drive = Drive(grace_s=30).session().trains(1, 3)
    if not connected:
        drive.feed(ev.Disconnected())
    drive.feed(ev.Terminated(waits=False))
    assert drive.bodies() == ([wire.Draining(25.0)] if connected else [])
    assert bool(drive.of(ev.Signal)) is not connected
    drive.wait(26)
    assert drive.exits(-15).of(ev.Exit) == [ev.Exit(143)]


@pytest.mark.parametrize("waits", [True, False])
def test_operator_that_goes_after_it_was_asked_is_waited_for_only_where_it_may_come_back(waits: bool) -> None:
    drive = Drive(grace_s=30).session().trains(1, 3).feed(ev.Terminated(waits=waits))
    assert drive.bodies() == [wire.Draining(25.0)]
    assert drive.feed(ev.Disconnected()).of(ev.Signal) == ([] if waits else [ev.Signal(0, signal.SIGTERM)])
    if not waits:
        assert drive.exits(-15).of(ev.Exit) == [ev.Exit(143)]


@pytest.mark.parametrize("connected", [True, False])
def test_worker_that_is_leaving_ends_with_regroup_run(connected: bool) -> None:
    """It was deleted before the run was interrupted."""
    drive = Drive(grace_s=30).session().trains(1, 3).feed(ev.Terminated())
    if not connected:
        assert drive.feed(ev.Disconnected()).of(ev.Signal) == []
    ended = [ev.Signal(0, signal.SIGTERM)]
    assert drive.feed(ev.Terminated(waits=False)).of(ev.Signal) == ([] if connected else ended)
    if connected:
        assert drive.feed(ev.Disconnected()).of(ev.Signal) == ended
    assert drive.exits(-15).of(ev.Exit) == [ev.Exit(143)]


@pytest.mark.parametrize(("grace_s", "end_s"), [(5, 3.0), (30, 25.0), (600, 595.0)])
@pytest.mark.parametrize("back_s", [2.0, None], ids=["it comes back", "it stays away"])
def test_holder_of_a_state_trains_on_in_its_grace_while_the_operator_is_away(
    grace_s: float, end_s: float, back_s: float | None
) -> None:
    drive = Drive(grace_s=grace_s).session().trains(1, 3).feed(ev.Disconnected()).feed(ev.Terminated())
    assert drive.bodies() == [], "nobody can hear it"
    if back_s is not None:
        drive.wait(back_s).feed(ev.Connected())
        assert drive.bodies(wire.Draining) == [wire.Draining(end_s - back_s)]
    assert drive.wait(end_s - (back_s or 0.0) - 0.1).effects == []
    assert drive.wait(0.1).told() == [(0, local.StopLocally(local.DRAINED))]
    drive.exits(0)
    assert (drive.bodies(wire.Fault), drive.of(ev.Exit)) == ([], [ev.Exit(143)])


def test_deleted_pod_without_a_state_does_not_wait_for_an_operator_that_is_away() -> None:
    drive = Drive(grace_s=30).session().feed(ev.Disconnected()).feed(ev.Terminated())
    assert drive.of(ev.Signal) == [ev.Signal(0, signal.SIGTERM)]


def test_one_process_that_holds_the_state_is_enough_to_wait_for_an_operator_that_is_away() -> None:
    drive = Drive(2, grace_s=30).session().trains(1, 3).exits(-9, 1).feed(ev.Disconnected()).feed(ev.Terminated())
    assert drive.wait(24.9).of(ev.Signal) == []


def test_deleted_pod_in_which_nothing_runs_ends_at_once() -> None:
    assert Drive(grace_s=30).feed(ev.Connected()).feed(ev.Terminated()).of(ev.Exit) == [ev.Exit(143)]


def test_operator_that_comes_back_too_late_changes_nothing_about_the_end() -> None:
    drive = Drive(grace_s=30).session().trains(1, 3).feed(ev.Disconnected()).feed(ev.Terminated()).wait(25)
    assert drive.feed(ev.Connected()).bodies(wire.Draining) == [wire.Draining(0.0)]
    assert [s.signum for s in drive.wait(4).of(ev.Signal)] == [signal.SIGTERM, signal.SIGKILL]


@pytest.mark.parametrize(
    ("grace_s", "saves", "trains_s"),
    [
        (5, False, 3.0), (25, False, 20.0), (600, False, 595.0),
        (5, True, 3.0), (25, True, 20.0), (600, True, 480.0),
    ],
)  # fmt: skip
def test_deleted_pod_ends_its_processes_in_time_for_its_grace(grace_s: float, saves: bool, trains_s: float) -> None:
    """A script that writes checkpoints has a fifth of the grace for the last one."""
    drive = Drive(grace_s=grace_s, saves=saves).session().trains(1, 3).feed(ev.Terminated())
    assert drive.bodies() == [wire.Draining(trains_s)]
    assert drive.wait(trains_s - 0.1).effects == []
    drive.wait(grace_s - trains_s)
    assert drive.told() == [(0, local.StopLocally(local.DRAINED))]
    assert [s.signum for s in drive.of(ev.Signal)] == [signal.SIGTERM, signal.SIGKILL]


def test_last_seconds_of_a_grace_are_the_processes_own() -> None:
    """From the word on it saves: no signal before the margin is nearly used up."""
    drive = Drive(grace_s=30).session().trains(1, 3).feed(ev.Terminated()).wait(25)
    assert drive.wait(3.7).of(ev.Signal) == []
    assert drive.wait(0.1).of(ev.Signal) == [ev.Signal(0, signal.SIGTERM)]
    assert drive.wait(0.3).of(ev.Signal) == [ev.Signal(0, signal.SIGKILL)]


def test_second_sigterm_changes_nothing_about_the_end() -> None:
    drive = Drive(grace_s=30).session().trains(1, 3).feed(ev.Terminated()).wait(20).feed(ev.Terminated())
    assert drive.bodies(wire.Draining) == []
    assert drive.wait(4.9).effects == []
    assert drive.wait(0.1).told() == [(0, local.StopLocally(local.DRAINED))]


def test_stop_of_a_draining_pod_keeps_its_last_moment() -> None:
    drive = Drive(grace_s=30).session().trains(1, 3).feed(ev.Terminated()).wait(20).command(wire.Stop("Released"))
    assert drive.wait(8.7).of(ev.Signal) == []
    assert drive.wait(0.1).of(ev.Signal) == [ev.Signal(0, signal.SIGTERM)]
    assert drive.exits(0).of(ev.Exit) == [ev.Exit(0)]


def test_process_that_crashes_while_draining_is_a_fault_and_not_restarted() -> None:
    drive = Drive(2).session().trains(1, 3).feed(ev.Terminated()).exits(-9, 1)
    assert len(drive.bodies(wire.Fault)) == 1
    assert drive.wait(5).of(ev.Start) == []


def test_process_that_waits_for_its_restart_is_not_started_in_a_pod_that_is_deleted() -> None:
    drive = Drive(2).session().trains(1, 3).exits(-9, 1).exits(-9, 1)
    assert drive.core.due_s is not None
    assert drive.feed(ev.Terminated()).wait(5).of(ev.Start) == []


@pytest.mark.parametrize("outcome", ["Complete", "Failed", "Released", "Suspended"])
def test_process_that_ends_after_a_stop_is_no_fault(outcome: str) -> None:
    drive = Drive().session().trains(1, 3).command(wire.Stop(outcome)).exits(1)
    assert (drive.bodies(wire.Fault), drive.of(ev.Exit)) == ([], [ev.Exit(0)])


# --- a script that is known to use the library -----------------------------------------------------------------------


def test_script_that_is_known_to_use_the_library_starts_with_the_connection() -> None:
    drive = Drive(2, session=True)
    assert drive.of(ev.Start) == []
    drive.feed(ev.Connected())
    assert [(s.local_rank, s.generation) for s in drive.of(ev.Start)] == [(0, None), (1, None)]
    condition = drive.report.condition
    assert (condition.phase, condition.session) == (Phase.STARTING, True)
    assert drive.command(wire.Welcome("Unknown")).of(ev.Start) == []
    assert drive.generation(1).of(ev.Start) == []
    assert [rank for rank, _ in drive.attach().told(local.Assignment)] == [1]


def test_session_whose_state_file_is_lost_starts_with_the_welcome() -> None:
    drive = Drive(saved=Saved(UNKNOWN, UNKNOWN, 1000, 0), session=True).feed(ev.Connected())
    assert drive.of(ev.Start) == []
    assert drive.command(wire.Welcome("Session"), generation=3).of(ev.Start)


# --- what can never run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("session", [True, False])
def test_process_that_can_never_run_is_reported_with_its_sentence_and_not_started_again(session: bool) -> None:
    drive = Drive(session=session).feed(ev.Connected()).command(wire.Welcome("Session" if session else "Unknown"))
    if not session:
        drive.command(generation(1))
    num_before = len(drive.all)
    drive.says(local.CannotRun(0, drive.incarnations[0], "torch 2.10.1 is too old."))
    assert [e.text for e in drive.effects if isinstance(e, ev.Log)] == ["torch 2.10.1 is too old."]
    drive.feed(ev.Exited(0, drive.incarnations[0], 1))
    (fault,) = [
        e.report.body for e in drive.effects if isinstance(e, ev.Send) and isinstance(e.report.body, wire.Fault)
    ]
    assert (fault.exit_code, fault.reason, fault.detail) == (1, "CannotRun", "torch 2.10.1 is too old.")
    drive.wait(60.0)
    assert not any(isinstance(e, ev.Start) for e in drive.all[num_before:])


def test_refusal_in_a_worker_that_has_trained_is_an_exit_as_any_other() -> None:
    """One of its GPUs may be gone: a new pod has another node."""
    drive = Drive(saved=Saved(3, 3, 1, 0), session=True).feed(ev.Connected()).command(wire.Welcome("Session"))
    drive.says(local.CannotRun(0, drive.incarnations[0], "LOCAL_RANK is 7, and this worker sees 7 GPUs."))
    num_before = len(drive.all)
    drive.feed(ev.Exited(0, drive.incarnations[0], 1))
    faults = [e.report.body for e in drive.effects if isinstance(e, ev.Send) and isinstance(e.report.body, wire.Fault)]
    assert [(fault.exit_code, fault.reason) for fault in faults] == [(1, None)]
    drive.wait(60.0)
    assert any(isinstance(e, ev.Start) for e in drive.all[num_before:])


def test_refusal_that_the_script_has_caught_is_no_reason_of_a_later_exit() -> None:
    drive = Drive(session=True).feed(ev.Connected()).command(wire.Welcome("Session"))
    drive.says(local.CannotRun(0, drive.incarnations[0], "No GPU of its own."))
    drive.attach()
    drive.feed(ev.Exited(0, drive.incarnations[0], -9))
    faults = [e.report.body for e in drive.effects if isinstance(e, ev.Send) and isinstance(e.report.body, wire.Fault)]
    assert [(fault.exit_code, fault.reason) for fault in faults] == [(-9, None)]


# --- the library of the image --------------------------------------------------------------------------------------


def test_library_of_another_protocol_is_refused_with_a_sentence_and_its_process_ends() -> None:
    drive = Drive(session=True).feed(ev.Connected()).command(wire.Welcome("Session"))
    library: dict[str, Any] = {"protocol": local.VERSION + 1, "release": "9.0.0", "path": "/opt/site-packages/regroup"}
    drive.says(local.Attach(1, 0, drive.incarnations[0], **library))
    sentence = (
        f"The library `regroup` in /opt/site-packages/regroup has release 9.0.0 and speaks version {local.VERSION + 1} of the "
        f"protocol; the agent of this pod has release {RELEASE} and speaks version {local.VERSION}: install regroup-training "
        f"{RELEASE} in the image, or remove the package from it, since the pod brings the library."
    )
    assert [e.text for e in drive.effects if isinstance(e, ev.Log)] == [sentence]
    assert drive.of(ev.Signal) == [ev.Signal(0, signal.SIGKILL)]
    assert drive.phase == Phase.STARTING
    num_before = len(drive.all)
    drive.feed(ev.Exited(0, drive.incarnations[0], -9))
    (fault,) = [
        e.report.body for e in drive.effects if isinstance(e, ev.Send) and isinstance(e.report.body, wire.Fault)
    ]
    assert (fault.exit_code, fault.reason, fault.detail) == (-9, "CannotRun", sentence)
    drive.wait(60.0)
    assert not any(isinstance(e, ev.Start) for e in drive.all[num_before:])


def test_library_of_another_release_is_said_and_trains() -> None:
    drive = Drive(session=True).feed(ev.Connected()).command(wire.Welcome("Session"))
    drive.says(local.Attach(1, 0, drive.incarnations[0], release="9.0.0", path="/opt/regroup"))
    said = [e.text for e in drive.effects if isinstance(e, ev.Log)]
    assert said == [f"The script uses regroup 9.0.0 in /opt/regroup; the agent is {RELEASE}."]
    assert drive.phase == Phase.READY
