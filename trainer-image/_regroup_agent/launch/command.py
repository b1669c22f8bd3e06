"""Reads the pod's command. Pure but for `uses_library`, which reads the script."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

from regroup.protocol import env, frameworks, launchers

from . import elastic_script

_PYTHON = re.compile(r"python(3(\.\d+)?)?$")
_IMPORT = re.compile(
    r"^[ \t]*(import|from)[ \t]+([\w.]+[ \t]*,[ \t]*)*regroup\b(?!\.horovod\b)(?![ \t]+import[ \t]+horovod\b)",
    re.MULTILINE,
)
"""Imports that make a script a session. `regroup.horovod` is Horovod's API for a script, which stays one."""
_HOROVOD = re.compile(r"^[ \t]*(import|from)[ \t]+horovod\b", re.MULTILINE)
_OUR_HOROVOD = re.compile(
    r"^[ \t]*((import|from)[ \t]+regroup\.horovod\b|from[ \t]+regroup[ \t]+import[ \t]+horovod\b)", re.MULTILINE
)
_ELASTIC = re.compile(r"\belastic\.run\b|^[ \t]*from[ \t]+[\w.]*\bhorovod\b[\w.]*\.elastic[ \t]+import\b", re.MULTILINE)
HOROVODS_LAUNCHERS = ("horovodrun", "mpirun")
"""Launchers that start scripts of Horovod. The library's API takes the name `horovod` under them."""
SHELLS = ("sh", "bash", "dash")
_SHELL_ACTS = frozenset("$`\\*?[]{}()<>|;#!~\n")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)$", re.DOTALL)


class LaunchError(Exception):
    """The pod's command or environment cannot work. The text is one sentence for the user."""


@dataclass(frozen=True)
class PythonCommand:
    """A command that a zygote can run: `python [-u] FILE args` or `python [-u] -m MODULE args`.

    `directory` and `environ` come from a shell around it: `sh -c "cd DIR && NAME=VALUE exec python FILE"`.
    """

    argv: tuple[str, ...]
    """The command without a shell around it."""
    file: str | None
    module: str | None
    args: tuple[str, ...]
    directory: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def script(self) -> Path | None:
        """Path of the script's file; None for a module."""
        return None if self.file is None else Path(self.directory or ".") / self.file

    def files(self, python_path: str) -> list[Path]:
        """Return the paths at which the source of `__main__` may be.

        A module is looked for in the directory and in `python_path` (PYTHONPATH), not in site-packages.
        """
        if self.script is not None or self.module is None:
            return [self.script] if self.script is not None else []
        here = Path(self.directory or ".")
        name = self.module.replace(".", "/")
        roots = [here, *(here / part for part in python_path.split(os.pathsep) if part)]
        return [root / found for root in roots for found in (f"{name}.py", f"{name}/__main__.py")]


def check_command(command: Sequence[str]) -> None:
    """Raise LaunchError for an empty command, and for one that starts a launcher such as torchrun from a shell."""
    if not command:
        raise LaunchError("No command: start the agent as `agent.pyz -- COMMAND ARGUMENT...`.")
    if (why := launchers.hidden(command)) is not None:
        raise LaunchError(why)


def python_command(command: Sequence[str]) -> PythonCommand | None:
    """Return the command in the form that a zygote runs, or None if it must be exec'd."""
    if len(command) == 3 and PurePath(command[0]).name in SHELLS and command[1] == "-c":
        return _shells_python(command[2])
    return _python(command)


def _python(command: Sequence[str]) -> PythonCommand | None:
    if not command or not _PYTHON.match(PurePath(command[0]).name):
        return None
    rest = list(command[1:])
    while rest and rest[0] == "-u":
        rest.pop(0)
    if rest and rest[0] == "-m" and len(rest) > 1:
        return PythonCommand(tuple(command), None, rest[1], tuple(rest[2:]))
    if rest and not rest[0].startswith("-") and rest[0].endswith(".py"):
        return PythonCommand(tuple(command), rest[0], None, tuple(rest[1:]))
    return None


def _shells_python(text: str) -> PythonCommand | None:
    """Return the python command of `[cd DIR &&] [NAME=VALUE ...] [exec] python ...`, or None for any other shell text.

    Nothing is expanded here. A text with a character that a shell would act on, quoted or not, is left to the shell.
    """
    if set(text) & _SHELL_ACTS:
        return None
    try:
        words = shlex.split(text)
    except ValueError:
        return None
    directory: str | None = None
    if words[:1] == ["cd"] and words[2:3] == ["&&"] and not words[1].startswith("-"):
        directory, words = words[1], words[3:]
    environ: dict[str, str] = {}
    while words and (assigned := _ASSIGNMENT.match(words[0])):
        environ[assigned[1]] = assigned[2]
        words.pop(0)
    if words[:1] == ["exec"]:
        words.pop(0)
    ours = any(name == "PATH" or name in env.RESERVED or name.startswith(env.RESERVED_PREFIXES) for name in environ)
    if ours or any("&" in word for word in (directory or "", *words)):
        return None
    found = _python(words)
    if found is None:
        return None
    if directory is not None:
        environ["PWD"] = str(Path.cwd() / directory)
    return replace(found, directory=directory, environ=environ)


def imports_library(source: str, framework: str = frameworks.PYTORCH) -> bool:
    """Return whether a script's text imports `regroup`. Its processes then belong to a session from the start.

    A script of `regroup.horovod`, or of `horovod` with that framework, has a session only if it calls `hvd.elastic.run`. Only True
    is certain. A script may import the library through a module of its own; the agent learns that when it attaches.
    """
    if _IMPORT.search(source):
        return True
    is_horovod = _OUR_HOROVOD.search(source) or (framework == frameworks.HOROVOD and _HOROVOD.search(source))
    if not is_horovod:
        return False
    calls = elastic_script.calls_elastic_run(source, framework == frameworks.HOROVOD)
    return bool(_ELASTIC.search(source)) if calls is None else calls


def is_library_module(module: str | None) -> bool:
    """Return whether `python -m MODULE` runs the library's own loop (`regroup.train`), which is always a session."""
    return module is not None and module.split(".")[:2] == ["regroup", "train"]


def uses_library(
    python: PythonCommand | None, framework: str = frameworks.PYTORCH, python_path: str = "", launcher: str = ""
) -> bool:
    """Return whether the command runs `regroup.train` or a script whose text imports `regroup` (`imports_library`).

    False for a file that cannot be read; the agent learns the truth when the script attaches. `launcher` started the command, and
    Horovod's launchers give the library its name.
    """
    if python is None or is_library_module(python.module):
        return python is not None
    if launcher in HOROVODS_LAUNCHERS:
        framework = frameworks.HOROVOD
    for path in python.files(python_path):
        try:
            return imports_library(path.read_text(errors="replace"), framework)
        except OSError:
            continue
    return False
