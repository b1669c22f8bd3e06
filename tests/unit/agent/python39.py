"""The interpreter that the agent has to run under, whatever the training image has."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def oldest_python() -> str:
    """Return a Python 3.9 where there is one, else the running interpreter."""
    for python in sorted(Path("~/.pyenv/versions").expanduser().glob("3.9.*/bin/python3.9")):
        return str(python)
    found = shutil.which("python3.9")
    works = found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0
    return found if found and works else sys.executable
