"""The operator's clock: time in which its loop stood still counts for nothing."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from regroup_operator.clock import MOST_S, TURN_S, LoopClock


class Source:
    """A clock that the test sets."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_loop_that_comes_round_counts_all_of_the_time() -> None:
    source = Source()
    clock = LoopClock(source)
    for turn in range(40):
        source.now_s = 100.0 + (turn + 1) * TURN_S
        clock.turn()
    assert round(clock(), 6) == 102.0


def test_a_loop_that_stands_still_counts_a_moment_of_it() -> None:
    source = Source()
    clock = LoopClock(source)
    source.now_s = 130.0
    assert clock() == 100.0 + MOST_S, "the loop has not come round yet"
    clock.turn()
    assert clock() == 100.0 + MOST_S, "and when it does, what it missed is not made up for"
    source.now_s = 130.1
    assert round(clock(), 6) == 100.0 + MOST_S + 0.1


def test_it_never_goes_back() -> None:
    source = Source()
    clock = LoopClock(source)
    seen = []
    for source.now_s in (100.1, 100.5, 100.5, 101.0, 101.05, 150.0):
        seen.append(clock())
        clock.turn()
        seen.append(clock())
    assert seen == sorted(seen)


def test_an_event_loop_drives_it() -> None:
    """What blocks the loop for half a second takes less than that from anybody's time; while it waits, time passes."""
    blocked_s, waited_s = asyncio.run(_blocked_and_waited())
    assert 0.9 * MOST_S < blocked_s < 2 * MOST_S
    assert waited_s > MOST_S


async def _blocked_and_waited() -> tuple[float, float]:
    clock = LoopClock()
    task = asyncio.create_task(clock.run())
    await asyncio.sleep(0)
    began_s = clock()
    time.sleep(2.5 * MOST_S)
    await asyncio.sleep(0)
    blocked_s, began_s = clock() - began_s, clock()
    until_s = time.monotonic() + 3 * MOST_S
    while time.monotonic() < until_s:
        await asyncio.sleep(TURN_S / 5)
    waited_s = clock() - began_s
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return blocked_s, waited_s
