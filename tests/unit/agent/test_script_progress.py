"""What the agent reports of an unmodified script's progress, when it does, and whose word counts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from _regroup_agent import events as ev
from _regroup_agent.main import _pattern
from _regroup_agent.script_progress import POINTS, ScriptProgress, Words
from regroup.protocol import env, local, wire
from regroup.protocol.wire import COUNTED, LOGGED, REPORTED
from tests.unit.agent.drive import Drive
from tests.unit.agent.test_script import starts

Said = tuple[str, int, Words]
"""Way, local rank, words."""


def after(*said: Said, every_s: float = 10.0) -> wire.ScriptProgress | None:
    """Return the report after these words, which came `every_s` apart."""
    progress = ScriptProgress()
    for index, (way, rank, words) in enumerate(said):
        progress.told(way, (rank, 1 + rank), words, interval_s=1.0, now_s=every_s * index)
    return progress.take(every_s * max(0, len(said) - 1))


def steps(way: str, *numbers: int, rank: int = 0, **more: Any) -> list[Said]:
    return [(way, rank, Words(step=number, **more)) for number in numbers]


@pytest.mark.parametrize(
    ("said", "want"),
    [
        pytest.param([], None, id="nothing was said"),
        pytest.param(steps(COUNTED, 3), (COUNTED, 3, None, None, None), id="optimizer steps alone"),
        pytest.param(
            [*steps(COUNTED, 3), *steps(REPORTED, 5003, total=9000, percent=55.0, loss=0.5)],
            (REPORTED, 5003, 9000, 55.0, 0.5),
            id="the program's own number comes before counted steps",
        ),
        pytest.param(
            [*steps(REPORTED, 5003, total=9000), *steps(COUNTED, 4)],
            (REPORTED, 5003, 9000, None, None),
            id="whichever came last",
        ),
        pytest.param(
            [*steps(REPORTED, 5003, total=9000, loss=0.5), *steps(LOGGED, 7)],
            (LOGGED, 7, None, None, 0.5),
            id="the user's own pattern comes first, and a loss may come in another way",
        ),
        pytest.param(
            [(LOGGED, 0, Words(loss=0.25)), *steps(REPORTED, 5003, loss=0.5)],
            (REPORTED, 5003, None, None, 0.25),
            id="a pattern for the loss alone",
        ),
        pytest.param(
            [(REPORTED, 0, Words(total=9000, percent=0.0)), *steps(COUNTED, 4)],
            (COUNTED, 4, None, None, None),
            id="the first status after a resume says no step: its total does not belong to the counted steps",
        ),
        pytest.param(
            [(REPORTED, 0, Words(percent=0.0)), (REPORTED, 0, Words(percent=12.5))],
            (REPORTED, None, None, 12.5, None),
            id="a share alone",
        ),
        pytest.param(
            [*steps(REPORTED, 40, total=60, percent=66.0), (REPORTED, 0, Words(percent=100.0))],
            (REPORTED, 40, 60, 100.0, None),
            id="the end is said without a step",
        ),
        pytest.param(
            [*steps(LOGGED, 7, rank=1), *steps(LOGGED, 5, rank=0), *steps(LOGGED, 9, rank=1)],
            (LOGGED, 5, None, None, None),
            id="of several processes the lowest local rank counts",
        ),
        pytest.param(
            [*steps(LOGGED, 1, loss=0.5), *steps(LOGGED, 2, loss=math.nan)],
            (LOGGED, 2, None, None, "nan"),
            id="a loss that is no number takes the place of the last one",
        ),
        pytest.param(
            [*steps(LOGGED, 7, total=10), *steps(LOGGED, -1, total=0, percent=101.0)],
            (LOGGED, 7, 10, None, None),
            id="what cannot be true was not said",
        ),
    ],
)
def test_whose_word_counts(said: list[Said], want: tuple[Any, ...] | None) -> None:
    report = after(*said)
    if want is None:
        assert report is None
        return
    assert report is not None
    loss = "nan" if report.loss is not None and math.isnan(report.loss) else report.loss
    assert (report.way, report.step, report.total_steps, report.percent, loss) == want


@pytest.mark.parametrize(
    ("said", "step_s", "remaining_s"),
    [
        pytest.param(steps(LOGGED, 0, 100, total=1000), 0.1, 90.0, id="steps of a hundred at a time"),
        pytest.param(steps(LOGGED, 5000, total=9000), None, None, id="the first word after a resume says no pace"),
        pytest.param(steps(LOGGED, 5000, 5100, total=9000), 0.1, 390.0, id="steps before the resume do not count"),
        pytest.param(steps(LOGGED, 900, 1000, total=1000), 0.1, 0.0, id="at the end"),
        pytest.param(steps(LOGGED, 900, 1100, total=1000), 0.05, 0.0, id="beyond the end"),
        pytest.param(steps(LOGGED, 80, 90, 10, 20, total=100), 1.0, 80.0, id="a program that counts anew, as per epoch"),
        pytest.param(steps(LOGGED, 1, 2), 10.0, None, id="without a total"),
        pytest.param(
            [(REPORTED, 0, Words(percent=p)) for p in (10.0, 20.0)], None, 80.0, id="a share alone has a pace as well"
        ),
        pytest.param(
            [(REPORTED, 0, Words(step=50 * n, percent=5.0 * n)) for n in (1, 2, 3)], 0.2, 170.0, id="a share says the total"
        ),
        pytest.param([(LOGGED, 0, Words(step=n, percent=0.0)) for n in (1, 2)], 10.0, None, id="a share of 0 says none"),
        pytest.param(
            steps(LOGGED, 0, *range(5001, 5015), total=9000), 10.0, 39860.0, id="a bar that begins at 0 and resumes at 5000"
        ),
        pytest.param([(COUNTED, 0, Words(step=9, step_s=0.2))], 0.2, None, id="the hook measures the first steps"),
        pytest.param(
            [*steps(LOGGED, *range(0, 10), total=1000), *steps(LOGGED, *range(100, 100 + 10 * POINTS + 1, 10), total=1000)],
            1.0,
            700.0,
            id="an old pace is forgotten",
        ),
    ],
)  # fmt: skip
def test_pace_and_time_left(said: list[Said], step_s: float | None, remaining_s: float | None) -> None:
    report = after(*said)
    assert report is not None
    assert report.step_s == (None if step_s is None else pytest.approx(step_s))
    assert report.remaining_s == (None if remaining_s is None else pytest.approx(remaining_s))


def test_time_between_two_signs_is_that_of_one_process_in_one_way() -> None:
    progress = ScriptProgress()
    words = [(0, COUNTED, 0, 1), (2, COUNTED, 1, 1), (4, REPORTED, 0, 7), (5, REPORTED, 0, 8), (10, COUNTED, 0, 2)]
    for at_s, way, rank, step in words:
        progress.told(way, (rank, 1), Words(step=step), interval_s=1.0, now_s=float(at_s))
    report = progress.take(13.0)
    assert report is not None
    assert (report.every_s, report.longest_s, report.age_ms) == (10.0, 10.0, 3000.0)


def test_eight_processes_that_change_together_have_the_pace_of_one() -> None:
    """Killed as hung after three times 10 ms, a healthy program would start again and again."""
    progress = ScriptProgress()
    for step in range(1, 30):
        for rank in range(8):
            progress.told(LOGGED, (rank, 1), Words(step=step), interval_s=1.0, now_s=60.0 * step + rank * 0.01)
    report = progress.take(60.0 * 30)
    assert report is not None
    assert report.every_s == pytest.approx(60.0)
    assert report.longest_s == pytest.approx(60.0)


def test_first_word_says_no_time_between_two_signs() -> None:
    report = after((COUNTED, 0, Words(step=9, step_s=0.2)))
    assert report is not None
    assert (report.every_s, report.longest_s) == (None, None)


def test_time_left_has_a_bound_that_the_operator_takes() -> None:
    report = after(*steps(LOGGED, 1, 2, total=2**52))
    assert report is not None
    assert report.remaining_s == wire.MAX_REMAINING_S


# --- in the agent --------------------------------------------------------------------------------------------------


def said(drive: Drive, way: str = LOGGED, rank: int = 0, **words: Any) -> Drive:
    return drive.feed(ev.Told(rank, drive.incarnations[rank], way, Words(**words)))


def reports(drive: Drive) -> list[wire.ScriptProgress]:
    return drive.bodies(wire.ScriptProgress, ever=True)


def test_first_word_is_reported_at_once_and_then_once_a_second() -> None:
    drive = said(starts(1), step=1)
    for step in range(2, 12):
        said(drive.wait(0.1), step=step)
    drive.wait(0.1)
    assert [report.step for report in reports(drive)] == [1, 11]
    assert reports(drive.wait(60.0))[2:] == [], "nothing new is not said again"


def test_steps_of_the_hook_are_reported() -> None:
    drive = starts(1)
    drive.says(local.Stepped(0, drive.incarnations[0], 12, 0.5))
    (report,) = reports(drive)
    assert (report.way, report.step, report.step_s) == (COUNTED, 12, 0.5)


def test_last_word_of_a_process_is_reported_with_its_exit() -> None:
    drive = said(said(starts(1), step=1), step=1000).exits(0)
    assert [report.step for report in reports(drive)] == [1, 1000]
    bodies = drive.bodies()
    assert bodies.index(reports(drive)[-1]) < bodies.index(wire.Finished(0))


def test_words_prove_nothing_and_change_no_condition() -> None:
    drive, silent = starts(1), starts(1)
    said(drive, step=5000, total=9000, loss=0.5).wait(5.0)
    silent.wait(5.0)
    assert drive.report.condition == silent.report.condition
    assert drive.report.seal == silent.report.seal
    assert drive.on_disk == silent.on_disk


def test_words_of_an_earlier_process_are_dropped() -> None:
    drive = said(starts(1), step=500)
    old = drive.incarnations[0]
    drive.generation(2)
    said(drive, step=501)
    drive.exits(-15).feed(ev.Told(0, old, LOGGED, Words(step=502))).wait(5.0)
    assert [report.step for report in reports(drive)] == [500]
    drive.feed(ev.Spawned(0, drive.incarnations[0]))
    said(drive.wait(1.0), step=400).wait(1.0)
    report = reports(drive)[-1]
    assert (report.step, report.incarnation) == (400, drive.incarnations[0]), "it continues from its own checkpoint"


def test_new_processes_begin_without_the_words_of_those_before() -> None:
    """The operator would take them for the newest generation's, and the time between both for a step."""
    drive = said(said(starts(1), step=500, total=900).wait(2.0), step=501).wait(2.0)
    drive.generation(2).exits(-15)
    drive.feed(ev.Spawned(0, drive.incarnations[0]))
    known = len(reports(drive))
    drive.feed(ev.Disconnected()).feed(ev.Connected())
    assert len(reports(drive)) == known
    said(drive.wait(100.0), step=400).wait(2.0)
    report = reports(drive)[-1]
    assert (report.step, report.total_steps, report.step_s, report.every_s) == (400, None, None, None)


