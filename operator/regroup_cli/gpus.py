"""Shares the machine's GPUs over the slots of `regroup run`. A slot keeps its GPUs when it gets a new worker.

`share` decides, pure: from names of GPUs it makes CUDA_VISIBLE_DEVICES of each slot, or one error sentence. `find`
looks at the machine. Neither imports torch, so that the command line stays quick and holds no GPU itself. Inside a
worker each process takes the GPU of its LOCAL_RANK (`regroup.device()`).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from regroup.protocol.gpus import VISIBLE, may_share, visible
from regroup_client.views import counted
from regroup_operator.api import SpecError

LIST_S = 60.0
"""Bound for `nvidia-smi -L`. Without the persistence daemon the driver wakes each GPU first, which takes seconds."""
_GPU = re.compile(r"GPU \d+: .*\(UUID: (GPU-[^)\s]+)\)")
_MIG = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)")
_MINOR = re.compile(r"^Device Minor:\s*(\d+)", re.MULTILINE)
_UUID = re.compile(r"^GPU UUID:\s*(GPU-\S+)", re.MULTILINE)
PROC = Path("/proc/driver/nvidia/gpus")
DEV = Path("/dev")


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine. `migs` has the UUIDs of its MIG devices. If there are any, CUDA computes only on them."""

    uuid: str
    migs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shares:
    """The GPUs of each slot.

    `names` has the run's GPUs as CUDA_VISIBLE_DEVICES names them; a slot gets `processes` of them. With None the
    workers see the GPUs that this process sees. If it is empty they see none.
    """

    names: tuple[str, ...] | None
    processes: int = 1

    def environment(self, slot: int) -> dict[str, str]:
        """Return the variables that a worker of this slot gets on top of this process's environment."""
        if self.names is None:
            return {}
        most = min(self.processes, len(self.names))
        mine = [self.names[(slot * self.processes + index) % len(self.names)] for index in range(most)]
        return {VISIBLE: ",".join(mine)}


def share(
    *,
    workers: int,
    most_workers: int,
    processes: int,
    choice: str,
    found: Sequence[Gpu],
    environment: Mapping[str, str],
) -> Shares:
    """Return the GPUs of each slot. Pure. Raises SpecError if there are too few for one in each process.

    - `workers`: number at the start. `most_workers`: largest number of the job. `processes`: in each worker.
    - `choice`: value of --gpus.
    - `found`: the machine's GPUs.
    - `environment`: the user's. CUDA_VISIBLE_DEVICES in it names the GPUs that the run may use; empty or "-1" means
      none.
    """
    if choice == "none":
        return Shares((), processes)
    said = environment.get(VISIBLE)
    names = _all(found) if said is None else visible(said)
    if said is not None:
        _check_names(names, found)
    if not names:
        return Shares(None, processes)
    if processes > 1 and any(name.startswith("MIG-") for name in names):
        raise SpecError(
            f"--processes-per-worker ({processes}) needs several GPUs in one worker, and CUDA shows a process only one MIG device. "
            "Use --workers for the number of processes, and leave --processes-per-worker at 1."
        )
    needed = most_workers * processes
    if needed > len(names) and not may_share(environment):
        raise SpecError(_too_few(workers, most_workers, processes, len(names), said))
    return Shares(names, processes)


def _too_few(workers: int, most_workers: int, processes: int, num_gpus: int, said: str | None) -> str:
    option, count = ("--workers", workers) if workers * processes > num_gpus else ("--max", most_workers)
    each = f" with --processes-per-worker ({processes})" if processes > 1 else ""
    gpus = counted(num_gpus, "GPU")
    where = f"this machine has {gpus}" if said is None else f"{VISIBLE} ({said}) names {gpus}"
    lower = f"Lower {option}" + (" or --processes-per-worker" if processes > 1 else "")
    return (
        f"{option} ({count}){each} needs {counted(count * processes, 'GPU')}, one for each process, and {where}. "
        f"{lower}, or give --gpus none if the script computes on the CPU."
    )


def _all(found: Sequence[Gpu]) -> tuple[str, ...]:
    """Return the names of all GPUs. They are numbers, as scripts expect, or UUIDs if there are MIG devices."""
    if not any(gpu.migs for gpu in found):
        return tuple(str(index) for index in range(len(found)))
    return tuple(name for gpu in found for name in (gpu.migs or (gpu.uuid,)))


def _check_names(names: Sequence[str], found: Sequence[Gpu]) -> None:
    """Raise SpecError for a name that makes CUDA hide some or all GPUs without an error."""
    for index, name in enumerate(names):
        if name in names[:index]:
            raise SpecError(f"{VISIBLE} names GPU {name} twice, and CUDA then shows no GPU. Name each one once.")
        if name.isdecimal() and found and int(name) >= len(found):
            has = "1 GPU, number 0" if len(found) == 1 else f"GPUs 0 to {len(found) - 1}"
            raise SpecError(f"{VISIBLE} names GPU {name}, and this machine has {has}. Correct or unset it.")
        if not name.isdecimal() and not name.startswith(("GPU-", "MIG-")):
            raise SpecError(
                f"{VISIBLE} names {name!r}, which is neither a GPU's number nor a UUID as `nvidia-smi -L` prints it. Correct or "
                "unset it."
            )


def find(proc: Path = PROC, dev: Path = DEV) -> tuple[Gpu, ...]:
    """Return the GPUs of this machine, in the driver's order. The tuple is empty if there is none, or no driver answers.

    `nvidia-smi -L` knows MIG devices. Containers may lack it. Then the driver's files are read, and GPUs without a
    device file are left out.
    """
    program = shutil.which("nvidia-smi")
    if program is not None:
        try:
            done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=LIST_S, check=False)
        except (OSError, subprocess.TimeoutExpired, ValueError):
            done = None
        if done is not None and done.returncode == 0:
            return listed(done.stdout)
    return _of_driver(proc, dev)


def listed(text: str) -> tuple[Gpu, ...]:
    """Return the GPUs in the output of `nvidia-smi -L`. Pure."""
    found: list[Gpu] = []
    for line in text.splitlines():
        if gpu := _GPU.match(line):
            found.append(Gpu(gpu[1]))
        elif found and (mig := _MIG.match(line)):
            found[-1] = Gpu(found[-1].uuid, (*found[-1].migs, mig[1]))
    return tuple(found)


def _of_driver(proc: Path, dev: Path) -> tuple[Gpu, ...]:
    found = []
    try:
        for directory in sorted(proc.iterdir()):  # by bus address, as nvidia-smi has them
            text = (directory / "information").read_text(errors="replace")
            minor, uuid = _MINOR.search(text), _UUID.search(text)
            if minor is not None and (dev / f"nvidia{minor[1]}").exists():
                found.append(Gpu(uuid[1] if uuid is not None else ""))
    except OSError:
        return ()
    return tuple(found)
