"""When a script whose progress stands still counts as hung, and what follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from regroup.protocol.state import Phase
from regroup.protocol.wire import LOGGED, REPORT_EVERY_S, ScriptProgress, Stacks
from regroup.protocol.wire import ProcessStack as P
from regroup_operator.api.status import Progress
from regroup_operator.model.records import Settings
from regroup_operator.model.worker import Standing, Worker
from regroup_operator.plan.facts.script_words import ScriptWords
from regroup_operator.plan.failures.hangs import KILL_AGAIN_S, Hang
from regroup_operator.plan.failures.script_hang import LATE_S, Silence, find_script_hang, silence_of
from tests.builders.plan import make_current, make_session, make_worker

SETTINGS = Settings(hang_s=300.0, first_step_s=1800.0)
MOVED_S = 1000.0
STARTED_S = make_session(0, Phase.TRAINING, 1, session=False).condition_at_s
SPEAKS_NOT = Silence()


def words(every_s: float | None = 1.0, longest_s: float = 2.0, **word: Any) -> ScriptWords:
    return ScriptWords(ScriptProgress(5, LOGGED, **{"step": 7, **word}), MOVED_S, MOVED_S, every_s, longest_s)


def member(slot: int, *places: str, at_s: float | None = None, standing: str = Standing.TRAINING) -> Worker:
    session = make_session(slot, Phase.TRAINING, 1, session=False)
    if places:
        said = tuple(P(i, 10 * slot + i, place, where=f"at {slot}") for i, place in enumerate(places))
        session = replace(session, stacks=Stacks(said), stacks_generation=1, stacks_at_s=at_s, asked_stacks_at_s=at_s)
    return make_worker(slot, standing, session=session)


def find(
    *workers: Worker,
    said: ScriptWords | None,
    now_s: float,
    hang_seconds: float | None = None,
    silence: Silence = SPEAKS_NOT,
) -> Hang:
    return find_script_hang(
        current=make_current(range(len(workers))),
        words=said,
        workers=workers,
        processes=max((len(w.session.stacks.processes) for w in workers if w.session and w.session.stacks), default=1),
        hang_seconds=hang_seconds,
        silence=silence,
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
        pytest.param(
            words(every_s=None, step=None, loss=0.5), [member(0)], id="a loss alone, or a pattern that was given up"
        ),
        pytest.param(words(step=10, total_steps=10), [member(0)], id="the last step is done"),
        pytest.param(words(percent=100.0), [member(0)], id="all of it is done"),
        pytest.param(words(), [member(0), member(1, standing=Standing.FINISHED)], id="one has returned"),
        pytest.param(words(), [member(0), member(1, standing=Standing.STARTING)], id="one starts"),
        pytest.param(words(), [member(0), member(1, standing=Standing.DIED)], id="one has died"),
    ],
)
def test_no_clock_runs(said: ScriptWords | None, workers: list[Worker]) -> None:
    assert find(*workers, said=said, now_s=MOVED_S + 1e6, hang_seconds=5) == Hang()


@pytest.mark.parametrize(
    ("said", "hang_seconds", "silence", "overdue_s"),
    [
        pytest.param(words(every_s=None), 20, Silence(), MOVED_S + 1800, id="after one word: a first step"),
        pytest.param(words(every_s=None), 2000, Silence(), MOVED_S + 2000, id="but not less than the spec says"),
        pytest.param(
            words(every_s=None), None, Silence(has_spoken=True, has_pattern=True), None, id="no bound in the spec"
        ),
        pytest.param(None, 20, Silence(has_spoken=True), STARTED_S + 1800, id="no word, and processes before had one"),
        pytest.param(None, 20, Silence(has_pattern=True), STARTED_S + 1800, id="no word, and a pattern"),
        pytest.param(
            None, 2000, Silence(has_spoken=True), STARTED_S + 2000, id="no word, and a longer time in the spec"
        ),
        pytest.param(None, None, Silence(has_spoken=True), None, id="no word, and no bound in the spec"),
        pytest.param(None, 20, Silence(), None, id="a script that may have no words"),
    ],
)
def test_clock_before_the_pace_is_known(
    said: ScriptWords | None, hang_seconds: float | None, silence: Silence, overdue_s: float | None
) -> None:
    workers = member(0), member(1)
    due_s = None if overdue_s is None else overdue_s + LATE_S
    before = find(*workers, said=said, now_s=(due_s or MOVED_S + 1e6) - 0.1, hang_seconds=hang_seconds, silence=silence)
    assert before == Hang(due_s=due_s)
    if due_s is not None:
        late = find(*workers, said=said, now_s=due_s, hang_seconds=hang_seconds, silence=silence)
        assert {w.id.slot for w in late.ask} == {0, 1}


@pytest.mark.parametrize("has_spoken", [True, False])
def test_silent_processes_are_restarted_only_if_those_before_them_have_spoken(has_spoken: bool) -> None:
    """A pattern that has never matched may be wrong, and its script healthy."""
    overdue_s = STARTED_S + 1800 + LATE_S
    workers = member(0, P.SILENT, at_s=overdue_s), member(1, P.STOPPED, at_s=overdue_s)
    silence = Silence(has_spoken=has_spoken, has_pattern=True)
    hang = find(*workers, said=None, now_s=overdue_s + 1, hang_seconds=60, silence=silence)
    assert hang.message.startswith(
        "Since their start the script's processes have not said how far they are for 1810 s: rank 1 (worker 1, process 0) is"
    )
    assert hang.is_only_said != has_spoken
    assert {member.slot for member in hang.culprits} == ({1} if has_spoken else set())
    assert ("spec.progress.log may be wrong" in hang.message) != has_spoken


@pytest.mark.parametrize(
    ("stored", "has_spoken"),
    [
        pytest.param(None, False, id="nothing"),
        pytest.param(Progress(step=7), True, id="a step"),
        pytest.param(Progress(optimizer_steps=7), True, id="counted steps"),
        pytest.param(Progress(percent=7.0), True, id="a share"),
        pytest.param(Progress(source=LOGGED), False, id="a pattern that was given up"),
        pytest.param(Progress(step=7, total_steps=7), False, id="the last step: the script runs its end again"),
        pytest.param(Progress(percent=100.0), False, id="all of it"),
    ],
)
def test_last_word_of_the_processes_before(stored: Progress | None, has_spoken: bool) -> None:
    assert silence_of(stored, has_pattern=True) == Silence(has_spoken, has_pattern=True)


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
