"""A torch backend with one owner: nobody else ever refers to it, so nobody else runs its destructor.

A backend's destructor waits for the backend's threads. gloo's never ends where gloo has forgotten a send, and NCCL's waits for
an abort. So it must run in a thread of its own, and that is only certain where no other reference can be the last one: a local
variable in the frame of a traceback is enough to keep a backend alive, and to end it in the thread that drops the traceback.
`Backend` is what the rest of this room passes around; it is emptied when the generation is left. torch's own ProcessGroup holds
its backends, too, and belongs to the script: as long as one of those lives, `let_go` waits.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup

from regroup.errors import Aborted

ABORT_S = 60.0
"""NCCL's abort may never end; after this it is said, and the next generation no longer waits for it."""
ASKED_S = 1.0
"""A question whether a work has ended takes microseconds. One that takes so long may need the abort."""
_aborting: dict[threading.Thread, float] = {}
"""Those that have not returned yet, with the monotonic time at which each began; each takes itself off."""

_closing: set[threading.Thread] = set()
"""Those in which backends end. Each takes itself off."""


class Backend:
    """The one reference to a backend of torch, until `release`."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

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
        if self._raw is None:
            return
        thread = threading.Thread(target=_abort, args=([self._raw], asking, keep), name="regroup-abort", daemon=True)
        _aborting[thread] = time.monotonic()
        thread.start()

    def release(self) -> list[Any]:
        """Return the backend, for `let_go`, and refer to it no longer."""
        raw, self._raw = self._raw, None
        return [] if raw is None else [raw]


def _abort(held: list[Any], asking: threading.Lock, _keep: Any) -> None:
    if asking.acquire(timeout=ASKED_S):
        asking.release()
    late = threading.Timer(ABORT_S, print, [_LATE], {"flush": True})
    late.daemon = True
    late.start()
    try:
        with contextlib.suppress(RuntimeError):
            held[0].abort()
    finally:
        late.cancel()
        held.clear()
        _aborting.pop(threading.current_thread(), None)


_LATE = (
    f"NCCL has not ended its communicator within {ABORT_S:.0f} s. Training goes on with the next one; the memory of this one stays "
    "in use on the GPU. If that repeats, delete the pod."
)


def wait_aborted(timeout_s: float = ABORT_S) -> None:
    """Wait until no abort is under way, for at most `timeout_s`: a new communicator is not made beside one that ends.

    An abort that is older than ABORT_S is not waited for: otherwise one that never ends would delay every later generation.
    """
    ends_s = time.monotonic() + timeout_s
    for thread, began_s in list(_aborting.items()):
        thread.join(max(0.0, min(ends_s, began_s + ABORT_S) - time.monotonic()))


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
