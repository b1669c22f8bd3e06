"""torch's NCCL backend as it was seen on a GPU, and as its sources have it: what is started returns at once, and a test says what
becomes of it.

- `wait()` of a work returns before the work has ended, or aborts the communicator in the thread that calls it. Only the thread of
  `torch_versions` may call it, of a work that has ended.
- Errors do not raise: they are in `work.exception()`, and in `get_error()` where a watchdog runs. `is_success()` is not there. In
  torch 2.11 and 2.12 `exception()` raises TypeError, whether the work has failed or not (`tells=False`).
- A synchronous all-gather returns no work, but None.
- A backend is not made without a store: it may be gone, after an abort.
- From `abort()` on, a question about a work waits until the abort has ended, and the interpreter is not free meanwhile.
- The first collective makes the communicator, also in a world of one. While that forms, it blocks, and only an abort ends it.
- An abort was seen to take 0.18 to 0.97 s. `shutdown()` ends a communicator in order, and raises where a rank has died. It holds
  the communicator's lock for all that time, so an abort that is called meanwhile waits for its end.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, ErrorType

from regroup.generation.backends import Backend


class FakeWork:
    """A collective on the GPU. It ends when a test says so."""

    def __init__(self, nccl: FakeNccl) -> None:
        self.nccl = nccl
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self.query_fails: RuntimeError | None = None
        self.seen_by_stream = False
        self.asked = threading.Event()

    def is_completed(self) -> bool:
        if self.nccl.abort_began.is_set():
            self.nccl.asked_too_late = True
            raise AssertionError("this question would wait for the abort, and hold the interpreter")
        self.asked.set()
        if self.query_fails is not None:
            raise self.query_fails
        return self.ended.is_set()

    def exception(self) -> BaseException | None:
        if not self.nccl.tells:
            raise TypeError(
                "Unable to convert function return value to a Python type! The signature was\n\t(self: ...)"
            )
        return self.error

    def block_current_stream(self) -> None:
        self.seen_by_stream = True

    def wait(self, *_: Any) -> bool:
        if self.nccl.tells or threading.current_thread().name != "regroup-errors" or not self.ended.is_set():
            raise AssertionError("wait() returns early, or aborts the communicator here")
        if self.error is not None:
            self.nccl.abort()
            raise self.error
        return True

    def is_success(self) -> bool:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")


class FakeNccl:
    """`works`: what was started, in order."""

    def __init__(
        self,
        *,
        forms: bool = True,
        abort_ends: bool = True,
        tells: bool = True,
        shutdown_ends: bool = True,
        rank_died: bool = False,
    ) -> None:
        self.tells = tells
        self.works: list[FakeWork] = []
        self._rank_died = rank_died
        self.is_connected = False
        self.forms = threading.Event()
        if forms:
            self.forms.set()
        self.abort_ends = threading.Event()
        if abort_ends:
            self.abort_ends.set()
        self.error = ErrorType.SUCCESS
        self.error_at_launch: RuntimeError | None = None
        self.connecting, self.abort_began = threading.Event(), threading.Event()
        self.shutdown_ends = threading.Event()
        if shutdown_ends:
            self.shutdown_ends.set()
        self.shutdown_began = threading.Event()
        self._lock = threading.Lock()
        self.aborted_in = self.shut_down_in = ""
        self.asked_too_late = False

    def allreduce(self, _tensors: list[torch.Tensor]) -> FakeWork:
        self.connecting.set()
        self.forms.wait()
        if self.abort_began.is_set():
            raise torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0.")
        if self.error_at_launch is not None:
            raise self.error_at_launch
        if self.shutdown_began.is_set():
            raise torch.distributed.DistBackendError("NCCL communicator was destroyed on rank 0.")
        self.is_connected = True
        work = FakeWork(self)
        self.works.append(work)
        return work

    def _allgather_base(
        self, output: torch.Tensor, _input: torch.Tensor, options: AllgatherOptions | None = None
    ) -> FakeWork | None:
        work = self.allreduce([output])
        return work if options is None or options.asyncOp else None

    def broadcast(self, tensors: list[torch.Tensor], _options: Any = None) -> FakeWork:
        return self.allreduce(tensors)

    def get_error(self) -> ErrorType:
        return self.error

    def abort(self) -> None:
        self.aborted_in = threading.current_thread().name
        self.abort_began.set()
        self.forms.set()
        with self._lock:
            self.abort_ends.wait()

    def shutdown(self) -> None:
        self.shut_down_in = threading.current_thread().name
        self.shutdown_began.set()
        with self._lock:
            self.shutdown_ends.wait()
        if self._rank_died:
            raise torch.distributed.DistBackendError("NCCL error: remote process exited or there was a network error")

    def backend(self, store: Any = "a store") -> Backend:
        if store is None:
            raise ValueError("store argument cannot be None")
        return Backend(self, on_gpu=True)
