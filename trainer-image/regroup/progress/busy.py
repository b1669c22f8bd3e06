"""Tells the agent of activities that may take longer than a step: pauses of the script, the wait for a checkpoint.

Activities nest. The agent knows the innermost one, and hears of the outer one again when the inner one is over.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from regroup.errors import UsageError
from regroup.protocol.local import BusyLocally
from regroup.protocol.state import Busy


class _Begun(NamedTuple):
    kind: str
    name: str
    end_s: float | None
    """Monotonic time at which the activity has taken too long; None: the operator has a bound for its kind."""


class BusyStack:
    """The activities that have begun, the innermost last. For the main thread.

    `send` sends a message to the agent; None in plain `python`. `paused` gets the seconds that an outermost activity took.
    """

    def __init__(self, send: Callable[[Any], None] | None, paused: Callable[[float], None]) -> None:
        self._send, self._paused = send, paused
        self._begun: list[_Begun] = []

    def pause(self, name: str, max_s: float) -> AbstractContextManager[None]:
        """Return a block that may take `max_s` seconds. Raises UsageError."""
        if not isinstance(max_s, int | float) or isinstance(max_s, bool) or not 0 < max_s < math.inf:
            raise UsageError(
                f'max_s of job.pause("{name}") is {max_s!r}; it must be a number of seconds above 0: the longest time that '
                "the block may take."
            )
        return self.during(Busy.PAUSE, name, max_s)

    @contextlib.contextmanager
    def during(self, kind: str, name: str = "", max_s: float | None = None) -> Iterator[None]:
        """Tell the agent of an activity for as long as the block lasts."""
        began_s = time.monotonic()
        self._begun.append(_Begun(kind, name, None if max_s is None else began_s + max_s))
        self._say(began_s)
        try:
            yield
        finally:
            now_s = time.monotonic()
            self._begun.pop()
            self._say(now_s)
            if not self._begun:
                self._paused(now_s - began_s)

    def _say(self, now_s: float) -> None:
        if self._send is None:
            return
        if not self._begun:
            self._send(BusyLocally())
            return
        kind, name, end_s = self._begun[-1]
        self._send(BusyLocally(kind, name[:100], None if end_s is None else max(0.001, end_s - now_s)))
