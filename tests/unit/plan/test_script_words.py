"""Whose word on a script's progress is shown, and what the status and the columns make of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from regroup.protocol.state import Phase
from regroup.protocol.wire import COUNTED, LOGGED, REPORTED, ScriptProgress
from regroup_operator.api.status import Progress
from regroup_operator.model.plan import Clock
from regroup_operator.model.worker import Worker
from regroup_operator.plan.facts.script_words import ScriptWords, script_words
from regroup_operator.plan.report.conditions import FINISHING, RUNNING, summary
from regroup_operator.plan.report.progress import script_progress_status
from tests.builders.plan import make_current, make_session, make_worker

CLOCK = Clock(100.0, 1_800_000_000.0)


def says(
    slot: int, way: str = LOGGED, step: int | None = None, *, generation: int = 1, at_s: float = 90.0, **more: Any
) -> Worker:
    session = make_session(
        slot,
        Phase.TRAINING,
        1,
        script=ScriptProgress(5, way, step, **more),
        script_generation=generation,
        script_at_s=at_s,
    )
    return make_worker(slot, session=session)


@pytest.mark.parametrize(
    ("workers", "step"),
    [
        pytest.param([make_worker(0, session=make_session(0))], None, id="nobody says anything"),
        pytest.param([make_worker(0), says(1, step=7)], 7, id="the only one that says anything"),
        pytest.param([says(0, step=7), says(1, step=9)], 7, id="of equal ways the lowest rank"),
        pytest.param([says(0, COUNTED, 3), says(1, REPORTED, 5003)], 5003, id="what it says comes before a count"),
        pytest.param([says(0, REPORTED, 5003), says(1, LOGGED, 1)], 1, id="what the user has asked for comes first"),
        pytest.param([says(0, loss=0.5), says(1, COUNTED, 9)], 9, id="a loss alone hides no step"),
        pytest.param([says(0), says(1, REPORTED, percent=5.0)], None, id="a word that was taken back hides no share"),
        pytest.param([says(0, step=7, generation=2), says(1, step=5)], 5, id="of the newest generation only"),
    ],
)
def test_whose_word_is_shown(workers: list[Worker], step: int | None) -> None:
    found = script_words(make_current(range(2)), workers)
    assert (None if found is None else found.word.step) == step


def test_loss_is_the_first_that_is_said() -> None:
    found = script_words(make_current(range(3)), [says(0, step=7), says(1, loss=0.5), says(2, step=9, loss=0.75)])
    assert found is not None
    assert (found.word.step, found.word.loss) == (7, 0.75), "that of a worker that says a step, too"
    found = script_words(make_current(range(2)), [says(0), says(1, REPORTED, percent=5.0)])
    assert found is not None
    assert (found.word.way, found.word.percent) == (REPORTED, 5.0)


def test_nothing_is_said_before_the_first_generation() -> None:
    assert script_words(None, [says(0, step=7)]) is None


def test_change_of_any_member_is_a_sign() -> None:
    found = script_words(
        make_current(range(2)),
        [
            says(0, step=7, at_s=50.0, every_s=2.0, longest_s=3.0),
            says(1, COUNTED, 3, at_s=60.0, every_s=1.0, longest_s=9.0),
        ],
    )
    assert found is not None
    assert (found.told_s, found.moved_s, found.every_s, found.longest_s) == (50.0, 60.0, 2.0, 9.0)


@pytest.mark.parametrize(
    ("word", "want"),
    [
        ({"step": 9}, False),
        ({"step": 9, "total_steps": 10}, False),
        ({"step": 10, "total_steps": 10}, True),
        ({"percent": 99.5}, False),
        ({"percent": 100.0}, True),
        ({"step": 40, "total_steps": 60, "percent": 100.0}, True),
    ],
)
def test_end(word: dict[str, Any], want: bool) -> None:
    assert words(**word).is_at_end is want


def words(way: str = LOGGED, **word: Any) -> ScriptWords:
    return ScriptWords(ScriptProgress(5, way, **word), 98.0, 98.0, None, 0.0)


@pytest.mark.parametrize(
    ("said", "status", "columns"),
    [
        pytest.param(
            words(REPORTED, step=40, total_steps=60, percent=66.6, loss=0.51234, step_s=0.25, remaining_s=4.7),
            {
                "source": REPORTED,
                "step": 40,
                "totalSteps": 60,
                "percent": 66.6,
                "loss": 0.51234,
                "stepTime": "0.25 s",
                "remainingSeconds": 5,
            },
            ("40", "66%", "0.5123", "5s"),
            id="all of it",
        ),
        pytest.param(
            words(step=30, total_steps=40),
            {"source": LOGGED, "step": 30, "totalSteps": 40},
            ("30", "75%", "", ""),
            id="a step and a total",
        ),
        pytest.param(
            words(step=41, total_steps=40),
            {"source": LOGGED, "step": 41, "totalSteps": 40},
            ("41", "100%", "", ""),
            id="a step beyond the total",
        ),
        pytest.param(words(percent=99.9), {"source": LOGGED, "percent": 99.9}, ("", "99%", "", ""), id="a share alone"),
        pytest.param(words(loss=0.5), {"source": LOGGED, "loss": 0.5}, ("", "", "0.5", ""), id="a loss alone"),
        pytest.param(
            words(COUNTED, step=12, step_s=2.0),
            {"source": COUNTED, "optimizerSteps": 12, "stepTime": "2 s"},
            ("+12", "", "", ""),
            id="counted steps are no step",
        ),
    ],
)
def test_status_and_columns(said: ScriptWords, status: dict[str, Any], columns: tuple[str, ...]) -> None:
    progress = script_progress_status(said, Progress(step=5000, loss=0.1, at="2026-01-01T00:00:00Z"), CLOCK)
    assert progress.to_dict() == {**status, "at": CLOCK.stamp(98.0)}
    shown = summary(phase=RUNNING, refused=None, ready=1, replicas=1, progress=progress, samples=None)
    assert (shown.step, shown.progress, shown.loss, shown.eta) == columns
    rested = summary(phase=FINISHING, refused=None, ready=1, replicas=1, progress=progress, samples=None)
    assert rested.eta == ""


def test_unchanged_words_keep_their_time() -> None:
    known = script_progress_status(words(step=7), None, CLOCK)
    again = script_progress_status(replace(words(step=7), told_s=99.0), known, Clock(101.0, 1_800_000_000.9))
    assert again == known
    assert script_progress_status(replace(words(step=8), told_s=110.0), known, CLOCK).at != known.at
