"""The hook that tells when a script has passed init_process_group: in real interpreters, with a torch that is a few lines."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from _regroup_agent.group_hook_files import source_of, write_group_hook
from _regroup_agent.launch.environment import hooked_env

C10D = """
def init_process_group(backend=None, *, fails=False):
    "Start it."
    if fails:
        raise RuntimeError("no peer")
    return backend
"""
OPTIMIZER = """
_hooks = []
def register_optimizer_step_post_hook(hook):
    _hooks.append(hook)
class Optimizer:
    def step(self):
        for hook in _hooks:
            hook(self, (), {})
"""
BATON = """
import os
class FileBaton:
    def __init__(self, lock_file_path):
        self.lock_file_path, self.fd = lock_file_path, None
    def try_acquire(self):
        try:
            self.fd = os.open(self.lock_file_path, os.O_CREAT | os.O_EXCL)
            return True
        except FileExistsError:
            return False
    def release(self):
        os.close(self.fd)
        os.remove(self.lock_file_path)
"""
STEP = "import torch.compiler, torch.optim; torch.optim.Optimizer().step(); print('stepped')"
CALL = "import torch.distributed as dist; print(dist.init_process_group('gloo'), dist.init_process_group.__doc__)"


class Machine:
    """A directory with a small torch and a script, and the socket of an agent."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        distributed = directory / "packages" / "torch" / "distributed"
        distributed.mkdir(parents=True)
        (distributed.parent / "__init__.py").touch()
        (distributed / "__init__.py").write_text("from .distributed_c10d import init_process_group")
        (distributed / "distributed_c10d.py").write_text(C10D)
        (distributed.parent / "compiler.py").write_text("def is_compiling(): return False")
        (distributed.parent / "utils").mkdir()
        (distributed.parent / "utils" / "__init__.py").touch()
        (distributed.parent / "utils" / "file_baton.py").write_text(BATON)
        (distributed.parent / "optim").mkdir()
        (distributed.parent / "optim" / "__init__.py").write_text("from .optimizer import Optimizer")
        (distributed.parent / "optim" / "optimizer.py").write_text(OPTIMIZER)
        self.hook = write_group_hook(str(directory), pytest.fail)
        self.agent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.agent.bind(str(directory / "s"))
        self.agent.listen(16)
        self.agent.setblocking(False)

    def run(self, script: str, *options: str, prefix: str = "", **environ: str) -> tuple[str, list[str]]:
        """Run a script; return what it printed and what the agent was told."""
        path = self.directory / "train.py"
        path.write_text(script)
        plain = {
            "PATH": os.environ["PATH"], "PYTHONPATH": str(self.directory / "packages"), "LOCAL_RANK": "1",
            "REGROUP_INCARNATION": "7", "REGROUP_SOCKET": str(self.directory / "s"), **environ,
        }  # fmt: skip
        command = (
            [sys.executable, *options, "-c", prefix + path.read_text()]
            if prefix
            else [sys.executable, *options, str(path)]
        )
        env = plain if prefix else hooked_env(plain, self.hook)
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr, [m.get("group", m["type"]) for m in self._messages()]

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        while True:
            try:
                connection, _ = self.agent.accept()
            except BlockingIOError:
                return messages
            with connection:
                messages += map(json.loads, connection.makefile().read().splitlines())
            assert all((message["localRank"], message["incarnation"]) == (1, 7) for message in messages)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.agent.close()


@pytest.mark.parametrize(
    ("script", "told"),
    [
        pytest.param(CALL, ["watched", "entered", "formed"], id="called"),
        pytest.param("from torch.distributed import init_process_group as i; i('nccl')", ["watched", "entered", "formed"],
                     id="called by the name that the script took"),
        pytest.param("import torch.distributed as d; d.init_process_group(fails=True)", ["watched", "entered"], id="raises"),
        pytest.param("import torch.distributed", ["watched"], id="never called"),
        pytest.param("import sys; print(*[m for m in sys.modules if m == 'torch'])", ["watched"], id="torch is not imported"),
        pytest.param("import sys, types; sys.modules['regroup.job'] = types\n" + CALL, ["watched"],
                     id="a session tells its agent more than this"),
        pytest.param(STEP, ["watched", "stepped"], id="an optimizer makes a step"),
        pytest.param(f"{CALL}\n{STEP}", ["watched", "entered", "formed", "stepped"], id="a group and an optimizer"),
        pytest.param("import sys, types; sys.modules['regroup.job'] = types\n" + STEP, ["watched"],
                     id="a session counts its steps itself"),
    ],
)  # fmt: skip
def test_what_the_agent_is_told(machine: Machine, script: str, told: list[str]) -> None:
    printed, messages = machine.run(script)
    assert messages == told
    assert printed != "torch\n", "the hook imported torch"
    if script == CALL:
        assert printed == "gloo Start it.\n"


