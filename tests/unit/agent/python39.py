"""The interpreter that the agent has to run under, whatever the training image has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path


def oldest_python() -> str:
    """Return a Python 3.9 of PATH, pyenv or uv. Else the running one, and pytest's last lines say so: it proves less."""
    for python in _candidates():
        code = "import sys; sys.exit(sys.version_info[:2] != (3, 9))"
        if subprocess.run([python, "-c", code], capture_output=True).returncode == 0:
            return python
    warnings.warn(
        "There is no Python 3.9 on this machine (in PATH, pyenv or uv), so the agent and the protocol ran under "
        f"{sys.version_info[0]}.{sys.version_info[1]} only. `uv python install 3.9` adds one.",
        stacklevel=2,
    )
    return sys.executable


def _candidates() -> Iterator[str]:
    found = shutil.which("python3.9")
    if found:
        yield found  # maybe pyenv's, which fails where no version is chosen
    home = Path.home()
    pyenv = Path(os.environ.get("PYENV_ROOT") or home / ".pyenv") / "versions"
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or home / ".local/share/uv/python")
    for place, pattern in ((pyenv, "3.9.*/bin/python3.9"), (uv, "cpython-3.9.*/bin/python3.9")):
        yield from (str(python) for python in sorted(place.glob(pattern)))
