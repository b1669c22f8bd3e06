"""Starts, signals and reaps the trainer processes, and passes on what they write. Decides nothing.

Owns pids, process groups and pipes. Each trainer has a group of its own, and its helpers are killed after it, even those that have
left the group. A pod's only process writes its stdout itself, unless lines are searched for its progress. Else all output
passes through here, and if there are several processes, each line gets the rank that wrote it. An exit is reported once, after the
last output was read.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regroup.protocol.env import GROUP_PLACE

from .last_words import KEPT_BYTES, LastWords, last_words
from .launch.command import SHELLS, LaunchError, python_command
from .launch.environment import hooked_env
from .launch.program import Program
from .lines import Lines
from .orphans import children, families, left_behind
from .posix import die_with_parent
from .progress_lines import ProgressPattern, ProgressReader
from .zygote import Zygote, run_of

_F_GETPIPE_SZ = 1032
"""Value of fcntl.F_GETPIPE_SZ, for which Python 3.9 has no name."""
_PF_EXITING = 0x4
"""Bit in the flags of a task (proc(5), stat) that the kernel has begun to take down."""


@dataclass
class _Stream:
    """The pipe of one output of a process."""

    fd: int
    """Descriptor in the process: 1 for stdout, 2 for stderr."""
    pipe: int
    """Reading end here; -1 once it is closed."""
    lines: Lines = field(default_factory=Lines)
    progress: ProgressReader | None = None
    """Reads what the lines say of the program's progress; None: nobody asked for that."""


@dataclass
class _Trainer:
    local_rank: int
    incarnation: int
    streams: list[_Stream] = field(default_factory=list)
    pid: int = 0
    spawning: asyncio.Task[None] | None = None
    signals: list[int] = field(default_factory=list)
    """Signals to send once the pid is known."""
    tail: bytes = b""
    """Last bytes of stderr."""
    place: str = ""
    """The process's REGROUP_GROUP_PLACE, which its helpers inherit."""


