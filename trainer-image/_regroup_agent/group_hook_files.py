"""Hands out group_hook.py: as a text to the zygote, as a `sitecustomize` file to processes that are exec'd."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from pathlib import Path


def source_of(name: str) -> str:
    """Return the source text of a file of this package, which may be in a zipapp."""
    text = pkgutil.get_data(__package__, name)
    assert text is not None
    return text.decode()


def write_group_hook(state_dir: str, log: Callable[[str], None]) -> str:
    """Write the hook as `sitecustomize.py` into a directory of its own and return that, or "" if the disk refuses it."""
    directory = Path(state_dir) / "group-hook"
    try:
        directory.mkdir(exist_ok=True)
        (directory / "sitecustomize.py").write_text(source_of("group_hook.py"), encoding="utf-8")
    except OSError as error:
        log(f"{directory} cannot be written ({error.strerror}); whether an exec'd script trains is not observed.")
        return ""
    return str(directory)
