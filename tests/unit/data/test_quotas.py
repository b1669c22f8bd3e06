"""Shares that follow how long ranks take: the deal that is done first, and when it is changed. Times are given, nothing waits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence

import pytest

from regroup.data import Quotas, SamplePlan, shares_of
from regroup.data.quotas import MOST_STAYS, STAYS, WINDOW, bounded, counts_for, ranges_of
from regroup.layout import Layout

FOREVER = 10**18
FIRST = 1 + WINDOW + STAYS - 1
"""Steps after which the first change can come: one that is left out, the first median, and STAYS in a row that promise it."""


@pytest.mark.parametrize(
    ("num_virtual", "costs", "want"),
    [
        pytest.param(28, [1, 1, 1, 2], (8, 8, 8, 4), id="one of four is slowed twofold"),
        pytest.param(28, [2, 2, 2, 2], (7, 7, 7, 7), id="all are equal"),
        pytest.param(7, [1, 1, 1], (3, 2, 2), id="of equals the lower rank gets what is left over"),
        pytest.param(8, [1, FOREVER], (7, 1), id="one is stuck and keeps one"),
        pytest.param(4, [1, 5, 9, 1], (1, 1, 1, 1), id="as many as there are ranks"),
        pytest.param(5, [FOREVER, FOREVER], (3, 2), id="all are stuck"),
        pytest.param(6, [1], (6,), id="alone"),
    ],
)
def test_deal_that_is_done_first(num_virtual: int, costs: list[float], want: tuple[int, ...]) -> None:
    assert counts_for(num_virtual, costs) == want


def test_no_deal_is_done_earlier() -> None:
    """Every way of dealing up to eight microbatches to three ranks of several speeds."""
    for num_virtual in range(3, 9):
        ways = [c for c in itertools.product(range(1, num_virtual), repeat=3) if sum(c) == num_virtual]
        for costs in itertools.product([1.0, 1.7, 4.0, 30.0], repeat=3):
            got = counts_for(num_virtual, costs)
            assert sum(got) == num_virtual
            assert min(got) >= 1
            best = min(max(count * cost for count, cost in zip(way, costs)) for way in ways)
            assert max(count * cost for count, cost in zip(got, costs)) == best, (num_virtual, costs)


def test_shares_are_contiguous_and_hold_all() -> None:
    assert ranges_of((3, 1, 2)) == (range(0, 3), range(3, 4), range(4, 6))


@pytest.mark.parametrize(
    ("costs", "want"),
    [
        pytest.param([0, 0, 0], None, id="nothing was measured"),
        pytest.param([16.0, 0, 16.0], [16.0, 1.0, 16.0], id="a time of zero is no endless speed"),
        pytest.param([2.0, 1e30], [2.0, 2e6], id="a rank that is stuck"),
        pytest.param([2.0, 3.0], [2.0, 3.0], id="as they are"),
    ],
)
def test_costs_are_kept_near_their_median(costs: list[float], want: list[float] | None) -> None:
    assert bounded(costs) == want


Speeds = Callable[[int], Sequence[float]]
"""Nanoseconds for a microbatch, by rank, in a step."""


def run(
    speeds: Speeds, steps: int, *, num_virtual: int = 28, uneven: bool = True, fixed_ns: float = 0.0
) -> list[list[int]]:
    """Return the deal after each step."""
    quotas = Quotas(SamplePlan(0, 1000, num_virtual, 1), uneven=uneven)
    quotas.begin_generation(len(speeds(0)))
    found = []
    for step in range(steps):
        counts = [len(share) for share in quotas.shares]
        quotas.committed([int(cost * count + fixed_ns) for cost, count in zip(speeds(step), counts)])
        found.append([len(share) for share in quotas.shares])
    return found


def changes(deals: Iterable[list[int]]) -> int:
    return sum(a != b for a, b in itertools.pairwise(deals))


def noisy(costs: Sequence[float], spread: float, seed: int = 0) -> Speeds:
    rng = random.Random(seed)
    return lambda _: [cost * rng.uniform(1 - spread, 1 + spread) for cost in costs]


@pytest.mark.parametrize(
    ("speeds", "want"),
    [
        pytest.param(lambda _: [100, 100, 100, 200], [8, 8, 8, 4], id="a slow rank gets fewer"),
        pytest.param(lambda _: [100, 100, 100, 100], [7, 7, 7, 7], id="equal ranks keep equal shares"),
        pytest.param(lambda _: [100, 100, 100, 120], [7, 7, 7, 7], id="a gain below the threshold is none"),
        pytest.param(lambda _: [0, 0, 0, 0], [7, 7, 7, 7], id="times of zero"),
        pytest.param(lambda _: [100, 0, 100, 100], [1, 25, 1, 1], id="one time of zero: sixteen times as fast as others"),
        pytest.param(lambda _: [100, 100, 100, FOREVER], [9, 9, 9, 1], id="a rank that hardly moves keeps one"),
        pytest.param(lambda s: [100, 100, 100, 900 if s % 4 == 0 else 100], [7, 7, 7, 7], id="odd steps are no trend"),
        pytest.param(lambda s: [900 if s % 4 == r else 100 for r in range(4)], [7, 7, 7, 7], id="each is slow in turn"),
        pytest.param(noisy([100] * 4, 0.3), [7, 7, 7, 7], id="jitter of 30 %"),
    ],
)  # fmt: skip
def test_deal_after_many_steps(speeds: Speeds, want: list[int]) -> None:
    assert run(speeds, 200)[-1] == want


def test_change_comes_once_a_gain_has_lasted() -> None:
    deals = run(lambda _: [100, 100, 100, 200], 100)
    assert deals[FIRST - 2] == [7, 7, 7, 7]
    assert deals[FIRST - 1] == [8, 8, 8, 4]
    assert changes(deals) == 1


def test_gain_that_ends_before_it_has_lasted_changes_nothing() -> None:
    slow_until = FIRST - WINDOW  # the median follows half a window later
    deals = run(lambda step: [100, 100, 100, 200 if step < slow_until else 100], 100)
    assert changes(deals) == 0


def test_rank_that_recovers_gets_its_share_again() -> None:
    deals = run(lambda step: [100, 100, 100, 200 if step < 60 else 100], 200)
    assert deals[59] == [8, 8, 8, 4]
    assert max(deals[-1]) - min(deals[-1]) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_noise_moves_a_deal_seldom(seed: int) -> None:
    """Times that vary by half, and a part of each step that does not depend on the share."""
    deals = run(noisy([100, 130, 170, 220], 0.5, seed), 2000, fixed_ns=150)
    assert 1 <= changes(deals) <= 6


@pytest.mark.parametrize("period", [7, 20, 50, 200])
def test_speeds_that_change_places_are_followed_ever_more_seldom(period: int) -> None:
    deals = run(lambda step: [100, 300] if step // period % 2 else [300, 100], 8000)
    doublings = (MOST_STAYS // STAYS).bit_length()
    assert changes(deals) <= doublings + 8000 / MOST_STAYS


def test_new_generation_begins_with_equal_shares_and_knows_nothing() -> None:
    quotas = Quotas(SamplePlan(0, 1000, 28, 1), uneven=True)
    quotas.begin_generation(2)
    for _ in range(FIRST):
        quotas.committed([100 * len(quotas.shares[0]), 900 * len(quotas.shares[1])])
    assert quotas.shares != shares_of(28, 2)
    quotas.begin_generation(2)
    assert quotas.shares == shares_of(28, 2)
    for _ in range(FIRST - 1):
        quotas.committed([100 * len(quotas.shares[0]), 900 * len(quotas.shares[1])])
        assert quotas.shares == shares_of(28, 2)


def test_shares_in_a_model_group_are_those_of_the_plan() -> None:
    """Before the first generation there are no ranks: not even one model group is whole."""
    plan = SamplePlan(0, 1000, 8, 1, layout=Layout.of({"shard": 2}))
    quotas = Quotas(plan)
    assert quotas.shares == ()
    quotas.begin_generation(4)
    assert quotas.shares == plan.shares(4)


def test_every_rank_comes_to_the_same_deal() -> None:
    """Ranks hold objects of their own; the rows are all that they share."""
    speeds = noisy([100, 250, 90], 0.2)
    mine = [Quotas(SamplePlan(0, 1000, 24, 1), uneven=True) for _ in range(3)]
    for quotas in mine:
        quotas.begin_generation(3)
    for step in range(60):
        rows = [int(cost * len(mine[0].shares[rank])) for rank, cost in enumerate(speeds(step))]
        for quotas in mine:
            quotas.committed(rows)
        assert len({quotas.shares for quotas in mine}) == 1
    assert mine[0].shares != shares_of(24, 3)


@pytest.mark.parametrize(
    ("num_virtual", "world_size", "uneven"),
    [
        pytest.param(3, 5, True, id="fewer microbatches than ranks: a hand-over"),
        pytest.param(4, 4, True, id="one for each rank"),
        pytest.param(28, 4, False, id="not asked for"),
        pytest.param(28, 1, True, id="alone"),
    ],
)
def test_shares_stay_equal_where_they_must(num_virtual: int, world_size: int, uneven: bool) -> None:
    costs = [100.0] * (world_size - 1) + [900.0]
    quotas = Quotas(SamplePlan(0, 1000, num_virtual, 1), uneven=uneven)
    quotas.begin_generation(world_size)
    for _ in range(50):
        quotas.committed([int(cost * len(share)) for cost, share in zip(costs, quotas.shares)])
        assert quotas.shares == shares_of(num_virtual, world_size)
