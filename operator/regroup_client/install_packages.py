"""Installs the packages of `--pip` in a pod, before its script starts. It runs by itself, in the image's own python3.

Packages that the user named are installed in any case. Of what they need, only what the image lacks is installed, or has in a
version that does not fit. torch is never replaced. The last line that is printed becomes a condition of the job.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any


def canonical(name: str) -> str:
    """Return the form of a package's name that all spellings share."""
    return re.sub("[-_.]+", "-", name).lower()


def in_image() -> dict[str, str]:
    """Return the versions of the packages that the image has, by name."""
    there: dict[str, str] = {}
    for found in importlib.metadata.distributions():
        there.setdefault(canonical(found.metadata["Name"] or ""), found.version)
    return there


def needed(lock: Any, there: Collection[str], chosen: Iterable[str]) -> set[str]:
    """Return `chosen`, and what they need and the image lacks."""
    chosen = set(chosen)
    while True:
        more = {
            one["name"] for one in lock["entries"] if one["name"] not in there and chosen & set(one["via"])
        } - chosen
        if not more:
            return chosen
        chosen |= more


def requirement_class() -> Any:
    """Return the class that parses requirements: of the package packaging, or of pip. None: the image has neither."""
    for name in ("packaging.requirements", "pip._vendor.packaging.requirements"):
        try:
            return importlib.import_module(name).Requirement
        except ImportError:
            continue
    return None


def unfit(to: str, lock: Any, there: Mapping[str, str], installed: set[str]) -> dict[str, str]:
    """Return sentences by the name of a package that the image has in a version that an installed one cannot use."""
    found: dict[str, str] = {}
    parse = requirement_class()
    pinned = {entry["name"] for entry in lock["entries"]} - installed
    for one in importlib.metadata.distributions(path=[to]) if parse else ():
        for need in map(parse, one.requires or ()):
            name = canonical(need.name)
            if name not in there or name not in pinned or (need.marker and not need.marker.evaluate({"extra": ""})):
                continue
            if not need.specifier.contains(there[name], prereleases=True):
                wanted = f"{need.name}{need.specifier}"
                found[name] = f"{one.metadata['Name']} needs {wanted}, and the image has {need.name} {there[name]}"
    return found


def install(to: str, lock: Any, names: set[str]) -> None:
    """Install the entries of these packages, compared with their hashes. If that fails, exit as pip does."""
    lines = [line for entry in lock["entries"] if entry["name"] in names for line in entry["lines"]]
    file = Path(tempfile.mkdtemp(), "requirements.txt")
    file.write_text("\n".join(lines) + "\n")
    common = ["--no-deps", "--require-hashes", "--target", to, "--requirement", str(file)]
    if importlib.util.find_spec("pip"):
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-input",
            "--no-cache-dir",
            "--disable-pip-version-check",
        ]
        command += ["--only-binary=:all:", "--progress-bar=off"]
    elif shutil.which("uv"):
        command = ["uv", "pip", "install", "--no-cache", "--no-config", "--no-build", "--no-progress"]
        command += ["--python", sys.executable]
        for option, name in (("--default-index", "PIP_INDEX_URL"), ("--find-links", "PIP_FIND_LINKS")):
            command += [option, os.environ[name]] if os.environ.get(name) else []
    else:
        sys.exit("ERROR: The image has neither pip nor uv, which --pip needs. Use an image that has one of them.")
    code = subprocess.call(command + common)
    if code:
        sys.exit(code)


def main(directory: str, to: str) -> None:
    """Install into a directory, whose contents go first: an earlier attempt may have left some."""
    for entry in Path(to).iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    lock = json.loads(Path(directory, "lock.json").read_text(encoding="utf-8"))
    there = in_image()
    installed: set[str] = set()
    left = needed(lock, there, lock["named"])
    while left:
        install(to, lock, left)
        installed |= left
        wrong = unfit(to, lock, there, installed)
        if "torch" in wrong:
            sys.exit(f"ERROR: {wrong['torch']}. Use an image with that torch, or name another version.")
        for why in wrong.values():
            print(why, flush=True)
        left = needed(lock, there, installed | set(wrong)) - installed
    print("Installed:", *sorted(installed), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
