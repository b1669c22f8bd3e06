"""Tells the agent how far an unmodified script has come, and holds it between two steps. Runs in the user's process.

Two functions of torch are observed. `torch.distributed.init_process_group` says when the process has formed its group.
A hook on all optimizers counts steps and sees the agent's request to hold (`Steps`). A third one is mended: the builder of
C++ extensions takes over the lock of a build whose process was killed (`take_over_locks`).

The zygote executes this text before it imports torch. A process that is exec'd finds it as `sitecustomize`, in a directory
that the agent puts first in PYTHONPATH. The user's own `sitecustomize` runs afterwards, and PYTHONPATH is restored.
The text imports neither torch nor anything of ours: an import hook waits for torch's modules.
Failures here are silent. The agent then calls the process unobserved, and the user's script runs on.
"""

# pathlib takes longer to import than all of this:
# ruff: noqa: PTH108, PTH115, PTH116, PTH119, PTH208
import atexit
import contextlib
import fcntl
import functools
import importlib.machinery
import importlib.util
import json
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Optional

FUNCTION = "init_process_group"
REGISTER = "register_optimizer_step_post_hook"
SAY_S = 2.0
"""Timeout of a message to the agent. Nothing waits for an answer."""
STEPPED_EVERY_S = 1.0
LOOK_EVERY_S = 0.001
"""Steps that follow each other faster look less often whether the agent has written, since a look is a system call."""
CONNECT_EVERY_S = 5.0
"""Time between two attempts to reach an agent that does not answer."""
LEADER_MISSED = 10
"""An optimizer that makes so many steps without one of the leader between becomes the leader. A critic makes five in a row."""
LOOKS, LOOK_AGAIN_S = 3, 0.5
"""A lock is stale if so many looks, with this time between them, find no process that has it open."""


def say(group: str) -> None:
    """Tell the agent the state of this process's group: watched, entered or formed."""
    if group == "watched":
        steps.begin()
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


