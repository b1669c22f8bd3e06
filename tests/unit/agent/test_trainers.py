"""Whose end is it? A pid that was reaped may be another process's a moment later."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from _regroup_agent import zygote as zygote_module
from _regroup_agent.last_words import LastWords
from _regroup_agent.launch.command import python_command
from _regroup_agent.trainers import Trainers
from _regroup_agent.zygote import Zygote
from harness.polling import until_async


class Fork:
    """In place of the zygote: says that the process it forked has a given pid, when it is told to."""

    pid = -1
    imports = False

    def __init__(self) -> None:
        self.answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def spawn(self, _env: Any, _fds: Any, _run: Any = None) -> int:
        return await self.answer


def ended_child(code: int) -> int:
    """Return the pid of a child that is a zombie."""
    process = subprocess.Popen(["sh", "-c", f"exit {code}"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    process.returncode = code  # reaped elsewhere
    return process.pid


@pytest.mark.parametrize(("asked_first", "ends"), [(True, [(0, 7, 3)]), (False, [])])
def test_only_what_ends_while_a_fork_is_asked_for_can_be_that_fork(
    asked_first: bool, ends: list[tuple[int, int, int]]
) -> None:
    async def run() -> list[tuple[int, int, int]]:
        seen: list[tuple[int, int, int]] = []

        def exited(local_rank: int, incarnation: int, code: int, _words: LastWords) -> None:
            seen.append((local_rank, incarnation, code))

        zygote = Fork()
        trainers = Trainers(["x"], cast(Zygote, zygote), "", lambda *_: None, None, lambda *_: None, exited)
        pid = ended_child(3)
        if not asked_first:
            trainers.reap()  # an orphan of somebody's, long before a trainer gets the same pid
        trainers.start(0, 7, {})
        await asyncio.sleep(0)
        if asked_first:
            trainers.reap()
        zygote.answer.set_result(pid)
        while trainers._tasks:
            await asyncio.gather(*trainers._tasks)
        return seen

    assert asyncio.run(run()) == ends


@pytest.mark.parametrize(
    ("imports", "has_begun", "ends"),
    [
        pytest.param(True, True, [(0, 7, -signal.SIGTERM)], id="it waits for the import"),
        pytest.param(True, False, [(0, 7, -signal.SIGTERM)], id="it has just been started"),
        pytest.param(False, True, [], id="it is being forked"),
    ],
)
def test_process_that_waits_for_the_import_is_ended_by_its_first_signal(
    imports: bool, has_begun: bool, ends: list[tuple[int, int, int]]
) -> None:
    """One that is being forked gets the signal once its pid is known."""

    async def run() -> list[tuple[int, int, int]]:
        seen: list[tuple[int, int, int]] = []
        ended = asyncio.Event()

        def exited(local_rank: int, incarnation: int, code: int, _words: LastWords) -> None:
            seen.append((local_rank, incarnation, code))
            ended.set()

        zygote = Fork()
        zygote.imports = imports
        trainers = Trainers(["x"], cast(Zygote, zygote), "", lambda *_: None, None, lambda *_: None, exited)
        trainers.start(0, 7, {})
        if has_begun:
            await asyncio.sleep(0)
        trainers.signal(0, signal.SIGTERM)
        assert seen == [], "whoever sends it is not called back in the middle of that"
        trainers.signal(0, signal.SIGKILL)
        if imports:
            await asyncio.wait_for(ended.wait(), 5.0)
        else:
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            zygote.answer.set_result(child.pid)
            await asyncio.gather(*trainers._tasks)
            assert await asyncio.to_thread(child.wait, 5.0) in (-signal.SIGTERM, -signal.SIGKILL)
        assert not trainers._tasks
        return seen

    assert asyncio.run(run()) == ends


@pytest.mark.parametrize(
    ("command", "alone", "ended"),
    [
        pytest.param([sys.executable, "-c", "{python}"], False, {"process", "helper"}, id="the whole group"),
        pytest.param([sys.executable, "-c", "{python}"], True, {"process"}, id="the process alone"),
        pytest.param(["sh", "-c", "{shell}; true"], True, {"process"}, id="the process in a shell"),
    ],
)
def test_signal_that_is_for_a_script_does_not_reach_its_helpers(
    tmp_path: Path, command: list[str], alone: bool, ended: set[str]
) -> None:
    """Data loaders have no handler, and would die of it."""
    python = "\n".join([
        "import os, signal, sys, time",
        "helper = os.fork()",
        "name = 'process' if helper else 'helper'",
        f"end = lambda *_: (open({str(tmp_path)!r} + '/' + name, 'w').close(), os._exit(0))",
        "signal.signal(signal.SIGUSR1, end)",
        f"open({str(tmp_path)!r} + '/runs-' + name, 'w').close()",
        "time.sleep(30)",
    ])  # fmt: skip
    script = tmp_path / "script.py"
    script.write_text(python)
    full = [part.format(python=python, shell=f"{sys.executable} {script}") for part in command]

    async def run() -> set[str]:
        trainers = Trainers(full, None, "", lambda *_: None, None, lambda *_: None, lambda *_: None)
        trainers.start(0, 1, dict(os.environ))
        runs = [tmp_path / "runs-process", tmp_path / "runs-helper"]
        await until_async(lambda: all(path.exists() for path in runs), "both run")
        trainers.signal(0, signal.SIGUSR1, alone=alone)
        await until_async(lambda: all((tmp_path / name).exists() for name in ended), "they have got the signal")
        trainers.signal(0, signal.SIGKILL)
        await asyncio.sleep(0)
        return {path.name for path in tmp_path.iterdir() if path.name in ("process", "helper")}

    assert asyncio.run(run()) == ended


def test_an_orphans_end_is_forgotten_once_no_fork_is_asked_for() -> None:
    """It ended while one fork was asked for, and a later one has its pid."""

    async def run() -> list[int]:
        seen: list[int] = []
        zygote = Fork()
        trainers = Trainers(
            ["x"], cast(Zygote, zygote), "", lambda *_: None, None, lambda *_: None, lambda rank, *_: seen.append(rank)
        )
        orphan = ended_child(0)
        trainers.start(0, 1, {})
        await asyncio.sleep(0)
        trainers.reap()
        zygote.answer.set_result(os.getpid())
        await asyncio.gather(*trainers._tasks)
        zygote.answer = asyncio.get_running_loop().create_future()
        zygote.answer.set_result(orphan)
        trainers.start(1, 1, {})
        await asyncio.gather(*trainers._tasks)
        return seen

    assert asyncio.run(run()) == []


def test_helper_that_writes_for_ever_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has left the process group, and keeps the inherited stderr: whenever the pipe is read, there is more in it."""

    async def run() -> int:
        num_read, seen = 0, list[int]()

        def write(_fd: int, data: bytes) -> None:
            nonlocal num_read
            num_read += len(data)
            assert num_read < 1 << 20, "it reads for ever"

        zygote = Fork()
        trainers = Trainers(
            ["x"], cast(Zygote, zygote), "", write, None, lambda *_: None, lambda rank, *_: seen.append(rank)
        )
        trainers.start(0, 1, {})
        trainer = trainers._by_rank[0]
        pipe, read = trainer.streams[0].pipe, os.read

        def more(fd: int, size: int) -> bytes:
            return b"x" * 4096 if fd == pipe else read(fd, size)

        await asyncio.sleep(0)
        monkeypatch.setattr(os, "read", more)
        zygote.answer.set_result(ended_child(0))
        trainers.reap()  # while the fork is asked for: it is that process's end
        await asyncio.gather(*trainers._tasks)
        assert seen == [0]
        return num_read

    assert asyncio.run(run()) == 1 << 16, "what a pipe holds"


