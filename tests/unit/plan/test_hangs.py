"""When a generation hangs, whose processes are killed, and what a long step, a pause and a first step are allowed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from regroup.protocol.state import Busy, Phase
from regroup.protocol.wire import Adopted, Progress, Stacks
from regroup.protocol.wire import ProcessStack as P
from regroup_operator.api import JobStatus
from regroup_operator.api.members import MemberId
from regroup_operator.model.records import AgentSession, Settings
from regroup_operator.model.worker import Standing, Worker
from regroup_operator.plan.failures import hangs
from regroup_operator.plan.failures.hangs import ALONE, ANSWER_S, Hang, find_hang, hangs_in_a_row, stack_lines
from tests.builders.plan import make_current, make_session, make_status, make_worker

SETTINGS = Settings(hang_s=60.0, first_step_s=600.0, checkpoint_s=900.0)
MOVED_S = 1000.0
"""The last commit, in all these tests."""


def member(
    slot: int, *places: str, at_s: float | None = None, standing: str = Standing.TRAINING, **changes: Any
) -> Worker:
    """Return a member that committed at MOVED_S; with `places`, its processes' answer of `at_s`."""
    condition = {"busy": changes.pop("busy", ())}
    values: dict[str, Any] = {
        "progress": Progress(7, step_s=changes.pop("step_s", 0.5), longest_s=changes.pop("longest_s", 1.0)),
        "progress_generation": 1,
        "progress_at_s": MOVED_S,
        "busy_since_s": changes.pop("since_s", ()),
    }
    session: AgentSession = make_session(slot, Phase.TRAINING, 1, **values | changes)
    session = replace(session, condition=replace(session.condition, **condition))
    if places:
        said = tuple(
            P(i, 10 * slot + i, place, None, f"load (train.py:{slot})", "x < y") for i, place in enumerate(places)
        )
        session = replace(session, stacks=Stacks(said), stacks_generation=1, stacks_at_s=at_s, asked_stacks_at_s=at_s)
    return make_worker(slot, standing, session=session)


def find(*workers: Worker, now_s: float, hang_seconds: float | None = None, in_a_row: int = 0, **changes: Any) -> Hang:
    return find_hang(
        current=make_current(range(len(workers)), **changes),
        workers=workers,
        processes=max((len(w.session.stacks.processes) for w in workers if w.session and w.session.stacks), default=1),
        hang_seconds=hang_seconds,
        in_a_row=in_a_row,
        now_s=now_s,
        settings=SETTINGS,
    )


# --- the clock -----------------------------------------------------------------------------------------------------

PAUSE = Busy(Busy.PAUSE, "eval", 1800.0)


@pytest.mark.parametrize(
    ("worker", "hang_seconds", "bound_s"),
    [
        pytest.param(member(0), None, 60, id="short steps: the floor"),
        pytest.param(member(0, step_s=10.0), None, 200, id="twenty times the median step"),
        pytest.param(member(0, longest_s=100.0), None, 300, id="three times the longest that was seen"),
        pytest.param(member(0), 5, 5, id="what the spec says, below the floor too"),
        pytest.param(member(0, step_s=10.0), 5, 30, id="but never less than three steps"),
        pytest.param(member(0, longest_s=100.0), 5, 5, id="what the spec says does not grow with what was seen"),
        pytest.param(member(0, progress=None, condition_at_s=MOVED_S), None, 60, id="from the adoption"),
        pytest.param(member(0, progress_generation=0, condition_at_s=MOVED_S + 1), None, 61, id="no older commits"),
        pytest.param(member(0, busy=(PAUSE,), since_s=(MOVED_S,)), None, 1800, id="a pause as long as it says"),
        pytest.param(member(0, busy=(PAUSE,), since_s=(MOVED_S,)), 5, 1800, id="a pause, whatever the spec says"),
        pytest.param(member(0, busy=(replace(PAUSE, max_s=2.0),), since_s=(MOVED_S,)), None, 60, id="a short pause"),
        pytest.param(member(0, busy_ended_s=MOVED_S + 500), None, 560, id="a step begins anew after a pause"),
        pytest.param(member(0, busy=(Busy(Busy.FIRST_STEP),), since_s=(MOVED_S,)), 5, 600, id="the first step of a process"),
        pytest.param(member(0, busy=(Busy(Busy.FIRST_STEP),), since_s=(MOVED_S,)), 700, 700, id="which is no shorter than others"),
        pytest.param(member(0, report_every_s=10.0), 5, 14, id="and what is heard of late"),
        pytest.param(member(0, busy=(Busy(Busy.CHECKPOINT),), since_s=(MOVED_S,)), None, 900, id="a checkpoint that is waited for"),
    ],
)  # fmt: skip
def test_bound(worker: Worker, hang_seconds: float | None, bound_s: float) -> None:
    other = member(1, progress=None)
    due_s = MOVED_S + bound_s
    assert find(worker, other, now_s=due_s - 0.1, hang_seconds=hang_seconds) == Hang(due_s=due_s)
    late = find(worker, other, now_s=due_s, hang_seconds=hang_seconds)
    assert {w.id.slot for w in late.ask} == {0, 1}
    assert late.message.endswith("asking where the ranks are.")