@pytest.mark.parametrize("option", ["-S", "-I", "-E"])
def test_interpreter_that_looks_at_no_pythonpath_or_site_tells_nothing(machine: Machine, option: str) -> None:
    path = f"import sys; sys.path.insert(0, {str(machine.directory / 'packages')!r})\n"
    printed, messages = machine.run(path + CALL, option)
    assert (printed, messages) == ("gloo Start it.\n", [])


def test_in_the_zygote_it_is_installed_before_torch_is_imported(machine: Machine) -> None:
    """The zygote executes the text, imports torch and forks; the child says that it is watched."""
    hook = f"hook = {{'__name__': 'hook'}}\nexec({source_of('group_hook.py')!r}, hook)\n"
    prefix = hook + "hook['install']()\nimport torch.distributed\nhook['say']('watched')\n"
    assert machine.run(CALL, prefix=prefix) == ("gloo Start it.\n", ["watched", "entered", "formed"])


def test_the_zygotes_own_steps_are_none_of_a_trainers(machine: Machine) -> None:
    hook = f"hook = {{'__name__': 'hook'}}\nexec({source_of('group_hook.py')!r}, hook)\nhook['install']()\n"
    assert machine.run(STEP, prefix=hook) == ("stepped\n", [])
    assert machine.run(STEP, prefix=hook + "hook['say']('watched')\n") == ("stepped\n", ["watched", "stepped"])


def test_torch_without_a_hook_for_steps_runs_as_ever(machine: Machine) -> None:
    (machine.directory / "packages" / "torch" / "compiler.py").unlink()
    script = STEP.replace("torch.compiler, ", "")
    assert machine.run(script) == ("stepped\n", ["watched"])


def test_process_without_an_agent_runs_as_ever(machine: Machine) -> None:
    assert machine.run(STEP, REGROUP_SOCKET=str(machine.directory / "nobody")) == ("stepped\n", [])
    assert machine.run(CALL, REGROUP_SOCKET=str(machine.directory / "nobody")) == ("gloo Start it.\n", [])


def test_the_users_sitecustomize_runs_and_pythonpath_is_as_it_was(machine: Machine) -> None:
    packages = machine.directory / "packages"
    (packages / "sitecustomize.py").write_text("import sys\nsys.mine = __name__, __file__")
    script = (
        "import os, sys, sitecustomize\nprint(sys.mine, sitecustomize.__file__, os.environ['PYTHONPATH'], sys.path[1])"
    )
    printed, messages = machine.run(script)
    mine = str(packages / "sitecustomize.py")
    assert printed.splitlines() == [f"{('sitecustomize', mine)} {mine} {packages} {packages}"]
    assert messages == ["watched"]


def test_error_of_the_users_sitecustomize_is_pythons_own_sentence(machine: Machine) -> None:
    (machine.directory / "packages" / "sitecustomize.py").write_text("raise ValueError('mine')")
    plain = subprocess.run(
        [sys.executable, "-c", ""], env={"PYTHONPATH": str(machine.directory / "packages")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    printed, messages = machine.run("")
    assert "ValueError: mine" in printed
    assert printed == plain.stderr
    assert messages == ["watched"]


def test_children_of_the_script_are_not_watched(machine: Machine) -> None:
    _, messages = machine.run(
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import torch.distributed'])"
    )
    assert messages == ["watched"]


def acquires(machine: Machine, lock: Path) -> str:
    """Return what torch's own builder prints that wants this lock, and whether the lock is there afterwards."""
    printed, _ = machine.run(
        f"import os; from torch.utils.file_baton import FileBaton; print(FileBaton({str(lock)!r}).try_acquire())"
    )
    return f"{printed.strip()} {lock.exists()}"


def test_lock_of_a_build_that_was_killed_is_taken_over(machine: Machine) -> None:
    """The path may lead through a link, as a cache in a home directory does."""
    builds, link = machine.directory / "builds", machine.directory / "link"
    builds.mkdir()
    link.symlink_to(builds)
    lock = builds / "lock"
    holds = f"import os, time; os.open({str(link / 'lock')!r}, os.O_CREAT | os.O_EXCL); print(1, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", holds], stdout=subprocess.PIPE) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == b"1\n"
        beside = acquires(machine, link / "lock")
        builder.kill()
    assert beside == "False True", "the builder lives"
    assert lock.exists()
    assert acquires(machine, link / "lock") == "True True"


