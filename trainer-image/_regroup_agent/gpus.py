"""Whether a worker has a GPU for each of its processes. Said before any process starts: each would find it out by itself, again and
again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from regroup.protocol import env
from regroup.protocol.gpus import VISIBLE, may_share, visible

DEV = Path("/dev")
_DEVICE = re.compile(r"nvidia\d+")
"""The driver's device of one GPU. A container has those that it was given; a privileged one has all of its node."""


def lack(environ: Mapping[str, str], processes: int, dev: Path = DEV) -> str:
    """Return one sentence where a worker has fewer GPUs than processes; empty: each has one, may share one, or there is no GPU and
    the script computes on the CPU."""
    num_gpus = count(environ, dev)
    if num_gpus == 0 or processes <= num_gpus or may_share(environ):
        return ""
    gpus = f"{num_gpus} GPU{'s' if num_gpus > 1 else ''}"
    return (
        f"The container of pod {environ[env.POD_NAME]} has {gpus}, and spec.processesPerWorker is {processes}: each process needs "
        f"a GPU of its own. Request as many GPUs as spec.processesPerWorker, or lower that. For a script that computes on the CPU, "
        f"set {VISIBLE} to an empty value in the container's env."
    )


def count(environ: Mapping[str, str], dev: Path = DEV) -> int:
    """Return how many GPUs CUDA shows a process of this container. Of MIG devices that is one, however many there are."""
    try:
        found = sum(_DEVICE.fullmatch(path.name) is not None for path in dev.iterdir())
    except OSError:
        return 0
    said = environ.get(VISIBLE)
    if said is None:
        return found
    names = visible(said)
    return min(1 if any(name.startswith("MIG-") for name in names) else len(names), found)
