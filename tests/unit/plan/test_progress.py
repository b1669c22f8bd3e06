"""What status.progress says of the newest report, and when a group counts as stalled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from regroup_operator.api.status import Progress
from regroup_operator.model.plan import Clock
from regroup_operator.plan.facts.stalls import FIRST_STALL_S, Reported, counted_generations, newest_progress
from regroup_operator.plan.report.progress import progress_status
from tests.builders.plan import make_current, make_progress, make_session

CLOCK = Clock(100.0, 1_800_000_000.0)


def reported(step: int = 7, *, age_s: float = 0.0, step_s: float | None = None, **changes: Any) -> Reported:
    """Return progress that was told at 98."""
    return Reported(1, step, 98.0 - age_s, make_progress(step, **changes), 98.0, step_s)


@pytest.mark.parametrize(
    ("newest", "known", "want"),
    [
        pytest.param(reported(loss=0.5), {"step": 6, "loss": 0.6}, 0.5, id="the newest loss"),
        pytest.param(reported(), {"step": 7, "loss": 0.6}, 0.6, id="adoption says the step without a loss"),
        pytest.param(reported(), {"step": 6, "loss": 0.6}, None, id="a loss that is no number hides no divergence"),
        pytest.param(reported(), {}, None, id="nothing is known"),
    ],
)
def test_loss(newest: Reported, known: dict[str, Any], want: float | None) -> None:
    assert progress_status(newest, Progress(**known), CLOCK).loss == want


def test_noise_scale_is_there_where_it_was_measured() -> None:
    assert progress_status(reported(noise_scale=512.0), None, CLOCK).noise_scale == 512.0
    assert progress_status(reported(), Progress(noise_scale=512.0), CLOCK).noise_scale is None


def test_time_of_a_step_may_change_without_a_new_report() -> None:
    """Another member has reported: the newest step and its time stay."""
    known = progress_status(reported(), None, CLOCK, "1 s: forward 100 %")
    assert known.step_time == "1 s: forward 100 %"
    later = progress_status(reported(), known, Clock(101.0, 1_800_000_000.3), "2 s: waits 50 %")
    assert (later.step_time, later.at) == ("2 s: waits 50 %", known.at)
    assert progress_status(reported(), later, CLOCK).step_time is None


@pytest.mark.parametrize(
    ("step_s", "age_s", "stalls_at_s"),
    [
        pytest.param(None, 0.0, 98.0 + FIRST_STALL_S, id="unknown: after a time of its own"),
        pytest.param(0.01, 0.0, 99.1, id="quick steps: a tenth of a second after the next report was due"),
        pytest.param(10.0, 0.0, 129.0, id="slow steps: three of them later"),
        pytest.param(0.01, 0.5, 98.0, id="the step was old when it was told: at once"),
        pytest.param(1.0, 0.5, 102.0, id="half a step old is not old"),
    ],
)
def test_when_a_group_stalls(step_s: float | None, age_s: float, stalls_at_s: float) -> None:
    assert reported(step_s=step_s, age_s=age_s).stalls_at_s == pytest.approx(stalls_at_s)


def test_group_that_reports_less_often_stalls_later() -> None:
    assert replace(reported(step_s=0.01), due_s=108.0).stalls_at_s == pytest.approx(108.1)
    assert replace(reported(step_s=0.01, age_s=0.5), due_s=108.0).stalls_at_s == pytest.approx(98.0)


@pytest.mark.parametrize(("kind", "want"), [("planned", 9), ("forced", None)])
def test_the_generation_before_counts_while_a_planned_one_is_pending(kind: str, want: int | None) -> None:
    session = make_session(0, progress=make_progress(9), progress_generation=1, progress_at_s=98.0)
    newest = newest_progress([session], counted_generations(make_current(number=2, kind=kind)))
    assert (newest.step if newest else None) == want
