"""The command `ui`, and the option --ui of `regroup run`."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable

from regroup_cli.page.server import Serving, serve
from regroup_cli.page.sources import Source
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
    """Serve the page until Ctrl-C."""

    async def until_interrupted() -> int:
        serving = await start(source, args.port, say)
        say(f"jobs of {source.title}: {serving.page.address()}")
        say("The address works once. Ctrl-C ends the page.")
        try:
            await asyncio.Event().wait()
        finally:
            await serving.close()
        return 0

    return asyncio.run(until_interrupted())
