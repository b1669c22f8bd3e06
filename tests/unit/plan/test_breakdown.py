"""Where the time of a step goes, in one line, and who is slowest."""

from __future__ import annotations

import pytest

from regroup.protocol.state import Times
from regroup_operator.plan.report.breakdown import breakdown, times_of
from tests.builders.plan import make_progress, make_session, make_worker


def times(**seconds: float) -> Times:
    return Times(**dict.fromkeys(Times.__dataclass_fields__, 0.0) | seconds)


FAST = times(data=0.02, forward=0.2, backward=0.4, waits=0.3)
SLOW_DATA = times(data=0.32, forward=0.2, backward=0.4)


@pytest.mark.parametrize(
    ("members", "want"),
    [
        pytest.param({}, None, id="nobody has measured a step"),
        pytest.param({"worker 0": times()}, None, id="a step of no time"),
        pytest.param(
            {"worker 0": times(forward=0.3, backward=0.6, apply=0.05)}, "0.95 s: backward 63 %, forward 32 %", id="alone"
        ),
        pytest.param(
            {"worker 0": FAST, "worker 1": FAST, "worker 2.1": SLOW_DATA},
            "0.92 s: backward 43 %, forward 22 %, waits 22 % (worker 2.1 is slowest: fetching data 0.32 s)",
            id="the others wait for one that is slow in one part",
        ),
        pytest.param(
            {"worker 0": times(forward=1.0, waits=0.02), "worker 1": times(forward=1.0)},
            "1 s: forward 99 %",
            id="a short wait names nobody",
        ),
        pytest.param(
            {"worker 0": times(device=1.0, communication=1.0, waits=0.0), "worker 1": times(device=1.0, communication=1.0)},
            "2 s: GPU 50 %, communication 50 %",
            id="equal workers",
        ),
        pytest.param(
            {"worker 0": times(between=0.0021, forward=0.0007)}, "2.8 ms: between steps 75 %, forward 25 %", id="milliseconds"
        ),
        pytest.param({"worker 0": times(forward=12.3)}, "12 s: forward 100 %", id="long steps"),
        pytest.param(
            {"worker 0": times(forward=0.5, waits=0.5), "worker 1": times(forward=0.5, between=0.5)},
            "1 s: forward 50 %, waits 25 %, between steps 25 % (worker 1 is slowest: between steps 0.5 s)",
            id="one that saves or prints between steps",
        ),
    ],
)  # fmt: skip
def test_breakdown(members: dict[str, Times], want: str | None) -> None:
    assert breakdown(members) == want


def test_only_what_was_measured_in_this_generation_counts() -> None:
    sessions = [
        make_session(progress=make_progress(7, times=FAST), progress_generation=2),
        make_session(progress=make_progress(7, times=SLOW_DATA), progress_generation=1),
        make_session(progress=make_progress(7), progress_generation=2),
        make_session(),
    ]
    workers = [make_worker(slot, session=session) for slot, session in enumerate([*sessions, None])]
    assert times_of(workers, 2) == {"worker 0": FAST}
