"""Lets every Python process of the pod find Regroup's library behind the user's own packages. Runs in the user's processes.

Each interpreter finds this text as `sitecustomize`, in a directory that the agent puts into PYTHONPATH and that holds nothing else.
The user's own `sitecustomize` runs afterwards. The directory stays in PYTHONPATH, so that child interpreters find the library, too.
The library is never in PYTHONPATH: an import asks the user's packages first, and the library only if none has the name.
Failures here are silent: the user's script runs on, and an import of the library fails as in an image without it.
Every interpreter that a script starts runs this text, so it imports only what site has imported before, unless there is work to do.
"""

# pathlib takes longer to import than all of this:
# ruff: noqa: PTH100, PTH110, PTH112, PTH113
from __future__ import annotations

import importlib.machinery
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAME = "regroup"
HOROVOD = "horovod"
PACKAGES = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "packages")
"""Directory of the library, beside the one of this text (library.py)."""
SAY_S = 2.0
"""Timeout of a message to the agent."""


class Finder:
    """Answers imports of the library. Python asks it before any other finder, since it also judges what they find."""

    def __init__(self) -> None:
        self.foreign = ""
        """Path of the user's own package of that name, if it is not the library; empty: there is none."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the module of the user's own packages, else the library's. Raises for a part that a foreign package lacks."""
        if name == HOROVOD and os.environ.get("REGROUP_HOROVOD") == "1":
            return self._as_horovod()
        if name != NAME and not (self.foreign and name.startswith(NAME + ".")):
            return None
        spec = self._of_the_user(name, path, target)
        if name != NAME:
            if spec is None and _has_module(name):
                self._refuse(ModuleNotFoundError, name=name)
            return spec
        if spec is None:
            _compile()
            return importlib.machinery.PathFinder.find_spec(name, [PACKAGES])
        if not _is_library(spec):
            self.foreign = str(spec.origin)
            self._judge_names(spec.loader)
        return spec

    def _as_horovod(self) -> Any:
        """Return the package that gives the library's API of Horovod that name. It wins over an installed Horovod.

        An installed one would find no other process, since no horovodrun serves its rendezvous, and each would train alone.
        """
        library = self.find_spec(NAME)
        if self.foreign:
            self._refuse(ModuleNotFoundError, name=HOROVOD)
        places = getattr(library, "submodule_search_locations", None) or ()
        spec = importlib.machinery.PathFinder.find_spec(
            HOROVOD, [os.path.join(place, "horovod", "as_horovod") for place in places]
        )
        if spec is None:
            sentence = (
                f"`import {HOROVOD}` needs Regroup's library, and the one in {', '.join(places) or PACKAGES} has no part for it. "
                "Remove the regroup package from the image: the library comes with the pod."
            )
            _tell_agent(sentence)
            raise ModuleNotFoundError(sentence, name=HOROVOD)
        return spec

    def _of_the_user(self, name: str, path: Any, target: Any) -> Any:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if finder is not self and find is not None else None
            # A directory without __init__.py, such as a clone in the working directory, is no package that somebody installed.
            if spec is not None and (spec.loader is not None or name != NAME) and spec.origin is not None:
                return spec
        return None

    def _judge_names(self, loader: Any) -> None:
        """Make a foreign module refuse the names that only the library has, with a sentence in place of Python's."""
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: Any) -> None:
            execute(module)
            own = getattr(module, "__getattr__", None)

            def missing(name: str) -> Any:
                if own is not None:
                    return own(name)
                if _exports(name):
                    self._refuse(AttributeError)
                raise AttributeError(f"module {NAME!r} has no attribute {name!r}")

            module.__getattr__ = missing

        try:
            loader.exec_module = exec_module
        except AttributeError:
            pass

    def _refuse(self, error: Any, **options: str) -> None:
        sentence = (
            f"`import {NAME}` gives {self.foreign}, which is not Regroup's library. The library comes with the pod, behind the "
            "packages of the image: rename that module, or remove the package."
        )
        _tell_agent(sentence)
        raise error(sentence, **options)


def _is_library(spec: Any) -> bool:
    places = spec.submodule_search_locations or ()
    return any(os.path.isfile(os.path.join(place, "protocol", "__init__.py")) for place in places)


def _has_module(name: str) -> bool:
    path = os.path.join(PACKAGES, *name.split("."))
    return os.path.isfile(path + ".py") or os.path.isdir(path)


def _exports(name: str) -> bool:
    """Return whether the library has this name. Its `__init__.py` lists each of them as a string."""
    try:
        with open(os.path.join(PACKAGES, NAME, "__init__.py"), encoding="utf-8") as source:
            return f'"{name}"' in source.read()
    except OSError:
        return False


def _compile() -> None:
    """Compile the library at its first import by this version of Python. An image may forbid Python to do so as it goes.

    The first import then takes as long as without this. Each later one, in a process that is started again, takes a quarter.
    """
    from importlib.util import cache_from_source

    try:
        if not os.path.exists(cache_from_source(os.path.join(PACKAGES, NAME, "__init__.py"))):
            import compileall

            compileall.compile_dir(PACKAGES, quiet=2)
    except (OSError, NotImplementedError, ImportError):
        pass


def _tell_agent(sentence: str) -> None:
    """Tell the agent that no restart helps. It fails the job with the sentence once this process has failed."""
    import json
    import socket

    try:
        message = {
            "type": "cannotRun",
            "localRank": int(os.environ["LOCAL_RANK"]),
            "incarnation": int(os.environ["REGROUP_INCARNATION"]),
            "message": sentence,
        }
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
            agent.settimeout(SAY_S)
            agent.connect(os.environ["REGROUP_SOCKET"])
            agent.sendall(json.dumps(message).encode() + b"\n")
            agent.recv(1)  # the agent closes once it has read the message; only then this process may end
    except (OSError, KeyError, ValueError):
        pass


def run_users_sitecustomize() -> None:
    """Remove this text's directory from `sys.path`, and run the `sitecustomize` that python would have run without it."""
    directory = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != directory]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    sys.modules["sitecustomize"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, Finder())
    run_users_sitecustomize()
