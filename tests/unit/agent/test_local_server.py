"""The agent's socket: what it tells of the connection of the hook in a script."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

from _regroup_agent.local_server import LocalServer
from regroup.protocol import local


def test_end_of_the_hooks_connection_is_told_with_its_process(tmp_path: Path) -> None:
    told: list[Any] = []

    async def runs() -> None:
        loop, heard, closed = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

        def on_unhooked(*process: int) -> None:
            told.append(process)
            closed.set()

        server = LocalServer(
            str(tmp_path / "s"),
            expects=lambda *_: True,
            on_message=lambda *_: heard.set(),
            on_closed=lambda *_: told.append("attached"),
            on_unhooked=on_unhooked,
            take_store=lambda _: None,
            log=told.append,
        )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as hook:
            hook.setblocking(False)
            await loop.sock_connect(hook, server.path)
            await loop.sock_sendall(hook, local.encode(local.Stepped(2, 7, 10, 0.1)))
            await asyncio.wait_for(heard.wait(), 10)
            assert told == []
        await asyncio.wait_for(closed.wait(), 10)
        server.close()

    asyncio.run(runs())
    assert told == [(2, 7)]
