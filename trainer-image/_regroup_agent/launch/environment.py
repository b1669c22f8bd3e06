"""Makes the environment of a trainer process. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping

from regroup.protocol import env, frameworks

from .frameworks import Place, environment

_AGENTS_OWN = (env.OPERATOR_URL, env.CA_FILE, env.TOKEN_FILE, env.STATE_DIR, env.GRACE_SECONDS, env.LOG_NAME,
               env.ENDS_ON_SIGINT, env.GROUP_POSITION, env.PROGRESS_LOG)  # fmt: skip
_READ_AT_IMPORT = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "TORCH_", "PYTORCH_", "PYTHON")


def preload_modules(environ: Mapping[str, str]) -> list[str]:
    """Return the modules that the zygote imports. An empty list means that there is no zygote.

    A framework other than torch has none unless the user names modules, because its runtime may not bear a fork.
    """
    default = env.DEFAULT_PRELOAD if framework_of(environ) in frameworks.ON_TORCH else ""
    return [name.strip() for name in environ.get(env.PRELOAD, default).split(",") if name.strip()]


def framework_of(environ: Mapping[str, str]) -> str:
    """Return `spec.framework` of the job that this pod belongs to."""
    return environ.get(env.FRAMEWORK, frameworks.PYTORCH)


def parser_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which a launcher reads its command: that of a trainer process without Regroup's variables."""
    return {
        name: value
        for name, value in environ.items()
        if name not in env.RESERVED and not name.startswith(env.RESERVED_PREFIXES)
    }


def read_at_import(environ: Mapping[str, str], zygote: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environ` that libraries read as they are loaded, and that the zygote's environment has not so."""
    return {
        name: value for name, value in environ.items() if name.startswith(_READ_AT_IMPORT) and zygote.get(name) != value
    }


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
    place: Place | None,
) -> dict[str, str]:
    """Return the whole environment of a trainer process.

    Without a `place`, as in a session, RANK, WORLD_SIZE, GROUP_RANK and MASTER_* are absent: the process asks the agent.
    """
    framework = framework_of(environ)
    ours = {*_AGENTS_OWN, *env.RESERVED, *frameworks.RESERVED.get(framework, ())}
    out = {name: value for name, value in environ.items() if name not in ours}
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
    if framework == frameworks.HOROVOD:  # in a session, too: an elastic script may import `horovod`
        out[env.HOROVOD] = "1"
    if place is not None and framework == frameworks.NONE:
        del out[env.LOCAL_RANK], out[env.LOCAL_WORLD_SIZE]
    if place is not None:
        for name, value in environment(framework, place).items():
            out.setdefault(name, value)  # the user may have set what is not reserved
    if place is not None and framework in frameworks.ON_TORCH:
        out[env.TORCHELASTIC_RUN_ID] = environ.get(env.JOB_UID, "regroup")
        out[env.TORCHELASTIC_RESTART_COUNT] = str(restarts)
        out[env.TORCHELASTIC_MAX_RESTARTS] = environ.get(env.MAX_RESTARTS, "0")
    return out
