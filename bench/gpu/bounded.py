"""Runs a part of the benchmark in a process of its own, reads its lines, and ends all of its processes at its bound."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.leftovers import end_leftovers

MARK = "BENCH_GPU_PART"
"""Environment name of a part's run. Its value marks each process of that run."""
_LOOK_S = 0.5


@dataclass(frozen=True)
class Ended:
    """The end of a part."""

    code: int | None
    """Exit code; None: its bound ended it."""
    took_s: float
    is_clean: bool
    """True if none of its processes is left."""


def run_bounded(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    mark: str,
    bound_s: float,
    log: Path,
    on_line: Callable[[str], None],
) -> Ended:
    """Run a command, and pass each line of its stdout to `on_line` as it comes; stderr goes to `log`.

    After `bound_s` SIGKILL ends the command. At the end of a run it also ends each process with `mark` in its
    environment. So a part that hangs does not keep the GPU from the next part.
    """
    began_s = time.monotonic()
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            env={**environment, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C in the terminal ends the benchmark, which ends the part
        )
    assert process.stdout is not None
    code: int | None = None
    try:
        os.set_blocking(process.stdout.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            rest = b""
            while (left_s := began_s + bound_s - time.monotonic()) > 0:
                # The pipe's end is no sign: a process that a part left behind may hold it open.
                code = process.poll()
                if selector.select(min(left_s, 0.0 if code is not None else _LOOK_S)):
                    new = process.stdout.read()
                    *lines, rest = (rest + (new or b"")).split(b"\n")
                    for line in lines:
                        on_line(line.decode(errors="replace"))
                    if new == b"":
                        selector.unregister(process.stdout)
                        code = _code(process, left_s)
                        break
                elif code is not None:
                    break
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        is_clean = end_leftovers(MARK, mark)
        process.stdout.close()
    return Ended(code, time.monotonic() - began_s, is_clean)


def _code(process: subprocess.Popen[bytes], left_s: float) -> int | None:
    """Return the exit code of a process that has closed its output, or None if it does not end in time."""
    try:
        return process.wait(left_s)
    except subprocess.TimeoutExpired:
        return None
