"""The zygote: imports slow modules once and forks trainer processes in milliseconds.

Runs as `python -c READ_SOURCE SOCKET_FD regroup-zygote COMMAND` under the command's own interpreter and path. This text and the
setup are the first two messages on the socket, so that `ps` shows a short line. The text imports nothing of ours, since a `regroup`
from the agent's zipapp would hide the image's. It stays single-threaded and never touches CUDA. Each fork goes through a
process that ends at once, so that the agent, a subreaper, becomes the parent and sees the exit status. The
forked child leaves the loop and runs the user's code at top level: exit codes, atexit and tracebacks are python's own.
"""

import ctypes
import errno
import gc
import importlib
import importlib.machinery
import json
import os
import signal
import socket
import sys
import time
import types
import warnings
import weakref
from pathlib import Path
from typing import Any

_hook: dict[str, Any] = {"__name__": "_regroup_group_hook"}
"""Namespace of group_hook.py, which tells the agent when the process has passed `init_process_group`."""
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
_fork_warning: Any = None
"""Warning filter of the zygote's own, which forks remove."""


def _die_with_parent(agent_pid: int, libc: ctypes.CDLL) -> None:
    """Have the kernel kill this process with the agent.

    Waits until the process in between is gone and the agent is the parent: the signal is sent at the death of the parent.
    """
    deadline = time.monotonic() + 10.0
    while os.getppid() != agent_pid:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0002)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent_pid:
        os._exit(1)


def _call_it(name: str, libc: ctypes.CDLL) -> None:
    """Set the process name in `ps` and /proc/PID/comm, since the zygote and its forks have the same command line."""
    libc.prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _fork() -> int:
    """Return the child's pid, and 0 in the child. If the kernel refuses the fork, return the negative error number."""
    try:
        return os.fork()
    except OSError as error:
        return -(error.errno or errno.EAGAIN)


def _serve(channel: socket.socket, libc: ctypes.CDLL) -> dict[str, Any]:
    """Fork a child for each request of the agent. Returns only in a forked child, with its request."""
    agent_pid = os.getppid()
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(channel, 1 << 20, 4)
        except InterruptedError:
            continue
        if not data:
            os._exit(0)
        request: dict[str, Any] = json.loads(data)
        between = _fork()
        if between == 0:
            forked = _fork()
            if forked != 0:
                os._exit(-min(forked, 0))
            os.setsid()
            for fd, standard in zip(fds, (2, 1)):
                os.dup2(fd, standard)
                os.close(fd)
            # The pid goes out first, so that the agent can kill a process that has not begun yet.
            channel.send(json.dumps({"id": request["id"], "pid": os.getpid()}).encode())
            channel.close()
            _die_with_parent(agent_pid, libc)
            _call_it(
                "launcher" if "code" in request["run"] else f"trainer-{request['env'].get('LOCAL_RANK', '')}", libc
            )
            return request
        for fd in fds:
            os.close(fd)
        failed = -between if between < 0 else os.waitstatus_to_exitcode(os.waitpid(between, 0)[1])
        if failed > 0:
            channel.send(json.dumps({"id": request["id"], "unforked": os.strerror(failed)}).encode())


def _become(request: dict[str, Any], setup: dict[str, Any]) -> types.ModuleType:
    """Make this process look like a fresh `python FILE ...` or `python -m MODULE ...`, and return its __main__ module."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.environ.update(setup["environ"])
    if setup["code"] is None:
        _set_path(setup)
        _hook["say"]("watched")
    for signum in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if sys.version_info < (3, 14):  # later versions make it on access
        main.__dict__.setdefault("__annotations__", {})
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # module of the classes that a pool of spawned processes returns
        sys.modules["__mp_main__"] = main
    _draw_anew()
    _forget()
    sys.argv[:] = [("-c" if setup["code"] else setup["file"]) or "-m", *setup["args"]]
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = setup["command"]
    return main


_unseeded: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Generators of Python's `random` that a preloaded module has made without a seed."""
_unseeded_numpy: list[Any] = []
"""Generators of numpy that a preloaded module has made without a seed."""
_OF_THE_SYSTEM = 1 << 96
"""A numpy seed from here on was drawn by numpy itself, with 128 bits. A person writes a smaller one."""


