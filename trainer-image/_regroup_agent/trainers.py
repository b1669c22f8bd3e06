"""Starts, signals and reaps the trainer processes, and passes on what they write to stderr.

Owns pids, process groups (each trainer has its own, so its helpers die with it) and the stderr pipes. Decides nothing.
A process's end is reported once, after its group is killed and its last output is read.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .last_words import KEPT_BYTES, LastWords, last_words
from .launch import hooked_env
from .posix import die_with_parent
from .zygote import Zygote

_PF_EXITING = 0x4
"""Bit of a task's flags (proc(5), stat): it is past the point of no return."""


@dataclass
class _Trainer:
    local_rank: int
    incarnation: int
    stderr_fd: int
    pid: int = 0
    signals: list[int] = field(default_factory=list)
    """Signals asked for before the pid was known."""
    tail: bytes = b""


class Trainers:
    """`on_spawned(local_rank, incarnation)` and `on_exited(local_rank, incarnation, code, last words)` are called from the loop;
    `write`, which must not block, with what the processes write to stderr."""

    def __init__(
        self,
        command: Sequence[str],
        zygote: Zygote | None,
        hook_directory: str,
        write: Callable[[bytes], None],
        on_spawned: Callable[[int, int], None],
        on_exited: Callable[[int, int, int, LastWords], None],
    ) -> None:
        self._command, self._zygote, self._hook_directory = list(command), zygote, hook_directory
        self._write, self._on_spawned, self._on_exited = write, on_spawned, on_exited
        self._by_rank: dict[int, _Trainer] = {}
        self._by_pid: dict[int, _Trainer] = {}
        self._unclaimed: dict[int, int] = {}  # pid -> status of a fork that ended before the zygote's answer was read
        self._popens: dict[int, subprocess.Popen[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, local_rank: int, incarnation: int, env: Mapping[str, str]) -> None:
        """Start a process; the one before it with this local rank is dead."""
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        trainer = _Trainer(local_rank, incarnation, read_fd)
        self._by_rank[local_rank] = trainer
        asyncio.get_running_loop().add_reader(read_fd, self._read_stderr, trainer)
        task = asyncio.get_running_loop().create_task(self._spawn(trainer, env, write_fd))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def signal(self, local_rank: int, signum: int) -> None:
        """Signal a process and its helpers. SIGTERM goes to the group too: a shell does not pass it on."""
        trainer = self._by_rank.get(local_rank)
        if trainer is None:
            return
        if trainer.pid:
            _kill_group(trainer.pid, signum)
        else:
            trainer.signals.append(signum)

    def pid(self, local_rank: int, incarnation: int) -> int | None:
        """Return the pid of a process that runs; None where it has ended or is only being started."""
        trainer = self._by_rank.get(local_rank)
        return trainer.pid if trainer is not None and trainer.incarnation == incarnation and trainer.pid else None

    def tail(self, local_rank: int) -> str:
        """Return the last that a process has written to stderr."""
        trainer = self._by_rank.get(local_rank)
        return trainer.tail.decode("utf-8", "replace") if trainer is not None else ""

    def dying(self) -> list[tuple[int, int]]:
        """Return (local rank, incarnation) of the processes that the kernel is taking down and that cannot be reaped yet.

        Freeing a large process's memory takes the kernel tens of milliseconds; its peers may hear of its end before us.
        """
        return [(t.local_rank, t.incarnation) for pid, t in self._by_pid.items() if is_exiting(pid)]

    def reap(self) -> None:
        """Reap every dead child (on SIGCHLD): trainers, the zygote, and orphans that became ours."""
        while True:
            try:
                # Look first: while it is a zombie its process group cannot be another's.
                result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if result is None:
                return
            pid = result.si_pid
            trainer = self._by_pid.pop(pid, None)
            if trainer is not None:
                _kill_group(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            popen = self._popens.pop(pid, None)
            if popen is not None:
                popen.returncode = os.waitstatus_to_exitcode(status)  # or it would wait for the pid again
            if trainer is not None:
                self._finish(trainer, os.waitstatus_to_exitcode(status))
            elif self._zygote is not None and pid == self._zygote.pid:
                self._zygote.died()
            elif self._zygote is not None:
                self._unclaimed[pid] = status
                if len(self._unclaimed) > 1000:
                    self._unclaimed.pop(next(iter(self._unclaimed)))

    async def _spawn(self, trainer: _Trainer, env: Mapping[str, str], write_fd: int) -> None:
        try:
            pid = await self._zygote.spawn(env, write_fd) if self._zygote else None
            if pid is None:
                pid = self._exec(env, write_fd)
        except OSError as error:
            os.close(write_fd)
            code = 126 if isinstance(error, PermissionError) else 127
            line = f"{self._command[0]}: cannot be started: {error.strerror or error}"
            self._write(line.encode() + b"\n")
            trainer.tail = line.encode()
            self._finish(trainer, code)
            return
        os.close(write_fd)
        trainer.pid = pid
        self._on_spawned(trainer.local_rank, trainer.incarnation)
        if pid in self._unclaimed:
            self._finish(trainer, os.waitstatus_to_exitcode(self._unclaimed.pop(pid)))
            return
        self._by_pid[pid] = trainer
        for signum in trainer.signals:
            _kill_group(pid, signum)

    def _exec(self, env: Mapping[str, str], write_fd: int) -> int:
        popen = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stderr=write_fd,
            env=hooked_env(env, self._hook_directory),
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self._popens[popen.pid] = popen
        return popen.pid

    def _finish(self, trainer: _Trainer, code: int) -> None:
        while self._read_stderr(trainer):
            pass
        self._close_stderr(trainer)
        if self._by_rank.get(trainer.local_rank) is trainer:
            del self._by_rank[trainer.local_rank]
        self._on_exited(trainer.local_rank, trainer.incarnation, code, last_words(trainer.tail))

    def _read_stderr(self, trainer: _Trainer) -> bool:
        """Pass on what there is; returns False when there is nothing more now."""
        if trainer.stderr_fd < 0:
            return False
        try:
            data = os.read(trainer.stderr_fd, 1 << 16)
        except (BlockingIOError, InterruptedError):
            return False
        if not data:
            self._close_stderr(trainer)
            return False
        self._write(data)
        trainer.tail = (trainer.tail + data)[-KEPT_BYTES:]
        return True

    def _close_stderr(self, trainer: _Trainer) -> None:
        if trainer.stderr_fd >= 0:
            asyncio.get_running_loop().remove_reader(trainer.stderr_fd)
            os.close(trainer.stderr_fd)
            trainer.stderr_fd = -1


def _kill_group(pid: int, signum: int) -> None:
    try:
        os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass


def is_exiting(pid: int) -> bool:
    """Return whether the kernel has begun to take a process down; it is True until the process is reaped."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False
    return bool(int(after_name[6]) & _PF_EXITING)
