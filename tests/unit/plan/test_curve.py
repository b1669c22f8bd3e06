"""status.progress.curve: bounded, evenly spaced, and no reason for a write."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from regroup_client import views
from regroup_operator.api.status import MAX_CURVE_POINTS
from regroup_operator.plan.report.curve import extended

THREE = ["10 100 2.5", "20 200 2.1", "30 300 1.9"]


@pytest.mark.parametrize(
    ("curve", "point", "want"),
    [
        pytest.param([], (10, 100.4, 2.5), ["10 100 2.5"], id="the first point"),
        pytest.param(["10 100 2.5"], (20, 200, 2.123456), ["10 100 2.5", "20 200 2.123"], id="a second one, rounded"),
        pytest.param(THREE, (40, 400, None), [*THREE, "40 400"], id="no loss"),
        pytest.param(THREE, (40, 400, float("nan")), [*THREE, "40 400"], id="a loss that is no number"),
        pytest.param(THREE, (30, 999, 1.9), THREE, id="the same step again"),
        pytest.param(THREE, (30, 999, None), THREE, id="the same step without its loss"),
        pytest.param([*THREE, "40 400"], (40, 999, 1.5), [*THREE, "40 400 1.5"], id="the loss of a step comes later"),
        pytest.param(THREE, (15, 400, 2.4), ["10 100 2.5", "15 400 2.4"], id="steps were rolled back"),
        pytest.param(THREE, (5, 400, 2.9), ["5 400 2.9"], id="all steps were rolled back"),
        pytest.param(THREE, (40, 250, 1.8), [*THREE, "40 300 1.8"], id="a clock that was set back"),
        pytest.param([], (1, -5, 3.0), ["1 0 3"], id="a report from before the start"),
        pytest.param(["10 100 2.5", "11 101 2.4"], (1000, 10000, 1.0), ["10 100 2.5", "1000 10000 1"],
                     id="a point that is too close to the one before it goes"),
        pytest.param(["x", "10 y", "10 100 2.5"], (20, 200, 1.0), ["10 100 2.5", "20 200 1"], id="entries that somebody edited"),
    ],
)  # fmt: skip
def test_extended(curve: list[str], point: tuple[int, float, float | None], want: list[str]) -> None:
    step, seconds, loss = point
    assert extended(curve, step=step, seconds=seconds, loss=loss) == want


@pytest.mark.parametrize("seed", range(20))
def test_curve_of_a_long_run_is_bounded_even_and_stable(seed: int) -> None:
    rng = random.Random(seed)
    curve: list[str] = []
    scale, step, seconds = rng.choice([1, 1000, 10**9]), 0, 0.0
    for _ in range(3000):
        step += rng.randrange(1, 5) * scale
        seconds += rng.choice([10, 10, 10, 600]) if seed % 2 else 10
        curve = extended(curve, step=step, seconds=seconds, loss=rng.uniform(-1e-9, 1e9))
        assert len(curve) <= MAX_CURVE_POINTS
        assert len(json.dumps(curve, separators=(",", ":"))) <= 2048
        assert extended(curve, step=step, seconds=seconds + 100, loss=None) == curve, "a write for nothing"
    points = views.curve({"curve": curve})
    assert (points[-1].step, points[-1].seconds) == (step, round(seconds))
    assert points[0].seconds <= 600
    gaps = [after.seconds - before.seconds for before, after in itertools.pairwise(points)]
    assert len(points) >= 30
    assert max(gaps) <= 4 * seconds / len(points) + 600
    assert [point.step for point in points] == sorted({point.step for point in points})
