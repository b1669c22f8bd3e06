"""Hands out group_hook.py: as a text to the zygote, as a `sitecustomize` file to processes that are exec'd."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from pathlib import Path


def group_hook() -> str:
    """Return the source text of the hook."""
    text = pkgutil.get_data(__package__, "group_hook.py")
    assert text is not None
    return text.decode()


def write_group_hook(state_dir: str, log: Callable[[str], None]) -> str:
    """Write the hook as `sitecustomize.py` into a directory of its own and return that, or "" if the disk refuses it."""
    directory = Path(state_dir) / "group-hook"
    try:
        directory.mkdir(exist_ok=True)
        (directory / "sitecustomize.py").write_text(group_hook(), encoding="utf-8")
    except OSError as error:
        log(f"{directory} cannot be written ({error.strerror}); whether an exec'd script trains is not observed.")
        return ""
    return str(directory)
