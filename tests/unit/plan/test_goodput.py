"""How much of a job's time went into steps that count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regroup_operator.api.status import Goodput
from regroup_operator.plan.report.goodput import goodput
from tests.builders.plan import make_job
from tests.simulator.world import World

KNOWN = Goodput(percent=90, productive_seconds=90.0, step=100, suspended_seconds=5)


@pytest.mark.parametrize(
    ("known", "given", "want"),
    [
        pytest.param(None, {"newest_step": 40, "first_step": 0}, (20.0, 40, 20), id="the first report"),
        pytest.param(None, {"newest_step": 40, "first_step": 30}, (5.0, 40, 5), id="continued from an earlier job's checkpoint"),
        pytest.param(None, {"newest_step": 40, "first_step": None}, None, id="not known with which step it began"),
        pytest.param(None, {"newest_step": 0, "first_step": 0}, (0.0, 0, 0), id="no step yet"),
        pytest.param(KNOWN, {"newest_step": 110, "running_s": 200.0}, (95.0, 110, 47), id="ten more in a hundred seconds"),
        pytest.param(KNOWN, {"newest_step": 90}, (90.0, 100, 90), id="steps that are redone count once"),
        pytest.param(KNOWN, {"newest_step": 110, "step_s": None}, (90.0, 100, 90), id="a new process has no duration yet"),
        pytest.param(KNOWN, {"newest_step": 110, "step_s": 9.0}, (100.0, 110, 100), id="no more than there was time"),
        pytest.param(KNOWN, {"newest_step": 110, "running_s": -3.0}, None, id="a clock that was set back"),
    ],
)  # fmt: skip
def test_goodput(known: Goodput | None, given: dict[str, Any], want: tuple[float, int, int] | None) -> None:
    got = goodput(known, **({"first_step": 0, "step_s": 0.5, "running_s": 100.0} | given))
    assert (None if got is None else (got.productive_seconds, got.step, got.percent)) == want
    assert got is None or got.suspended_seconds == (known.suspended_seconds if known else 0)


def test_hang_and_a_suspension(tmp_path: Path) -> None:
    """A step each half second; 20 s in which nobody steps; a suspension, which is not counted; the end."""
    world = World(tmp_path, make_job().with_replicas(2).elastic(1, 2), total_steps=600)
    world.advance(100, step_every_s=0.5)
    assert world.status["goodput"]["percent"] >= 97
    world.advance(20, step_every_s=None)
    world.advance(20, step_every_s=0.5)
    after_hang = world.status["goodput"]["percent"]
    assert 83 <= after_hang <= 87  # 120 of 140 s
    world.suspend(True)
    world.advance(300, step_every_s=0.5)
    assert (world.phase, world.status["goodput"]["percent"]) == ("Suspended", after_hang)
    world.suspend(False)
    world.advance(60, step_every_s=0.5)
    resumed = world.status["goodput"]
    assert abs(resumed["suspendedSeconds"] - 300) <= 5
    world.until(lambda: world.phase == "Succeeded", 400, 0.5)
    ended = world.status["goodput"]
    world.advance(100)
    assert (world.status["goodput"], ended["step"]) == (ended, 600)