def _watch_seeds() -> Any:
    """Collect the generators that are made without a seed, until the returned function is called."""
    import random

    seed = random.Random.seed

    def noted(self: Any, a: Any = None, version: int = 2) -> None:
        seed(self, a, version)
        (_unseeded.add if a is None else _unseeded.discard)(self)

    def ends() -> None:
        setattr(random.Random, "seed", seed)  # noqa: B010
        if "numpy.random" in sys.modules:
            generator = sys.modules["numpy.random"].Generator
            for found in [one for one in gc.get_objects() if type(one) is generator]:
                entropy = getattr(getattr(found.bit_generator, "seed_seq", None), "entropy", None)
                if isinstance(entropy, int) and entropy >= _OF_THE_SYSTEM:
                    _unseeded_numpy.append(found)

    setattr(random.Random, "seed", noted)  # noqa: B010
    return ends


def _draw_anew() -> None:
    """Draw new seeds for the libraries' global generators and for those made without a seed.

    Otherwise all forks would draw the same numbers. A generator that was given a seed keeps its numbers.
    """
    if "random" in sys.modules:
        sys.modules["random"].seed()
    for generator in list(_unseeded):
        generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    for generator in _unseeded_numpy:
        generator.bit_generator.state = type(generator.bit_generator)().state
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()  # the CPU's; a GPU's generator is seeded at its first use
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


def _forget() -> None:
    """Undo what imported libraries have cached for the zygote's process, and the zygote's own warning filter."""
    warnings.filters[:] = [one for one in warnings.filters if one is not _fork_warning]  # type: ignore[index]
    getattr(warnings, "_filters_mutated", lambda: None)()
    if "tempfile" in sys.modules:
        setattr(sys.modules["tempfile"], "tempdir", None)  # noqa: B010  (the script may set TMPDIR before it asks)
    if "threading" in sys.modules:
        getattr(sys.modules["threading"].main_thread(), "_set_native_id", lambda: None)()


def _run(main: types.ModuleType, setup: dict[str, Any]) -> None:
    """Run the user's code to its end, or a text of the agent's (`code`). Raises any exception of it."""
    if setup["code"]:
        exec(compile(setup["code"], "<agent>", "exec", dont_inherit=True), main.__dict__)
        return
    if setup["module"]:
        import runpy

        getattr(runpy, "_run_module_as_main")(setup["module"])  # noqa: B009  (what `python -m` itself calls)
        return
    path = setup["file"]
    if not Path(path).is_file():
        sys.stderr.write(f"{setup['command'][0]}: can't open file {path!r}: [Errno 2] No such file or directory\n")
        sys.exit(2)
    main.__file__ = path
    main.__dict__["__cached__"] = None
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    with open(path, "rb") as source:
        code = compile(source.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _trimmed(error: BaseException) -> "types.TracebackType | None":
    """Return the traceback without the frames of this text."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == "<string>":
        trace = trace.tb_next
    return trace


def _set_path(setup: dict[str, Any]) -> None:
    """Set the first entry of the path as `python FILE` and `python -m` do. Each fork repeats it for its own file."""
    sys.path[0] = os.path.dirname(os.path.realpath(setup["file"])) if setup["file"] else str(Path.cwd())


def _zygote() -> tuple[types.ModuleType, dict[str, Any]]:
    channel = socket.socket(fileno=int(sys.argv[1]))
    setup = json.loads(channel.recv(1 << 20))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _call_it("zygote", libc)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _set_path(setup)  # a preload module is found where the script would find it
    exec(setup["hook"], _hook)
    _hook["install"]()
    for name, value in setup["settings"].items():  # for the imports only; in a fork the script sets them itself
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    began = time.monotonic()
    stop_watching = _watch_seeds()
    try:
        for name in setup["preload"]:
            importlib.import_module(name)
    except BaseException as error:
        channel.send(json.dumps({"failed": f"{type(error).__name__}: {str(error)[:300]}"}).encode())
        os._exit(0)
    stop_watching()
    gc.collect()
    gc.freeze()
    # Python 3.12 warns at a fork of any thread, also of OpenBLAS, whose threads are made for forks.
    warnings.filterwarnings("ignore", message=".*multi-threaded.*fork.*", category=DeprecationWarning)
    global _fork_warning
    _fork_warning = warnings.filters[0]
    channel.send(json.dumps({"ready": round(time.monotonic() - began, 3)}).encode())
    request = _serve(channel, libc)
    setup = {"code": None, **setup, **request["run"]}
    return _become(request, setup), setup


_main, _setup = _zygote()
try:
    _run(_main, _setup)
except SystemExit:
    raise
except BaseException as _error:
    if isinstance(_error, KeyboardInterrupt):
        raise
    _error = _error.with_traceback(_trimmed(_error))
    sys.excepthook(type(_error), _error, _error.__traceback__)
    sys.exit(1)
