"""What is done beside the plan: tasks that are held and ended in one place."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

MAX_TOGETHER = 32
"""Hundreds of jobs that start at once would fill all connections to the API server with the creation of pods: reviews of agents'
tokens and writes of statuses would wait behind thousands of them."""


class Background(Protocol):
    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` beside the caller. It raises nothing."""
        ...

    async def together(self, works: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Return when all have ended. None raises. At most MAX_TOGETHER run at once, whoever calls; the others have not begun."""
        ...


class LoopBackground:
    """Tasks of the running event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._free = asyncio.Semaphore(MAX_TOGETHER)

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """See Background. An error is the event loop's to log."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def together(self, works: Iterable[Coroutine[Any, Any, None]]) -> None:
        """See Background."""
        await asyncio.gather(*(self._in_turn(work) for work in works))

    async def _in_turn(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            async with self._free:
                await work
        finally:
            work.close()  # of one that was cancelled before its turn

    async def stop(self) -> None:
        """Cancel everything and wait for its end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