class Steps:
    """Counts the optimizer steps of this process, and holds the process after one of them when the agent asks for it.

    A script may have several optimizers, and a wrapper such as ZeRO is an optimizer around another one. So only the steps of
    one optimizer count, the leader: the first that makes a step. Another one that is seen to have replaced it becomes the leader.
    Its steps count from its first. A step that GradScaler skips is none, since torch does not call the optimizer. One call of
    `step` counts once, however often LBFGS evaluates its closure.

    The process holds after a step of any optimizer. If two threads make steps, the second one waits at its next step, too.

    One connection carries all messages. It is opened at the first step. Forked children of the process do not use it.
    """

    def __init__(self) -> None:
        self._pid = 0
        """Process that counts. 0: none does, as in the zygote and in children of the script."""
        self._leader: Callable[[], Any] = lambda: None
        self._missed: dict[int, int] = {}
        """Steps of each other optimizer since the last one of the leader, by its id."""
        self._steps = 0
        self._said_steps, self._said_s = 0, 0.0
        self._look_s = self._connect_s = 0.0
        """Time of the next look, and of the next attempt to connect."""
        self._agent: Optional[socket.socket] = None
        self._lock = threading.RLock()
        """Held by the thread that looks or holds. A handler of the script that runs in the hold may make a step of its own."""
        self._holds = False
        os.register_at_fork(after_in_child=self._forget)

    def begin(self) -> None:
        """Count in this process. Called once its environment is that of a trainer."""
        self._pid = os.getpid()

    def end(self) -> None:
        """Tell the agent the last count, because the interpreter ends."""
        if self._agent is not None and os.getpid() == self._pid:
            with contextlib.suppress(OSError, KeyError, ValueError):
                self._say_count(time.monotonic())

    def stepped(self, optimizer: Any) -> None:
        """Take in a step of any optimizer."""
        if not self._pid:
            return
        leader = self._leader()
        if optimizer is leader:
            if self._missed:
                self._missed = {}
            self._steps += 1
        elif leader is None:
            self._lead(optimizer, 1)
        else:
            missed = self._missed[id(optimizer)] = self._missed.get(id(optimizer), 0) + 1
            if missed >= LEADER_MISSED:
                self._lead(optimizer, missed)
        now_s = time.monotonic()
        if now_s >= self._look_s:
            with self._lock:
                if not self._holds:
                    self._look_and_hold(now_s)

    def _lead(self, optimizer: Any, counted: int) -> None:
        """Make this optimizer the leader, of which so many steps count that it has made already."""
        self._leader, self._missed = weakref.ref(optimizer), {}
        self._steps += counted

    def _look_and_hold(self, now_s: float) -> None:
        self._look_s = now_s + LOOK_EVERY_S
        try:
            is_asked = self._look(now_s)
        except (OSError, KeyError, ValueError):
            self._close()
            return
        if is_asked:
            self._look_s, self._holds = 0.0, True  # each other thread comes here at its next step
            try:
                self._hold()
            finally:
                self._holds = False

    def _look(self, now_s: float) -> bool:
        """Tell the agent the count if a second is over. Return whether the agent has asked to hold, and was told that it is so."""
        if os.getpid() != self._pid or "regroup.job" in sys.modules:
            self._pid = 0  # a forked child, or a session, which tells its agent more than this
            return False
        if self._agent is None:
            if now_s < self._connect_s:
                return False
            self._connect_s = now_s + CONNECT_EVERY_S
            atexit.unregister(self.end)  # of an earlier connection
            atexit.register(self.end)
            agent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            agent.setblocking(False)
            self._agent = agent
            agent.connect(os.environ["REGROUP_SOCKET"])
        if now_s - self._said_s >= STEPPED_EVERY_S:
            self._say_count(now_s)
        try:
            asked = self._agent.recv(4096)
        except (BlockingIOError, InterruptedError):
            return False
        if not asked:
            self._close()
        is_asked = b'"hold"' in asked and b'"go"' not in asked
        if is_asked:
            self._send({"type": "held"})
        return is_asked

    def _say_count(self, now_s: float) -> None:
        counted = self._steps - self._said_steps
        if counted:
            step_s = (now_s - self._said_s) / counted if self._said_steps else 0.0
            self._said_steps, self._said_s = self._steps, now_s
            self._send({"type": "stepped", "steps": self._steps, "stepS": step_s})

    def _hold(self) -> None:
        """Wait for the agent's word to go on, which comes after the agent has signalled this process.

        A handler of the script for that signal runs in this wait, and what it raises is the script's. The wait also ends with the
        connection. If the agent dies, the kernel kills this process.
        """
        agent = self._agent
        assert agent is not None
        said = b""
        agent.setblocking(True)
        try:
            while b'"go"' not in said:
                try:
                    said = agent.recv(4096)
                except ConnectionError:
                    said = b""
                if not said:
                    self._close()
                    return
        finally:
            if agent.fileno() >= 0:
                agent.setblocking(False)
            self._said_steps, self._said_s = self._steps, time.monotonic()  # the wait is no part of a step

    def _send(self, message: "dict[str, Any]") -> None:
        assert self._agent is not None
        message["localRank"] = int(os.environ["LOCAL_RANK"])
        message["incarnation"] = int(os.environ["REGROUP_INCARNATION"])
        line = json.dumps(message).encode() + b"\n"
        if self._agent.send(line) < len(line):
            raise BlockingIOError

    def _close(self) -> None:
        if self._agent is not None:
            self._agent.close()
            self._agent = None

    def _forget(self) -> None:
        """Stop to count in a forked child, which shares the connection of its parent."""
        self._pid = 0
        self._close()
        self._lock = threading.RLock()  # another thread of the parent may have held it


steps = Steps()


