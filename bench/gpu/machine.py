"""The machine of `bench.gpu`: its devices and libraries, and the settings with which several ranks share one GPU.

`python -m bench.gpu.machine` asks torch and the driver in a process of its own and prints the answer as JSON. So
neither of them can hang the benchmark itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.gpu import prepare
from bench.trials import BenchError

REPOSITORY = Path(__file__).resolve().parents[2]
SHARES_FROM = (2, 30)
"""NCCL lets several ranks share a GPU from this version on; older ones refuse it as invalid usage."""
SHARING = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""Environment of several ranks on one GPU. Seen to work on one H200 with NCCL 2.30.7."""
PACKAGES = {
    "aiohttp": "aiohttp",
    "cryptography": "cryptography",
    "numpy": "numpy",
    "pydantic": "pydantic",
    "torch": "torch",
    "yaml": "pyyaml",
}
"""Import name -> package, for the imports of `regroup run` and of the language model's configurations."""
PROBE_S = 90.0
"""Bound for asking torch and the driver. The first import of torch on a cold disk takes most of it."""


@dataclass(frozen=True)
class Machine:
    """Facts about the machine, found once."""

    device: str
    """`cuda` or `cpu`."""
    gpus: tuple[str, ...]  # their names
    driver: str
    torch: str
    nccl: tuple[int, ...]
    """Version of NCCL that ranks on one GPU load; empty if there is none."""
    preload: str
    """Library that is loaded before torch's own NCCL; empty if torch's own is used."""
    python: str
    cpus: int
    compiler: str
    """C compiler for Triton; empty if there is none."""
    site: str = ""
    """Directory of fetched packages; empty if all packages are installed."""

    @property
    def is_gpu(self) -> bool:
        """False in a dry run on CPUs."""
        return self.device == "cuda"

    def shares(self, ranks: int) -> bool:
        """Return whether this number of ranks has to share GPUs."""
        return self.is_gpu and ranks > len(self.gpus)

    def lacks(self, ranks: int) -> str:
        """Return a sentence that says why this number of ranks cannot form here; empty if they can. Pure."""
        if not self.shares(ranks) or self.nccl[:2] >= SHARES_FROM:
            return ""
        return (
            f"{ranks} ranks on {len(self.gpus)} GPU{'s' if len(self.gpus) > 1 else ''} have to share, and NCCL "
            f"{version(self.nccl)} refuses that before {version(SHARES_FROM)}. "
            "Run `python -m bench.gpu.prepare` where there is a network, and bring .cache/bench-gpu here."
        )

    def environment(self, ranks: int) -> dict[str, str]:
        """Return the environment for this many ranks. Pure but for the path of the project."""
        path = [str(REPOSITORY), str(REPOSITORY / "operator"), str(REPOSITORY / "trainer-image")]
        path += [self.site] if self.site else []
        out = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *path]),
            "BENCH_DEVICE": self.device,
        }
        if not self.is_gpu:
            return out | {"CUDA_VISIBLE_DEVICES": ""}
        if not self.shares(ranks):
            return out
        return out | SHARING | ({"LD_PRELOAD": self.preload} if self.preload else {})


def version(parts: Iterable[int]) -> str:
    """Return a version as text."""
    return ".".join(map(str, parts)) or "none"


def packages() -> str:
    """Return the directory of fetched packages that this Python needs; empty if all are installed. Raises BenchError.

    A fetched package hides an installed one, so the directory is used only if a package is missing.
    """
    if not _missing():
        return ""
    fetched = prepare.site(".".join(platform.python_version_tuple()[:2]))
    if fetched is not None:
        sys.path.append(str(fetched))
        importlib.invalidate_caches()
    missing = _missing()
    if missing:
        raise BenchError(
            f"These packages are missing: {', '.join(missing)}. Install them, or run `python -m bench.gpu.prepare --site "
            f"{sys.version_info.major}.{sys.version_info.minor}` where there is a network and bring .cache/bench-gpu here."
        )
    return str(fetched)


def _missing() -> list[str]:
    return [package for name, package in PACKAGES.items() if importlib.util.find_spec(name) is None]


def find(device: str, site: str) -> Machine:
    """Return the machine, asked in a process of its own. Raises BenchError.

    `device` is `cuda` or `cpu`, `site` the directory of fetched packages or empty.
    """
    library = prepare.library()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bench.gpu.machine", device, str(library or "")],
            env={**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"torch and the GPU's driver did not answer within {PROBE_S:g} s. Try nvidia-smi.") from None
    if done.returncode:
        raise BenchError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "torch cannot be imported.")
    found = replace(from_json(json.loads(done.stdout.splitlines()[-1])), site=site)
    if found.is_gpu and not found.gpus:
        raise BenchError("torch sees no GPU here. Run it on a machine with one, or dry-run it with --device cpu.")
    return found


def from_json(data: dict[str, object]) -> Machine:
    """Return a machine from the JSON of its `asdict`."""
    lists = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    return Machine(**lists)  # type: ignore[arg-type]


def _probe(device: str, library: str) -> Machine:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if device == "cuda" else []
    own: tuple[int, ...] = torch.cuda.nccl.version() if gpus else ()  # type: ignore[no-untyped-call]
    is_own = not gpus or own[:2] >= SHARES_FROM or not library
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    return Machine(
        device=device,
        gpus=tuple(gpus),
        driver=_driver() if gpus else "",
        torch=torch.__version__,
        nccl=tuple(own) if is_own else nccl_version(library),
        preload="" if is_own else library,
        python=platform.python_version(),
        cpus=os.cpu_count() or 1,
        compiler=next(filter(None, map(shutil.which, names)), ""),
    )


def nccl_version(library: str) -> tuple[int, ...]:
    """Return the version of an NCCL library."""
    import ctypes

    number = ctypes.c_int()
    if ctypes.CDLL(library).ncclGetVersion(ctypes.byref(number)) != 0:
        raise BenchError(f"{library} does not tell its version.")
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (done.stdout.split() or ["unknown"])[0]


if __name__ == "__main__":
    print(json.dumps(asdict(_probe(*sys.argv[1:3]))))
