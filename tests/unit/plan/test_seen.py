"""When the operator says that it has looked: a line that nobody writes grows old, one that is true does not."""

from __future__ import annotations

from typing import Any

import pytest

from regroup_operator.api import JobStatus
from regroup_operator.model.plan import Clock
from regroup_operator.plan.report.seen import seen_at, seen_due_s
from tests.builders.plan import make_status

WALL = 1_800_000_000.0
CLOCK = Clock(50.0, WALL)


def stored(ago_s: float | None, **fields: Any) -> JobStatus:
    at = {} if ago_s is None else {"observedAt": CLOCK.timestamp(ago_s)}
    return make_status({"phase": "Running", "membership": {"generation": 1}} | at | fields)


@pytest.mark.parametrize(
    ("before", "changed", "ended", "written"),
    [
        pytest.param(stored(9.0), {}, False, False, id="nothing has changed"),
        pytest.param(stored(10.0), {}, False, True, id="nothing has changed for ten seconds"),
        pytest.param(stored(3.0), {"phase": "Recovering"}, False, True, id="every write carries its time"),
        pytest.param(stored(None), {}, False, True, id="nothing was written before"),
        pytest.param(stored(3600.0), {}, True, False, id="the end stays as it was told"),
        pytest.param(
            stored(3600.0, membership=None), {}, False, False, id="a job that waits in a queue costs no writes"
        ),
        pytest.param(stored(-3600.0), {}, False, False, id="the clock was set back"),
    ],
)
def test_seen_at(before: JobStatus, changed: dict[str, Any], ended: bool, written: bool) -> None:
    got = seen_at(before.with_fields(**changed), before, CLOCK, ended=ended, every_s=10.0)
    assert got == (CLOCK.timestamp() if written else before.observed_at)


@pytest.mark.parametrize(
    ("ago_s", "ended", "want"), [(4.0, False, 56.0), (12.0, False, 48.0), (-3600.0, False, 60.0), (4.0, True, None)]
)
def test_due(ago_s: float, ended: bool, want: float | None) -> None:
    assert seen_due_s(stored(ago_s), CLOCK, ended=ended, every_s=10.0) == want
