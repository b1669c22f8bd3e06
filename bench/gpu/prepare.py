"""`python -m bench.gpu.prepare`: fetch the parts that a machine with a GPU and without a network lacks for `bench.gpu`.

It writes to .cache/bench-gpu:

- `libnccl.so.2.xz`, an NCCL that lets several ranks share one GPU. Without the device code of other architectures it
  has a sixth of its size.
- with `--site 3.12`, `site-3.12.tar.xz`: the packages that `regroup run` imports.

Copy the directory with the project. `bench.gpu` unpacks both at its first run. The command needs `uv` or `pip`, and
access to a package index.
"""

from __future__ import annotations

import argparse
import lzma
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Collection
from pathlib import Path

from bench.trials import BenchError
from harness.archives import extract

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = REPOSITORY / ".cache" / "bench-gpu"
LIBRARY = CACHE / "libnccl.so.2"
PACKED_LIBRARY = CACHE / "libnccl.so.2.xz"
NCCL = "nvidia-nccl-cu13==2.30.7"
"""The version that was seen to let several ranks share an H200. The feature is there from 2.30 on."""
PACKAGES = ("aiohttp", "cryptography", "pydantic", "pyyaml")
"""Packages that `regroup run` imports. torch and numpy are not among them: a machine with a GPU has them."""
FETCH_S = 600.0

_FATBIN = 0xBA55ED50
_CONTAINER, _ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ")
_ARCH_AT = 28
_KINDS = (1, 2, 0x10)  # of entries: PTX, machine code, NVVM code


def prune(code: bytearray, keep: Collection[int]) -> dict[int, int]:
    """Empty the device code of all architectures but `keep` (90 is sm_90), in place. Return architecture -> its bytes before.

    Sizes and offsets stay, so the library loads as before. CUDA's fat binaries are containers that begin with a magic
    number. Each entry of a container has its kind, header size and payload size, and at byte 28 the architecture.
    """
    found: dict[int, int] = {}
    magic, at = struct.pack("<I", _FATBIN), 0
    while (at := code.find(magic, at)) >= 0:
        if at + _CONTAINER.size > len(code):
            break
        _, number, header, size = _CONTAINER.unpack_from(code, at)
        end = at + header + size
        if (number, header) != (1, _CONTAINER.size) or end > len(code):
            at += len(magic)  # four bytes that look like it
            continue
        entry = at + header
        while entry + _ARCH_AT + 4 <= end:
            kind, _, entry_header, payload = _ENTRY.unpack_from(code, entry)
            if kind not in _KINDS or entry_header < _ARCH_AT + 4:
                break
            (arch,) = struct.unpack_from("<I", code, entry + _ARCH_AT)
            found[arch] = found.get(arch, 0) + payload
            if arch not in keep:
                code[entry + entry_header : entry + entry_header + payload] = bytes(payload)
            entry += entry_header + payload
        at = end
    return found


def library() -> Path | None:
    """Return the fetched NCCL, unpacked at the first call, or None if it was not fetched."""
    if not LIBRARY.exists() and PACKED_LIBRARY.exists():
        aside = LIBRARY.with_suffix(".tmp")
        with lzma.open(PACKED_LIBRARY) as packed, aside.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 24)
        aside.rename(LIBRARY)
    return LIBRARY if LIBRARY.exists() else None


def packed_site(python: str) -> Path:
    """Return the path of the packed packages for a Python, such as 3.12. Machine code for one Python does not load in another."""
    return CACHE / f"site-{python}.tar.xz"


def site(python: str) -> Path | None:
    """Return the directory of the fetched packages for a Python, unpacked at the first call, or None if there are none."""
    here, packed_here = CACHE / f"site-{python}", packed_site(python)
    if not here.is_dir() and packed_here.exists():
        with tempfile.TemporaryDirectory(dir=CACHE) as aside, tarfile.open(packed_here) as packed:
            extract(packed, aside)
            Path(aside, "site").rename(here)
    return here if here.is_dir() else None


def fetch(target: Path, python: str, *packages: str) -> None:
    """Install packages for CPython `python` on Linux x86-64 into a directory. Raises BenchError."""
    try:
        subprocess.run(
            [*_client(python), "--target", str(target), *packages],
            stdin=subprocess.DEVNULL,
            timeout=FETCH_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BenchError(
            f"{', '.join(packages)} could not be fetched ({error}). Give this machine a package index."
        ) from None


def _client(python: str) -> list[str]:
    """Return the command of uv, the project's or the machine's, else of pip."""
    own = REPOSITORY / ".uv" / "bin" / "uv"
    uv = str(own) if own.exists() else shutil.which("uv")
    if uv:
        platform = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
        return [uv, "pip", "install", "--quiet", "--only-binary", ":all:", *platform]
    platform = ["--python-version", python, "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64"]
    return [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", *platform]


def prepare_library(keep: Collection[int]) -> None:
    """Fetch NCCL, prune and pack it. Raises BenchError."""
    with tempfile.TemporaryDirectory(dir=CACHE) as aside:
        fetch(Path(aside), "3.12", "--no-deps", NCCL)
        found = next(Path(aside).rglob("libnccl.so.2"), None)
        if found is None:
            raise BenchError(f"{NCCL} has no libnccl.so.2. Look into its wheel.")
        code = bytearray(found.read_bytes())
        has = prune(code, keep)
        if not set(keep) & set(has):
            raise BenchError(
                f"{NCCL} has no device code for {sorted(keep)}; it has {sorted(has)}. Choose with --architecture."
            )
        packed_aside = Path(aside, PACKED_LIBRARY.name)
        with lzma.open(packed_aside, "wb", preset=6) as packed:
            packed.write(code)
        LIBRARY.unlink(missing_ok=True)
        packed_aside.rename(PACKED_LIBRARY)


def prepare_site(python: str) -> None:
    """Fetch the packages of `regroup run` and pack them. Raises BenchError."""
    with tempfile.TemporaryDirectory(dir=CACHE) as aside:
        fetch(Path(aside, "site"), python, *PACKAGES)
        packed_aside = Path(aside, "site.tar.xz")
        with tarfile.open(packed_aside, "w:xz") as packed:
            packed.add(Path(aside, "site"), "site")
        shutil.rmtree(CACHE / f"site-{python}", ignore_errors=True)
        packed_aside.rename(packed_site(python))


def main() -> int:
    """Fetch and pack both files. Return 1, after one sentence, if one cannot be had."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.prepare", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--architecture",
        type=int,
        action="append",
        help="of the GPU, such as 90 for H100 and H200 (the default); may be repeated",
    )
    parser.add_argument(
        "--site", metavar="PYTHON", help="also fetch the packages of `regroup run` for this Python, such as 3.12"
    )
    args = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    try:
        prepare_library(args.architecture or [90])
        if args.site:
            prepare_site(args.site)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    for path in (PACKED_LIBRARY, *([packed_site(args.site)] if args.site else [])):
        print(f"{path.relative_to(REPOSITORY)}: {path.stat().st_size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
