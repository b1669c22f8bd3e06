"""Brings Regroup's library, which travels in the agent's zipapp, to the processes of the pod.

The zipapp is unpacked into the state directory, the only place in a pod that the agent can write to. Python keeps the compiled
modules there. To import from the zipapp itself takes four times as long (docs/design/adr/0078-the-library-comes-with-the-agent.md).
"""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

from .group_hook_files import source_of

PACKAGE = "regroup/"
"""Beginning of the names of the library's files in the zipapp."""


def bring_library(state_dir: str, log: Callable[[str], None]) -> str:
    """Unpack the library, and return the directory of its hook, which belongs into PYTHONPATH.

    Returns "" if the agent runs from its sources, whose processes find the library as the agent does, or if the disk refuses it.
    A container that starts again finds the library, and what Python has compiled of it, as the one before left them.
    """
    archive = getattr(globals().get("__loader__"), "archive", None)
    return unpack(archive, Path(state_dir) / "library", log) if archive else ""


def unpack(archive: str, directory: Path, log: Callable[[str], None]) -> str:
    """Unpack the library of this zipapp into `directory`, unless it is there, and return the directory of its hook.

    Whatever was there of another release is removed. The rename at the end makes it whole or absent after a power cut.
    """
    aside = directory.with_name(directory.name + ".new")
    try:
        with zipfile.ZipFile(archive) as zipped:
            files = [info for info in zipped.infolist() if info.filename.startswith(PACKAGE)]
            contents = [(info.filename, info.CRC) for info in zipped.infolist()]
            digest = hashlib.sha256(repr(contents).encode()).hexdigest()
            stamp = directory / "digest"
            if not stamp.is_file() or stamp.read_text(encoding="utf-8") != digest:
                for old in (aside, directory):
                    shutil.rmtree(old, ignore_errors=True)
                zipped.extractall(aside / "packages", files)
                (aside / "hook").mkdir()
                (aside / "hook" / "sitecustomize.py").write_text(source_of("library_hook.py"), encoding="utf-8")
                (aside / "digest").write_text(digest, encoding="utf-8")
                aside.rename(directory)
    except OSError as error:
        why = error.strerror or error
        log(f"{directory} cannot be written ({why}); `import regroup` finds the library only where the image has it.")
        return ""
    return str(directory / "hook")
