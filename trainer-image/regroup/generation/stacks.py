"""The stacks of all threads of this process, as text. The watcher's thread sends them while the main thread is stuck.

Reads no source files: the volume that they are on may be what hangs. `describe` is the whole answer; the rest are pure
functions on frames, innermost first.
"""

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_LIBRARIES = (str(Path(os.__file__).resolve().parent) + os.sep, "<frozen", "<string>")
_TORCH_COLLECTIVES = str(Path(torch.__file__).parent / "distributed" / "distributed_c10d.py")
_HOROVOD_WAITS = _OURS + str(Path("horovod") / "handles.py")
MAX_CHAIN = 8
"""Calls of the main thread that are named in one line."""
MAX_TEXT = 32_000


class Call(NamedTuple):
    """One frame of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({Path(self.file).name}:{self.line})"


class Description(NamedTuple):
    """`where`: the innermost call of the user's own code. `in_torch`: inside a collective that the script called itself, of
    torch or of Horovod."""

    where: str
    chain: str
    in_torch: bool
    text: str


def describe() -> Description:
    """Return where every thread is. Called from any thread; takes no lock and reads no file."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {ident: calls_of(frame) for ident, frame in sys._current_frames().items()}
    main = stacks.get(threading.main_thread().ident or 0, [])
    lines = []
    for ident in sorted(stacks, key=lambda ident: names.get(ident) != "MainThread"):
        lines.append(f"thread {names.get(ident, ident)}:")
        lines += [f'  File "{call.file}", line {call.line}, in {call.function}' for call in stacks[ident]]
    in_torch = any(
        call.file == _TORCH_COLLECTIVES or (call.file, call.function) == (_HOROVOD_WAITS, "wait") for call in main
    )
    return Description(where_of(main), chain_of(main), in_torch, "\n".join(lines)[:MAX_TEXT])


def calls_of(frame: FrameType | None) -> list[Call]:
    """Return a stack's calls, innermost first."""
    calls = []
    while frame is not None:
        calls.append(Call(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return calls


def where_of(calls: Sequence[Call]) -> str:
    """Return the innermost call that is neither ours nor a library's; where there is none, the innermost of all."""
    return str(next((call for call in calls if _is_users(call)), calls[0] if calls else "nowhere"))


def chain_of(calls: Sequence[Call]) -> str:
    """Return the calls in one line, innermost first; what is further out than MAX_CHAIN is left out."""
    return " < ".join(str(call) for call in calls[:MAX_CHAIN])


def _is_users(call: Call) -> bool:
    return not call.file.startswith((_OURS, *_LIBRARIES)) and "-packages" + os.sep not in call.file
