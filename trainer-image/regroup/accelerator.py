"""Chooses the GPU of this process by LOCAL_RANK. A worker has one process for each of its GPUs."""

import os
from pathlib import Path

import torch

from . import cannot_run
from .errors import UsageError
from .protocol import env, gpus


def device() -> torch.device:
    """Return the device of this process and make it torch's current one: the GPU of its LOCAL_RANK, or the CPU without GPUs.

    Call it before the model is built or moved. Raises UsageError if this process has no GPU of its own, and if
    LOCAL_RANK is no number.
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
    """Return the device of a worker's process. Pure.

    Raises UsageError if there are fewer GPUs than processes and they may not share one (`shares`).
    """
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
    """Make a GPU torch's current one. Streams, NCCL and the random numbers of a step belong to the current GPU."""
    if here.type == "cuda":
        torch.cuda.set_device(here)


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""File with an identifier of the machine, which is the same in all of its containers."""


def identity(here: torch.device) -> str:
    """Return an identifier of the GPU, "machine/GPU-uuid", which is the same in each process that computes on it.

    Ranks compare it to find out that two of them use one GPU. It is empty on the CPU, if ranks may share a GPU, and if torch
    does not know it.
    """
    if here.type != "cuda" or gpus.may_share(os.environ):
        return ""
    try:
        uuid = getattr(torch.cuda.get_device_properties(here), "uuid", None)
        return "" if uuid is None else f"{BOOT_ID.read_text().strip()}/GPU-{uuid}"
    except (RuntimeError, AssertionError, OSError):  # the device cannot be asked; NCCL will find a shared GPU itself
        return ""
