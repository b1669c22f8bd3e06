"""Tells the agent when this process has passed `torch.distributed.init_process_group`. Runs in the user's process.

The zygote executes this text before it imports torch. A process that is exec'd finds it as `sitecustomize`, in a directory
that the agent puts first in PYTHONPATH. The user's own `sitecustomize` runs afterwards, and PYTHONPATH is restored.
The text imports neither torch nor anything of ours: an import hook waits for torch's module.
Failures here are silent. The agent then calls the process unobserved, and the user's script runs on.
"""

import functools
import importlib.machinery
import importlib.util
import json
import os
import socket
import sys
from typing import Any

MODULE = "torch.distributed.distributed_c10d"
FUNCTION = "init_process_group"
SAY_S = 2.0
"""Timeout of a message to the agent. Nothing waits for an answer."""


def say(group: str) -> None:
    """Tell the agent the state of this process's group: watched, entered or formed."""
    try:
        message = {
            "type": "observed",
            "group": group,
            "localRank": int(os.environ["LOCAL_RANK"]),
            "incarnation": int(os.environ["REGROUP_INCARNATION"]),
        }
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
            agent.settimeout(SAY_S)
            agent.connect(os.environ["REGROUP_SOCKET"])
            agent.sendall(json.dumps(message).encode() + b"\n")
    except (OSError, KeyError, ValueError):
        pass


def wrap(module: Any) -> None:
    """Replace the module's function by one that tells the agent when it is called and when it has returned."""
    original = getattr(module, FUNCTION, None)
    if original is None or hasattr(original, "_regroup"):
        return

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        # The library tells the agent more than this hook can.
        if "regroup.job" in sys.modules:
            return original(*args, **kwargs)
        say("entered")
        result = original(*args, **kwargs)
        say("formed")
        return result

    init_process_group._regroup = True  # type: ignore[attr-defined]
    setattr(module, FUNCTION, init_process_group)


class Finder:
    """Wraps the function while its module is imported, before any other module can take the function from there."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = getattr(spec, "loader", None)
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return spec

        def exec_module(module: Any) -> None:
            del loader.exec_module
            execute(module)
            wrap(module)

        loader.exec_module = exec_module
        return spec


def install() -> None:
    """Wrap the function now, or when its module is imported."""
    if MODULE in sys.modules:
        wrap(sys.modules[MODULE])
    else:
        sys.meta_path.insert(0, Finder())


def run_users_sitecustomize() -> None:
    """Restore PYTHONPATH and `sys.path`, and run the `sitecustomize` that python would have run without this hook."""
    directory = os.path.dirname(__file__)
    sys.path[:] = [path for path in sys.path if path != directory]
    rest = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path != directory]
    if rest:
        os.environ["PYTHONPATH"] = os.pathsep.join(rest)
    else:
        os.environ.pop("PYTHONPATH", None)
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        return
    sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    install()
    say("watched")
    run_users_sitecustomize()
