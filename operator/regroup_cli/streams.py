"""Standard streams of a command, and its end when they fail first: a pipe closed early, a full disk, Ctrl-C.

Standard library only, as `kubectl regroup` is.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable

INTERRUPTED, CLOSED = 130, 141
"""Exit codes after Ctrl-C and `| head`. A shell shows the same for a command that SIGINT or SIGPIPE ended."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def guarded(name: str, command: Callable[[], int]) -> int:
    """Run a command and return its exit code. A reader that closes the output, and Ctrl-C, are no errors."""
    _open_closed()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a letter that the terminal does not have
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()  # an error of the interpreter's own flush at exit cannot be caught
    except BrokenPipeError:
        _drop_unwritten()
        return CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _drop_unwritten()
        print(f"{name}: It cannot write any more ({error.strerror}). Make room, or write elsewhere.", file=sys.stderr)
        return 2


def _open_closed() -> None:
    """Open /dev/null for each stream that was closed before the start (`>&-`). Else the next opened file would get its number."""
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:
            opened = open(os.devnull, mode)  # noqa: SIM115 (until the process ends)
            os.set_inheritable(opened.fileno(), True)
            setattr(sys, stream, opened)


def _drop_unwritten() -> None:
    """Send unwritten output to /dev/null, since the interpreter would try to write it again at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
