"""Whether an interval that was asked for is kept, and what is said where it is not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from regroup.state.intervals import Interval


def after(asked_s: float, apart_s: Sequence[float | None]) -> Interval:
    """Return the interval after copies that began so many seconds apart; None: a generation begins."""
    interval, now_s = Interval("Checkpoints", "spec.checkpoint.everySeconds", asked_s), 1000.0
    interval.began(now_s, "because")
    for one in apart_s:
        if one is None:
            interval.begin_generation()
        else:
            now_s += one
            interval.began(now_s, "because")
    return interval


@pytest.mark.parametrize(
    ("asked_s", "apart_s", "real"),
    [
        pytest.param(2, [30, 30], "30", id="long copies"),
        pytest.param(10, [10.2, 10.4], None, id="kept, to a step"),
        pytest.param(10, [14, 14], None, id="steps of 7 s: two of them are the nearest"),
        pytest.param(10, [18, 18], "18", id="steps of 9 s"),
        pytest.param(300, [600, 301], None, id="one pause of the script"),
        pytest.param(2, [30], None, id="one alone says nothing"),
        pytest.param(2, [30, None, 30], None, id="a generation has begun between them"),
        pytest.param(1, [1.9, 1.9], None, id="less than a second"),
        pytest.param(1, [2.5, 2.5], "2.5", id="short ones"),
        pytest.param(320, [320.4, 320.4], None, id="what was said of steps of 320.4 s"),
        pytest.param(2, [30, 30, 2, 2], None, id="kept again"),
        pytest.param(2, [30, 30, 32, 33], "30", id="nearly as it was said"),
        pytest.param(2, [30, 30, 60, 60], "60", id="another one by now"),
    ],
)
def test_what_is_said(asked_s: float, apart_s: list[float | None], real: str | None) -> None:
    want = (
        ""
        if real is None
        else f"Checkpoints begin every {real} s, and spec.checkpoint.everySeconds is {asked_s:g}: because. Raise it to "
        f"{math.floor(float(real))}, or "
        "keep the longer interval."
    )
    assert after(asked_s, apart_s).sentence == want


@pytest.mark.parametrize("step_s", [2.5, 9.0, 320.4])
def test_who_follows_the_advice_has_copies_as_often_as_before(step_s: float) -> None:
    advised_s = int(after(1, [step_s, step_s]).sentence.partition("Raise it to ")[2].partition(",")[0])
    assert advised_s <= step_s  # a copy begins after a step, once the interval is over
    assert after(advised_s, [step_s, step_s]).sentence == ""