def test_session_says_its_progress_itself() -> None:
    drive = Drive(1).session()
    drive.trains(1, 3)
    assert reports(said(drive, step=77).wait(5.0)) == []


def test_new_operator_hears_the_newest_words() -> None:
    drive = said(starts(1), step=7)
    drive.feed(ev.Disconnected())
    said(drive, step=8).wait(60.0)
    assert len(reports(drive)) == 1
    drive.feed(ev.Connected())
    assert [report.step for report in reports(drive)] == [7, 8]


def test_words_of_a_pattern_that_is_given_up_are_taken_back() -> None:
    """The operator would take the last one for a hang, and other ways could not speak."""
    drive = starts(1)
    for step in (1, 2, 3):
        said(drive, step=step, loss=0.5).wait(2.0)
    assert reports(drive)[-1].every_s is not None
    drive.feed(ev.PatternGivenUp()).wait(2.0)
    report = reports(drive)[-1]
    assert (report.step, report.percent, report.loss, report.every_s) == (None, None, None, None)
    assert report.incarnation == drive.incarnations[0], "the operator drops a word of an older process"
    said(drive, REPORTED, step=5004).wait(2.0)
    assert (reports(drive)[-1].way, reports(drive)[-1].step) == (REPORTED, 5004)


def test_other_ways_speak_once_the_pattern_is_given_up() -> None:
    drive = said(said(starts(1), step=1), REPORTED, step=5001).wait(2.0)
    drive.feed(ev.PatternGivenUp()).wait(2.0)
    assert [(report.way, report.step) for report in reports(drive)][-1] == (REPORTED, 5001)


