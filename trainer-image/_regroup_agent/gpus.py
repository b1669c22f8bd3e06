"""Checks that a worker has a GPU for each of its processes, before any process starts and would fail again and again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from regroup.protocol import env
from regroup.protocol.gpus import VISIBLE, may_share, visible

DEV = Path("/dev")
_ACCELERATOR = re.compile(r"nvidia\d|dxg|kfd|dri|accel|hl\d|davinci|neuron|vfio|xpu")
"""Begin of the names of devices of accelerators: of NVIDIA, AMD, Intel, Google, Habana, Huawei and AWS."""
_DEVICE = re.compile(r"nvidia\d+")
"""Name of the driver's device of one GPU. A container has the GPUs that it was given, a privileged one has all of its node."""


def lack(environ: Mapping[str, str], processes: int, dev: Path = DEV) -> str:
    """Return a sentence if a worker has fewer GPUs than processes, else an empty text.

    Nothing is lacking if the processes may share a GPU, or if there is no GPU at all: the script then computes on the CPU.
    """
    num_gpus = count(environ, dev)
    if num_gpus == 0 or processes <= num_gpus or may_share(environ):
        return ""
    gpus = f"{num_gpus} GPU{'s' if num_gpus > 1 else ''}"
    return (
        f"The container of pod {environ[env.POD_NAME]} has {gpus}, and spec.processesPerWorker is {processes}: each process needs "
        f"a GPU of its own. Request as many GPUs as spec.processesPerWorker, or lower that. For a script that computes on the CPU, "
        f"set {VISIBLE} to an empty value in the container's env."
    )


def has_none(environ: Mapping[str, str], dev: Path = DEV) -> bool:
    """Return whether a process of this container certainly computes on the CPU.

    It does if the container has no device of any accelerator, or NVIDIA's only and CUDA is told to show none of them.
    """
    try:
        found = {path.name for path in dev.iterdir() if _ACCELERATOR.match(path.name)}
    except OSError:
        return False
    hidden = environ.get(VISIBLE) is not None and not visible(environ[VISIBLE])
    return not found or (hidden and all(name.startswith("nvidia") for name in found))


def count(environ: Mapping[str, str], dev: Path = DEV) -> int:
    """Return the number of GPUs that CUDA shows to a process of this container. Of several MIG devices CUDA shows one."""
    try:
        found = sum(_DEVICE.fullmatch(path.name) is not None for path in dev.iterdir())
    except OSError:
        return 0
    said = environ.get(VISIBLE)
    if said is None:
        return found
    names = visible(said)
    return min(1 if any(name.startswith("MIG-") for name in names) else len(names), found)
