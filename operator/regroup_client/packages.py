"""Packages of `--pip`: finds the versions and hashes that a job installs. `install_packages.py` installs them in the pod.

uv resolves on the user's machine, for every Python from 3.10 on, because nobody knows the Python of the image yet (adr/0093). The
program pip would resolve for the Python that it runs under. Only wheels are taken, so that nothing is built, here or in the pod.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from regroup_client.errors import SubmitError

DIR, LOCK_DIR = "/packages", "/regroup-packages"
PYTHON = "3.10"
RESOLVE_S = 300.0
_REQUIREMENT = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]*)(\[[A-Za-z0-9._, -]+\])?(\s*(==|>=|<=|~=|!=|>|<)[A-Za-z0-9.*+!, <>=~]+)?"
)
_PINNED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?==")
PROGRAM = Path(__file__).with_name("install_packages.py").read_text(encoding="utf-8")
"""The code that installs, for the pod."""


@dataclass(frozen=True)
class Packages:
    """The packages of one job."""

    lock: str
    """JSON of {named, entries}: each entry has a name, its lines for pip, and the names of the packages that need it."""

    index_url: str = ""
    """The index from which the pods install. Empty: that of the image's own pip."""

    env: Mapping[str, str] = field(default_factory=dict)
    """The user's variables for pip."""


def resolve(
    wanted: Sequence[str], index_url: str = "", python: str = "", env: Mapping[str, str] | None = None
) -> Packages | None:
    """Return the packages with versions and hashes, or None if none are wanted. Raises SubmitError.

    `python` is the version of the image's Python, for packages that do not fit every Python from 3.10 on. `env` are the job's
    variables.
    """
    if not wanted:
        if index_url:
            raise SubmitError("--index-url goes with --pip. Name a package, or leave it out.")
        return None
    names = [_name(one) for one in wanted]
    _check_index(index_url)
    command = [_uv(), "pip", "compile", "-", "--universal", "--generate-hashes", "--no-header", "--no-build"]
    command += [
        "--no-python-downloads",
        "--no-config",
        "--quiet",
        "--color=never",
        f"--python-version={python or PYTHON}",
    ]
    command += _index_options(index_url, os.environ)
    text = "\n".join(wanted) + "\n"
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, errors="replace", check=False, timeout=RESOLVE_S
        )
    except subprocess.TimeoutExpired:
        raise SubmitError(f"uv did not resolve --pip in {RESOLVE_S:.0f} s. Check the index and the network.") from None
    except OSError as error:
        raise SubmitError(f"uv cannot be started ({error.strerror}). Install it again: pip install uv") from None
    if done.returncode:
        raise SubmitError(f"--pip ({', '.join(wanted)}) cannot be resolved: {_cause(done.stderr)}")
    lock = json.dumps({"named": sorted(names), "entries": entries(done.stdout)}, separators=(",", ":"))
    return Packages(lock, index_url, {name: value for name, value in (env or {}).items() if name.startswith("PIP_")})


def _name(requirement: str) -> str:
    match = _REQUIREMENT.fullmatch(requirement.strip())
    if match is None:
        raise SubmitError(f"--pip ({requirement}) is no package of an index. Write NAME or NAME==VERSION.")
    return canonical(match[1])


def canonical(name: str) -> str:
    """Return the form of a package's name that all spellings share."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _check_index(index_url: str) -> None:
    parts = urlsplit(index_url)
    if index_url and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise SubmitError(f"--index-url ({index_url}) is no URL of an index. It begins with https:// or http://.")
    if parts.username or parts.password:
        raise SubmitError(
            "--index-url has a password, which everyone who may read the job could read. Put PIP_INDEX_URL with it into a Secret, "
            "and give --env-from."
        )


def _uv() -> str:
    """Return the path of uv: on the PATH, or in the environment of this command. Raises SubmitError."""
    found = shutil.which("uv")
    if found is None:
        try:
            found = str(importlib.import_module("uv").find_uv_bin())
        except (ImportError, OSError):
            raise SubmitError("--pip needs uv, which resolves packages. Install it: pip install uv") from None
    return found


def _index_options(index_url: str, environment: Mapping[str, str]) -> list[str]:
    """Return the options for uv that say what pip's own variables say. uv does not read these."""
    options = []
    chosen = index_url or ("" if "UV_DEFAULT_INDEX" in environment else environment.get("PIP_INDEX_URL", ""))
    if chosen:
        options.append(f"--default-index={chosen}")
    options += [f"--index={one}" for one in environment.get("PIP_EXTRA_INDEX_URL", "").split()]
    options += [f"--find-links={one}" for one in environment.get("PIP_FIND_LINKS", "").split()]
    return options


def _cause(said: str) -> str:
    lines = [line.strip().removeprefix("error: ").removeprefix("cause: ") for line in said.strip().splitlines()]
    found = next((line for line in lines if line.startswith("Because ")), lines[-1] if lines else "uv gave no reason")
    return found if found.endswith(".") else f"{found}."


def entries(compiled: str) -> list[dict[str, Any]]:
    """Return the entries of a file that `uv pip compile --generate-hashes` wrote.

    A package may have several entries, each for other Pythons. pip reads the marker of each.
    """
    found: list[dict[str, Any]] = []
    for line in compiled.splitlines():
        if match := _PINNED.match(line):
            found.append({"name": canonical(match[1]), "lines": [line], "via": []})
        elif line.strip().startswith("#") and found:
            found[-1]["via"] += [
                canonical(one) for one in re.split(r"[,\s]+", line.strip("# ")) if one not in ("", "via")
            ]
        elif line.strip() and found:
            found[-1]["lines"].append(line)
    for entry in found:
        entry["lines"][-1] = entry["lines"][-1].rstrip(" \\")
    return found
