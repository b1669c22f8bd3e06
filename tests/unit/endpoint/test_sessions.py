"""What a report does to a session: rules FENCE (what is dropped) and RESAY (the newest condition is all that counts)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from regroup.protocol import codec
from regroup.protocol.codec import ProtocolError
from regroup.protocol.state import Phase, Seal, StatePair
from regroup.protocol.wire import (
    LOGGED,
    MAX_REMAINING_S,
    Adopted,
    Changed,
    Draining,
    Fault,
    Progress,
    Report,
    ScriptProgress,
    Unheard,
)
from regroup_operator.endpoint.sessions import (
    MAX_EXITS,
    MAX_UNHEARD,
    apply_report,
    is_routine,
    stream_closed,
    stream_opened,
)
from regroup_operator.model.records import AgentSession, Silence
from tests.unit.endpoint.reports import hello, make_report


def session(*reports: Report, now_s: float = 10.0, **condition: Any) -> AgentSession:
    """Return the session after a hello and these reports."""
    out = apply_report(None, hello(**condition), now_s)
    for report in reports:
        out = apply_report(out, report, now_s)
        assert out is not None
    assert out is not None
    return out


@pytest.mark.parametrize(
    ("report", "dropped"),
    [
        pytest.param(make_report(incarnation=2, generation=2, heard=2), False, id="the same condition again is taken"),
        pytest.param(
            make_report(incarnation=3, generation=2, heard=2, entered=2), False, id="everything newer is taken"
        ),
        pytest.param(make_report(incarnation=1), True, id="an older incarnation is dropped"),
        pytest.param(make_report(incarnation=2, heard=1), True, id="a generation that was heard before is dropped"),
        pytest.param(
            make_report(incarnation=2, entered=0, heard=2), True, id="less entered than said before is dropped"
        ),
        pytest.param(
            make_report(incarnation=3, heard=0, entered=0),
            False,
            id="a new incarnation may have heard less: another process",
        ),
        pytest.param(
            make_report(incarnation=2, boot="other"), True, id="another agent process without hello is dropped"
        ),
        pytest.param(
            hello(incarnation=2, boot="other", heard=0, entered=0), False, id="a restarted agent's hello is taken"
        ),
        pytest.param(hello(incarnation=1, boot="other"), True, id="a hello of an agent before this one is dropped"),
        pytest.param(hello(incarnation=2, heard=1), True, id="a delayed hello of this agent is dropped"),
    ],
)
def test_fence(report: Report, dropped: bool) -> None:
    before = session(make_report(incarnation=2, generation=2, heard=2, entered=1))
    after = apply_report(before, report, 20.0)
    assert (after is None) == dropped


def test_ports_of_the_processes_are_those_of_the_last_report() -> None:
    before = session(replace(make_report(), ports=(7000, 7001)))
    assert before.ports == (7000, 7001)
    after = apply_report(before, replace(make_report(), ports=(7002, 7003)), 20.0)
    assert after is not None
    assert after.ports == (7002, 7003)
    assert session().ports == ()


def test_first_report_opens_a_session_that_is_not_connected() -> None:
    got = session()
    assert (got.boot, got.connected, got.condition_at_s, got.store_port) == ("boot", False, 10.0, 5000)


def test_restarted_agent_starts_from_its_hello_and_keeps_what_was_counted() -> None:
    crash = make_report(Fault("exit", exit_code=1, local_rank=0, ended=1, generation=1))
    before = stream_opened(session(crash, make_report(Draining(25.0))))
    after = apply_report(before, hello(boot="other", phase=Phase.READY, generation=0), 30.0)
    assert after is not None
    assert (after.boot, after.draining, after.fault, after.fault_generation) == ("other", None, None, 0)
    assert (after.num_exits, len(after.exits)) == (1, 1)
    assert (after.condition.phase, after.condition_at_s) == (Phase.READY, 30.0)


@pytest.mark.parametrize(
    ("changes", "moved"),
    [
        pytest.param({"step": 9}, False, id="a step is no change of condition"),
        pytest.param({"heard": 2}, False, id="hearing is none"),
        pytest.param({"phase": Phase.BROKEN}, True, id="the phase is one"),
        pytest.param({"generation": 2}, True, id="the generation is one"),
        pytest.param({"incarnation": 2}, True, id="the incarnation is one"),
    ],
)
def test_condition_is_dated_by_its_last_change(changes: dict[str, Any], moved: bool) -> None:
    after = apply_report(session(), make_report(**changes), 20.0)
    assert after is not None
    assert after.condition_at_s == (20.0 if moved else 10.0)


def test_seal_is_what_was_said_last() -> None:
    seal = Seal(1, StatePair(1, 5), 1, 1)
    sealed = session(make_report(seal=seal))
    assert sealed.seal == seal
    assert session(make_report(seal=seal), make_report()).seal is None


# --- progress: proof of life ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("second", "at_s"),
    [
        pytest.param((1, 6), 20.0, id="a further step is a sign of life"),
        pytest.param((1, 5), 10.0, id="the same step said again is none"),
        pytest.param((1, 4), 10.0, id="an older step is none"),
        pytest.param((2, 4), 20.0, id="an older step in a newer generation is one"),
    ],
)
def test_only_a_new_step_dates_progress(second: tuple[int, int], at_s: float) -> None:
    generation, step = second
    before = session(make_report(Progress(5)))
    after = apply_report(before, make_report(Progress(step), generation=generation, heard=generation), 20.0)
    assert after is not None
    assert (after.progress_at_s, after.progress_generation) == (at_s, generation)


def test_progress_may_name_a_generation_that_the_worker_has_left() -> None:
    saved = {"generation": 1, "step": 7, "directory": "step-7"}
    after = session(make_report(Progress(7, generation=1, checkpoint=saved), phase="starting", generation=0))
    assert (after.progress_generation, after.progress) == (1, Progress(7, generation=1, checkpoint=saved))


@pytest.mark.parametrize(
    ("named", "taken"),
    [
        pytest.param(1, False, id="older than the newest progress"),
        pytest.param(2, True, id="the same generation"),
        pytest.param(3, True, id="a newer one that was entered"),
        pytest.param(4, False, id="one that was not entered"),
    ],
)
def test_progress_of_a_fenced_generation_changes_nothing(named: int, taken: bool) -> None:
    before = session(make_report(Progress(9, generation=2), generation=2, heard=2, entered=2))
    report = make_report(Progress(5, generation=named), generation=3, heard=4, entered=3)
    after = apply_report(before, report, 20.0)
    assert after is not None
    got = (after.progress_generation, after.progress and after.progress.step)
    assert got == ((named, 5) if taken else (2, 9))


def test_first_step_of_a_generation_is_remembered_until_the_next() -> None:
    first = Progress(5, first_step_ms=12.0, steps_redone=1)
    after = session(make_report(first), make_report(Progress(6)))
    assert after.first_progress == first
    newer = apply_report(after, make_report(Progress(7), generation=2, heard=2, entered=2), 20.0)
    assert newer is not None
    assert newer.first_progress is None


def test_closed_stream_remembers_the_newest_step_of_the_whole_job() -> None:
    """FENCE: what others had reported by then proves nothing for this worker later."""
    closed = stream_closed(stream_opened(session(make_report(Progress(5), step=6))), 30.0, newest_step=9)
    assert (closed.connected, closed.closed_at_s, closed.closed_step) == (False, 30.0, 9)
    assert stream_closed(session(make_report(Progress(5), step=6)), 30.0).closed_step == 6


def test_opened_stream_has_been_told_nothing() -> None:
    told = replace(session(), told_generation=3, told_tier="Session", told_outcome="Complete", closed_at_s=5.0)
    opened = stream_opened(told)
    assert (opened.connected, opened.closed_at_s) == (True, None)
    assert (opened.told_generation, opened.told_tier, opened.told_stop) == (0, "", False)


# --- faults --------------------------------------------------------------------------------------------------------


def test_exits_are_counted_and_their_list_is_bounded() -> None:
    ends = [Fault("exit", exit_code=-9, local_rank=1, last_line=f"line {i}", ended=i + 1) for i in range(40)]
    got = session(*map(make_report, ends))
    assert (got.num_exits, len(got.exits)) == (40, MAX_EXITS)
    assert (got.exits[-1].exit_code, got.exits[-1].local_rank, got.exits[-1].last_line) == (-9, 1, "line 39")


@pytest.mark.parametrize(
    ("fault", "count"),
    [
        pytest.param(Fault("exit", exit_code=1), 1, id="an exit by itself counts"),
        pytest.param(Fault("exit", exit_code=-11), 1, id="a signal counts"),
        pytest.param(Fault("exit", exit_code=0), 1, id="exit code 0 before the last step does, too"),
        pytest.param(Fault("collective"), 0, id="a broken collective does not"),
        pytest.param(Fault("witness"), 0, id="a refusal does not"),
    ],
)
def test_what_counts_as_an_exit(fault: Fault, count: int) -> None:
    assert session(make_report(fault)).num_exits == count


def test_numbered_exit_counts_once_and_is_what_it_was_when_it_is_said_again() -> None:
    """In the next generation, after another fault, by an agent whose processes have been started again."""
    ended = Fault("exit", exit_code=-9, local_rank=0, ended=4, generation=1, incarnation=3)
    later = make_report(
        Fault("collective", generation=2, incarnation=4), incarnation=4, generation=2, heard=2, entered=2
    )
    before = session(make_report(ended, incarnation=3), later)
    again = replace(later, body=replace(ended, observed_ms=60_000.0))
    assert apply_report(before, again, 10.0) == before, "its answer was lost"
    anew = apply_report(session(incarnation=4), again, 100.0)  # at another operator
    assert anew is not None
    assert [(e.number, e.generation, e.incarnation, e.at_s) for e in anew.exits] == [(4, 1, 3, 40.0)]
    assert (anew.fault, anew.num_exits) == (None, 1), "it is not why the worker has left a later generation"


@pytest.mark.parametrize(
    ("before", "alone"),
    [
        pytest.param((), False, id="it is the first"),
        pytest.param(((4, 1, 1),), True, id="the one before it in its place failed, too"),
        pytest.param(((4, 1, 1), *((4, 1, rank) for rank in range(2, 64))), True, id="and many others since"),
        pytest.param(((3, 1, 1),), False, id="and it has been in a generation since"),
        pytest.param(((4, 1, 0),), False, id="another process of its worker failed"),
        pytest.param(((4, 2, 1),), False, id="it is the same one"),
    ],
)
def test_process_that_is_started_again_and_enters_no_generation_is_alone(
    before: tuple[tuple[int, int, int], ...], alone: bool
) -> None:
    ends = [*before, (4, 2, 1)]
    faults = [
        Fault("exit", exit_code=1, local_rank=rank, generation=generation, incarnation=incarnation, ended=number)
        for number, (generation, incarnation, rank) in enumerate(ends, 1)
    ]
    got = session(*(make_report(fault, generation=4, heard=4, entered=4) for fault in faults))
    assert got.exits[-1].alone is alone


def test_fault_belongs_to_the_newest_generation_entered() -> None:
    fault = Fault("collective", observed_ms=500.0, generation=1)
    got = session(make_report(fault, phase=Phase.STARTING, generation=0, entered=1))
    assert (got.fault_generation, got.fault_at_s) == (1, 9.5)
    later = session(make_report(replace(fault, generation=0), entered=1))
    assert later.fault is None, "it says nothing of how the worker left a later generation"


def test_last_words_are_fit_for_a_status() -> None:
    got = session(
        make_report(Fault("exit", exit_code=1, generation=1, last_line="x" * 900 + "\n", message="half \ud800 pair"))
    )
    assert got.fault is not None
    assert len(got.exits[0].last_line) == 500
    words = Fault("exit", exit_code=-9, tail="t" * 9000, reason="OOMKilled", detail="limit 1 GiB")
    ended = session(make_report(words)).exits[0]
    assert (len(ended.tail), ended.reason, ended.detail) == (1500, "OOMKilled", "limit 1 GiB")
    assert got.fault.message == "half ? pair"


def test_bodies_are_kept_with_their_generation() -> None:
    got = session(make_report(Adopted(7, "self", form_ms=3.0)), make_report(Changed()))
    assert (got.adopted, got.adopted_generation) == (Adopted(7, "self", form_ms=3.0), 1)


def test_silence_that_an_observer_reports_is_dated_and_is_replaced_by_its_next_report() -> None:
    told = replace(make_report(), observed_port=7000, unheard=(Unheard("other", 1.5), Unheard("third", -3.0)))
    before = session(told, now_s=50.0)
    assert before.observed_port == 7000
    assert before.unheard == (Silence("other", 48.5, 1.5), Silence("third", 50.0, 0.0))
    assert session(told, make_report(), now_s=50.0).unheard == ()
    many = replace(make_report(), unheard=tuple(Unheard(f"pod{at}", 1.5) for at in range(5000)))
    assert len(session(many).unheard) == MAX_UNHEARD


def test_progress_with_news_of_an_observer_is_looked_at_at_once() -> None:
    plain = make_report(Progress(3))
    before = replace(session(plain), connected=True)
    for unheard, routine in (((), True), ((Unheard("other", 0.5),), False)):
        report = replace(make_report(Progress(4)), unheard=unheard)
        after = apply_report(before, report, 11.0)
        assert after is not None
        assert is_routine(before, after, report) == routine


@pytest.mark.parametrize(
    ("incarnation", "step"),
    [
        pytest.param(4, 12, id="the same process"),
        pytest.param(5, 12, id="a newer process of the worker"),
        pytest.param(3, 7, id="a process that has been replaced"),
        pytest.param(6, 7, id="a process that the worker has not started"),
    ],
)
def test_word_on_a_scripts_progress_is_fenced_by_incarnation(incarnation: int, step: int) -> None:
    known: dict[str, Any] = {"incarnation": 5, "generation": 2, "heard": 2, "entered": 2}
    before = session(make_report(ScriptProgress(4, LOGGED, 7), **known))
    after = apply_report(before, make_report(ScriptProgress(incarnation, LOGGED, 12, age_ms=2000.0), **known), 20.0)
    assert after is not None
    assert after.script is not None
    assert (after.script.step, after.script_generation) == (step, 2)
    assert after.script_at_s == (18.0 if step == 12 else 10.0)


def test_word_on_a_scripts_progress_is_no_progress() -> None:
    """Progress proves life, and dates crashes and stalls."""
    known: dict[str, Any] = {"incarnation": 5, "generation": 2, "heard": 2, "entered": 2}
    before = replace(session(make_report(ScriptProgress(4, LOGGED, 7), **known)), connected=True)
    report = make_report(ScriptProgress(4, LOGGED, 8), **known)
    after = apply_report(before, report, 20.0)
    assert after is not None
    assert is_routine(before, after, report), "it is looked at when progress is written"
    assert (after.progress, after.progress_at_s, after.step_s, after.closed_step) == (None, None, None, 0)
    later = make_report(ScriptProgress(4, LOGGED, 1), **{**known, "generation": 3, "heard": 3, "entered": 3})
    newer = apply_report(after, later, 30.0)
    assert newer is not None
    assert not is_routine(after, newer, later), "the first one of a generation"


@pytest.mark.parametrize(
    "word",
    [
        *({"percent": 100.5}, {"percent": -1.0}, {"step": -1}, {"step": 2**53}, {"total_steps": -1}, {"way": "x" * 300_000}),
        *({name: -0.5} for name in ("step_s", "remaining_s", "every_s", "longest_s", "age_ms")),
        {"remaining_s": 2 * MAX_REMAINING_S},
    ],
    ids=lambda word: str(word)[:30],
)  # fmt: skip
def test_word_that_cannot_be_true_is_refused(word: dict[str, Any]) -> None:
    report = make_report(ScriptProgress(**{"incarnation": 4, "way": LOGGED, **word}))
    with pytest.raises(ProtocolError, match=r"^scriptProgress\..{,200}$"):
        Report.decode(codec.line(report))


def test_word_at_its_bounds_is_taken() -> None:
    word = ScriptProgress(4, LOGGED, 0, 0, 100.0, -1e9, 0.0, MAX_REMAINING_S, 0.0, 0.0, 0.0)
    assert Report.decode(codec.line(make_report(word))).body == word


def test_first_change_of_a_scripts_number_is_looked_at_at_once() -> None:
    """Then it is Running. Each further one waits until progress is written."""
    known: dict[str, Any] = {"incarnation": 5, "generation": 2, "heard": 2, "entered": 2}
    before = replace(session(make_report(ScriptProgress(4, LOGGED, 7), **known)), connected=True)
    report = make_report(ScriptProgress(4, LOGGED, 8, every_s=2.0), **known)
    after = apply_report(before, report, 20.0)
    assert after is not None
    assert not is_routine(before, after, report)
    later = make_report(ScriptProgress(4, LOGGED, 9, every_s=2.0), **known)
    newer = apply_report(after, later, 22.0)
    assert newer is not None
    assert is_routine(after, newer, later)


def test_session_is_copied_whole_and_takes_no_field_that_it_does_not_have() -> None:
    before = session(make_report(Progress(3)))
    after = before.but(step_s=2.0)
    assert (after, before.step_s) == (replace(before, step_s=2.0), None)
    with pytest.raises(AssertionError):
        before.but(stpe_s=2.0)
