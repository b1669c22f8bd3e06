"""A torch backend with one owner: nobody else ever refers to it, so nobody else runs its destructor.

A backend's destructor waits for the backend's threads. gloo's never ends if gloo has forgotten a send, and NCCL's waits for an
abort. So the destructor must run in a thread of its own, and no other reference may be the last one. Even a local variable in the
frame of a traceback keeps a backend alive, and ends it in the thread that drops the traceback. So the rest of this room passes
`Backend` objects around, which are emptied when the generation is left. A ProcessGroup of torch's holds its backends, too, and
belongs to the script: `let_go` waits as long as one of those lives.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup

from regroup.errors import Aborted

END_S = 60.0
"""Seconds after which nothing waits for the end of a communicator any more, and a message says so. The end may never come."""
ASKED_S = 1.0
"""Seconds after which an abort does not wait for a question whether a work has ended. The question takes microseconds, or hangs."""
_ending: dict[threading.Thread, float] = {}
"""Threads in which communicators end, with the monotonic time at which each began. Each takes itself off."""
_one_less = threading.Condition()
"""Guards `_ending`, and is notified when a thread takes itself off."""

_closing: set[threading.Thread] = set()
"""Threads in which backends end. Each takes itself off."""


class Backend:
    """The one reference to a backend of torch, until `release`."""

    def __init__(self, raw: Any, *, on_gpu: bool = False) -> None:
        """`on_gpu`: the backend is NCCL's, for tensors on a GPU."""
        self.on_gpu = on_gpu
        self._raw = raw
        self._ends = False
        """`abort` or `end` was called."""

    def launch(self, method: str, *arguments: Any) -> Any:
        """Start a collective by its name and return torch's Work. Raises what the backend raises."""
        if self._raw is None:
            raise Aborted("The groups were left.")
        return getattr(self._raw, method)(*arguments)  # without a variable: a traceback would keep it

    def serve(self, group: ProcessGroup, device_type: str, kind: Any) -> None:
        """Be the group's default backend, and the one for tensors of this device type."""
        group._register_backend(torch.device(device_type), kind, self._raw)
        group._set_default_backend(kind)

    def abort(self, asking: threading.Lock, keep: Any) -> None:
        """End what runs on the backend, in a thread of its own: NCCL's abort takes seconds, and may never return.

        It begins once nobody holds `asking`, or after ASKED_S. `keep` is held until it has returned: until then the GPU may write
        there.
        """
        if self._raw is None or self._ends:
            return
        self._ends = True
        _start_ending("regroup-abort", lambda raw: _abort(raw, asking), [self._raw], keep)

    def end(self) -> None:
        """End a backend that all ranks have stopped using, in a thread of its own.

        NCCL finishes what it still sends, and then lets go of its memory. If that fails, the thread aborts the backend. A later
        `abort` does nothing: torch lets none pass.
        """
        if self._raw is None or self._ends:
            return
        self._ends = True
        _start_ending("regroup-end", _shut_down, [self._raw])

    def release(self) -> list[Any]:
        """Return the backend, for `let_go`, and refer to it no longer."""
        raw, self._raw = self._raw, None
        return [] if raw is None else [raw]


def _start_ending(name: str, ends: Callable[[Any], None], held: list[Any], keep: Any = None) -> None:
    thread = threading.Thread(target=_run, args=(ends, held, keep), name=name, daemon=True)
    with _one_less:
        _ending[thread] = time.monotonic()
    thread.start()


def _run(ends: Callable[[Any], None], held: list[Any], _keep: Any) -> None:
    late = threading.Timer(END_S, print, [_LATE], {"flush": True})
    late.daemon = True
    late.start()
    try:
        with contextlib.suppress(RuntimeError):
            ends(held[0])
    finally:
        late.cancel()
        held.clear()
        with _one_less:
            _ending.pop(threading.current_thread(), None)
            _one_less.notify_all()


def _abort(raw: Any, asking: threading.Lock) -> None:
    if asking.acquire(timeout=ASKED_S):
        asking.release()
    raw.abort()


def _shut_down(raw: Any) -> None:
    try:
        raw.shutdown()
    except RuntimeError:  # a rank has died meanwhile, or torch's own bound for a call of NCCL is over
        raw.abort()


_LATE = (
    f"NCCL has not ended its communicator within {END_S:.0f} s. Training goes on with the next one; the memory of this one stays "
    "in use on the GPU. If that repeats, delete the pod."
)


def patience_s(ages_s: Sequence[float], most: int) -> float:
    """Return how long a new communicator waits at most until only `most` older ones are ending. Pure.

    `ages_s` has the age of each end that has not come yet. An end that is older than END_S may never come, and does not count.
    """
    left_s = sorted(END_S - age_s for age_s in ages_s if age_s < END_S)
    return left_s[len(left_s) - most - 1] if len(left_s) > most else 0.0


def wait_ended(most: int = 0, timeout_s: float = END_S) -> None:
    """Wait until at most `most` communicators are ending, as long as `patience_s` says, and for at most `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    with _one_less:
        while True:
            now_s = time.monotonic()
            wait_s = min(until_s - now_s, patience_s([now_s - began_s for began_s in _ending.values()], most))
            if wait_s <= 0:
                return
            _one_less.wait(wait_s)


def let_go(held: list[Any], groups: Iterable[Any]) -> None:
    """Empty `held` in a thread, at once where none of these ProcessGroups lives, else when the last one has gone.

    The list is the only reference to what is in it. A script that keeps a group for good keeps its backends, too.
    """
    waiting = _Waiting(held)
    for group in groups:
        waiting.tokens.append(None)
        weakref.finalize(group, waiting.one_less).atexit = False
    waiting.one_less()


class _Waiting:
    """`one_less` may be called from any thread, and by the garbage collector in the middle of itself: it takes no lock."""

    def __init__(self, held: list[Any]) -> None:
        self._held = held
        self.tokens: list[None] = [None]

    def one_less(self) -> None:
        self.tokens.pop()
        if not self.tokens:
            thread = threading.Thread(target=_end, args=(self._held,), name="regroup-close", daemon=True)
            _closing.add(thread)
            thread.start()


def _end(held: list[Any]) -> None:
    held.clear()
    _closing.discard(threading.current_thread())


def wait_closed(timeout_s: float) -> None:
    """Wait until no backend is ending, for at most `timeout_s`. An interpreter that ends while a thread comes out of a backend's
    destructor aborts the process."""
    ends_s = time.monotonic() + timeout_s
    for thread in list(_closing):
        thread.join(max(0.0, ends_s - time.monotonic()))
