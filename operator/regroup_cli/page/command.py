"""The command `ui`, and the option --ui of `regroup run`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Callable

from regroup_cli.page.server import Serving, serve
from regroup_cli.page.sources import Source
from regroup_cli.streams import TERMINATED
from regroup_client.errors import JobError


async def start(source: Source, port: int, say: Callable[[str], None]) -> Serving:
    """Serve the page and say its address. Raises JobError if the port cannot be used."""
    try:
        serving = await serve(source, port, say)
    except OSError as error:
        raise JobError(
            f"--port ({port}) cannot be used ({os.strerror(error.errno or 0)}). Give another one, or none for a free one."
        ) from None
    return serving


def run(source: Source, args: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Serve the page until Ctrl-C or SIGTERM."""

    async def until_interrupted() -> int:
        # A handler that raises would end the task of a request that runs at that moment, and nothing else.
        terminated = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
        serving = await start(source, args.port, say)
        say(f"jobs of {source.title}: {serving.page.address()}")
        say("The address works once. Ctrl-C ends the page.")
        try:
            await terminated.wait()
        finally:
            await serving.close()
        return TERMINATED

    return asyncio.run(until_interrupted())