def test_one_step_of_ten_times_the_median_is_no_hang_at_any_pace() -> None:
    for step_s in (0.01, 1.0, 60.0, 3600.0):
        assert find(member(0, step_s=step_s), now_s=MOVED_S + 10 * step_s).ask == ()


@pytest.mark.parametrize(
    "standing",
    [
        Standing.PENDING,
        Standing.STARTING,
        Standing.FORMING,
        Standing.BROKEN,
        Standing.DIED,
        Standing.SILENT,
        Standing.LOST,
    ],
)
def test_generation_that_does_not_stand_is_no_hang(standing: str) -> None:
    assert find(member(0), member(1, standing=standing), now_s=MOVED_S + 1e6) == Hang()


# --- who it is -----------------------------------------------------------------------------------------------------

DUE_S = MOVED_S + 60
NOW_S = DUE_S + 1


@pytest.mark.parametrize(
    ("places", "hung"),
    [
        pytest.param([[P.COLLECTIVE], [P.OUTSIDE]], {1: (10,)}, id="the rank that is in no collective"),
        pytest.param([[P.COLLECTIVE], [P.STOPPED]], {1: (10,)}, id="a stopped process"),
        pytest.param([[P.SILENT], [P.COLLECTIVE]], {0: (0,)}, id="a process none of whose threads answers"),
        pytest.param([[P.OUTSIDE], [P.COLLECTIVE], [P.STOPPED]], {0: (0,), 2: (20,)}, id="two at once"),
        pytest.param([[P.COLLECTIVE, P.OUTSIDE], [P.COLLECTIVE] * 2], {0: (1,)}, id="one process of a worker, not its sibling"),
        pytest.param([[P.OUTSIDE] * 2, [P.COLLECTIVE] * 2], {0: (0, 1)}, id="both of a worker"),
        pytest.param([[P.WAITING], [P.OUTSIDE]], {1: (10,)}, id="who waits for the operator does not hang"),
        pytest.param([[P.COLLECTIVE], [P.COLLECTIVE]], {}, id="nobody where all are in collectives"),
    ],
)  # fmt: skip
def test_culprits(places: list[list[str]], hung: dict[int, tuple[int, ...]]) -> None:
    found = find(*(member(slot, *of, at_s=DUE_S) for slot, of in enumerate(places)), now_s=NOW_S)
    assert {id.slot: culprit.incarnations for id, culprit in found.culprits.items()} == hung
    assert found.together == (not hung)
    assert found.ask == ()
    assert found.failure is None
    assert found.found_s == DUE_S


def test_sentence_names_rank_time_and_place() -> None:
    found = find(member(0, P.COLLECTIVE, at_s=DUE_S), member(1, P.OUTSIDE, at_s=DUE_S), now_s=NOW_S)
    assert found.culprits[MemberId(1, 0)].message == (
        "No step was committed for 60 s: rank 1 (worker 1, process 0) hangs in load (train.py:1)"
    )