# --- a real zygote, whose end is reaped by the test ----------------------------------------------------------------


async def imported_zygote(directory: Path) -> Zygote:
    """Return a zygote that can fork."""
    imported = asyncio.Event()
    python = python_command([sys.executable, str(directory / "train.py")])
    assert python is not None
    zygote = Zygote(python, ["json"], os.environ, lambda _: None, imported.set)
    zygote.start()
    await asyncio.wait_for(imported.wait(), 10.0)
    return zygote


def bury(zygote: Zygote) -> None:
    """Reap a zygote that is dead or about to be."""
    assert zygote.pid is not None
    os.waitpid(zygote.pid, 0)
    zygote.died()


def test_zygote_that_does_not_answer_is_killed_and_another_one_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        zygote = await imported_zygote(tmp_path)
        assert zygote.pid is not None
        os.kill(zygote.pid, signal.SIGSTOP)
        monkeypatch.setattr(zygote_module, "MAX_FORK_S", 0.1)
        forking = asyncio.ensure_future(zygote.spawn({}, []))
        await asyncio.sleep(0)
        monkeypatch.undo()
        async with ended(zygote):
            await asyncio.wait_for(asyncio.to_thread(os.waitid, os.P_PID, zygote.pid, os.WEXITED | os.WNOWAIT), 5.0)
            bury(zygote)
            pid = await asyncio.wait_for(forking, 10.0)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    asyncio.run(run())


@contextlib.asynccontextmanager
async def ended(zygote: Zygote) -> AsyncIterator[None]:
    """Leave no zygote."""
    try:
        yield
    finally:
        if zygote.pid is not None:
            os.kill(zygote.pid, signal.SIGKILL)
            os.waitpid(zygote.pid, 0)