class Trainers:
    """The trainer processes of one worker, on the running event loop.

    - `on_spawned(local_rank, incarnation)` is called when a process runs.
    - `on_exited(local_rank, incarnation, code, last_words)` is called when one has ended.
    - `write(fd, data)` gets their output: 1 for stdout, 2 for stderr. It must not block.
    - `label(local_rank)` returns the text before each line. It is None for a pod's only process, whose stdout does not come here.
    - `pattern` is looked for in all lines; None: there is none. With a pattern the stdout of a pod's only process comes here, too.
    """

    def __init__(
        self,
        command: Sequence[str],
        zygote: Zygote | None,
        hook_directory: str,
        write: Callable[[int, bytes], None],
        label: Callable[[int], bytes] | None,
        on_spawned: Callable[[int, int], None],
        on_exited: Callable[[int, int, int, LastWords], None],
        pattern: ProgressPattern | None = None,
    ) -> None:
        self._command, self._zygote, self._hook_directory = list(command), zygote, hook_directory
        self._write, self._label, self._on_spawned, self._on_exited = write, label, on_spawned, on_exited
        self._pattern = pattern
        self._by_rank: dict[int, _Trainer] = {}
        self._by_pid: dict[int, _Trainer] = {}
        self._num_asked = 0
        """Number of forks that the zygote has not answered with a pid yet."""
        self._unclaimed: dict[int, int] = {}
        """Exit status by pid of processes reaped meanwhile, since one may be such a fork. Cleared afterwards: pids are reused."""
        self._popens: dict[int, subprocess.Popen[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._program: asyncio.Future[Program] | None = None

    def wait_for(self, program: asyncio.Future[Program]) -> None:
        """Start no process before `program` is known, which replaces the command. If it raises LaunchError, none is started."""
        self._program = program

    def adopt(self, popen: subprocess.Popen[bytes]) -> None:
        """Take a process that the agent has started beside the trainers, so that `reap` tells its Popen of its end."""
        self._popens[popen.pid] = popen

    def start(self, local_rank: int, incarnation: int, env: Mapping[str, str]) -> None:
        """Start a process. The last one with this local rank must be dead."""
        trainer = _Trainer(local_rank, incarnation, place=env.get(GROUP_PLACE, ""))
        self._by_rank[local_rank] = trainer
        loop = asyncio.get_running_loop()
        write_fds = []
        for fd in (2,) if self._label is None and self._pattern is None else (2, 1):
            read_fd, write_fd = os.pipe()
            os.set_blocking(read_fd, False)
            reader = None if self._pattern is None else self._pattern.reader(local_rank, incarnation, loop.call_later)
            stream = _Stream(fd, read_fd, progress=reader)
            trainer.streams.append(stream)
            write_fds.append(write_fd)
            loop.add_reader(read_fd, self._read, trainer, stream)
        trainer.spawning = task = loop.create_task(self._spawn(trainer, env, write_fds))
        self._tasks.add(task)
        task.add_done_callback(lambda ended: self._spawned(trainer, write_fds, ended))

    def signal(self, local_rank: int, signum: int, *, alone: bool = False) -> None:
        """Signal a process and its helpers: the whole group, since a shell does not pass SIGTERM on.

        `alone`: without its helpers. If it is a shell, its children get the signal.
        A process that waits for the zygote's import does not exist yet. Its first signal ends it: the import may take minutes.
        """
        trainer = self._by_rank.get(local_rank)
        if trainer is None:
            return
        if trainer.pid and alone:
            for pid in children(trainer.pid) if _is_shell(trainer.pid) else (trainer.pid,):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signum)
        elif trainer.pid:
            _kill_group(trainer.pid, signum)
        else:
            trainer.signals.append(signum)
            waits = self._program is not None and not self._program.done()
            if (waits or (self._zygote is not None and self._zygote.imports)) and trainer.spawning is not None:
                trainer.spawning.cancel()

    def pid(self, local_rank: int, incarnation: int) -> int | None:
        """Return the pid of a running process; None if it has ended or is still being started."""
        trainer = self._by_rank.get(local_rank)
        return trainer.pid if trainer is not None and trainer.incarnation == incarnation and trainer.pid else None

    def families(self) -> Callable[[], list[int]]:
        """Return a function that finds the pids of all running processes and of their helpers, in any thread."""
        zygote = self._zygote.pid if self._zygote is not None else None
        known = {*self._by_pid, *self._popens, *(() if zygote is None else (zygote,))}
        running = {pid: (trainer.place, f"trainer-{trainer.local_rank}") for pid, trainer in self._by_pid.items()}
        return lambda: families(running, known)

    def tail(self, local_rank: int) -> str:
        """Return the end of a process's stderr."""
        trainer = self._by_rank.get(local_rank)
        return trainer.tail.decode("utf-8", "replace") if trainer is not None else ""

    def dying(self) -> list[tuple[int, int]]:
        """Return (local rank, incarnation) of the processes that the kernel takes down and that cannot be reaped yet.

        Freeing the memory of a large process takes tens of milliseconds, so its peers may hear of its end before the agent does.
        """
        return [(t.local_rank, t.incarnation) for pid, t in self._by_pid.items() if is_exiting(pid)]

    def reap(self) -> None:
        """Reap every dead child: trainers, the zygote, and orphans of both. Called on SIGCHLD."""
        while True:
            try:
                # Look first: while the child is a zombie, its pid and its group cannot be reused.
                result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if result is None:
                return
            pid = result.si_pid
            trainer = self._by_pid.pop(pid, None)
            if trainer is not None:
                _kill_group(pid, signal.SIGKILL)
                self._kill_left_behind(trainer, pid)
            _, status = os.waitpid(pid, 0)
            popen = self._popens.pop(pid, None)
            if popen is not None:
                popen.returncode = os.waitstatus_to_exitcode(status)  # or Popen would wait for the pid again
            if trainer is not None:
                self._finish(trainer, os.waitstatus_to_exitcode(status))
            elif self._zygote is not None and pid == self._zygote.pid:
                self._zygote.died()
            elif self._num_asked:
                self._unclaimed[pid] = status

    def _kill_left_behind(self, trainer: _Trainer, pid: int) -> None:
        """Kill the helpers of an ended process in sessions of their own. The next process needs their ports and memory."""
        zygote = self._zygote.pid if self._zygote is not None else None
        known = {pid, *self._by_pid, *self._popens, *(() if zygote is None else (zygote,))}
        for helper in left_behind(trainer.place, f"trainer-{trainer.local_rank}", known):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(helper, signal.SIGKILL)

    def _spawned(self, trainer: _Trainer, write_fds: Sequence[int], task: asyncio.Task[None]) -> None:
        """Take in the end of the task that starts a process. If a signal has cancelled it, that is the process's exit."""
        self._tasks.discard(task)
        if task.cancelled() and trainer.signals:
            _close(write_fds)
            self._finish(trainer, -trainer.signals[0])

    async def _spawn(self, trainer: _Trainer, env: Mapping[str, str], write_fds: Sequence[int]) -> None:
        command = self._command
        try:
            status = run = None
            if self._program is not None:
                program = await asyncio.shield(self._program)
                command, env = program.command_of(trainer.local_rank), program.environ_of(env)
                python = python_command(command)
                run = None if python is None else run_of(python)
            pid = None
            if self._program is None or run is not None:
                pid = await self.fork(env, write_fds, run)
            if pid is None:
                pid = self._exec(command, env, write_fds)
            else:
                status = self._unclaimed.pop(pid, None)
            if not self._num_asked:
                self._unclaimed.clear()
        except LaunchError as error:
            _close(write_fds)
            trainer.tail = str(error).encode()
            self._finish(trainer, 2)
            return
        except OSError as error:
            _close(write_fds)
            code = 126 if isinstance(error, PermissionError) else 127
            line = f"{command[0]}: cannot be started: {error.strerror or error}"
            self._write(2, line.encode() + b"\n")
            trainer.tail = line.encode()
            self._finish(trainer, code)
            return
        _close(write_fds)
        trainer.pid = pid
        self._on_spawned(trainer.local_rank, trainer.incarnation)
        if status is not None:
            self._finish(trainer, os.waitstatus_to_exitcode(status))
            return
        self._by_pid[pid] = trainer
        for signum in trainer.signals:
            _kill_group(pid, signum)

    async def fork(
        self, env: Mapping[str, str], write_fds: Sequence[int], run: Mapping[str, Any] | None = None
    ) -> int | None:
        """Have the zygote fork a process and return its pid. None if there is no zygote, or if the process must be exec'd."""
        if self._zygote is None:
            return None
        self._num_asked += 1
        try:
            return await self._zygote.spawn(env, write_fds, run)
        finally:
            self._num_asked -= 1

    async def fork_aside(self, env: Mapping[str, str], write_fds: Sequence[int], run: Mapping[str, Any]) -> int | None:
        """Have the zygote fork a process that is no trainer, whose end nobody asks for. None if there is no zygote."""
        pid = await self.fork(env, write_fds, run)
        if pid is not None:
            self._unclaimed.pop(pid, None)
        return pid

    def _exec(self, command: Sequence[str], env: Mapping[str, str], write_fds: Sequence[int]) -> int:
        popen = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=write_fds[1] if len(write_fds) > 1 else None,
            stderr=write_fds[0],
            env=hooked_env(env, self._hook_directory),
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self._popens[popen.pid] = popen
        return popen.pid

    def _finish(self, trainer: _Trainer, code: int) -> None:
        for stream in trainer.streams:
            # A helper that has left the process group may write for ever. Only what was in the pipe can be of the process.
            left = fcntl.fcntl(stream.pipe, _F_GETPIPE_SZ) if stream.pipe >= 0 else 0
            while left > 0 and (read := self._read(trainer, stream)):
                left -= read
            self._close(trainer, stream)
        if self._by_rank.get(trainer.local_rank) is trainer:
            del self._by_rank[trainer.local_rank]
        self._on_exited(trainer.local_rank, trainer.incarnation, code, last_words(trainer.tail))

    def _read(self, trainer: _Trainer, stream: _Stream) -> int:
        """Pass on the output that is there, and return its length in bytes; 0 if there is none at the moment."""
        if stream.pipe < 0:
            return 0
        try:
            data = os.read(stream.pipe, 1 << 16)
        except (BlockingIOError, InterruptedError):
            return 0
        if not data:
            self._close(trainer, stream)
            return 0
        if stream.fd == 2:
            trainer.tail = (trainer.tail + data)[-KEPT_BYTES:]
        self._pass_on(stream, data if self._label is None else stream.lines.add(data, self._label(trainer.local_rank)))
        if stream.progress is not None:
            stream.progress.add(data)
        return len(data)

    def _close(self, trainer: _Trainer, stream: _Stream) -> None:
        if stream.pipe >= 0:
            asyncio.get_running_loop().remove_reader(stream.pipe)
            os.close(stream.pipe)
            stream.pipe = -1
            if self._label is not None:
                self._pass_on(stream, stream.lines.end(self._label(trainer.local_rank)))
            if stream.progress is not None:
                stream.progress.end()

    def _pass_on(self, stream: _Stream, data: bytes) -> None:
        if data:
            self._write(stream.fd, data)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _kill_group(pid: int, signum: int) -> None:
    try:
        os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass


def _is_shell(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip() in SHELLS
    except OSError:
        return False


def is_exiting(pid: int) -> bool:
    """Return whether the kernel has begun to take a process down. True until the process is reaped."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False
    return bool(int(after_name[6]) & _PF_EXITING)
