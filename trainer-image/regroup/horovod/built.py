"""Answers to the questions that Horovod's scripts ask about how it was built, and the timeline, which does nothing here."""

from __future__ import annotations

from typing import Any, cast

import torch


def gloo_built() -> bool:
    """Return True: tensors on the CPU travel by gloo."""
    return True


def gloo_enabled() -> bool:
    """Return True: no MPI is needed."""
    return True


def nccl_built() -> int:
    """Return NCCL's version as a number, and 0 if this torch has none."""
    if not torch.distributed.is_nccl_available() or not torch.cuda.is_available():
        return 0
    major, minor, patch = cast(Any, torch.cuda.nccl).version()[:3]
    return int(major * 10000 + minor * 100 + patch)


def cuda_built() -> bool:
    """Return whether this torch runs on CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether this torch runs on ROCm."""
    return torch.version.hip is not None


def mpi_built() -> bool:
    """Return False, as do the next functions: neither MPI nor the libraries of other makers take part."""
    return False


mpi_enabled = mpi_threads_supported = ddl_built = ccl_built = mpi_built


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Do nothing: there is no timeline. `torch.profiler` shows the collectives."""


def stop_timeline() -> None:
    """Do nothing, as `start_timeline`."""


def check_extension(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing: no extension is compiled."""
