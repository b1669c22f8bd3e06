"""Waits for a condition until a deadline: for tests, tour, benchmarks, chaos and the cluster. Standard library only.

`until` fails at the deadline, `within` returns whether the condition came, `until_async` lets an event loop go on
meanwhile. Scripts in a trainer, and process 1 of a node, have loops of their own and import none of this.

Nothing waits by a pause of fixed length: a condition ends a wait, and at the deadline an error names the condition.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class TimedOutError(AssertionError):
    """A condition did not become true in time. The text is one sentence, then the caller's details."""


def until(
    condition: Callable[[], T | None],
    what: str,
    *,
    timeout_s: float = 60.0,
    every_s: float = 0.02,
    details: Callable[[], str] | None = None,
    passing: type[Exception] | tuple[type[Exception], ...] = (),
    error: Callable[[str], Exception] = TimedOutError,
) -> T:
    """Return the first true value of `condition`, asked every `every_s`; it is asked at least once after the deadline.

    After `timeout_s` raises `error("Not within 30 s: WHAT ...")` with what `details()` adds. An exception in `passing` counts
    as "not yet" and the last one is quoted. `what` is the awaited state as a phrase: "an operator leads".
    """
    deadline = _Deadline(what, timeout_s, details, error)
    while True:
        try:
            value = condition()
            if value:
                return value
        except passing as not_yet:
            deadline.last = not_yet
        deadline.check()
        time.sleep(every_s)


def within(condition: Callable[[], object], timeout_s: float, *, every_s: float = 0.02) -> bool:
    """Return whether `condition` became true in time, for a wait that may end without it. It is asked as by `until`."""
    deadline = _Deadline("", timeout_s, None, TimedOutError)
    while not condition():
        if deadline.is_over():
            return False
        time.sleep(every_s)
    return True


async def until_async(
    condition: Callable[[], T | None],
    what: str,
    *,
    timeout_s: float = 60.0,
    every_s: float = 0.005,
    details: Callable[[], str] | None = None,
    error: Callable[[str], Exception] = TimedOutError,
) -> T:
    """Wait as `until` does, while the event loop goes on. `condition` is an ordinary function."""
    deadline = _Deadline(what, timeout_s, details, error)
    while not (value := condition()):
        deadline.check()
        await asyncio.sleep(every_s)
    return value


class _Deadline:
    def __init__(
        self, what: str, timeout_s: float, details: Callable[[], str] | None, error: Callable[[str], Exception]
    ) -> None:
        self._what, self._timeout_s, self._details, self._error = what, timeout_s, details, error
        self._ends_s = time.monotonic() + timeout_s
        self.last: Exception | None = None

    def is_over(self) -> bool:
        return time.monotonic() > self._ends_s

    def check(self) -> None:
        """Raise if the condition was still false after the deadline."""
        if not self.is_over():
            return
        text = f"Not within {self._timeout_s:g} s: {self._what}"
        if self.last is not None:
            text += f" ({self.last})"
        if self._details is not None:
            text += f"\n{self._details()}"
        raise self._error(text) from self.last
