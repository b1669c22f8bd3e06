"""NCCL as a generation's groups use it: its settings, how a communicator forms, and whether a collective has succeeded.

torch's ProcessGroupNCCL is made for processes that end with the first error. Here they live on, so nothing of torch's may end the
process, and an abort may come at any time, also while the communicator forms. The reasons are in docs/design/adr/0026-nccl.md.
The page docs/how-to/gpu.md says what ran on a GPU, and how to check it there.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import ErrorType, Work

from regroup import torch_versions
from regroup.errors import PeerLost, UsageError
from regroup.protocol import env

from .backends import Backend
from .pauses import pause_s

CONNECT_S = 300
"""Bound for the connection of the GPUs, and for each other call in which NCCL connects or ends something. The operator ends a
generation earlier (adoptTimeoutSeconds, 60 at first); this is for what an abort cannot reach. torch reads it once."""
ENDING = 2
"""Number of older communicators that may still be ending while the next one forms; further ones are waited for. Each of them holds
memory of the GPU until it has ended. 0: a communicator forms only when none is ending, should NCCL hang otherwise."""
_FOREVER = timedelta(days=30)

OURS: Mapping[str, str] = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",  # there is no watchdog thread then, and no monitor: both can end the process
    # Where a torch has a watchdog all the same:
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # it turns error handling on again
    "TORCH_NCCL_PROPAGATE_ERROR": "0",  # who has left says so to the operator, not to the store
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # the watchdog sleeps four times as long, and holds a lock
}
"""Settings without which an error of one rank ends the processes of the others."""
DEFAULTS: Mapping[str, str] = {
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(CONNECT_S),
}
"""A user's own value is left: with the first at 0 no abort reaches a communicator that forms, and all else is the same."""


class Settings(NamedTuple):
    """Variables for the environment, and a sentence for each value of the user's that changes."""

    environment: dict[str, str]
    sentences: tuple[str, ...]


def settings(environment: Mapping[str, str]) -> Settings:
    """Return what has to be set before the process has an NCCL backend. Pure."""
    changed = {name: value for name, value in OURS.items() if environment.get(name) != value}
    added = {name: value for name, value in DEFAULTS.items() if name not in environment}
    sentences = tuple(
        f"{name} is {environment[name]}, and is set to {value}: survivors must not end with a rank that failed. Remove it."
        for name, value in changed.items()
        if name in environment
    )
    return Settings(changed | added, sentences)


def most_ending(environment: Mapping[str, str]) -> int:
    """Return ENDING, or what the user says instead. Pure. Raises UsageError."""
    text = environment.get(env.NCCL_ENDING) or str(ENDING)
    if not (text.isascii() and text.isdigit()):
        raise UsageError(
            f"{env.NCCL_ENDING} is {text!r}, and must be a whole number, 0 or more: how many NCCL communicators may still be "
            f"ending while the next one forms. Correct it, or remove it to have {ENDING}."
        )
    return int(text)


def prepare() -> None:
    """Apply `settings` to this process. Once, from the main thread: NCCL's own threads read the environment."""
    most_ending(os.environ)
    found = settings(os.environ)
    for sentence in found.sentences:
        print(sentence, flush=True)
    os.environ.update(found.environment)


def serves(device: torch.device) -> bool:
    """Return whether tensors on this device are NCCL's."""
    return device.type == "cuda"


_PLACES = (torch.int16, torch.int32, torch.int64)


def hold_places(values: Any) -> bool:
    """Return whether a tensor among these, or in lists of them, holds whole numbers, which a model may use as places or sizes.

    An abort leaves anything in the tensors of a collective. Floating-point numbers of that kind do no harm until the commit fails.
    A place that does not exist fails on the GPU, which then ends every process that uses it. So the host waits for these.
    """
    if isinstance(values, (list, tuple)):
        return any(map(hold_places, values))
    return isinstance(values, torch.Tensor) and values.dtype in _PLACES


def open_backend(store: Any, rank: int, size: int) -> Backend:
    """Return a backend that is not connected. No collective of it times out: membership ends it."""
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = _FOREVER
    return Backend(ProcessGroupNCCL(store, rank, size, options), on_gpu=True)


def first_tensor(device: torch.device) -> torch.Tensor:
    """Make the device this thread's current one, and return a tensor on it."""
    torch.cuda.set_device(device)
    return torch.zeros(1, device=device)


def connect(backend: Backend, tensor: torch.Tensor, is_completed: Callable[[Work], bool]) -> None:
    """Connect the GPUs of all ranks by a first collective. Blocks for up to CONNECT_S; all ranks call it. `is_completed` asks a
    work whether it has ended; what it raises ends this.

    Not by `eager_connect_single_device`: a communicator that does not block is not ready after it, and torch 2.13 has no call that
    says when it is. Raises PeerLost at the bound, or what NCCL says.
    """
    began_s = time.monotonic()
    work = backend.launch("allreduce", [tensor])
    while not is_completed(work):
        waited_s = time.monotonic() - began_s
        if waited_s > CONNECT_S:
            raise PeerLost(f"The GPUs of all ranks are not connected after {CONNECT_S} s.")
        time.sleep(pause_s(waited_s))
    finish(backend, work)


def with_work(arguments: Sequence[Any]) -> None:
    """Change a collective's options so that torch returns a Work. For a synchronous collective torch returns None with NCCL, and
    nobody could ask whether it has ended."""
    for argument in arguments:
        if hasattr(argument, "asyncOp"):
            argument.asyncOp = True


def finish(backend: Backend, work: Work) -> None:
    """Raise the error of a collective that has ended, as torch's DistBackendError; else have the current stream see its result.

    Without `work.wait()` in this thread: where there is an error that aborts the communicator, and may never return. And
    without `is_success`, which torch has for gloo only. `get_error` is a watchdog's, where there is one.
    """
    error = torch_versions.error_of(work)
    if error is not None:
        raise torch.distributed.DistBackendError(str(error))
    said = backend.launch("get_error")
    if said != ErrorType.SUCCESS:
        raise torch.distributed.DistBackendError(f"NCCL reports {said.name}.")
    order(work)


def order(work: Work) -> None:
    """Have what is launched next on the current stream see the result of a collective. Does not wait for it."""
    work.block_current_stream()
