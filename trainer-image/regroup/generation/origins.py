"""The origin of an error: a collective, or the script's own code that ran during the wait for the collective.

torch raises a plain RuntimeError for a collective that fails, and another one for a DataLoader's worker that is killed. The second
one comes from a handler of SIGCHLD. Python runs it wherever the main thread is, which is mostly in a wait of ours. The type and the
text do not tell them apart; the frames of the traceback do.
"""

import contextlib
import functools
import signal
import types
from collections.abc import Callable, Iterator
from typing import Any

_LOADERS = ("torch.utils.data.", "torch._utils.")
"""Beginnings of the names of torch's modules that raise what is wrong with a loader or its workers."""


def is_collectives(error: BaseException) -> bool:
    """Return whether a RuntimeError may be a collective's. False: a signal's handler has raised it, or torch's loader of data, in
    whatever the process was doing. Call it while the handler is still installed."""
    handlers = set(_handlers())
    innermost = ""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return False
        innermost = trace.tb_frame.f_globals.get("__name__", "")
        trace = trace.tb_next
    return not f"{innermost}.".startswith(_LOADERS)


def pass_others_on(error: RuntimeError) -> None:
    """Raise the error again where it is no collective's. For an `except RuntimeError` around one."""
    if not is_collectives(error):
        raise error


@contextlib.contextmanager
def collective(becomes: Callable[[RuntimeError], Exception]) -> Iterator[None]:
    """Around a collective: raise what `becomes` makes of its error, and any other error as it is."""
    try:
        yield
    except RuntimeError as error:
        pass_others_on(error)
        raise becomes(error) from error


def _handlers() -> Iterator[types.CodeType]:
    """Yield the code of each signal handler that is installed and written in Python."""
    for signum in signal.valid_signals():
        handler: Any = signal.getsignal(signum)
        while isinstance(handler, functools.partial):
            handler = handler.func
        handler = getattr(handler, "__func__", handler)  # of a bound method
        if not hasattr(handler, "__code__"):
            handler = getattr(type(handler), "__call__", None)  # noqa: B004
        code = getattr(handler, "__code__", None)
        if isinstance(code, types.CodeType):
            yield code