def test_pause_that_outlasts_its_limit_is_named() -> None:
    hung = member(1, P.OUTSIDE, at_s=DUE_S, busy=(replace(PAUSE, max_s=20.0),), since_s=(MOVED_S + 1,))
    assert hung.session is not None
    assert hung.session.stacks is not None
    hung = replace(
        hung, session=replace(hung.session, stacks=Stacks((replace(hung.session.stacks.processes[0], pause="eval"),)))
    )
    found = find(member(0, P.COLLECTIVE, at_s=DUE_S), hung, now_s=NOW_S)
    assert 'rank 1 (worker 1, process 0) is in pause "eval" for longer than its max_s' in found.message


def test_answers_of_before_the_commit_was_overdue_say_nothing() -> None:
    old = member(1, P.OUTSIDE, at_s=DUE_S - 30)
    assert [w.id.slot for w in find(member(0, P.COLLECTIVE, at_s=DUE_S), old, now_s=NOW_S).ask] == [1]


def test_agent_is_asked_once_and_waited_for_and_then_it_is_decided_without_it() -> None:
    there, deaf = member(0, P.OUTSIDE, at_s=DUE_S), member(1, asked_stacks_at_s=DUE_S)
    third = member(2, P.COLLECTIVE, at_s=DUE_S)
    waiting = find(there, deaf, third, now_s=NOW_S)
    assert (waiting.ask, waiting.due_s, waiting.culprits) == ((), DUE_S + ANSWER_S, {})
    decided = find(there, deaf, third, now_s=DUE_S + ANSWER_S)
    assert [id.slot for id in decided.culprits] == [0]


def test_agents_none_of_which_answers_are_asked_again() -> None:
    deaf = [member(slot, asked_stacks_at_s=DUE_S) for slot in (0, 1)]
    assert find(*deaf, now_s=DUE_S + ANSWER_S - 1).ask == ()
    assert len(find(*deaf, now_s=DUE_S + ANSWER_S).ask) == 2


# --- nobody would be left ------------------------------------------------------------------------------------------

ALONE_S = DUE_S + (ALONE - 1) * 60


@pytest.mark.parametrize("places", [[], [P.OUTSIDE], [P.COLLECTIVE]])
def test_sentence_does_not_change_while_nothing_happens(places: list[str]) -> None:
    """Each other one would be a write of the status."""
    both = [member(slot, *places, at_s=DUE_S if places else None, asked_stacks_at_s=DUE_S) for slot in (0, 1)]
    said = {find(*both, now_s=NOW_S + seconds).message for seconds in (0, 1, 3)}
    assert len(said) == 1, said


def test_where_no_rank_waits_for_another_it_takes_three_times_as_long_and_says_so() -> None:
    both = [member(slot, P.OUTSIDE, at_s=DUE_S) for slot in (0, 1)]
    found = find(*both, now_s=NOW_S)
    assert (found.culprits, found.together, found.due_s) == ({}, False, ALONE_S)
    assert "no rank waits for another: rank 0 (worker 0, process 0) hangs in load (train.py:0)" in found.message
    assert len(find(*both, now_s=ALONE_S).ask) == 2, "they may have moved meanwhile"


@pytest.mark.parametrize(
    ("places", "named"),
    [
        pytest.param([P.COLLECTIVE, P.OUTSIDE], "rank 1 (worker 1, process 0) is in load (train.py:1)", id="one is waited for"),
        pytest.param([P.OUTSIDE, P.OUTSIDE], "rank 0 (worker 0, process 0) is in load (train.py:0)", id="an evaluation"),
        pytest.param([P.OUTSIDE, P.STOPPED], "rank 0 (worker 0, process 0) is in load (train.py:0)", id="any of them"),
    ],
)  # fmt: skip
def test_script_with_steps_of_its_own_is_restarted_only_if_the_spec_says_how_long_is_too_long(
    places: list[str], named: str
) -> None:
    """Elastic Horovod commits what it likes when it likes, and may evaluate for an hour in between."""
    adopted = Adopted(0, "self", own_steps=True)
    workers = [member(slot, place, at_s=MOVED_S + 60, adopted=adopted) for slot, place in enumerate(places)]
    hang = find(*workers, now_s=MOVED_S + 5000)
    assert hang == Hang(message=hang.message, is_only_said=True)
    assert hang.message == (
        f"No step was committed for 60 s: {named}. A long evaluation between two commits looks the same. To have the process "
        "restarted, set spec.recovery.hangSeconds."
    )
    assert find(*workers, now_s=MOVED_S + 5000, hang_seconds=20).culprits


