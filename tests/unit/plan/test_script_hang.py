"""When a script whose progress stands still counts as hung, and what follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from regroup.protocol.state import Phase
from regroup.protocol.wire import LOGGED, REPORT_EVERY_S, ScriptProgress, Stacks
from regroup.protocol.wire import ProcessStack as P
from regroup_operator.model.records import Settings
from regroup_operator.model.worker import Standing, Worker
from regroup_operator.plan.facts.script_words import ScriptWords
from regroup_operator.plan.failures.hangs import KILL_AGAIN_S, Hang
from regroup_operator.plan.failures.script_hang import LATE_S, find_script_hang
from tests.builders.plan import make_current, make_session, make_worker

SETTINGS = Settings(hang_s=300.0)
MOVED_S = 1000.0


def words(every_s: float | None = 1.0, longest_s: float = 2.0, **word: Any) -> ScriptWords:
    return ScriptWords(ScriptProgress(5, LOGGED, **{"step": 7, **word}), MOVED_S, MOVED_S, every_s, longest_s)


def member(slot: int, *places: str, at_s: float | None = None, standing: str = Standing.TRAINING) -> Worker:
    session = make_session(slot, Phase.TRAINING, 1, session=False)
    if places:
        said = tuple(P(i, 10 * slot + i, place, where=f"at {slot}") for i, place in enumerate(places))
        session = replace(session, stacks=Stacks(said), stacks_generation=1, stacks_at_s=at_s, asked_stacks_at_s=at_s)
    return make_worker(slot, standing, session=session)


def find(*workers: Worker, said: ScriptWords | None, now_s: float, hang_seconds: float | None = None) -> Hang:
    return find_script_hang(
        current=make_current(range(len(workers))),
        words=said,
        workers=workers,
        processes=max((len(w.session.stacks.processes) for w in workers if w.session and w.session.stacks), default=1),
        hang_seconds=hang_seconds,
        now_s=now_s,
        settings=SETTINGS,
    )


@pytest.mark.parametrize(
    ("said", "hang_seconds", "bound_s"),
    [
        pytest.param(words(), None, 300, id="quick steps: the floor"),
        pytest.param(words(every_s=60.0), None, 1200, id="twenty times the usual time"),
        pytest.param(words(longest_s=200.0), None, 600, id="three times the longest: an evaluation comes again"),
        pytest.param(words(), 20, 20, id="what the spec says"),
        pytest.param(words(every_s=60.0), 20, 180, id="but never less than three times the usual time"),
        pytest.param(words(longest_s=200.0), 20, 20, id="whatever was seen"),
    ],
)
def test_bound(said: ScriptWords, hang_seconds: float | None, bound_s: float) -> None:
    due_s = MOVED_S + bound_s + LATE_S
    both = member(0), member(1)
    assert find(*both, said=said, now_s=due_s - 0.1, hang_seconds=hang_seconds) == Hang(due_s=due_s)
    late = find(*both, said=said, now_s=due_s, hang_seconds=hang_seconds)
    assert {w.id.slot for w in late.ask} == {0, 1}
    assert (
        late.message
        == f"The script's progress has not changed for {bound_s + LATE_S:.0f} s; asking where the ranks are."
    )


def test_large_job_and_operator_with_many_jobs_wait_longer() -> None:
    """Their agents report less often (adr/0062), so a change is heard later."""
    many = [member(slot) for slot in range(1000)]
    assert find(*many, said=words(), now_s=MOVED_S) == Hang(due_s=MOVED_S + 300 + 1000 / 50)
    rare = replace(many[0], session=replace(many[0].session, report_every_s=3 * REPORT_EVERY_S))  # type: ignore[type-var]
    assert find(rare, many[1], said=words(), now_s=MOVED_S) == Hang(due_s=MOVED_S + 300 + 3 * LATE_S)


@pytest.mark.parametrize(
    ("said", "workers"),
    [
        pytest.param(None, [member(0)], id="nothing was ever said"),
        pytest.param(words(every_s=None), [member(0)], id="one word says no pace"),
        pytest.param(words(step=10, total_steps=10), [member(0)], id="the last step is done"),
        pytest.param(words(percent=100.0), [member(0)], id="all of it is done"),
        pytest.param(words(), [member(0), member(1, standing=Standing.FINISHED)], id="one has returned"),
        pytest.param(words(), [member(0), member(1, standing=Standing.STARTING)], id="one starts"),
        pytest.param(words(), [member(0), member(1, standing=Standing.DIED)], id="one has died"),
    ],
)
def test_no_clock_runs(said: ScriptWords | None, workers: list[Worker]) -> None:
    assert find(*workers, said=said, now_s=MOVED_S + 1e6, hang_seconds=5) == Hang()


def test_without_hang_seconds_it_is_only_said() -> None:
    overdue_s = MOVED_S + 300 + LATE_S
    hang = find(
        member(0, P.SILENT, at_s=overdue_s), member(1, P.STOPPED, at_s=overdue_s), said=words(), now_s=overdue_s + 5
    )
    assert hang.is_only_said
    assert (hang.culprits, hang.ask, hang.failure) == ({}, (), None)
    assert hang.message == (
        "The script's progress has not changed for 310 s: rank 1 (worker 1, process 0) is at 1. A long evaluation or checkpoint "
        "looks the same. To have the script restarted, set spec.recovery.hangSeconds."
    )
    later = find(
        member(0, P.SILENT, at_s=overdue_s), member(1, P.STOPPED, at_s=overdue_s), said=words(), now_s=overdue_s + 5000
    )
    assert later.message == hang.message, "each other sentence would be a write of the status"


@pytest.mark.parametrize(
    ("places", "culprit"),
    [
        pytest.param([(P.SILENT, P.SILENT), (P.SILENT, P.STOPPED)], (1, 11), id="the process that is stopped"),
        pytest.param([(P.SILENT, P.SILENT), (P.SILENT, P.SILENT)], (0, 0), id="else the lowest rank"),
    ],
)
def test_with_hang_seconds_one_process_is_killed(places: list[tuple[str, ...]], culprit: tuple[int, int]) -> None:
    """The others start again with the next generation, so they count as no failures of their own."""
    overdue_s = MOVED_S + 60 + LATE_S
    workers = [member(slot, *place, at_s=overdue_s) for slot, place in enumerate(places)]
    hang = find(*workers, said=words(), now_s=overdue_s + 1, hang_seconds=60)
    assert {(member.slot, one.incarnations) for member, one in hang.culprits.items()} == {(culprit[0], (culprit[1],))}
    assert not hang.is_only_said
    assert hang.due_s == overdue_s + 1 + KILL_AGAIN_S