def test_zygote_whose_command_does_not_fit_on_its_socket_says_so(tmp_path: Path) -> None:
    """The python that it names could be started."""
    logged: list[str] = []

    async def run() -> None:
        python = python_command([sys.executable, str(tmp_path / "train.py"), *["x" * 1000] * 3000])
        assert python is not None
        zygote = Zygote(python, ["json"], os.environ, logged.append, lambda: None)
        zygote.start()
        assert (zygote.usable, zygote.pid) == (False, None)

    asyncio.run(run())
    (line,) = logged
    assert line.startswith("No zygote: the command and the variables that it sets do not fit on the zygote's socket (")
    assert "cannot be started" not in line


def test_what_a_zygote_forked_right_before_its_end_is_the_process_that_was_asked_for(tmp_path: Path) -> None:
    """Else two processes of one incarnation would train, and nobody would know one of them."""

    async def run() -> None:
        zygote = await imported_zygote(tmp_path)
        assert zygote.pid is not None
        async with ended(zygote):
            forking = asyncio.ensure_future(zygote.spawn({}, []))
            await asyncio.sleep(0)
            channel = zygote._channel
            assert channel is not None
            assert select.select([channel], [], [], 5.0)[0], "the pid is there, and not read"
            forked = json.loads(channel.recv(1 << 16, socket.MSG_PEEK))["pid"]
            os.kill(zygote.pid, signal.SIGKILL)
            bury(zygote)
            try:
                assert await asyncio.wait_for(forking, 10.0) == forked
            finally:
                os.kill(forked, signal.SIGKILL)

    asyncio.run(run())


def test_fork_that_is_asked_for_between_a_zygotes_end_and_its_reaping_waits(tmp_path: Path) -> None:
    """Its end of the channel is closed first. A task that spins there would keep the agent from everything, the reaping too."""

    async def run() -> None:
        zygote = await imported_zygote(tmp_path)
        assert zygote.pid is not None
        os.kill(zygote.pid, signal.SIGKILL)
        await until_async(lambda: zygote._channel is None, "the end is seen")
        async with ended(zygote):
            forking = asyncio.ensure_future(zygote.spawn({}, []))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not forking.done()
            bury(zygote)
            pid = await asyncio.wait_for(forking, 10.0)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    def spins(_number: int, _frame: Any) -> None:
        raise AssertionError("it spins")

    before = signal.signal(signal.SIGALRM, spins)
    signal.alarm(20)
    try:
        asyncio.run(run())
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# --- a zygote that the test plays ----------------------------------------------------------------------------------


class Played(Zygote):
    """One whose process is the test; its successor imports for ever."""

    def __init__(self, directory: Path) -> None:
        python = python_command([sys.executable, str(directory / "train.py")])
        assert python is not None
        super().__init__(python, ["json"], {}, lambda _: None, lambda: None)
        self.theirs = self.ours = socket.socket()

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._process = cast(Any, subprocess.CompletedProcess([], returncode=0))
        if self.theirs is not self.ours:
            return
        self.theirs.close()
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.setblocking(False)
        self._channel = self.ours
        loop.add_reader(self.ours.fileno(), self._read)
        self._ready.set_result(True)

    def die_after(self, pid: int) -> None:
        """Take the first request, say that it was forked, and be gone."""
        request = json.loads(self.theirs.recv(1 << 16))
        self.theirs.send(json.dumps({"id": request["id"], "pid": pid}).encode())
        self.theirs.close()
        self.died()


def test_fork_is_known_although_its_zygote_left_another_request_unread(tmp_path: Path) -> None:
    async def run() -> None:
        zygote = Played(tmp_path)
        forks = [asyncio.ensure_future(zygote.spawn({"A": str(number)}, [])) for number in range(2)]
        await until_async(lambda: len(zygote._waiting) == 2, "both have asked")
        zygote.die_after(4242)
        assert await asyncio.wait_for(forks[0], 5.0) == 4242
        assert not forks[1].done(), "it is asked for again"
        forks[1].cancel()

    asyncio.run(run())


def test_process_that_was_forked_is_no_process_that_waits_for_an_import(tmp_path: Path) -> None:
    """A signal that comes right after its zygote's end, while the next one imports, is for the process."""

    async def run() -> None:
        zygote, spawned = Played(tmp_path), list[int]()
        child = subprocess.Popen(["sleep", "60"], start_new_session=True)
        trainers = Trainers(
            ["x"], zygote, str(tmp_path), lambda *_: None, None, lambda rank, _: spawned.append(rank), lambda *_: None
        )
        trainers.start(0, 7, {})
        await until_async(lambda: bool(zygote._waiting), "it has asked")
        zygote.die_after(child.pid)
        trainers.signal(0, signal.SIGTERM)
        await until_async(lambda: spawned == [0], "it is known")
        assert await asyncio.to_thread(child.wait, 5.0) == -signal.SIGTERM

    asyncio.run(run())
