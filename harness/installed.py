"""A wheel as a user installs it: into a new environment, with the packages that its extras ask for and no others."""

from __future__ import annotations

import os
import subprocess
import venv
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement


def contents(wheel: Path) -> dict[str, bytes]:
    """Return the files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def asked(wheel: Path, extra: str) -> list[str]:
    """Return the packages of an extra, as the wheel names them."""
    files = contents(wheel)
    (name,) = [name for name in files if name.endswith(".dist-info/METADATA")]
    wanted = Parser().parsestr(files[name].decode()).get_all("Requires-Dist") or []
    return [one.name for one in map(Requirement, wanted) if one.marker is None or one.marker.evaluate({"extra": extra})]


class Clean:
    """An environment with the wheel, into which pip has installed it, and no other package."""

    def __init__(self, directory: Path, wheel: Path) -> None:
        """Make the environment in a directory that is not there."""
        venv.create(directory, with_pip=True)
        self.bin = directory / "bin"
        (self.packages,) = directory.glob("lib/python*/site-packages")
        pip = [str(self.bin / "python"), "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel)]
        subprocess.run(pip, check=True)

    def add(self, names: Iterable[str]) -> None:
        """Link packages of the tests' environment, and those that they need, so that nothing is downloaded."""
        left, seen = list(names), set[str]()
        while left:
            name = left.pop()
            if name in seen:
                continue
            seen.add(name)
            found = metadata.distribution(name)
            for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
                link = self.packages / top
                if not link.exists():
                    link.symlink_to(Path(str(found.locate_file(top))))
            wanted = map(Requirement, found.requires or ())
            left += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]

    def run(
        self, directory: Path, *command: str, timeout_s: float = 300, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command with the environment's programs first on the PATH. `variables` are added to this process's own."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        path = os.pathsep.join((str(self.bin), variables.pop("PATH", os.environ["PATH"])))
        environment = kept | variables | {"PATH": path, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, timeout=timeout_s
        )
