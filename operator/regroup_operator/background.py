"""What is done beside the plan: tasks that are held and ended in one place, and whose jobs take turns."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

MAX_TOGETHER = 32
"""Hundreds of jobs that start at once would fill all connections to the API server with the creation of pods: agents' requests
and writes of statuses would wait behind thousands of them."""
MAX_TURNS = 16
"""Jobs that have a turn at once. A job of eight has two requests under way on average, since it begins with one."""
START_COST = 8
"""Turns of jobs that have started for one of a job that starts, where both wait. Not all of them: pods that fail again and again
would keep every new job from starting."""


class Background(Protocol):
    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` beside the caller. It raises nothing."""
        ...

    def turn(self, namespace: str, *, starts: bool) -> AbstractAsyncContextManager[None]:
        """Return what holds a turn of a job in `namespace`; entering it waits for one. At most MAX_TURNS are held at once.

        Namespaces take turns, so that one that has hundreds of jobs, or whose requests take long, does not keep the others waiting;
        within one, who came first is first. Jobs that have started, which replace what they lost, have START_COST turns for
        each turn of one that `starts`.
        """
        ...

    async def together(self, works: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Return when all have ended. None raises. At most MAX_TOGETHER run at once, whoever calls; the others have not begun."""
        ...


class LoopBackground:
    """Tasks of the running event loop."""

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
                work.close()  # those that were cancelled before they began

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
    """A semaphore whose waiters are served in the order of Background.turn.

    That is start-time fair queueing (Goyal, Vin, Cheng 1996). A flow is what starts in one namespace, or what has started there.
    Each turn of a flow has a number that is its cost higher than the last one's, but at least that much higher than the number of
    the turn that was given last. The lowest number is next.
    """

    def __init__(self, number: int) -> None:
        self._num_free = number
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        """A heap: the turn's number, the order of those that have the same, and what they wait for."""
        self._num_waits = 0
        self._given = 0
        self._last: dict[tuple[str, bool], int] = {}
        """The last number of each flow, where it is higher than `_given`."""

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
        """Give the turn to the first one that still waits."""
        while self._waiting:
            number, _, given = heapq.heappop(self._waiting)
            if not given.done():
                self._given = max(self._given, number)
                self._last = {flow: last for flow, last in self._last.items() if last > self._given}
                given.set_result(None)
                return
        self._num_free += 1
