"""Which GPU this process computes on. There is one process for each GPU of a worker, told by LOCAL_RANK."""

import os
from pathlib import Path

import torch

from . import cannot_run
from .errors import UsageError
from .protocol import env, gpus


def device() -> torch.device:
    """Return the device of this process, and make it torch's current one: a GPU by LOCAL_RANK; the CPU where there is no GPU.

    Call it before the model is built or moved. Raises UsageError where this process has no GPU of its own,
    or LOCAL_RANK is no number.
    """
    said = os.environ.get(env.LOCAL_RANK) or "0"
    if not said.isdecimal():
        raise UsageError(
            f"LOCAL_RANK is {said!r}; it must be a whole number from 0. Unset it: Regroup sets it in each process."
        )
    try:
        here = choose(int(said), torch.cuda.device_count(), shares=gpus.may_share(os.environ))
    except UsageError as error:
        cannot_run.refuse(str(error))
    make_current(here)
    return here


def choose(local_rank: int, num_gpus: int, *, shares: bool = False) -> torch.device:
    """Return the device of a worker's process. Pure. Raises UsageError where the processes before it have all GPUs, unless
    processes may share one (`shares`)."""
    if num_gpus == 0:
        return torch.device("cpu")
    if shares:
        return torch.device("cuda", local_rank % num_gpus)
    if local_rank >= num_gpus:
        raise UsageError(
            f"LOCAL_RANK is {local_rank}, and this worker sees {num_gpus} GPU{'s' if num_gpus > 1 else ''}: each process needs one "
            "of its own. Request as many GPUs as spec.processesPerWorker, or lower that."
        )
    return torch.device("cuda", local_rank)


def make_current(here: torch.device) -> None:
    """Make a GPU torch's current one: streams, NCCL and the random numbers of a step are those of the current GPU."""
    if here.type == "cuda":
        torch.cuda.set_device(here)


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""The same in all containers of a machine, and another one on each machine."""


def identity(here: torch.device) -> str:
    """Return which GPU this is, as "machine/GPU-uuid", the same in each process that computes on it.

    Empty where nothing is to be compared: on the CPU, where ranks may share a GPU, and where torch cannot say it.
    """
    if here.type != "cuda" or gpus.may_share(os.environ):
        return ""
    try:
        uuid = getattr(torch.cuda.get_device_properties(here), "uuid", None)
        return "" if uuid is None else f"{BOOT_ID.read_text().strip()}/GPU-{uuid}"
    except (RuntimeError, AssertionError, OSError):  # the device cannot be asked: NCCL finds out by itself
        return ""
