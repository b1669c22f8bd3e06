"""What a parameter server decides, without anything that is sent."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from regroup.data import SamplePlan
from regroup.parameter_server.dealing import Answer, Deal, Desk, Roles, Terms, roles_of
from regroup.parameter_server.ledger import CountedPlan, Entry, Ledger, key_of

PLAN = SamplePlan(0, 100, 24, 4)
"""Six microbatches in a block."""


def make_desk(
    num_ranks: int = 3,
    staleness: int | None = None,
    shares: int = 1,
    *,
    computes: bool = True,
    is_whole: bool = False,
    total: int = 100,
    ledger: Ledger | None = None,
) -> Desk:
    roles = roles_of(num_ranks, 1, computes=computes)
    return Desk(ledger or Ledger(), Terms(staleness, shares, roles, is_whole), num_ranks, 0.0, total)


def dealt(desk: Desk, rank: int, now_s: float = 0.0) -> Deal:
    deal = desk.pull(rank, now_s)
    assert isinstance(deal, Deal)
    return deal


def push(desk: Desk, rank: int, now_s: float = 0.0) -> None:
    desk.push(rank, 4.0, 1.0, now_s)


def make(desk: Desk, now_s: float = 0.0) -> tuple[int, ...]:
    """Make the next version and return its shares; empty: there is none."""
    version = desk.next_version(now_s)
    if version is None:
        return ()
    desk.ledger.count(version.entry, PLAN)
    desk.made(now_s)
    return version.entry.shares


def told(desk: Desk) -> dict[int, bool]:
    """Return what has been decided since the last call: whether the push of a rank was counted."""
    found = {one.deal.rank: counted for one, counted in desk.decided}
    desk.decided.clear()
    return found


@pytest.mark.parametrize(
    ("world_size", "per_worker", "computes", "want"),
    [
        pytest.param(1, 1, True, Roles(None, (0,)), id="one rank has no standby"),
        pytest.param(3, 1, True, Roles(1, (0, 1, 2)), id="server and standby compute as well"),
        pytest.param(4, 2, True, Roles(2, (0, 1, 2, 3)), id="the standby is in another worker"),
        pytest.param(2, 2, True, Roles(1, (0, 1)), id="of one worker it is another process"),
        pytest.param(4, 1, False, Roles(1, (2, 3)), id="server and standby only serve"),
        pytest.param(2, 1, False, Roles(1, (1,)), id="of two ranks the standby computes"),
        pytest.param(1, 1, False, Roles(None, (0,)), id="one rank computes in any case"),
    ],
)
def test_roles(world_size: int, per_worker: int, computes: bool, want: Roles) -> None:
    assert roles_of(world_size, per_worker, computes=computes) == want


@pytest.mark.parametrize(
    ("shares", "want"),
    [
        pytest.param(6, [2, 2, 2], id="a version's shares are dealt evenly"),
        pytest.param(4, [2, 1, 1], id="the first ranks get what is left"),
        pytest.param(2, [1, 1, 1], id="the third is a backup worker"),
    ],
)
def test_quotas_are_a_versions_shares(shares: int, want: list[int]) -> None:
    desk = make_desk(3, 0, shares)
    assert [len(dealt(desk, rank).shares) for rank in range(3)] == want


def test_version_sums_by_share_whoever_came_first() -> None:
    desk = make_desk(3, 0, 6)
    for rank in range(3):
        dealt(desk, rank)
    for rank in (2, 0, 1):
        assert not make(desk)
        push(desk, rank)
    assert make(desk) == (0, 1, 2, 3, 4, 5)
    assert told(desk) == {0: True, 1: True, 2: True}


def test_backup_worker_is_refused_and_its_share_comes_first_next_time() -> None:
    desk = make_desk(3, 0, 2)
    for rank in range(3):
        dealt(desk, rank)
    push(desk, 2)
    push(desk, 0)
    assert make(desk) == (0, 2)
    assert told(desk) == {0: True, 2: True}
    assert dealt(desk, 0) == Deal(0, 1, (1,)), "the share of rank 1 was owed as soon as the version was made"
    push(desk, 1)
    assert told(desk) == {1: False}


def test_backup_worker_that_had_pushed_is_told_at_once() -> None:
    desk = make_desk(3, 0, 2)
    for rank in range(3):
        dealt(desk, rank)
        push(desk, rank)
    assert make(desk) == (0, 1)
    assert told(desk) == {0: True, 1: True, 2: False}
    assert dealt(desk, 2).shares == (2,)


@pytest.mark.parametrize(("staleness", "counted"), [(0, False), (1, False), (2, True), (None, True)])
def test_gradient_of_age_two_is_applied_within_the_bound_only(staleness: int | None, counted: bool) -> None:
    desk = make_desk(2, staleness)
    dealt(desk, 1)
    for _ in range(2):
        dealt(desk, 0)
        push(desk, 0)
        assert make(desk)
    desk.decided.clear()
    push(desk, 1)
    make(desk)
    assert told(desk) == {1: counted}


def test_age_is_that_of_the_version_that_would_apply_it() -> None:
    """Two come at once, and the second is one version older when its turn comes (rule AGE)."""
    desk = make_desk(2, 0)
    for rank in range(2):
        dealt(desk, rank)
        push(desk, rank)
    assert make(desk) == (0,)
    assert not make(desk)
    assert told(desk) == {0: True, 1: False}


def test_late_share_is_dealt_again_and_what_comes_of_it_is_dropped() -> None:
    desk = make_desk(2)
    dealt(desk, 1)
    for second in range(6):
        dealt(desk, 0, float(second))
        push(desk, 0, second + 0.5)
        make(desk, second + 0.5)
    assert desk.patience_s(1) == 2.0, "four times half a second"
    assert 0 in {share for one, _ in desk.decided for share in one.deal.shares}, "rank 0 got the late share"
    assert told(desk) == {0: True}
    push(desk, 1, 6.0)
    assert told(desk) == {1: False}
    assert not make(desk, 6.0)


def test_who_is_always_slow_is_late_once() -> None:
    """Else all that it computes would be dropped."""
    desk, now_s, counted = make_desk(2), 0.0, []
    for _ in range(4):
        dealt(desk, 1, now_s)
        for _ in range(10):
            dealt(desk, 0, now_s)
            now_s += 0.5
            push(desk, 0, now_s)
            assert make(desk, now_s)
        desk.decided.clear()
        push(desk, 1, now_s)
        make(desk, now_s)
        counted.append(told(desk)[1])
    assert counted == [False, True, True, True]


@pytest.mark.parametrize("share_s", [70.0, 600.0])
def test_first_shares_count_however_long_they_take(share_s: float) -> None:
    desk, now_s, counted = make_desk(2), 0.0, []
    for _ in range(2):
        for rank in range(2):
            dealt(desk, rank, now_s)
        now_s += share_s
        desk.give_up(now_s)
        for rank in range(2):
            push(desk, rank, now_s)
        while make(desk, now_s):
            pass
        counted.append(told(desk))
    assert counted == [{0: True, 1: True}] * 2


def test_nobody_is_late_for_a_server_that_was_away() -> None:
    """It computes a microbatch of its own, or evaluates, and what workers have pushed meanwhile is not taken yet."""
    desk = make_desk(2)
    for _ in range(3):
        dealt(desk, 0, 0.0)
        push(desk, 0, 0.1)
        assert make(desk, 0.1)
    dealt(desk, 1, 1.0)
    desk.was_away(60.0)
    assert not make(desk, 61.0)
    desk.decided.clear()
    push(desk, 1, 61.1)
    assert make(desk, 61.1)
    assert told(desk) == {1: True}
    dealt(desk, 1, 62.0)
    assert not make(desk, 1000.0)
    push(desk, 1, 1000.0)
    assert told(desk) == {1: False}


def test_nobody_is_late_where_a_version_needs_a_whole_block() -> None:
    desk = make_desk(2, 0, 6, is_whole=True)
    for rank in range(2):
        dealt(desk, rank)
    push(desk, 0, 0.1)
    assert not make(desk, 1000.0)
    push(desk, 1, 1000.0)
    assert make(desk, 1000.0) == tuple(range(6))


def test_version_does_not_wait_for_shares_that_nobody_computes() -> None:
    desk = make_desk(3, 1, 3)
    for rank in range(3):
        dealt(desk, rank)
        if rank:
            push(desk, rank, 0.1)
    assert not make(desk, 0.9)
    assert make(desk, 1.1) == (1, 2)
    assert dealt(desk, 1, 1.2).shares == (0,)


def test_job_ends_at_its_version() -> None:
    desk = make_desk(2, None, total=1)
    for rank in range(2):
        dealt(desk, rank)
        push(desk, rank)
    assert make(desk) == (0,)
    assert not make(desk)
    assert told(desk) == {0: True, 1: False}
    assert [desk.pull(rank, 0.0) for rank in range(2)] == [Answer.FINISHED] * 2
    assert desk.is_over


def test_job_ends_where_a_script_leaves_its_loop() -> None:
    desk = make_desk(2)
    dealt(desk, 0)
    desk.heard(1, knows_newer=False, ended=True)
    assert desk.pull(1, 0.0) is Answer.FINISHED
    push(desk, 0)
    assert not make(desk)
    assert told(desk) == {0: False}
    assert not desk.is_over
    assert desk.pull(0, 0.0) is Answer.FINISHED
    assert desk.is_over


def test_cut_waits_until_all_know_and_for_what_is_dealt() -> None:
    desk = make_desk(2)
    desk.heard(0, knows_newer=True)
    dealt(desk, 0)
    dealt(desk, 1)
    desk.heard(1, knows_newer=True)
    push(desk, 1)
    assert make(desk) == (1,)
    assert desk.pull(1, 0.1) is Answer.LEAVE
    assert not desk.is_over
    push(desk, 0, 0.2)
    assert make(desk) == (0,)
    assert desk.pull(0, 0.3) is Answer.LEAVE
    assert desk.is_over
    assert not desk.must_break(1000.0)


def test_cut_gives_up_what_makes_no_version() -> None:
    desk = make_desk(2, 0, 6, is_whole=True)
    dealt(desk, 0)
    desk.heard(0, knows_newer=True)
    desk.heard(1, knows_newer=True)
    assert desk.pull(1, 0.0) is Answer.LEAVE
    push(desk, 0)
    assert not make(desk)
    assert told(desk) == {0: False}
    assert desk.pull(0, 0.0) is Answer.LEAVE


def test_cut_has_a_bound() -> None:
    desk = make_desk(2, 0, 6, is_whole=True)
    dealt(desk, 0)
    dealt(desk, 1)
    push(desk, 1, 0.5)
    for rank in range(2):
        desk.heard(rank, knows_newer=True)
    assert not desk.must_break(1.9)
    assert desk.must_break(2.1)


def test_cut_does_not_wait_for_what_a_late_worker_knows() -> None:
    desk = make_desk(2, 0, 6, is_whole=True)
    dealt(desk, 0)
    dealt(desk, 1)
    push(desk, 0, 0.5)
    desk.heard(0, knows_newer=True)
    assert not make(desk, 1.9)
    assert not desk.must_break(1.9)
    assert not make(desk, 2.1)
    assert desk.must_break(2.1)


def test_cut_waits_for_a_server_that_does_not_know() -> None:
    desk = make_desk(2)
    dealt(desk, 0)
    desk.heard(1, knows_newer=True)
    dealt(desk, 1)
    assert not make(desk, 1000.0)
    assert not desk.is_leaving


def test_who_only_serves_hears_of_each_version() -> None:
    desk = make_desk(4, None, computes=False)
    for rank in range(4):
        deal = dealt(desk, rank)
        assert bool(deal.shares) == (rank > 1)
        if rank < 3:
            push(desk, rank)
    assert make(desk) == (0,)
    assert told(desk) == {0: True, 1: True, 2: True}


def test_what_was_dealt_is_owed_in_the_next_generation() -> None:
    desk = make_desk(3)
    for rank in range(3):
        dealt(desk, rank)
    push(desk, 1)
    assert make(desk) == (1,)
    copied = Ledger()
    copied.load_state_dict(desk.ledger.state_dict())
    assert copied.uncounted == {0, 2}
    after = make_desk(3, ledger=copied)
    assert [dealt(after, rank).shares for rank in range(3)] == [(0,), (2,), (3,)]


def test_what_the_standby_has_not_heard_of_is_dealt_again() -> None:
    desk = make_desk(2)
    dealt(desk, 0)
    push(desk, 0)
    version = desk.next_version(0.0)
    assert version is not None
    standby = Ledger()
    numbers = version.entry.to_numbers()
    standby.count(Entry.from_numbers(numbers, 4.0, 1.0), PLAN)
    dealt(desk, 1)
    after = make_desk(1, ledger=standby)
    assert dealt(after, 0).shares == (1,)


@pytest.mark.parametrize("staleness", [None, 0, 1, 3])
@pytest.mark.parametrize(("num_ranks", "shares"), [(1, 1), (3, 1), (3, 2), (4, 6), (2, 6)])
def test_every_share_is_counted_once_whatever_the_order(staleness: int | None, num_ranks: int, shares: int) -> None:
    """Random orders with generations that end anywhere: no share twice, none left out, none too old, and it never stands still."""
    draws = random.Random(f"{staleness} {num_ranks} {shares}")
    for _ in range(20):
        ledger, now_s, counted = Ledger(), 0.0, Counter[int]()
        for _ in range(4):
            desk = make_desk(num_ranks, staleness, shares, ledger=ledger)
            desk.now_s = now_s
            asks, computes = set(range(num_ranks)), set[int]()
            for _ in range(draws.randrange(60)):
                now_s += draws.choice([0.01, 0.01, 0.1, 3.0])
                rank = draws.choice(sorted(asks | computes))
                if rank in asks:
                    asks.remove(rank)
                    computes.add(rank)
                    dealt(desk, rank, now_s)
                else:
                    computes.remove(rank)
                    push(desk, rank, now_s)
                while (version := desk.next_version(now_s)) is not None:
                    assert all(
                        staleness is None or ledger.version - one.deal.base <= staleness for one in version.pushes
                    )
                    counted.update(version.entry.shares)
                    ledger.count(version.entry, PLAN)
                    desk.made(now_s)
                asks |= set(told(desk))
                assert asks | computes, "everybody waits for a version that nobody makes"
            copied = Ledger()
            copied.load_state_dict(ledger.state_dict())
            ledger = copied
        assert set(counted.values()) <= {1}
        assert set(counted) | ledger.uncounted == set(range(ledger.following))
        assert ledger.samples == 4 * len(counted)
        want = sum(PLAN.hash_of(*key_of(share, PLAN)) for share in counted) % 2**64
        assert ledger.digest == want


def test_plan_of_a_server_says_what_its_ledger_does() -> None:
    ledger = Ledger()
    plan = CountedPlan(0, 100, 24, 4, ledger=ledger, shares_per_version=2)
    assert (plan.samples(0), plan.digest(0), plan.step_samples) == (0, f"{0:016x}", 8)
    ledger.count(Entry(1, 6, 24.0, 1.0, ((0, tuple(range(6))),)), plan)
    assert plan.samples(1) == 24
    assert plan.digest(1) == PLAN.digest(1), "all shares of a block are its step's samples"
    for block in (0, 3, 1000):
        assert plan.ids(block, 5).tolist() == PLAN.ids(block, 5).tolist(), (
            "which samples a share has is no matter of the ledger"
        )
