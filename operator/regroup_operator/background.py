"""Work beside the plan: tasks that are held and ended in one place. Jobs take turns with it."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

MAX_TOGETHER = 32
"""Bound of coroutines in `together`. Without one, hundreds of jobs that start at once would fill all connections to the
API server with the creation of pods. Requests of agents and writes of statuses would wait behind them."""
MAX_TURNS = 16
"""Number of jobs that have a turn at once. A job of eight has two requests under way on average, since it begins with one."""
START_COST = 8
"""Turns of started jobs for each turn of a job that starts, while both wait. A starting job gets a share, so that pods
that fail again and again cannot keep it from starting."""


class Background(Protocol):
    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` beside the caller. It raises nothing."""
        ...

    def turn(self, namespace: str, *, starts: bool) -> AbstractAsyncContextManager[None]:
        """Return a context manager that waits for a turn of a job in `namespace` and holds it. At most MAX_TURNS are held at once.

        Namespaces take turns, so that one with hundreds of jobs or slow requests does not keep the others waiting.
        Within a namespace the first to ask is served first. Started jobs, which replace lost pods, have START_COST
        turns for each turn of a job that `starts`.
        """
        ...

    async def together(self, works: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Run the coroutines and return when all have ended. None of them raises.

        At most MAX_TOGETHER run at once, counted over all callers.
        """
        ...


class LoopBackground:
    """Implements Background with tasks of the running event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._free = asyncio.Semaphore(MAX_TOGETHER)
        self._turns = Turns(MAX_TURNS)

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` as a task of the event loop, which logs an error."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def turn(self, namespace: str, *, starts: bool) -> AbstractAsyncContextManager[None]:
        return self._turns.turn(namespace, starts=starts)

    async def together(self, works: Iterable[Coroutine[Any, Any, None]]) -> None:
        works = list(works)
        try:
            await asyncio.gather(*map(self._limited, works))
        finally:
            for work in works:
                work.close()  # cancelled before it began

    async def _limited(self, work: Coroutine[Any, Any, None]) -> None:
        async with self._free:
            await work

    async def stop(self) -> None:
        """Cancel everything and wait for its end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Turns:
    """A semaphore that serves its waiters in the order that Background.turn describes.

    The order is start-time fair queueing (Goyal, Vin, Cheng 1996). A flow is the starting jobs of one namespace, or its
    started jobs. Each turn has a number: the flow's cost plus the number of its last turn, or of the newest given turn
    if that is higher. The turn with the lowest number is given next.
    """

    def __init__(self, number: int) -> None:
        self._num_free = number
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        """A heap of the waiters: number of the turn, order of arrival, and the future that gives the turn."""
        self._num_waits = 0
        self._given = 0
        self._last: dict[tuple[str, bool], int] = {}
        """Flow -> number of its last turn. Flows whose number is not above `_given` are left out."""

    @asynccontextmanager
    async def turn(self, namespace: str, *, starts: bool) -> AsyncIterator[None]:
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait(namespace, starts=starts)
        try:
            yield
        finally:
            self._give()

    async def _wait(self, namespace: str, *, starts: bool) -> None:
        flow = namespace, starts
        number = self._last[flow] = max(self._given, self._last.get(flow, 0)) + (START_COST if starts else 1)
        self._num_waits += 1
        given = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (number, self._num_waits, given))
        try:
            await given
        except asyncio.CancelledError:
            if not given.cancelled():  # the turn was given, and this task cancelled before it went on
                self._give()
            raise

    def _give(self) -> None:
        """Give the turn to the waiter with the lowest number that was not cancelled."""
        while self._waiting:
            number, _, given = heapq.heappop(self._waiting)
            if not given.done():
                self._given = max(self._given, number)
                self._last = {flow: last for flow, last in self._last.items() if last > self._given}
                given.set_result(None)
                return
        self._num_free += 1
