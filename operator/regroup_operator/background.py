"""What is done beside the plan: tasks that are held and ended in one place."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, Protocol


class Background(Protocol):
    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` beside the caller. It raises nothing."""
        ...

    async def together(self, works: Iterable[Awaitable[None]]) -> None:
        """Return when all have ended. None raises."""
        ...


class LoopBackground:
    """Tasks of the running event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """See Background. An error is the event loop's to log."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def together(self, works: Iterable[Awaitable[None]]) -> None:
        """See Background."""
        await asyncio.gather(*works)

    async def stop(self) -> None:
        """Cancel everything and wait for its end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
