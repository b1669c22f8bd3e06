"""Laps of a step: every moment belongs to one part, and waits are what the slowest rank took longer."""

from __future__ import annotations

import pytest

from regroup.transaction import laps as module
from regroup.transaction.laps import APPLY, BACKWARD, BETWEEN, DATA, EXCHANGE, FORWARD, WAITS, Laps


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    monkeypatch.setattr(module, "perf_counter", lambda: one.now_s)
    return one


def test_parts_add_up_to_the_time_between_two_commits(clock: Clock) -> None:
    laps = Laps()
    clock.now_s += 0.5
    laps.begin()
    for part, seconds in ((FORWARD, 1.0), (DATA, 2.0), (FORWARD, 4.0), (BACKWARD, 8.0)):
        clock.now_s += seconds
        laps.lap(part)
    laps.computed()
    assert laps.busy_ns == 15_500_000_000
    assert laps.work_ns() == 15_000_000_000, "without what was before the block"
    clock.now_s += 16.0
    laps.met(0, [laps.busy_ns, 25_500_000_000])
    clock.now_s += 32.0
    laps.committed()
    assert {part: laps.sums[part] for part in (DATA, FORWARD, BACKWARD, APPLY, BETWEEN)} == {
        DATA: 2.0, FORWARD: 5.0, BACKWARD: 8.0, APPLY: 32.0, BETWEEN: 0.5
    }  # fmt: skip
    assert (laps.sums[WAITS], laps.sums[EXCHANGE]) == pytest.approx((10.0, 6.0))
    assert sum(laps.sums) == pytest.approx(clock.now_s - 100.0)


@pytest.mark.parametrize(
    ("rank", "busy_s", "waits_s"),
    [
        pytest.param(0, [3.0], 0.0, id="alone"),
        pytest.param(0, [3.0, 1.0], 0.0, id="the slowest waits for nobody"),
        pytest.param(1, [3.0, 1.0], 2.0, id="another waits for it"),
        pytest.param(1, [30.0, 1.0], 5.0, id="no longer than the exchange took"),
    ],
)
def test_waits_are_taken_out_of_the_exchange(clock: Clock, rank: int, busy_s: list[float], waits_s: float) -> None:
    laps = Laps()
    laps.begin()
    clock.now_s += 5.0
    laps.met(rank, [int(seconds * 1e9) for seconds in busy_s])
    assert (laps.sums[WAITS], laps.sums[EXCHANGE]) == pytest.approx((waits_s, 5.0 - waits_s))


def test_what_one_was_busy_with_counts_from_the_moment_at_which_ranks_met(clock: Clock) -> None:
    laps = Laps()
    laps.begin()
    laps.met(0, [0, 0])
    clock.now_s += 2.0  # applying, and what the script does between steps
    laps.committed()
    clock.now_s += 1.0
    laps.begin()
    laps.computed()
    assert laps.busy_ns == 3_000_000_000
    clock.now_s += 4.0
    assert laps.busy_ns == 3_000_000_000, "of the step before, until the device has computed this one"
    laps.begin_generation()
    assert laps.busy_ns == 0


def test_step_that_comes_again_begins_at_nothing(clock: Clock) -> None:
    laps = Laps()
    laps.begin()
    clock.now_s += 1.0
    laps.lap(DATA)
    laps.begin()
    assert laps.sums[DATA] == 0.0
    assert laps.sums[BETWEEN] == 1.0
