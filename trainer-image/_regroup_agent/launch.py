"""Reads the pod's command, and makes the environment of a trainer process. Pure but for `uses_library`, which reads the script."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

from regroup.protocol import env, wire

LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun")
TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_PYTHON = re.compile(r"python(3(\.\d+)?)?$")
_IMPORT = re.compile(r"^[ \t]*(import|from)[ \t]+([\w.]+[ \t]*,[ \t]*)*regroup\b", re.MULTILINE)
_SHELLS = ("sh", "bash", "dash")
_SHELL_ACTS = frozenset("$`\\*?[]{}()<>|;#!~\n")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)$", re.DOTALL)
_AGENTS_OWN = (env.OPERATOR_URL, env.CA_FILE, env.TOKEN_FILE, env.STATE_DIR, env.GRACE_SECONDS, env.LOG_NAME,
               env.ENDS_ON_SIGINT, env.GROUP_POSITION)  # fmt: skip


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
    """Raise LaunchError for an empty command, and for a launcher such as torchrun."""
    if not command:
        raise LaunchError("No command: start the agent as `agent.pyz -- COMMAND ARGUMENT...`.")
    name = PurePath(command[0]).name
    is_module = len(command) > 2 and _PYTHON.match(name) is not None and command[1] == "-m"
    launcher = "torchrun" if is_module and command[2] in TORCHRUN_MODULES else name
    if launcher in LAUNCHERS:
        raise LaunchError(
            f"The command starts with {launcher}, which starts and restarts processes itself. "
            f"Give the script itself (python train.py ...): Regroup starts processesPerWorker of them."
        )


def python_command(command: Sequence[str]) -> PythonCommand | None:
    """Return the command in the form that a zygote runs, or None if it must be exec'd."""
    if len(command) == 3 and PurePath(command[0]).name in _SHELLS and command[1] == "-c":
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


def imports_library(source: str) -> bool:
    """Return whether a script's text imports `regroup`. Its processes then belong to a session from the start.

    Only True is certain. A script may import the library through a module of its own; the agent learns that when it attaches.
    """
    return _IMPORT.search(source) is not None


def is_library_module(module: str | None) -> bool:
    """Return whether `python -m MODULE` runs the library's own loop (`regroup.train`), which is always a session."""
    return module is not None and module.split(".")[:2] == ["regroup", "train"]


def uses_library(python: PythonCommand | None) -> bool:
    """Return whether the command runs `regroup.train` or a script whose text imports `regroup`.

    False for a file that cannot be read; the agent learns the truth when the script attaches.
    """
    if python is None or python.script is None:
        return python is not None and is_library_module(python.module)
    try:
        return imports_library(python.script.read_text(errors="replace"))
    except OSError:
        return False


def preload_modules(environ: Mapping[str, str]) -> list[str]:
    """Return the modules that the zygote imports. An empty list means that there is no zygote."""
    return [name.strip() for name in environ.get(env.PRELOAD, env.DEFAULT_PRELOAD).split(",") if name.strip()]


def hooked_env(environ: Mapping[str, str], directory: str) -> dict[str, str]:
    """Return the environment of a process that is exec'd, in which python finds the hook's `sitecustomize` in `directory`.

    An empty `directory` means that there is no hook.
    """
    if not directory:
        return dict(environ)
    path = environ.get("PYTHONPATH")
    return {**environ, "PYTHONPATH": directory + (os.pathsep + path if path else "")}


def trainer_env(
    environ: Mapping[str, str],
    *,
    socket_path: str,
    local_rank: int,
    processes: int,
    incarnation: int,
    restarts: int,
    generation: wire.Generation | None,
) -> dict[str, str]:
    """Return the whole environment of a trainer process.

    Without a `generation`, as in a session, RANK, WORLD_SIZE, GROUP_RANK and MASTER_* are absent: the process asks the agent.
    """
    out = {name: value for name, value in environ.items() if name not in _AGENTS_OWN and name not in env.RESERVED}
    out.setdefault("PYTHONUNBUFFERED", "1")
    # The end of a store's host is no error here, and torch would fill stderr with C++ stack traces of it.
    out.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if processes > 1:
        # As torchrun does. Otherwise each process uses all cores, and the processes slow each other down.
        out.setdefault("OMP_NUM_THREADS", "1")
    out[env.SOCKET] = socket_path
    out[env.INCARNATION] = str(incarnation)
    out[env.LOCAL_RANK] = str(local_rank)
    out[env.LOCAL_WORLD_SIZE] = str(processes)
    out.setdefault(env.WORKERS_PER_GROUP, "1")
    out[env.GROUP_PLACE] = str(int(environ.get(env.GROUP_POSITION, "0")) * processes + local_rank)
    if generation is not None:
        out[env.RANK] = str(generation.rank_offset + local_rank)
        out[env.WORLD_SIZE] = str(generation.world_size)
        out[env.GROUP_RANK] = str(generation.group_rank)
        out[env.MASTER_ADDR] = generation.store_host
        out[env.MASTER_PORT] = str(generation.store_port)
        out[env.TORCHELASTIC_RUN_ID] = environ.get(env.JOB_UID, "regroup")
        out[env.TORCHELASTIC_RESTART_COUNT] = str(restarts)
        out[env.TORCHELASTIC_MAX_RESTARTS] = environ.get(env.MAX_RESTARTS, "0")
    return out
