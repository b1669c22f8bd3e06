"""Runs a launcher's own parser once, in a fork of the zygote or under the trainer's interpreter, and returns its answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from regroup.protocol.launchers import LauncherCommand

from ..group_hook_files import source_of
from ..posix import die_with_parent
from .command import LaunchError

MAX_S = 300.0
"""Longest time that a launcher may take to read its command. On a cold network disk importing torch takes a minute or two."""
MARK = b"regroup-launcher: "
"""The beginning of the answer's line, as in own_parser.py."""

Fork = Callable[[Mapping[str, str], Sequence[int], Mapping[str, Any]], Awaitable["int | None"]]
"""Forks the zygote: (environment, descriptors for stderr and stdout, what to run) -> pid, or None if there is no zygote."""


async def answer_of(
    found: LauncherCommand,
    python: str,
    environ: Mapping[str, str],
    fork: Fork,
    adopt: Callable[[subprocess.Popen[bytes]], None],
) -> dict[str, Any]:
    """Return the answer of the launcher's own parser. Raises LaunchError if none comes.

    `adopt` takes a process that is exec'd, because the agent reaps all its children in one place.
    """
    request = json.dumps({"launcher": found.launcher, "arguments": list(found.arguments), "module": found.module})
    source = source_of("launch/own_parser.py")
    read_fd, write_fd = os.pipe()
    environ = {**environ, **found.environ}
    try:
        pid = await fork(environ, [write_fd, write_fd], {"code": source, "args": [request]})
        if pid is None:
            popen = subprocess.Popen(
                [python, "-c", source, request],
                stdin=subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                env=dict(environ),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
            adopt(popen)
            pid = popen.pid
    except OSError as error:
        os.close(read_fd)
        raise LaunchError(
            f"{python}, which {found.launcher} needs, cannot be started ({error.strerror or error})."
        ) from None
    finally:
        os.close(write_fd)
    return read_answer(found.launcher, await _output(read_fd, pid))


async def _output(read_fd: int, pid: int) -> bytes:
    """Return all that a process writes. A process that takes longer than MAX_S is killed."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb", 0)
    )
    try:
        return await asyncio.wait_for(reader.read(-1), MAX_S)
    except asyncio.TimeoutError:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        return b""
    finally:
        transport.close()


def read_answer(launcher: str, output: bytes) -> dict[str, Any]:
    """Return the answer in what a process wrote. Raises LaunchError if there is none."""
    lines = output.splitlines()
    for line in reversed(lines):
        if line.startswith(MARK):
            answer: dict[str, Any] = json.loads(line[len(MARK) :])
            return answer
    last = lines[-1].decode("utf-8", "replace")[:300] if lines else "it wrote nothing"
    raise LaunchError(f"{launcher} did not say how it reads the command ({last}). Write the program's own command.")
