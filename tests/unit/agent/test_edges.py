"""The agent's small parts: state file, command and environment, HTTP, zipapp."""

from __future__ import annotations

import ast
import asyncio
import getpass
import json
import os
import pwd
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from _regroup_agent import http, statefile
from _regroup_agent.build import build
from _regroup_agent.launch.command import (
    LaunchError,
    check_command,
    imports_library,
    is_library_module,
    python_command,
    uses_library,
)
from _regroup_agent.launch.environment import preload_modules, trainer_env
from _regroup_agent.launch.frameworks import Place
from _regroup_agent.main import NEEDED, user_name
from _regroup_agent.progress import interval_s
from _regroup_agent.statefile import UNKNOWN, Saved, StateFile
from _regroup_agent.store_socket import Ports, StoreSocket
from _regroup_agent.trainers import is_exiting
from regroup.protocol import env
from regroup_operator.api import parse_job
from regroup_operator.render import RenderSettings, worker_pod
from tests.builders.jobs import stored_job
from tests.unit.agent.drive import generation
from tests.unit.agent.python39 import oldest_python

# --- state file ----------------------------------------------------------------------------------------------------


def test_state_file_returns_what_was_saved(tmp_path: Path) -> None:
    file = StateFile(str(tmp_path))
    assert file.load() == (Saved(), "")
    saved = Saved(3, 2, 7, 1, sealed=4, finished=3, done=0b101)
    file.save(saved)
    assert StateFile(str(tmp_path)).load() == (saved, "")
    assert [p.name for p in tmp_path.iterdir()] == ["agent.json"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"entered": 1}', '{"entered": "1", "adopted": 1, "incarnation": 1, "started": 1}', "\udc80",
     '{"entered": -1, "adopted": 1, "incarnation": 1, "started": 1}'],
)  # fmt: skip
def test_unreadable_state_file_is_everything_adopted_and_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "agent.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    saved, sentence = StateFile(str(tmp_path)).load()
    assert (saved.entered, saved.adopted) == (UNKNOWN, UNKNOWN)
    assert saved.incarnation > 1_000_000_000
    assert sentence.count(str(tmp_path)) == 1


def test_state_file_of_an_earlier_boot_is_everything_adopted_and_one_sentence(tmp_path: Path) -> None:
    StateFile(str(tmp_path), boot="one").save(Saved(3, 2, 7, 1))
    assert StateFile(str(tmp_path), boot="one").load() == (Saved(3, 2, 7, 1), "")
    saved, sentence = StateFile(str(tmp_path), boot="another").load()
    assert (saved.entered, saved.adopted) == (UNKNOWN, UNKNOWN)
    assert "the node has restarted since" in sentence


def test_incarnation_never_falls_where_the_clock_is_behind(tmp_path: Path) -> None:
    StateFile(str(tmp_path), boot="one").save(Saved(3, 2, 4_000_000_000_000, 1))
    assert StateFile(str(tmp_path), boot="another").load()[0].incarnation == 4_000_000_000_000