def test_pattern_that_is_given_up_before_any_word_is_reported_for_all_later_processes() -> None:
    """The operator would wait for their first word, and take them for hanging."""
    drive = starts(1).feed(ev.PatternGivenUp()).wait(5.0)
    first = drive.incarnations[0]
    drive.generation(2).exits(-15)
    drive.feed(ev.Spawned(0, drive.incarnations[0])).wait(5.0)
    said = [(report.step, report.percent, report.loss, report.incarnation) for report in reports(drive)]
    assert said == [(None, None, None, first), (None, None, None, drive.incarnations[0])]
    assert drive.incarnations[0] > first


def test_session_does_not_report_that_the_pattern_is_given_up() -> None:
    drive = Drive(1).session()
    drive.trains(1, 3)
    assert reports(drive.feed(ev.PatternGivenUp()).wait(5.0)) == []


@pytest.mark.parametrize(("text", "given_up"), [("step (?P<step>[0-9]+)", 0), ("(?P<step>", 1)])
def test_pattern_that_this_python_cannot_compile_is_given_up(text: str, given_up: int) -> None:
    calls: list[int] = []
    _pattern({env.PROGRESS_LOG: text}, lambda *_: None, lambda: calls.append(1))
    assert len(calls) == given_up


def test_word_that_waits_is_reported_sooner_once_the_operator_asks_for_more() -> None:
    drive = starts(1).feed(ev.Paced(10.0))
    said(said(drive, step=1).wait(0.1), step=2).wait(2.0)
    assert [report.step for report in reports(drive)] == [1]
    drive.feed(ev.Paced(1.0)).wait(0.1)
    assert [report.step for report in reports(drive)] == [1, 2]
