"""The machine: facts about it, and whether it is enough for the other parts."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from bench.gpu.machine import SHARES_FROM, version
from bench.gpu.part import Context, Row


def run(context: Context, say: Callable[[Row], None]) -> None:
    """Report the facts, and judge those that the other parts depend on."""
    found = context.machine
    names = ", ".join(dict.fromkeys(found.gpus)) or "none"
    say(Row("GPUs", f"{len(found.gpus)}: {names}" if found.is_gpu else "a dry run on CPUs with gloo", value=found.gpus))
    say(Row("Python, torch", f"{found.python}, {found.torch}"))
    say(Row("CPUs, room in /dev/shm", f"{found.cpus}, {shutil.disk_usage('/dev/shm').free / 2**30:.0f} GiB"))
    if not found.is_gpu:
        return
    say(Row("driver", found.driver))
    most = max((*context.sizes.worlds, *context.sizes.sizes, 4))
    how = f"up to {most} ranks share GPUs" if found.shares(most) else "each rank has a GPU of its own"
    how = "ranks cannot share a GPU" if found.lacks(most) else how
    loaded = " (preloaded)" if found.preload else " (torch's)"
    say(
        context.judged(
            "NCCL",
            f"{version(found.nccl)}{loaded}: {how}",
            f"{most} GPUs, or NCCL >= {version(SHARES_FROM)}",
            not found.lacks(most),
            version(found.nccl),
        )
    )
    say(context.judged("C compiler, for compile: true", found.compiler or "none", "one is there", bool(found.compiler)))