def count_steps(module: Any) -> None:
    """Have torch call `steps` after each step of any optimizer."""
    torch, register = sys.modules["torch"], getattr(module, REGISTER, None)
    if register is None or importlib.util.find_spec("torch.compiler") is None:
        return

    def stepped(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        # A compiled step is not counted. The compiler sees a constant here, and the hook adds nothing to the graph.
        if not torch.compiler.is_compiling():
            steps.stepped(optimizer)

    register(stepped)


def take_over_locks(module: Any) -> None:
    """Have torch remove the lock of a build whose process is gone, and build anew. Torch itself would wait for it for ever.

    torch builds a C++ extension (DeepSpeed's operators are such) while its process holds a lock file open. A killed process leaves
    the file behind, in a directory that outlives the processes of a generation.
    """
    baton = getattr(module, "FileBaton", None)
    original = getattr(baton, "try_acquire", None)
    if original is None or hasattr(original, "_regroup"):
        return

    @functools.wraps(original)
    def try_acquire(self: Any) -> Any:
        return original(self) or take_over(self.lock_file_path, functools.partial(original, self))

    try_acquire._regroup = True  # type: ignore[attr-defined]
    baton.try_acquire = try_acquire  # type: ignore[union-attr]


def take_over(path: str, acquire: Callable[[], Any]) -> Any:
    """Remove a lock file that no process has open, and call `acquire`. Return what that returns, or False for a lock that stays.

    Only a file beside this system's own root is judged: on a volume, its process may run in another pod and not be seen here.
    One process at a time judges. It locks the directory meanwhile, and the kernel ends that lock with the process.
    """
    try:
        if os.stat(path).st_dev != os.stat("/").st_dev:
            return False
        directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    except FileNotFoundError:
        return acquire()
    except OSError:
        return False
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        return remove_if_stale(path) and acquire()
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(directory, fcntl.LOCK_UN)  # a child that was forked meanwhile has the directory open, too
        os.close(directory)


def remove_if_stale(path: str) -> bool:
    """Remove a lock file that no process has open. Return whether the lock is gone. Call it with the directory locked."""
    try:
        lock = os.stat(path)
        for look in range(LOOKS):
            if look:
                time.sleep(LOOK_AGAIN_S)
            if is_open(os.path.basename(path), lock):
                return False
        if identity(os.stat(path)) != identity(lock):
            return False
        os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def identity(file: os.stat_result) -> "tuple[int, ...]":
    """Return what tells two files apart. A new file may have the inode of one that was removed, but not its times."""
    return file.st_dev, file.st_ino, file.st_mtime_ns, file.st_ctime_ns


def is_open(name: str, lock: os.stat_result) -> bool:
    """Return whether a process of this machine may have the lock file open, under any name of its directory.

    Only files with the lock's own name are asked for, since the volume of another one may hang. A process whose files cannot
    be listed counts as a holder if it runs as the file's owner.
    """
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
        except PermissionError:
            if runs_as(pid, lock.st_uid):
                return True
            continue
        except OSError:
            continue  # it has ended
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                opened = f"/proc/{pid}/fd/{descriptor}"
                if os.path.basename(os.readlink(opened)) == name and os.path.samestat(os.stat(opened), lock):
                    return True
    return False


def runs_as(pid: str, uid: int) -> bool:
    """Return whether a process has this user among its ids. A file that it creates has one of them as its owner."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
            ids = next((line.split()[1:] for line in status if line.startswith("Uid:")), [])
    except OSError:
        return False  # it has ended
    return str(uid) in ids


OBSERVED = {
    "torch.distributed.distributed_c10d": wrap,
    "torch.optim.optimizer": count_steps,
    "torch.utils.file_baton": take_over_locks,
}
"""Maps each observed module to the function that gets it once it is imported."""


class Finder:
    """Changes each observed module while it is imported, before any other module can take a function from there."""

    def __init__(self, names: "list[str]") -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if name not in self._names:
            return None
        self._names.remove(name)
        if not self._names:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = getattr(spec, "loader", None)
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return spec

        def exec_module(module: Any) -> None:
            del loader.exec_module
            execute(module)
            OBSERVED[name](module)

        loader.exec_module = exec_module
        return spec


def install() -> None:
    """Change each observed module now, or when it is imported."""
    for name in OBSERVED:
        if name in sys.modules:
            OBSERVED[name](sys.modules[name])
    missing = [name for name in OBSERVED if name not in sys.modules]
    if missing:
        sys.meta_path.insert(0, Finder(missing))


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