def test_one_process_is_left_with_the_state() -> None:
    all_outside = [member(slot, P.OUTSIDE, at_s=ALONE_S) for slot in (0, 1, 2)]
    assert [id.slot for id in find(*all_outside, now_s=ALONE_S).culprits] == [1, 2]
    stopped = [member(0, P.STOPPED, at_s=ALONE_S), *all_outside[1:]]
    assert [id.slot for id in find(*stopped, now_s=ALONE_S).culprits] == [0, 2], "one that can still come by itself"


def test_only_process_of_a_job_is_killed_in_the_end() -> None:
    assert find(member(0, P.OUTSIDE, at_s=DUE_S), now_s=ALONE_S - 1).culprits == {}
    assert [id.slot for id in find(member(0, P.OUTSIDE, at_s=ALONE_S), now_s=ALONE_S).culprits] == [0]


def test_finished_member_holds_the_state() -> None:
    done = member(0, standing=Standing.FINISHED)
    assert [id.slot for id in find(done, member(1, P.OUTSIDE, at_s=DUE_S), now_s=NOW_S).culprits] == [1]


# --- again and again -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "advice"),
    [
        pytest.param(P.OUTSIDE, "Correct the script there", id="a rank of the script"),
        pytest.param(P.COLLECTIVE, "Look for ranks that run different collectives", id="all in collectives"),
    ],
)
def test_third_hang_in_a_row_fails_the_job(place: str, advice: str) -> None:
    members = [member(0, P.COLLECTIVE, at_s=DUE_S), member(1, place, at_s=DUE_S)]
    assert find(*members, now_s=NOW_S, in_a_row=1).failure is None
    found = find(*members, now_s=NOW_S, in_a_row=2)
    assert found.failure is not None
    assert "hang 3 in a row without a committed step" in found.failure
    assert advice in found.failure
    assert (found.culprits, found.together) == ({}, False)


def status(start: int, lineage: list[tuple[int, int]], incidents: list[tuple[int, str]]) -> JobStatus:
    return make_status(
        {
            "membership": {"generation": lineage[-1][0], "startStep": start},
            "lineage": [{"generation": g, "startStep": s} for g, s in lineage],
            "incidents": [{"generation": g, "cause": cause} for g, cause in incidents],
        }
    )


@pytest.mark.parametrize(
    ("status", "step", "want"),
    [
        pytest.param(status(7, [(1, 0), (2, 7)], [(2, "Hung")]), None, 1, id="the generation before hung at this step"),
        pytest.param(status(7, [(1, 0), (2, 7), (3, 7)], [(2, "Hung"), (3, "Hung")]), 7, 2, id="twice"),
        pytest.param(status(7, [(1, 0), (2, 7)], [(2, "Hung")]), 8, 0, id="a step was committed since"),
        pytest.param(status(7, [(1, 0), (2, 7)], [(2, "ProcessExited")]), None, 0, id="another cause"),
        pytest.param(status(9, [(1, 0), (2, 7), (3, 9)], [(2, "Hung"), (3, "Hung")]), None, 1, id="one earlier"),
        pytest.param(status(7, [(1, 0), (2, 7), (4, 7)], [(2, "Hung"), (3, "Overdue"), (4, "PodDeleted")]), None, 1, id="others"),
        pytest.param(make_status({"membership": {"generation": 1}}), None, 0, id="not adopted yet"),
    ],
)  # fmt: skip
def test_hangs_in_a_row(status: JobStatus, step: int | None, want: int) -> None:
    assert hangs_in_a_row(status, step) == want


def test_stacks_of_the_incident_are_short_and_the_hung_ranks_come_first() -> None:
    members = [member(slot, P.COLLECTIVE, P.OUTSIDE, at_s=DUE_S) for slot in range(20)]
    lines = stack_lines(make_current(range(20)), members, 2)
    assert lines[:2] == ["rank 1 (0): outside: x < y", "rank 3 (1): outside: x < y"]
    assert len(lines) == hangs.MAX_LINES
