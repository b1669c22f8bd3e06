"""Makes of a launcher's command the program that each process runs, with arguments and environment. Pure but for `interpreter`.

The launcher's own parser says what the command means (`own_parser`, which `translator` runs). Images of today lack horovodrun and
mpirun. Their commands are read by the table in `regroup.protocol.launchers`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from regroup.protocol import env
from regroup.protocol.launchers import LauncherCommand, count_of

from .command import HOROVODS_LAUNCHERS, LaunchError
from .environment import hooked_env

HAS_OWN_PARSER = ("torchrun", "accelerate", "deepspeed")
_SHEBANG_TRICK = re.compile(rb"""^'''exec' ["']?([^"'\n]+?)["']? "\$0" "\$@"$""", re.MULTILINE)
_NEEDS_MPI = re.compile(r"^[ \t]*(?:import|from)[ \t]+(mpi4py)\b", re.MULTILINE)
_MPI_NAMES = {
    "OMPI_COMM_WORLD_RANK": env.RANK, "OMPI_COMM_WORLD_SIZE": env.WORLD_SIZE, "OMPI_COMM_WORLD_LOCAL_RANK": env.LOCAL_RANK,
    "OMPI_COMM_WORLD_LOCAL_SIZE": env.LOCAL_WORLD_SIZE, "OMPI_COMM_WORLD_NODE_RANK": env.LOCAL_RANK,
}  # fmt: skip
"""Open MPI's names, which scripts for mpirun read, and where their values come from."""
_HOROVOD_NAMES = {
    "HOROVOD_RANK": env.RANK, "HOROVOD_SIZE": env.WORLD_SIZE, "HOROVOD_LOCAL_RANK": env.LOCAL_RANK,
    "HOROVOD_LOCAL_SIZE": env.LOCAL_WORLD_SIZE, "HOROVOD_CROSS_RANK": env.GROUP_RANK,
}  # fmt: skip
"""Names that scripts for horovodrun read."""


@dataclass(frozen=True)
class Program:
    """The program of a worker's processes."""

    command: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables that the launcher sets."""
    launcher: str = ""
    local_rank_argument: str = ""
    """Name of the argument by which each process gets its local rank; "": there is none."""
    first_argument: int = 1
    """Index of the program's first argument in `command`."""

    def command_of(self, local_rank: int) -> list[str]:
        """Return the command of one process."""
        if not self.local_rank_argument:
            return list(self.command)
        index = self.first_argument
        return [*self.command[:index], f"{self.local_rank_argument}={local_rank}", *self.command[index:]]

    def environ_of(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of one process: `environ`, and what the launcher adds. Ranks and addresses stay Regroup's."""
        out = {**environ, **{name: value for name, value in self.environ.items() if not _is_ours(name)}}
        if self.launcher in HOROVODS_LAUNCHERS:
            # Either of them starts scripts of Horovod, whose name the library's API takes.
            out[env.HOROVOD] = "1"
            names = {**_MPI_NAMES, **_HOROVOD_NAMES}
            out.update({name: environ[of] for name, of in names.items() if of in environ})
        if self.launcher in ("deepspeed", "accelerate") and env.LOCAL_WORLD_SIZE in environ:
            out.setdefault("LOCAL_SIZE", environ[env.LOCAL_WORLD_SIZE])  # DeepSpeed without GPUs asks for it
        return out


def _is_ours(name: str) -> bool:
    return name in env.RESERVED or name.startswith(env.RESERVED_PREFIXES)


def guess(found: LauncherCommand, python: str) -> tuple[str, ...]:
    """Return the program's command as the table reads it. The agent prepares its zygote by it until the launcher has answered."""
    if found.launcher not in HAS_OWN_PARSER or found.is_set("--no-python") or found.is_set("--no_python"):
        return found.program
    module = found.is_set("-m") or found.is_set("--module")
    return (python, "-u", *found.python_options, *(("-m",) if module else ()), *found.program)


def program_of(found: LauncherCommand, python: str, answer: Mapping[str, Any]) -> Program:
    """Return the program that the launcher's own parser answers with. Raises LaunchError if the launcher refuses the command."""
    if "refused" in answer:
        raise LaunchError(str(answer["refused"]))
    words = [str(answer["program"])]
    if not answer["no_python"]:
        words = [python, "-u", *found.python_options, *(["-m"] if answer["module"] else []), *words]
    environ = {**found.environ, **answer.get("environ", {})}
    command = (*words, *map(str, answer["args"]))
    return Program(command, environ, found.launcher, found.local_rank_argument, len(words))


def zygote_env(found: LauncherCommand, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which the zygote imports before the launcher has answered.

    accelerate sets OMP_NUM_THREADS for every program. With the likely value the zygote need not import again.
    """
    out = {**environ, **found.environ}
    if found.launcher == "accelerate":
        threads = found.options.get("--num_cpu_threads_per_process", ("1",))[-1]
        out["OMP_NUM_THREADS"] = (
            threads if found.is_set("--num_cpu_threads_per_process") else out.get("OMP_NUM_THREADS", "1")
        )
    return out


def with_library(program: Program, directory: str) -> Program:
    """Return the program with the library's directory in its PYTHONPATH, if the command sets PYTHONPATH without it."""
    path = program.environ.get("PYTHONPATH")
    if path is None or directory in path.split(os.pathsep):
        return program
    return replace(program, environ=hooked_env(program.environ, directory))


def program_of_table(found: LauncherCommand) -> Program:
    """Return the program of horovodrun or mpirun, by the table of their options."""
    environ = dict(found.environ)
    for given in found.options.get("-x", ()):
        name, equals, value = given.partition("=")
        if equals:
            environ[name] = value
    if found.launcher == "horovodrun":
        if found.is_set("--no-stall-check"):
            environ["HOROVOD_STALL_CHECK_DISABLE"] = "1"
        for seconds in found.options.get("--stall-check-warning-time-seconds", ()):
            environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = seconds
    pairs = found.options.get("-genv", ())
    environ.update(zip(pairs[::2], pairs[1::2]))
    return Program(found.program, environ, found.launcher)


def contradiction(launcher: str, answer: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    """Return a sentence if the launcher, in this pod, asks for other counts than the job has.

    The operator has compared the literal command. A configuration file of accelerate and variables from a ConfigMap are known only
    in the pod. A word such as `gpu` contradicts nothing: the operator has made a number of it.
    """
    processes, workers = answer.get("processes"), answer.get("workers")
    have = int(environ.get(env.PROCESSES, "1"))
    if processes is not None and str(processes).isdecimal() and count_of(str(processes)) != have:
        processes = str(processes)[:20]
        return (
            f"{launcher} asks for {processes} processes in this pod, by its command, a configuration file or a variable, but the "
            f"job starts {have} in each worker. Set spec.processesPerWorker to {processes}, or correct the number there."
        )
    most = int(environ.get(env.MAX_WORLD_SIZE, "0")) // have
    if workers is not None and most and workers[1] != most:
        return (
            f"{launcher} asks for {workers[1]} workers in this pod, by its command, a configuration file or a variable, but the "
            f"job has at most {most}. Set spec.replicas or spec.elasticPolicy.maxReplicas to {workers[1]}, or correct "
            "the number there."
        )
    return None


def needs_mpi(launcher: str, source: str, environ: Mapping[str, str]) -> str | None:
    """Return a sentence if a script for mpirun or horovodrun imports mpi4py, which works only under the real launcher.

    Each of its processes would train alone. One process alone may import it.
    """
    found = _NEEDS_MPI.search(source) if launcher in HOROVODS_LAUNCHERS else None
    most = int(environ.get(env.MAX_WORLD_SIZE, "1"))
    if found is None or most <= 1:
        return None
    return (
        f"The script imports {found[1]}, which finds other processes only under {launcher}, and Regroup starts {most} processes "
        "without it. Use torch.distributed in the script, or a job of one process."
    )


def interpreter(start: Sequence[str], search_path: str | None) -> str:
    """Return the Python that a launcher runs under: the one that its command or its first line names.

    Falls back to the Python beside the launcher's file, and to `python3` of the search path.
    """
    if len(start) > 1:
        return start[0]
    found = shutil.which(start[0], path=search_path)
    if found is not None:
        try:
            with open(found, "rb") as file:
                head = file.read(4096)
        except OSError:
            head = b""
        line = head.partition(b"\n")[0]
        words = line[2:].decode("utf-8", "replace").split() if line.startswith(b"#!") else []
        trick = _SHEBANG_TRICK.search(head)
        if trick is not None:
            return trick[1].decode("utf-8", "replace")
        if words and PurePath(words[0]).name.startswith("python"):
            return words[0]
        if len(words) > 1 and PurePath(words[0]).name == "env" and words[-1].startswith("python"):
            return words[-1]
        for name in ("python3", "python"):
            if (Path(found).parent / name).exists():
                return str(Path(found).parent / name)
    return "python3" if shutil.which("python3", path=search_path) else "python"