TAKERS = """
import os, sys, time
from torch.utils.file_baton import FileBaton
for _ in range(4):
    if os.fork() == 0:
        break
else:
    codes = [os.wait()[1] for _ in range(4)]
    print("ends", codes)
    sys.exit()
baton = FileBaton(LOCK)
if baton.try_acquire():
    os.mkdir(LOCK + "-held")
    time.sleep(1.0)
    os.rmdir(LOCK + "-held")
    baton.release()
os._exit(0)
"""


def test_only_one_of_several_processes_takes_over_a_lock(machine: Machine) -> None:
    """They look at the same time. The new lock may have the inode of the one that was removed."""
    lock = machine.directory / "lock"
    lock.touch()
    printed, _ = machine.run(TAKERS.replace("LOCK", repr(str(lock))))
    assert printed.splitlines()[-1] == "ends [0, 0, 0, 0]", printed
    assert not lock.exists()


BESIDE = """
import fcntl, os, threading
from torch.utils.file_baton import FileBaton
judges = os.open(os.path.dirname(PATH), os.O_RDONLY)
fcntl.flock(judges, fcntl.LOCK_EX)
taker = threading.Thread(target=FileBaton(PATH).try_acquire)
before = os.stat(PATH).st_ino, os.stat(PATH).st_mtime_ns
taker.start()
taker.join(2.0)
print(taker.is_alive(), before == (os.stat(PATH).st_ino, os.stat(PATH).st_mtime_ns))
fcntl.flock(judges, fcntl.LOCK_UN)
taker.join()
print(before == (os.stat(PATH).st_ino, os.stat(PATH).st_mtime_ns))
"""


def test_process_judges_no_lock_while_another_one_does(machine: Machine) -> None:
    """Three looks take a second. Between the last one and the removal another process could have made a lock of its own."""
    lock = machine.directory / "lock"
    lock.touch()
    printed, _ = machine.run(BESIDE.replace("PATH", repr(str(lock))))
    assert printed.split() == ["True", "True", "False"]


@pytest.mark.skipif(os.getuid() != 0, reason="another view of the file system needs root")
def test_lock_of_a_living_process_that_has_another_name_for_the_directory_is_left_alone(machine: Machine) -> None:
    """A directory that is mounted at two places has two names. Both are the same file."""
    builds, mounted = machine.directory / "builds", machine.directory / "mounted"
    builds.mkdir()
    mounted.mkdir()
    holds = f"""
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):
    sys.exit(print("no mount", flush=True))
if libc.mount({str(builds)!r}.encode(), {str(mounted)!r}.encode(), None, 4096, None):
    sys.exit(print("no mount", flush=True))
os.open({str(mounted / "lock")!r}, os.O_CREAT | os.O_EXCL)
print("holds", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", holds], stdout=subprocess.PIPE) as builder:
        assert builder.stdout is not None
        try:
            if builder.stdout.readline() != b"holds\n":
                pytest.skip("this process may not mount")
            beside = acquires(machine, builds / "lock")
        finally:
            builder.kill()
    assert beside == "False True", "the builder lives"


def test_process_whose_files_cannot_be_listed_holds_a_lock_of_its_user(machine: Machine) -> None:
    """Such a process is one that has changed its user, or that may not be debugged."""
    lock = machine.directory / "lock"
    lock.touch()
    code = f"""
import os
from torch.utils.file_baton import FileBaton
lists = os.listdir
def listdir(path):
    if path == "/proc/" + str(os.getppid()) + "/fd":
        raise PermissionError(path)
    return lists(path)
os.listdir = listdir
print(FileBaton({str(lock)!r}).try_acquire())
"""
    printed, _ = machine.run(code)
    assert (printed.strip(), lock.exists()) == ("False", True)


def test_lock_on_a_volume_is_left_alone(machine: Machine) -> None:
    """Its builder may run in another pod."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == Path("/").stat().st_dev:
        pytest.skip("/dev/shm is no file system of its own")
    lock = shm / f"lock-{os.getpid()}"
    lock.touch()
    try:
        assert acquires(machine, lock) == "False True"
    finally:
        lock.unlink()


def test_hook_that_cannot_be_written_is_one_sentence_and_no_hook(tmp_path: Path) -> None:
    (tmp_path / "group-hook").touch()
    log: list[str] = []
    assert write_group_hook(str(tmp_path), log.append) == ""
    (said,) = log
    assert "group-hook cannot be written" in said
    assert hooked_env({"A": "1"}, "") == {"A": "1"}
