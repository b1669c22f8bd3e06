"""Standard streams of a command, and its end when they fail first: a pipe closed early, a full disk, Ctrl-C.

Standard library only, as `kubectl regroup` is.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable

INTERRUPTED, CLOSED, TERMINATED = 130, 141, 143
"""Exit codes after Ctrl-C, `| head` and `kill`. A shell shows the same for a command that SIGINT, SIGPIPE or SIGTERM ended."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class _Terminated(BaseException):
    """SIGTERM came. A command puts its terminal in order and ends the programs that it started, as after Ctrl-C."""


def guarded(name: str, command: Callable[[], int]) -> int:
    """Run a command and return its exit code. A reader that closes the output, Ctrl-C and SIGTERM are no errors."""
    _open_closed()
    before = signal.getsignal(signal.SIGTERM)
    if before != signal.SIG_DFL or threading.current_thread() is not threading.main_thread():
        return _guarded(name, command)  # the handler is the caller's, and only the main thread may set one
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return _guarded(name, command)
    except _Terminated:
        return TERMINATED
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: object) -> None:  # noqa: ARG001 (a handler's parameters)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends a command that does not end
    raise _Terminated


def _guarded(name: str, command: Callable[[], int]) -> int:
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
