"""Handles of collectives that run in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from regroup.horovod.errors import HorovodInternalError
from regroup.horovod.negotiation import Request

SAY_WAIT_AFTER_S = 1.0
"""Time after which a blocked rank tells the coordinator what it waits for."""


@dataclass(eq=False)
class Handle:
    """A collective that runs in the background. `hvd.synchronize` waits for it and returns its result."""

    request: Request
    tensors: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor] | None = None
    """Tensors that get the result, for an operation in place."""
    shape_result: Callable[[Any], Any] = lambda result: result
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: str = ""
    ready: Any = None
    """CUDA event after which the tensors have their values; None on a CPU."""
    say_wait: Callable[[], None] = lambda: None
    """Tells the coordinator that this rank is blocked."""

    def end(self, result: Any = None, error: str = "") -> None:
        """Set result or error. The first call counts."""
        if not self.done.is_set():
            self.result, self.error = result, error
            self.tensors = ()
            self.done.set()

    def wait(self) -> Any:
        """Return the result. Raises HorovodInternalError if the ranks do not match, or one of them has ended."""
        if not self.done.wait(SAY_WAIT_AFTER_S):
            self.say_wait()
            self.done.wait()
        if self.error:
            raise HorovodInternalError(self.error)
        return self.shape_result(self.result)