def test_incarnation_rises_where_the_file_is_lost_twice_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two starts of a process in between count two."""
    monkeypatch.setattr(time, "time_ns", lambda: 1_790_000_000_100_000_000)
    (tmp_path / "agent.json").write_text("{")
    first = StateFile(str(tmp_path)).load()[0].incarnation
    monkeypatch.setattr(time, "time_ns", lambda: 1_790_000_000_500_000_000)
    assert StateFile(str(tmp_path)).load()[0].incarnation > first + 2


def test_first_write_waits_for_the_disk_and_no_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    file = StateFile(str(tmp_path))
    file.save(Saved(incarnation=1))
    assert len(synced) == 2, (
        "the file and its directory: a file that is missing after a power cut would say that the pod is new"
    )
    file.save(Saved(entered=1, incarnation=1))
    StateFile(str(tmp_path)).save(Saved(entered=2, incarnation=1))
    assert len(synced) == 2


def test_boot_has_one_name_until_the_node_restarts_and_a_new_one_each_time_where_the_kernel_tells_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert statefile.boot_id() == statefile.boot_id()
    monkeypatch.setattr(statefile, "BOOT_ID", tmp_path / "none")
    assert statefile.boot_id() != statefile.boot_id()
    (tmp_path / "none").write_text("\n")
    assert statefile.boot_id() != statefile.boot_id()


# --- command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "want"),
    [
        (["python", "train.py", "--lr", "1"], ("train.py", None, ("--lr", "1"))),
        (["/usr/bin/python3.12", "-u", "train.py"], ("train.py", None, ())),
        (["python3", "-m", "train.digits", "x"], (None, "train.digits", ("x",))),
        (["python", "-c", "print()"], None),
        (["python", "-O", "train.py"], None),
        (["python", "directory"], None),
        (["pythonish", "train.py"], None),
        (["python"], None),
    ],
)
def test_python_command(command: list[str], want: tuple[object, ...] | None) -> None:
    got = python_command(command)
    assert (got and (got.file, got.module, got.args)) == want
    assert got is None or (got.argv, got.directory, got.environ) == (tuple(command), None, {})


@pytest.mark.parametrize("shell", ["sh", "/bin/bash"])
@pytest.mark.parametrize(
    "text",
    [
        "exec {python} train.py --lr 0.1",
        "{python} train.py",
        "cd sub && exec {python} -u train.py 'two words' \"it's\"",
        "cd {here}/sub && {python} train.py",
        "A=1 B='two words' PYTHONPATH={here}/sub exec {python} train.py",
        "cd sub && OMP_NUM_THREADS=1 {python} -m train x",
    ],
)
def test_python_inside_a_shell_is_what_the_shell_would_run(tmp_path: Path, shell: str, text: str) -> None:
    """The real shell runs a program that prints what it was given; the agent must have read the same."""
    (tmp_path / "sub").mkdir()
    python = tmp_path / "python3"
    python.write_text(
        f"#!{sys.executable} -I\nimport json, os, sys\nprint(json.dumps([sys.argv, os.getcwd(), dict(os.environ)]))"
    )
    python.chmod(0o755)
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": "/before"}
    text = text.format(python=python, here=tmp_path)
    got = python_command([shell, "-c", text])
    assert got is not None
    done = subprocess.run([shell, "-c", text], capture_output=True, check=True, cwd=tmp_path, env=environ)
    argv, directory, set_by_shell = json.loads(done.stdout)
    assert list(got.argv) == argv
    assert os.path.realpath(tmp_path / (got.directory or ".")) == directory
    inherited = ("PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE")  # the shell's own
    assert {**environ, **got.environ} | dict.fromkeys(inherited, "") == set_by_shell | dict.fromkeys(inherited, "")


@pytest.mark.parametrize(
    "text",
    [
        "python prepare.py && python train.py", "python train.py --lr $LR", "python train.py | tee log", "python train.py &",
        "set -e; python train.py", "python train.py *.txt", "cd - && python train.py", "source venv && python train.py",
        "PATH=/x python train.py", "RANK=3 python train.py", "REGROUP_SOCKET=x python train.py", "python train.py 'unbalanced",
        "cd a && cd b && python train.py", "sh -c 'python train.py'", "cd a", "exec", "", "python `which train.py`",
        "python train.py > log", "cd a&& python train.py", "(python train.py)", "python train.py\npython test.py",
        "exec -a x python train.py",
    ],
)  # fmt: skip
def test_any_other_shell_text_is_left_to_the_shell(text: str) -> None:
    assert python_command(["sh", "-c", text]) is None


@pytest.mark.parametrize("command", [["sh", "-ec", "python a.py"], ["sh", "-c", "python a.py", "x"], ["sh", "a.sh"]])
def test_other_options_of_a_shell_are_left_to_the_shell(command: list[str]) -> None:
    assert python_command(command) is None


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ([], "No command"),
        (["sh", "-c", "exec torchrun --nproc-per-node 2 train.py"], r"\[torchrun, --nproc-per-node, '2', train.py\]"),
        (["bash", "-lc", "cd /x && python -m torch.distributed.run train.py"], "from a shell"),
        (["numactl", "--cpunodebind=0", "torchrun", "train.py"], "from numactl"),
    ],
)
def test_command_that_cannot_work_is_refused(command: list[str], word: str) -> None:
    with pytest.raises(LaunchError, match=word):
        check_command(command)


@pytest.mark.parametrize(
    ("text", "want"),
    [("import regroup", True), ("if x:\n    from regroup import session", True), ("import os, regroup", True),
     ("import regrouping", False), ("import regroup.horovod as hvd", False),
     ("from regroup import horovod as hvd", False),
     ("from regroup.horovod import init", False), ("import regroup.horovod, regroup", True),
     ("# import regroup", False), ("from . import regroup", False), ("", False)],
)  # fmt: skip
def test_script_that_imports_the_library_is_a_sessions(text: str, want: bool) -> None:
    assert imports_library(text) is want


@pytest.mark.parametrize(
    ("text", "framework", "want"),
    [
        pytest.param("import regroup.horovod as hvd\nhvd.init()", "PyTorch", False, id="ours, not elastic"),
        pytest.param("import regroup.horovod as hvd\n@hvd.elastic.run\n", "PyTorch", True, id="ours, elastic"),
        pytest.param(
            "from regroup import horovod as hvd\nhvd.init()", "Horovod", False, id="ours by from, not elastic"
        ),
        pytest.param(
            "from regroup import horovod as hvd\nhvd.elastic.run(f)", "PyTorch", True, id="ours by from, elastic"
        ),
        pytest.param("from regroup.horovod.elastic import run\n", "PyTorch", True, id="the decorator alone"),
        pytest.param("import horovod.torch as hvd\n@hvd.elastic.run\n", "Horovod", True, id="Horovod's name for ours"),
        pytest.param("import horovod.torch as hvd\n@hvd.elastic.run\n", "PyTorch", False, id="Horovod itself"),
        pytest.param("import horovod.torch as hvd\nhvd.init()", "Horovod", False, id="Horovod's name, not elastic"),
        pytest.param("import torch\nt = my.elastic.run(1)", "Horovod", False, id="something else that is elastic"),
        pytest.param("import regroup\nimport regroup.horovod", "PyTorch", True, id="the library beside it"),
        pytest.param("import regroup.horovod as hvd\n# hvd.elastic.run later", "PyTorch", False, id="a comment"),
        pytest.param("import regroup.horovod as hvd\nprint('elastic.run')", "PyTorch", False, id="a string"),
        pytest.param("import horovod.torch.elastic as el\n@el.run\ndef f(): 1", "Horovod", True, id="its module"),
        pytest.param(
            "from horovod.torch import elastic as ela\n@ela.run\ndef f(): 1", "Horovod", True, id="its module by from"
        ),
        pytest.param(
            "import horovod.torch as hvd\ndef main():\n  E = hvd.elastic\n  E.run(f)", "Horovod", True, id="assigned"
        ),
        pytest.param("import horovod.torch\nhorovod.torch.elastic.run(f)", "Horovod", True, id="its whole name"),
        pytest.param("from regroup.horovod.elastic import *\n", "PyTorch", True, id="a star"),
        pytest.param(
            "import regroup.horovod as hvd\nprint 'Python 2'; hvd.elastic.run(f)", "PyTorch", True, id="unreadable"
        ),
    ],
)
def test_script_of_horovod_is_a_sessions_if_it_is_elastic(text: str, framework: str, want: bool) -> None:
    assert imports_library(text, framework) is want


@pytest.mark.parametrize(
    ("module", "want"),
    [("regroup.train", True), ("regroup.train.__main__", True), ("regroup", False), ("train", False),
     ("regroup.trainer", False), (None, False)],
)  # fmt: skip
def test_librarys_own_loop_is_a_sessions(module: str | None, want: bool) -> None:
    assert is_library_module(module) is want


def test_script_of_a_launcher_or_a_module_is_read_like_a_file(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "train.py").write_text("import horovod.torch as hvd\n@hvd.elastic.run\ndef train(): ...\n")
    file, module = (
        python_command(["python", *words]) for words in ([f"{tmp_path}/jobs/train.py"], ["-m", "jobs.train"])
    )
    assert uses_library(file, launcher="horovodrun")
    assert not uses_library(file), "without that name it is an installed Horovod"
    assert uses_library(module, "Horovod", str(tmp_path))
    assert not uses_library(module, "Horovod"), "the module is nowhere"


def test_preload_begins_with_torch_unless_said() -> None:
    assert preload_modules({})[0] == "torch"
    assert preload_modules({env.PRELOAD: ""}) == []
    assert preload_modules({env.PRELOAD: "torch, numpy"}) == ["torch", "numpy"]


BASE = {
    "HOME": "/h", "RANK": "9", env.OPERATOR_URL: "https://x", env.TOKEN_FILE: "/t", env.CA_FILE: "/c", env.STATE_DIR: "/s",
    env.CHECKPOINT_DIR: "/ckpt", env.MAX_WORLD_SIZE: "8", env.JOB_UID: "job", env.MAX_RESTARTS: "4",
}  # fmt: skip


def test_pod_has_what_the_agent_reads() -> None:
    raw = stored_job()
    settings = RenderSettings(operator_url="https://x", agent_image="x")
    pod = worker_pod(parse_job(raw), 0, 0, settings=settings)
    trainer = next(c for c in pod["spec"]["containers"] if c["name"] == "trainer")
    assert {*NEEDED, env.PROCESSES, env.MAX_RESTARTS} <= {entry["name"] for entry in trainer["env"]}


def test_environment_of_a_session_has_no_rank_and_no_secrets() -> None:
    got = trainer_env(BASE, socket_path="/a", local_rank=1, processes=2, incarnation=5, restarts=0, place=None)
    assert got == {
        "HOME": "/h", env.CHECKPOINT_DIR: "/ckpt", env.MAX_WORLD_SIZE: "8", env.JOB_UID: "job", env.MAX_RESTARTS: "4",
        env.SOCKET: "/a", env.INCARNATION: "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "PYTHONUNBUFFERED": "1",
        env.WORKERS_PER_GROUP: "1", env.GROUP_PLACE: "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def test_process_knows_its_place_in_its_group_of_workers() -> None:
    environ = {**BASE, env.WORKERS_PER_GROUP: "3", env.GROUP_POSITION: "2"}
    got = trainer_env(environ, socket_path="/a", local_rank=1, processes=4, incarnation=0, restarts=0, place=None)
    assert (got[env.WORKERS_PER_GROUP], got[env.GROUP_PLACE]) == ("3", "9")
    assert env.GROUP_POSITION not in got


@pytest.mark.parametrize(("processes", "given", "want"), [(1, None, None), (2, None, "1"), (2, "4", "4")])
def test_processes_of_one_pod_share_its_cores(processes: int, given: str | None, want: str | None) -> None:
    environ = BASE if given is None else {**BASE, "OMP_NUM_THREADS": given}
    got = trainer_env(
        environ, socket_path="/a", local_rank=0, processes=processes, incarnation=0, restarts=0, place=None
    )
    assert got.get("OMP_NUM_THREADS") == want


def test_environment_of_a_script_is_torchruns() -> None:
    place = Place(generation(1, 2, rank_offset=4, world_size=8, group_rank=2), local_rank=1, processes=2)
    got = trainer_env(BASE, socket_path="/a", local_rank=1, processes=2, incarnation=5, restarts=3, place=place)
    assert {name: got[name] for name in (*env.RESERVED, env.TORCHELASTIC_RUN_ID, env.TORCHELASTIC_RESTART_COUNT,
                                         env.TORCHELASTIC_MAX_RESTARTS)} == {
        "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "2",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000", "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_MAX_RESTARTS": "4",
    }  # fmt: skip
    assert not [name for name in got if name.startswith("TORCHELASTIC_USE")]


@pytest.mark.parametrize(
    ("rank", "world", "factor", "want"),
    [
        (0, 5000, 1.0, 1.0), (1, 5000, 1.0, 1.0), (2, 4, 1.0, 10.0), (2, 5000, 1.0, 100.0),
        (0, 8, 4.0, 4.0), (2, 8, 4.0, 40.0), (0, 8, 0.01, 1.0), (0, 8, 1e9, 20.0), (0, 8, float("nan"), 1.0),
    ],
)  # fmt: skip
def test_progress_of_all_workers_and_jobs_together_is_bounded(
    rank: int, world: int, factor: float, want: float
) -> None:
    assert interval_s(rank, world, factor) == want


# --- HTTP ----------------------------------------------------------------------------------------------------------


async def _read(data: bytes) -> tuple[int, bytes]:
    reader = asyncio.StreamReader(limit=http.MAX_HEAD_BYTES)
    reader.feed_data(data)
    reader.feed_eof()
    answer = await http.read_head(reader)
    return answer.status, await http.read_body(reader, answer)


@pytest.mark.parametrize(
    ("data", "want"),
    [
        pytest.param(b"HTTP/1.1 204 No Content\r\n\r\n", (204, b""), id="no body"),
        pytest.param(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 3\r\n\r\nabc", (403, b"abc"), id="a length"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1;x=y\r\nc\r\n0\r\n\r\n",
            (200, b"abc"),
            id="chunks",
        ),
    ],
)
def test_answer_is_read(data: bytes, want: tuple[int, bytes]) -> None:
    assert asyncio.run(_read(data)) == want


LONG_HEAD = b"HTTP/1.1 200 OK\r\nX: " + b"x" * 40000 + b"\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n", LONG_HEAD,
     b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"],
)  # fmt: skip
def test_answer_that_is_not_http_is_an_error(data: bytes) -> None:
    with pytest.raises(http.HttpError):
        asyncio.run(_read(data))


def test_lines_are_put_together_from_chunks() -> None:
    async def read() -> list[bytes]:
        reader = asyncio.StreamReader()
        reader.feed_data(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\na\nb\r\n3\r\nc\nd\r\n1\r\n\n\r\n0\r\n\r\n"
        )
        reader.feed_eof()
        return [line async for line in http.read_lines(reader, await http.read_head(reader), 100)]

    assert asyncio.run(read()) == [b"a", b"bc", b"d"]


@pytest.mark.parametrize(
    ("body", "want"), [(b'{"error": "No."}', "No."), (b"<html>", "<html>"), (b"[1]", "[1]"), (b"\xff", "\ufffd")]
)
def test_sentence_of_a_refusal(body: bytes, want: str) -> None:
    assert http.sentence(body) == want


# --- the store's socket --------------------------------------------------------------------------------------------


def test_store_socket_is_held_for_a_script_and_listens_for_a_session() -> None:
    store = StoreSocket("127.0.0.1")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", store.port))
    store.listen()
    socket.create_connection(("127.0.0.1", store.port)).close()
    with store.take() as taken:
        assert taken.getsockname()[1] != store.port
        socket.create_connection(("127.0.0.1", store.port)).close()
    store.take().close()
    store._socket.close()  # an agent holds it as long as it lives


# --- processes -----------------------------------------------------------------------------------------------------


def test_process_that_is_past_its_end_is_known_before_it_is_reaped() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not is_exiting(process.pid)
        process.kill()
        assert os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT) is not None
        assert is_exiting(process.pid)
    finally:
        process.kill()
        process.communicate()
    assert not is_exiting(process.pid)


# --- the oldest Python ---------------------------------------------------------------------------------------------


TRAINER_IMAGE = Path(__file__).parents[3] / "trainer-image"
OLD = sorted([*TRAINER_IMAGE.glob("_regroup_agent/**/*.py"), *TRAINER_IMAGE.glob("regroup/protocol/**/*.py")])


@pytest.mark.parametrize("path", [TRAINER_IMAGE / "regroup/__init__.py", *OLD], ids=lambda path: path.name)
def test_source_is_python_3_9(path: Path) -> None:
    """Holds on every machine, also without that interpreter: nothing newer in the syntax."""
    ast.parse(path.read_text(), feature_version=(3, 9))


def test_machine_without_python_3_9_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATH", "HOME", "PYENV_ROOT", "UV_PYTHON_INSTALL_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    with pytest.warns(UserWarning, match=r"no Python 3\.9 on this machine"):
        assert oldest_python() == sys.executable
    (tmp_path / "versions/3.9.7/bin").mkdir(parents=True)
    python = tmp_path / "versions/3.9.7/bin/python3.9"
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    assert oldest_python() == str(python)


# --- zipapp --------------------------------------------------------------------------------------------------------


def test_zipapp_imports_the_standard_library_and_itself_only(tmp_path: Path) -> None:
    build(tmp_path / "agent.pyz")
    script = "import json, sys; print(json.dumps(sorted(getattr(sys, 'stdlib_module_names', []))))"
    names = json.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)
    argv = [oldest_python(), "-I", "-S", str(tmp_path / "agent.pyz"), "--check-imports"]
    modules = subprocess.run(argv, capture_output=True, check=True, text=True).stdout.split()
    # Modules that only the older Python's standard library has; `sys.stdlib_module_names` is of 3.10.
    allowed = {*names, "__main__", "_bootlocale", "asynchat", "asyncore", "binascii", "imp"}
    foreign = [m for m in modules if m.partition(".")[0] not in allowed and not _ours(m)]
    assert foreign == []
    assert {"_regroup_agent.main", "regroup.protocol.wire"} <= set(modules)


def _ours(module: str) -> bool:
    return module in ("regroup", "_regroup_agent") or module.startswith(("_regroup_agent.", "regroup.protocol"))


def test_zipapp_is_the_same_bytes_each_time(tmp_path: Path) -> None:
    build(tmp_path / "a.pyz")
    build(tmp_path / "b.pyz")
    assert (tmp_path / "a.pyz").read_bytes() == (tmp_path / "b.pyz").read_bytes()


INTERRUPTED = """\
import runpy, signal, sys
signal.signal(2, signal.default_int_handler)  # as Python sets it, unless the tests run in the background of a shell
sys.addaudithook(lambda event, given: event == "import" and given[0] == "_regroup_agent.core" and signal.raise_signal(2))
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_zipapp_that_is_interrupted_while_it_starts_ends_without_a_word(tmp_path: Path) -> None:
    build(tmp_path / "agent.pyz")
    command = [sys.executable, "-I", "-c", INTERRUPTED, str(tmp_path / "agent.pyz")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_zipapp_without_its_environment_says_what_is_missing(tmp_path: Path) -> None:
    build(tmp_path / "agent.pyz")
    argv = [oldest_python(), "-I", str(tmp_path / "agent.pyz"), "--", "python", "train.py"]
    done = subprocess.run(argv, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 2
    assert done.stderr.startswith("regroup: REGROUP_OPERATOR_URL, ")
    assert done.stderr.count("\n") == 1


def test_ports_of_processes_are_held_until_they_are_released_and_others_are_held_then() -> None:
    ports = Ports("127.0.0.1", 2)
    first = ports.numbers
    assert len(set(first)) == 2
    with socket.socket() as process, pytest.raises(OSError, match="in use"):
        process.bind(("127.0.0.1", first[0]))
    ports.renew()
    assert not set(ports.numbers) & set(first)
    with socket.socket() as process:
        process.bind(("127.0.0.1", first[0]))
        process.listen()


@pytest.mark.parametrize(
    ("environ", "has_account", "want"),
    [
        ({}, True, {}),
        ({}, False, {"LOGNAME": str(os.getuid())}),
        ({"USER": "ana"}, False, {}),
        ({"LOGNAME": ""}, False, {"LOGNAME": str(os.getuid())}),
    ],
)
def test_user_id_without_account_has_a_name(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], has_account: bool, want: dict[str, str]
) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if not has_account:
        monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert user_name() == want
    monkeypatch.setenv("LOGNAME", want.get("LOGNAME") or os.environ.get("LOGNAME", ""))
    assert getpass.getuser()
