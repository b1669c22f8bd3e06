"""Which GPU this process computes on. There is one process for each GPU of a worker, told by LOCAL_RANK."""

import os

import torch

from .errors import UsageError
from .protocol import env


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
    here = choose(int(said), torch.cuda.device_count())
    make_current(here)
    return here


def choose(local_rank: int, num_gpus: int) -> torch.device:
    """Return the device of a worker's process. Pure. Raises UsageError where the processes before it have all GPUs."""
    if num_gpus == 0:
        return torch.device("cpu")
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
