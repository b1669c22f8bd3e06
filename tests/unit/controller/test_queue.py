"""The work queue's promises: never twice at once, nothing lost, the earliest time counts, namespaces take turns."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from regroup_operator.api import UnavailableError
from regroup_operator.queue import BACKOFF_MAX_S, BACKOFF_MIN_S, Schedule, WorkQueue

A, B, C = ("one", "a"), ("one", "b"), ("one", "c")
X = ("two", "x")


def drain(schedule: Schedule, now_s: float = 0.0) -> list[tuple[str, str]]:
    taken = []
    while (key := schedule.take(now_s)) is not None:
        taken.append(key)
    return taken


@pytest.mark.parametrize(
    ("adds", "want"),
    [
        pytest.param([], [], id="an empty schedule has nothing"),
        pytest.param([A, B], [A, B], id="first come, first taken"),
        pytest.param([A, A, B, A], [A, B], id="a key is taken once however often it was added"),
        pytest.param([A, B, C, X], [A, X, B, C], id="a namespace with many keys does not starve another"),
    ],
)
def test_keys_are_taken_in_fair_order(adds: list[tuple[str, str]], want: list[tuple[str, str]]) -> None:
    schedule = Schedule()
    for key in adds:
        schedule.add(key)
    assert drain(schedule) == want


def test_key_in_processing_is_not_taken_again_but_its_add_is_not_lost() -> None:
    schedule = Schedule()
    schedule.add(A)
    assert schedule.take(0) == A
    schedule.add(A)
    assert schedule.take(0) is None
    assert len(schedule) == 1
    schedule.done(A)
    assert schedule.take(0) == A
    schedule.done(A)
    assert schedule.take(0) is None


@pytest.mark.parametrize(
    ("delays_s", "due_s"),
    [
        pytest.param([5.0], 5.0, id="a delayed key waits"),
        pytest.param([5.0, 2.0], 2.0, id="an earlier time replaces a later one"),
        pytest.param([2.0, 5.0], 2.0, id="a later time does not replace an earlier one"),
        pytest.param([2.0, 5.0, 1.0, 1.5], 1.0, id="the earliest of many counts"),
    ],
)
def test_earliest_delayed_add_wins_and_counts_once(delays_s: list[float], due_s: float) -> None:
    schedule = Schedule()
    for delay_s in delays_s:
        schedule.add_at(A, delay_s)
    assert schedule.next_due_s() == due_s
    assert schedule.take(due_s - 0.01) is None
    assert schedule.take(due_s) == A
    schedule.done(A)
    assert drain(schedule, 100.0) == []


@pytest.mark.parametrize(
    ("put_off_s", "at_s"),
    [
        pytest.param([None], 5.0, id="nothing is known: at its time"),
        pytest.param([4.0], 5.0, id="it was overdue before"),
        pytest.param([7.0, 9.0, 9.0], 9.0, id="as often as there is a later time"),
    ],
)
def test_what_is_expected_can_be_put_off_when_its_time_comes(put_off_s: list[float | None], at_s: float) -> None:
    answers = iter(put_off_s)
    schedule = Schedule(lambda _: next(answers))
    schedule.expect(A, 8.0)
    schedule.expect(A, 5.0)
    while (due_s := schedule.next_due_s()) is not None and due_s < at_s:
        assert schedule.take(due_s) is None
    assert schedule.next_due_s() == at_s
    assert schedule.take(at_s) == A
    schedule.done(A)
    assert drain(schedule, 100.0) == []


def test_delayed_add_comes_although_something_later_is_expected_and_drops_it() -> None:
    schedule = Schedule(lambda _: 1000.0)
    schedule.expect(A, 3.0)
    schedule.add_at(A, 6.0)
    assert schedule.take(3.0) is None
    assert schedule.next_due_s() == 6.0
    assert schedule.take(6.0) == A
    schedule.done(A)
    assert schedule.next_due_s() is None


def test_key_that_rests_is_not_taken_before_and_others_are() -> None:
    schedule = Schedule()
    schedule.rest(A, 5.0)
    for key in (A, B, A):
        schedule.add(key)
    assert drain(schedule, 4.0) == [B]
    assert schedule.next_due_s() == 5.0
    schedule.add_at(A, 3.0)
    assert schedule.take(4.9) is None
    assert schedule.take(5.0) == A
    schedule.done(A)
    assert drain(schedule, 100.0) == []
    schedule.add(A)
    assert schedule.take(5.1) == A, "the rest is over for good"


def test_taking_a_key_drops_its_delayed_add() -> None:
    schedule = Schedule()
    schedule.add_at(A, 5.0)
    schedule.add(A)
    assert schedule.take(1.0) == A
    schedule.done(A)
    assert schedule.next_due_s() is None


def test_delayed_add_during_processing_survives_it() -> None:
    schedule = Schedule()
    schedule.add(A)
    schedule.take(0)
    schedule.add_at(A, 3.0)
    schedule.done(A)
    assert schedule.take(2.9) is None
    assert schedule.take(3.0) == A


def test_backoff_doubles_to_its_cap_and_success_resets_it() -> None:
    schedule = Schedule()
    waits = [schedule.fail(A, 0.0) for _ in range(40)]
    assert waits[:4] == [BACKOFF_MIN_S * factor for factor in (1, 2, 4, 8)]
    assert max(waits) == waits[-1] == BACKOFF_MAX_S
    schedule.succeed(A)
    assert schedule.fail(A, 0.0) == BACKOFF_MIN_S


def test_key_is_not_taken_before_the_api_server_wants_to_be_asked_again() -> None:
    """Whatever is added meanwhile, and however short its back-off is."""
    schedule = Schedule()
    schedule.add(A)
    assert schedule.take(0.0) == A
    assert schedule.fail(A, 0.0, least_s=2.0) == 2.0
    schedule.done(A)
    schedule.add(A)
    assert schedule.take(1.9) is None
    assert schedule.next_due_s() == 2.0
    assert schedule.take(2.0) == A
    schedule.done(A)
    assert drain(schedule, 100.0) == []


def test_event_does_not_cut_a_back_off_short() -> None:
    """A status that stays refused was sent as often as the agents reported, twice a second and more."""
    schedule, taken, now_s = Schedule(), 0, 0.0
    while now_s < 60.0:
        schedule.add(A)  # a report
        if schedule.take(now_s) is not None:
            taken += 1
            schedule.fail(A, now_s)
            schedule.done(A)
        now_s += 0.1
    assert taken <= 20


def test_no_sequence_hands_a_key_out_twice_or_loses_one() -> None:
    """Every order of six steps on two keys: a taken key is not taken again before done; at the end nothing is left over."""
    steps = ("add a", "add b", "take", "done", "later a", "take")
    for order in set(itertools.permutations(steps)):
        schedule, held, wanted = Schedule(), [], set()
        for now_s, step in enumerate(order):
            if step in ("add a", "add b"):
                key = A if step == "add a" else X
                schedule.add(key)
                wanted.add(key)
            elif step == "later a":
                schedule.add_at(A, now_s + 10)
                wanted.add(A)
            elif step == "take" and (taken := schedule.take(now_s)) is not None:
                assert taken not in held, order
                held.append(taken)
                wanted.discard(taken)
            elif step == "done" and held:
                schedule.done(held.pop(0))
        for key in held:
            schedule.done(key)
        assert set(drain(schedule, 1000.0)) == wanted, order


def test_reconcile_runs_again_after_its_own_time_and_after_a_failure() -> None:
    async def scenario() -> list[str]:
        runs: list[str] = []
        over = asyncio.Event()

        async def reconcile(key: tuple[str, str]) -> float | None:
            runs.append(key[1])
            if len(runs) == 1:
                return 0.01
            if len(runs) == 2:
                raise UnavailableError("The API server is away.")
            over.set()
            return None

        queue = WorkQueue(reconcile, num_workers=2)
        task = asyncio.create_task(queue.run())
        queue.add(A)
        async with asyncio.timeout(5):
            await over.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return runs

    assert asyncio.run(scenario()) == ["a", "a", "a"]


def test_workers_run_side_by_side_but_never_on_one_key() -> None:
    async def scenario() -> tuple[int, int]:
        running: dict[tuple[str, str], int] = {}
        most_per_key = most = count = 0
        over = asyncio.Event()
        gate = asyncio.Event()

        async def reconcile(key: tuple[str, str]) -> None:
            nonlocal most_per_key, most, count
            running[key] = running.get(key, 0) + 1
            most_per_key = max(most_per_key, running[key])
            most = max(most, sum(running.values()))
            if sum(running.values()) == 3:
                gate.set()
            await gate.wait()
            running[key] -= 1
            count += 1
            if count == 4:
                over.set()

        queue = WorkQueue(reconcile, num_workers=3)
        task = asyncio.create_task(queue.run())
        for key in (A, B, C, X):
            queue.add(key)
        async with asyncio.timeout(5):
            await gate.wait()
            queue.add(A)
            await over.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return most_per_key, most

    assert asyncio.run(scenario()) == (1, 3)


def test_wait_is_counted_from_the_first_event_and_not_for_what_was_to_come_later() -> None:
    async def scenario() -> list[float]:
        waits: list[float] = []
        now_s, over = 0.0, asyncio.Event()
        runs = 0

        async def reconcile(_: tuple[str, str]) -> float | None:
            nonlocal runs
            runs += 1
            if runs == 2:
                over.set()
            return 0.0 if runs == 1 else None

        queue = WorkQueue(reconcile, clock=lambda: now_s, observe_wait=waits.append)
        queue.add(A)
        now_s = 2.0
        queue.add(A)
        now_s = 3.0
        task = asyncio.create_task(queue.run())
        async with asyncio.timeout(5):
            await over.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return waits

    assert asyncio.run(scenario()) == [3.0]


def test_bug_in_what_puts_off_ends_nothing() -> None:
    async def scenario() -> None:
        done: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

        async def reconcile(key: tuple[str, str]) -> None:
            await done.put(key)

        def put_off(_: object) -> float:
            raise ValueError("a bug")

        queue = WorkQueue(reconcile, put_off=put_off)
        running = asyncio.create_task(queue.run())
        queue.expect(A, 0.0)
        assert await asyncio.wait_for(done.get(), 5) == A
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())
