"""Pythons with torch on a volume of a job: any version that this machine has, without a layer of gigabytes for each."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cluster import paths


def find(version: str) -> Path:
    """Return the directory of a Python X.Y of pyenv or uv. Skip the test if this machine has none."""
    home = Path.home()
    pyenv = Path(os.environ.get("PYENV_ROOT") or home / ".pyenv") / "versions"
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or home / ".local/share/uv/python")
    found = [*sorted(pyenv.glob(f"{version}.*")), *sorted(uv.glob(f"cpython-{version}.*"))]
    if not found:
        pytest.skip(f"This machine has no Python {version} of pyenv or uv: `uv python install {version}` adds one.")
    return found[-1]


def put(directory: Path, version: str, torch: str) -> None:
    """Put a Python of this version with this torch into `directory`, which becomes its prefix.

    Both are hard links where the file system allows it: the interpreter's to where it was found, torch's to the cache of uv.
    """
    links = subprocess.run(["cp", "-al", f"{find(version)}/.", str(directory)], capture_output=True)
    if links.returncode != 0:
        subprocess.run(["cp", "-a", f"{find(version)}/.", str(directory)], check=True)
    python = directory / "bin" / "python3"
    command = [str(paths.REPOSITORY / ".uv/bin/uv"), "pip", "install", "--quiet", "--break-system-packages"]
    subprocess.run([*command, "--python", str(python), f"torch=={torch}", "numpy"], check=True)
    for mine in (directory / "lib").glob("python3.*/site-packages/*regroup*"):
        raise AssertionError(f"{mine} belongs to Regroup: the test would show nothing")
