"""torch's NCCL backend as its sources have it, without a GPU: what is started returns at once, and `test` says what becomes of it.

- `wait()` of a work returns before the work has ended, or aborts the communicator in the thread that calls it: nothing may call it.
- Errors do not raise: they are in `work.exception()`, and in `get_error()` where a watchdog runs. `is_success()` is not there.
- From `abort()` on, a question about a work waits until the abort has ended, and the interpreter is not free meanwhile.
- While the communicator forms, a first collective blocks, and only an abort ends it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch._C._distributed_c10d import ErrorType

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
        return self.error

    def block_current_stream(self) -> None:
        self.seen_by_stream = True

    def wait(self, *_: Any) -> None:
        raise AssertionError("wait() returns early, or aborts the communicator here")

    def is_success(self) -> bool:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")


class FakeNccl:
    """`works`: what was started, in order."""

    def __init__(self, *, forms: bool = True, abort_ends: bool = True) -> None:
        self.works: list[FakeWork] = []
        self.forms = threading.Event()
        if forms:
            self.forms.set()
        self.abort_ends = threading.Event()
        if abort_ends:
            self.abort_ends.set()
        self.error = ErrorType.SUCCESS
        self.error_at_launch: RuntimeError | None = None
        self.connecting, self.abort_began = threading.Event(), threading.Event()
        self.aborted_in = ""
        self.asked_too_late = False

    def allreduce(self, _tensors: list[torch.Tensor]) -> FakeWork:
        self.connecting.set()
        self.forms.wait()
        if self.abort_began.is_set():
            raise torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0.")
        if self.error_at_launch is not None:
            raise self.error_at_launch
        work = FakeWork(self)
        self.works.append(work)
        return work

    def get_error(self) -> ErrorType:
        return self.error

    def abort(self) -> None:
        self.aborted_in = threading.current_thread().name
        self.abort_began.set()
        self.forms.set()
        self.abort_ends.wait()

    def backend(self) -> Backend:
        return Backend(self)
