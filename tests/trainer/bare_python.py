"""A Python as an image without anything of ours has it: torch and what torch needs, in a virtual environment."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

OURS = ("regroup", "_regroup")
"""Beginnings of what the installation of this project leaves in site-packages."""


def bare_python(directory: Path) -> Path:
    """Make the virtual environment in `directory`, without pip, and return its interpreter.

    Its packages are links to those of the running interpreter. No `.pth` file is among them: one of them is ours.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    (packages,) = directory.glob("lib/python3.*/site-packages")
    for found in Path(sysconfig.get_path("purelib")).iterdir():
        if not found.name.startswith(OURS) and found.suffix != ".pth":
            (packages / found.name).symlink_to(found)
    return directory / "bin" / "python"
