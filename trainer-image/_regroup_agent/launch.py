"""Reads the command, and writes the environment of a trainer process. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from regroup.protocol import env, wire

LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun")
_PYTHON = re.compile(r"python(3(\.\d+)?)?$")
_IMPORT = re.compile(r"^[ \t]*(import|from)[ \t]+([\w.]+[ \t]*,[ \t]*)*regroup\b", re.MULTILINE)
_AGENTS_OWN = (env.OPERATOR_URL, env.CA_FILE, env.TOKEN_FILE, env.STATE_DIR, env.GRACE_SECONDS)


class LaunchError(Exception):
    """The pod's command or environment cannot work; the text is one sentence for the user."""


@dataclass(frozen=True)
class PythonCommand:
    """A command that a zygote can run: `python [-u] FILE args` or `python [-u] -m MODULE args`."""

    interpreter: str
    file: str | None
    module: str | None
    args: tuple[str, ...]


def check_command(command: Sequence[str]) -> None:
    """Raise LaunchError for a command that cannot be run."""
    if not command:
        raise LaunchError("No command: start the agent as `agent.pyz -- COMMAND ARGUMENT...`.")
    name = PurePath(command[0]).name
    module = command[2] if len(command) > 2 and _PYTHON.match(name) and command[1] == "-m" else ""
    named = (
        name
        if name in LAUNCHERS
        else "torchrun"
        if module in ("torch.distributed.run", "torch.distributed.launch")
        else ""
    )
    if named:
        raise LaunchError(
            f"The command starts with {named}, which would start and restart processes itself. "
            f"Give the script itself (python train.py ...): Regroup starts processesPerWorker of them."
        )


def python_command(command: Sequence[str]) -> PythonCommand | None:
    """Return how a zygote runs the command, or None where it has to be exec'd."""
    if not _PYTHON.match(PurePath(command[0]).name):
        return None
    rest = list(command[1:])
    while rest and rest[0] == "-u":
        rest.pop(0)
    if rest and rest[0] == "-m" and len(rest) > 1:
        return PythonCommand(command[0], None, rest[1], tuple(rest[2:]))
    if rest and not rest[0].startswith("-") and rest[0].endswith(".py"):
        return PythonCommand(command[0], rest[0], None, tuple(rest[1:]))
    return None


def imports_library(source: str) -> bool:
    """Return whether a script's text imports `regroup`: then its processes are a session's from the start.

    Only a yes is proof. A script that reaches the library through a module of its own is found out when it attaches.
    """
    return _IMPORT.search(source) is not None


def preload_modules(environ: Mapping[str, str]) -> list[str]:
    """Return the modules that the zygote imports; empty: no zygote."""
    return [name.strip() for name in environ.get(env.PRELOAD, env.DEFAULT_PRELOAD).split(",") if name.strip()]


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

    `generation` None (tier Session): without RANK, WORLD_SIZE, GROUP_RANK and MASTER_*; the process asks the agent.
    """
    out = {name: value for name, value in environ.items() if name not in _AGENTS_OWN and name not in env.RESERVED}
    out.setdefault("PYTHONUNBUFFERED", "1")
    # A store that goes with its host is our daily business; torch would fill stderr with its C++ stack traces.
    out.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    out[env.SOCKET] = socket_path
    out[env.INCARNATION] = str(incarnation)
    out[env.LOCAL_RANK] = str(local_rank)
    out[env.LOCAL_WORLD_SIZE] = str(processes)
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
