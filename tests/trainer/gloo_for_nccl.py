"""gloo in place of NCCL, for a process without a GPU: its tensors in host memory go the way of those on a GPU.

What a process sees of NCCL is as it was seen on a GPU:
- A backend is not connected when it is made; its first collective connects it.
- A collective on which another one depends is not waited for by the host (`order`). Where a rank has died that does not raise:
  the host goes on with anything in its tensors, as after an abort, until the commit.
- An optimizer steps the parameters of a group together, where the script does not say otherwise.
- Whoever asks whether a collective has ended gets an answer at once; its error is found afterwards (`finish`).

`install` is called before `regroup.mesh()` and the session.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from typing import Any

import torch
from torch._C._distributed_c10d import ErrorType, ProcessGroup

from regroup.generation import living, nccl
from regroup.generation.backends import Backend
from regroup.generation.groups import open_gloo
from regroup.generation.sockets import Sockets, device_alone

POLL_S = 0.005
_end = threading.Event()
"""Set by the abort of the communicators that were opened last."""


class GlooForNccl(Backend):
    """A communicator. `calls`: names of the collectives that were launched on it."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        global _end
        super().__init__(None, on_gpu=True)
        self._store, self._rank, self._size = store, rank, size
        self._sockets = Sockets(0)
        self._is_left = False
        if _end.is_set():
            _end = threading.Event()
        self._end = _end

    def launch(self, method: str, *arguments: Any) -> Any:
        if method == "get_error":
            return ErrorType.SUCCESS
        self._connect()
        return super().launch(method, *arguments)

    def serve(self, group: ProcessGroup, device_type: str, kind: Any) -> None:  # noqa: ARG002
        self._connect()
        super().serve(group, "cpu", ProcessGroup.BackendType.GLOO)

    def abort(self, asking: threading.Lock, keep: Any) -> None:  # noqa: ARG002
        self._end.set()
        self._sockets.shut_down()

    def end(self) -> None:
        pass

    def release(self) -> list[Any]:
        self._is_left = True
        return super().release()

    def _connect(self) -> None:
        if self._raw is not None or self._is_left:
            return
        device = device_alone()
        if self._size > 1:
            device, port = self._sockets.open_device("127.0.0.1")
            self._store.set(f"port/{self._rank}", str(port))
            self._sockets.add_ports(int(self._store.get(f"port/{rank}")) for rank in range(self._size))
        self._raw = open_gloo(self._store, self._rank, self._size, device).release()[0]
        if self._size > 1:
            self._sockets.keep(self._size - 1)


def order(work: Any) -> None:
    """In place of a stream, which has no host to tell: wait until the collective has ended, failed, or was aborted."""
    end, is_over = _end, threading.Event()

    def wait() -> None:
        with contextlib.suppress(RuntimeError):
            work.wait()  # not in this thread: an abort does not end gloo's own wait
        is_over.set()

    threading.Thread(target=wait, daemon=True).start()
    while not (is_over.is_set() or end.is_set()):
        is_over.wait(POLL_S)


def finish(_backend: Backend, work: Any) -> None:
    """Raise what has failed as NCCL's error."""
    try:
        work.wait()
    except RuntimeError as error:
        raise torch.distributed.DistBackendError(str(error)) from None


def install() -> None:
    """Let this process's tensors go the way of those on a GPU from now on."""
    replaced: dict[str, Any] = {
        "serves": lambda _device: True,
        "open_backend": GlooForNccl,
        "first_tensor": lambda _device: torch.zeros(1),
        "prepare": lambda: None,
        "order": order,
        "finish": finish,
    }
    for name, value in replaced.items():
        setattr(nccl, name, value)
    # gloo's own is never complete, whoever asks (torch 2.13).
    living.LivingGroup.scatters = lambda *_: False  # type: ignore[method-assign]
    optimizers: Any = importlib.import_module("torch.optim.optimizer")  # torch.optim takes the name off
    optimizers._get_foreach_kernels_supported_devices = lambda: ["cpu"]
