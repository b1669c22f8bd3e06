"""Means of a step's parts."""

from __future__ import annotations

import pytest

from regroup.progress.breakdown import SMOOTHED_STEPS, Smoothed


def test_mean_leaves_out_the_first_step_and_follows_a_change() -> None:
    smoothed = Smoothed()
    smoothed.add([9.0] * 8)
    assert smoothed.times() is None
    smoothed.add([1.0] * 8)
    smoothed.add([2.0] * 8)
    found = smoothed.times()
    assert found is not None
    assert found.data == found.between == 1.5
    for _ in range(5 * SMOOTHED_STEPS):
        smoothed.add([4.0] * 8)
    found = smoothed.times()
    assert found is not None
    assert found.backward == pytest.approx(4.0, rel=0.01)
    smoothed.begin_generation()
    assert smoothed.times() is None
