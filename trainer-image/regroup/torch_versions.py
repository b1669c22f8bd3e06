"""The torch versions that Regroup runs with, and the differences between them. No other module asks for a version.

Imports nothing beyond the standard library, because the library and `regroup run` ask here before anything imports torch.
"""

from __future__ import annotations

import os
import queue
import re
import sys
import threading
from concurrent import futures
from typing import Any, NamedTuple

from regroup import cannot_run
from regroup.protocol import env

OLDEST, NEWEST = (2, 11), (2, 13)
"""The oldest torch that Regroup runs with, and the newest that it is tested with. The images of the project have NEWEST."""


class Difference(NamedTuple):
    """One row of the table in docs/reference/library.md."""

    what: str
    since: tuple[int, int]
    """First version of torch that has it."""
    older: str
    """Behaviour of Regroup in an older torch."""


FSDP = Difference(
    "FSDP2 (`fully_shard`) recovers from a backward that was cut off, and reduces parameters that a process has not used",
    (2, 13),
    "A session refuses a model with `fully_shard`, in one sentence. The other dimensions of `regroup.mesh()` work.",
)
DIFFERENCES = (
    FSDP,
    Difference(
        "`Work.exception()` returns the error of a collective",
        (2, 13),
        "On a GPU the error is read by `Work.wait()`, in a thread of its own. The log may lack the text of an error.",
    ),
)
"""Features that a newer torch in the range has and an older one lacks."""


class Judgement(NamedTuple):
    """The sentence for the user about a version of torch; both are empty for one in the tested range."""

    refuses: str = ""
    """The version is too old."""
    warns: str = ""
    """The version is newer than the newest that is tested."""


def judge(version: str) -> Judgement:
    """Return the judgement on a version of torch, given as in `torch.__version__`. Pure."""
    release = _release(version)
    if release < OLDEST:
        return Judgement(
            refuses=f"torch {version} is older than {_text(OLDEST)}, the oldest that Regroup runs with: use an image with "
            f"torch {_text(OLDEST)} to {_text(NEWEST)}."
        )
    if release > NEWEST:
        return Judgement(
            warns=f"torch {version} is newer than {_text(NEWEST)}, the newest that Regroup is tested with. If something fails, "
            f"try torch {_text(NEWEST)}."
        )
    return Judgement()


_warned: set[str] = set()
"""Warnings that `require` has printed. It is called for each name of the library that a script uses."""


def require() -> None:
    """Check the torch of this process. The library calls this before it imports anything that needs torch.

    Raises UsageError for a version that is too old. The agent hears of it, so that the process is not started again. If the version
    is newer than those tested, the first process of each worker prints a warning.
    """
    import torch

    judged = judge(torch.__version__)
    if judged.refuses:
        cannot_run.refuse(judged.refuses)
    if judged.warns and judged.warns not in _warned and os.environ.get(env.LOCAL_RANK, "0") == "0":
        _warned.add(judged.warns)
        print(f"regroup: {judged.warns}", file=sys.stderr, flush=True)


def require_fsdp() -> None:
    """Raise UsageError if the torch of this process is too old for FSDP2 in a session. The agent hears of it as well."""
    import torch

    if not has(FSDP, torch.__version__):
        cannot_run.refuse(
            f"torch {torch.__version__} is older than {_text(FSDP.since)}, and the model uses fully_shard(): a session needs torch "
            f"{_text(FSDP.since)} for it. Use a newer torch, or split the model by another dimension of regroup.mesh()."
        )


def has(difference: Difference, version: str) -> bool:
    """Return whether a version of torch has this feature. Pure."""
    return _release(version) >= difference.since


def table() -> str:
    """Return the table of differences in docs/reference/library.md."""
    rows = ["| of torch | in torch | in an older one |", "| --- | --- | --- |"]
    rows += [f"| {row.what} | {_text(row.since)} and newer | {row.older} |" for row in DIFFERENCES]
    return "\n".join(rows)


def _release(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else NEWEST  # a build with a name instead of a number


def _text(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


_SLICE_S, _SLICES = 0.02, 25
"""Length and number of the slices in which `_Waiter.ask` waits for an answer.

A work without an error answers `wait` in microseconds. There are many slices for a busy machine, which pauses the thread that
counts them together with the one that answers. With an error the answer takes as long as NCCL's abort.
"""


def error_of(work: Any) -> BaseException | None:
    """Return the error with which a collective has ended, or None if it has succeeded. `work.is_completed()` must be True.

    torch 2.13 answers `work.exception()`. In 2.11 and 2.12 this call raises TypeError for every work, since the error is a C++ type
    that Python does not know. There only `work.wait()` tells whether the work has failed. With NCCL an error makes `wait` abort the
    communicator in the calling thread, which may take long or never return. So a thread of its own calls it.
    """
    try:
        error: BaseException | None = work.exception()
    except TypeError:
        return _Waiter.ask(work)
    return error


class _Waiter:
    """A thread that calls `work.wait()` for others. The process has one. If a call does not return, a new one replaces it."""

    _current: _Waiter | None = None

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[Any, futures.Future[None]] | None] = queue.SimpleQueue()
        """Works to wait for; None ends the thread."""
        threading.Thread(target=self._run, name="regroup-errors", daemon=True).start()

    @classmethod
    def ask(cls, work: Any) -> BaseException | None:
        """Return the error of a work that has ended. The main thread calls this, or the thread that connects in its place."""
        waiter, cls._current = cls._current or _Waiter(), None
        answer: futures.Future[None] = futures.Future()
        waiter._asked.put((work, answer))
        if not any(futures.wait([answer], _SLICE_S).done for _ in range(_SLICES)):
            waiter._asked.put(None)  # ends the thread, if `wait` ever returns
            return RuntimeError("A collective has ended with an error, and torch has not said which one within 0.5 s.")
        cls._current = waiter
        return answer.exception()

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            work, answer = asked
            try:
                work.wait()
                answer.set_result(None)
            except Exception as error:
                answer.set_exception(error.with_traceback(None))  # the frames of the traceback hold the work
            del asked, work, answer  # otherwise the tensors of a work live until the next one
