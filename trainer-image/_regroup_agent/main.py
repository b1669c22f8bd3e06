"""The agent's edge: feeds events to the core and executes its effects. Run as `python3 -I agent.pyz -- COMMAND ARGUMENT...`."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from regroup.protocol import env, frameworks, launchers, local, snapshot
from regroup.protocol.launchers import LauncherCommand
from regroup.protocol.progress_log import PatternError, compile_pattern
from regroup.protocol.wire import LOGGED, REPORTED, ProcessStack

from . import events as ev
from . import gpus, kernel_view
from .core import Core
from .ending import Terms
from .group_hook_files import write_group_hook
from .last_words import LastWords
from .launch import program, translator
from .launch.command import LaunchError, PythonCommand, check_command, python_command, uses_library
from .launch.environment import framework_of, hooked_env, parser_env, preload_modules, read_at_import, trainer_env
from .launch.frameworks import Place
from .library import bring_library
from .link import Endpoint, Link
from .local_server import LocalServer
from .memory import LOOK_EVERY_S, MemoryCgroup
from .output import Output
from .posix import become_subreaper
from .prober import Prober, QuietPort
from .progress_lines import ProgressPattern
from .progress_server import ProgressServer, reporting_env
from .save_watcher import SaveWatcher, watched_directory
from .script_progress import Words
from .script_settings import ScriptSettings, script_settings
from .statefile import StateFile
from .store_socket import Ports, StoreSocket
from .trainers import Trainers
from .worker import Identity
from .zygote import Zygote

MAX_SOCKET_PATH = 100
"""Longest path of the agent's socket in bytes. Linux allows 107."""
STACKS_S = 0.5
"""Time that a process has to write its stacks to stderr."""
STDOUT = Output(1)
OUTPUT = Output(2, name=os.environ.get(env.LOG_NAME, ""))
TERMINATION_LOG = "/dev/termination-log"
"""File whose text the kubelet shows as the container's last message."""


class Agent:
    """One agent: its core and the I/O around it, on one event loop."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._command = list(command)
        # Trainers, their children and the zygote take PYTHONPATH from here.
        self._library = library = bring_library(environ[env.STATE_DIR], log)
        self._environ = environ = {
            **hooked_env(environ, library),
            **temporary_directory(environ[env.STATE_DIR]),
            **user_name(),
        }
        self._processes = _positive(environ, env.PROCESSES)
        self._state = StateFile(environ[env.STATE_DIR])
        saved, lost = self._state.load()
        if lost:
            log(lost)
        boot = secrets.token_hex(8)
        grace_s = float(environ.get(env.GRACE_SECONDS) or 25.0)
        saves = bool(environ.get(env.CHECKPOINT_DIR))
        self._quiet = QuietPort(environ[env.POD_IP])
        self._prober = Prober(lambda watches: self._feed(ev.Watched(watches)))
        framework = framework_of(environ)
        lists = framework in frameworks.LISTS_MEMBERS
        self._ports = Ports(environ[env.POD_IP], self._processes) if lists else None
        identity = Identity(
            environ[env.JOB_UID],
            environ[env.POD_UID],
            boot,
            self._processes,
            grace_s,
            saves,
            self._quiet.port,
            Terms.of(environ),
            framework,
        )
        self._launcher, cannot_run = _launcher(self._command, environ)
        if self._launcher is not None:
            self._python = program.interpreter(self._launcher.start, environ.get("PATH"))
            self._command = list(program.guess(self._launcher, self._python))
        python = python_command(self._command)
        if python is not None and self._launcher is not None:
            python = replace(python, environ={**self._launcher.environ, **python.environ})
            cannot_run = cannot_run or _needs_mpi(self._launcher, python, environ)
        if python and "PYTHONPATH" in python.environ:
            python = replace(python, environ=hooked_env(python.environ, library))
        self._store = StoreSocket(environ[env.POD_IP])
        # The zygote imports under the environment of the image and the template. A fork gets its trainer's own.
        base = trainer_env(
            environ,
            socket_path="",
            local_rank=0,
            processes=self._processes,
            incarnation=0,
            restarts=0,
            place=None,
        )
        del base[env.GROUP_PLACE]  # /proc shows a fork with the zygote's environment, which must name no local rank
        preload = preload_modules(environ)
        settings = _settings(python, base) if python and preload else ScriptSettings()
        if settings.unknown:
            log(
                f"The script sets {settings.unknown} before it imports torch, to a value that only the running script knows. "
                "Processes are started by exec, so each of them repeats the imports. Set it in the container's env instead."
            )
        cannot_run = cannot_run or gpus.lack(environ, self._processes)
        if cannot_run:
            log(cannot_run)
        has_zygote = bool(python and preload and not settings.unknown and not cannot_run)
        self._core = Core(
            identity,
            saved,
            session=uses_library(
                python,
                framework_of(environ),
                environ.get("PYTHONPATH", ""),
                self._launcher.launcher if self._launcher is not None else "",
            ),
            preloading=has_zygote or self._launcher is not None,
            cannot_run=cannot_run,
            snapshots=_snapshots(environ, identity.processes),
        )
        self._zygote: Zygote | None = None
        if python and has_zygote:
            imports = dict(base) if self._launcher is None else program.zygote_env(self._launcher, base)
            self._zygote = Zygote(python, preload, imports, log, self._imported, settings.values)
        hook = write_group_hook(environ[env.STATE_DIR], log)
        self._saves = SaveWatcher(watched_directory(environ), self._saved)
        self._memory = MemoryCgroup()
        self._trainers = Trainers(
            self._command,
            self._zygote,
            hook,
            lambda fd, data: (OUTPUT if fd == 2 else STDOUT).write(data),
            self._label if self._processes > 1 else None,
            lambda local_rank, incarnation: self._feed(ev.Spawned(local_rank, incarnation)),
            self._exited,
            _pattern(
                environ,
                lambda rank, incarnation, words: self._told(rank, incarnation, LOGGED, words),
                lambda: self._later(ev.PatternGivenUp()),
            ),
        )
        self._reports = ProgressServer(
            environ[env.STATE_DIR],
            lambda rank, incarnation, words: self._told(rank, incarnation, REPORTED, words),
        )
        self._link = Link(
            Endpoint(
                environ[env.OPERATOR_URL],
                environ[env.CA_FILE],
                environ[env.TOKEN_FILE],
                environ[env.NAMESPACE],
                environ[env.POD_NAME],
                boot,
            ),
            envelope=lambda body: self._core.report(body, time.monotonic()),
            on_up=lambda: self._feed(ev.Connected()),
            on_down=lambda: self._feed(ev.Disconnected()),
            on_command=lambda command: self._feed(ev.Commanded(command)),
            on_pace=lambda factor: self._feed(ev.Paced(factor)),
            processes=self._processes,
            log=log,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: LocalServer | None = None
        self._zygote_env, self._cannot_run = base, cannot_run
        self._program: asyncio.Future[program.Program] | None = None
        self._translating: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._exit_code: asyncio.Future[int] | None = None

    async def run(self) -> int:
        """Run until the worker ends, by the operator's `stop` or by SIGTERM, and return the exit code."""
        loop = self._loop = asyncio.get_running_loop()
        self._exit_code = loop.create_future()
        become_subreaper()
        loop.add_signal_handler(signal.SIGCHLD, self._trainers.reap)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):  # an image's STOPSIGNAL may be any of them
            ends = number == signal.SIGINT and bool(self._environ.get(env.ENDS_ON_SIGINT))
            loop.add_signal_handler(number, self._feed, ev.Terminated(waits=not ends))
        path, made = _socket_path(self._environ[env.STATE_DIR])
        self._server = LocalServer(
            path,
            expects=self._core.expects,
            on_message=self._from_trainer,
            on_closed=lambda rank, incarnation: self._feed(ev.Detached(rank, incarnation)),
            on_unhooked=lambda rank, incarnation: self._feed(ev.Unhooked(rank, incarnation)),
            take_store=self._take_store,
            log=log,
        )
        try:
            await self._reports.start()
        except OSError as error:
            log(f"Programs cannot report their progress to the agent: {error.strerror or error}.")
        if self._launcher is not None and not self._cannot_run:
            self._program = loop.create_future()
            self._trainers.wait_for(self._program)
        if self._zygote is not None:
            self._zygote.start()
        elif self._program is not None:
            self._imported()
        self._feed(ev.StoreOpened(self._store.port))
        if self._ports is not None:
            self._feed(ev.PortsOpened(self._ports.numbers))
        self._look_at_memory()
        link = asyncio.ensure_future(self._link.run())
        link.add_done_callback(self._link_ended)
        try:
            return await self._exit_code
        finally:
            link.remove_done_callback(self._link_ended)
            await self._link.flush(1.0)
            link.cancel()
            self._prober.observe(())
            self._saves.stop()
            self._server.close()
            self._reports.close()
            if made:
                shutil.rmtree(made, ignore_errors=True)

    def _imported(self) -> None:
        """Take in that the zygote forks from now on, or that there is none. A launcher reads its command first."""
        if self._program is None or self._program.done():
            self._later(ev.Preloaded())
        elif self._translating is None:
            self._translating = asyncio.get_running_loop().create_task(self._translate(self._program))

    async def _translate(self, translated: asyncio.Future[program.Program]) -> None:
        """Have the launcher read its command, and let the processes start. The zygote may have to import anew before."""
        assert self._launcher is not None
        try:
            found = await self._read_by_launcher()
        except LaunchError as error:
            log(str(error))
            self._feed(ev.Refused(str(error)))
            translated.set_exception(error)
            translated.exception()  # nobody may ever ask for it
            return
        for option in self._launcher.ignored():
            log(f"{self._launcher.launcher} {option.names[0]} is ignored: {option.says}")
        anew = read_at_import(found.environ_of({}), program.zygote_env(self._launcher, self._zygote_env))
        translated.set_result(found)
        if self._zygote is not None and self._zygote.usable and anew:
            self._zygote.renew(anew)
        else:
            self._later(ev.Preloaded())

    async def _read_by_launcher(self) -> program.Program:
        launcher, environ = self._launcher, parser_env(self._zygote_env)
        assert launcher is not None
        if launcher.launcher not in program.HAS_OWN_PARSER:
            return program.with_library(program.program_of_table(launcher), self._library)
        answer = await translator.answer_of(
            launcher, self._python, environ, self._trainers.fork_aside, self._trainers.adopt
        )
        found = program.program_of(launcher, self._python, answer)
        wrong = program.contradiction(launcher.launcher, answer, self._environ)
        if wrong:
            raise LaunchError(wrong)
        return program.with_library(found, self._library)

    def _link_ended(self, task: asyncio.Task[None]) -> None:
        error = task.exception() if not task.cancelled() else None
        if error is not None:
            asyncio.get_running_loop().call_exception_handler({"message": "link", "exception": error})
        self._finish(1)

    def _feed(self, event: ev.Event) -> None:
        effects = self._core.handle(event, time.monotonic())
        if self._core.by_session:
            self._store.listen()
        self._execute(effects)
        if self._core.sees_saves:
            self._saves.start()
        else:
            self._saves.stop()
        self._set_timer()

    def _execute(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ev.Send):
                self._link.send(effect.report)
            elif isinstance(effect, ev.Tell):
                assert self._server is not None
                self._server.send(effect.local_rank, effect.message)
            elif isinstance(effect, ev.Persist):
                self._save(effect)
            elif isinstance(effect, ev.Start):
                self._start(effect)
            elif isinstance(effect, ev.Signal):
                self._trainers.signal(effect.local_rank, effect.signum, alone=effect.alone)
            elif isinstance(effect, ev.LookAtFiles):
                self._look_at_files()
            elif isinstance(effect, ev.Probe):
                self._probe(effect)
            elif isinstance(effect, ev.Observe):
                self._prober.observe(effect.observed)
            elif isinstance(effect, ev.YieldStore):
                self._store.take().close()
                self._later(ev.StoreOpened(self._store.port))
            elif isinstance(effect, ev.YieldPorts):
                assert self._ports is not None
                self._ports.renew()
                self._later(ev.PortsOpened(self._ports.numbers))
            elif isinstance(effect, ev.Exit):
                self._finish(effect.code)
            else:
                log(effect.text)

    def _look_at_files(self) -> None:
        """Look in a thread, since many children with many open files take a tenth of a second."""
        find, loop = self._trainers.families(), asyncio.get_running_loop()

        def looks() -> None:
            look = kernel_view.look_at_files(find())
            with contextlib.suppress(RuntimeError):  # the agent has ended meanwhile
                loop.call_soon_threadsafe(self._feed, ev.Looked(look))

        threading.Thread(target=looks, daemon=True).start()

    def _probe(self, effect: ev.Probe) -> None:
        """Look at a process through the kernel. If it is attached and not stopped, a signal also asks for its Python stacks."""
        pid = self._trainers.pid(effect.local_rank, effect.incarnation)
        if pid is None:
            return
        place, where, text = kernel_view.look(pid)

        signals = effect.attached and place != ProcessStack.STOPPED
        before = self._trainers.tail(effect.local_rank)

        def found() -> None:
            tail = self._trainers.tail(effect.local_rank)
            calls = kernel_view.calls_in(tail) if signals and tail != before else ""
            said = "; ".join(filter(None, [calls, where]))
            self._feed(ev.Probed(effect.local_rank, effect.incarnation, place, said, text))

        if signals:
            os.kill(pid, local.STACK_SIGNAL)  # faulthandler writes to the process's stderr, and so into the log
        asyncio.get_running_loop().call_later(STACKS_S if signals else 0.0, found)

    def _save(self, effect: ev.Persist) -> None:
        try:
            self._state.save(effect.saved)
        except OSError as error:
            # The effects that follow promise what is in the file, so the agent ends before them.
            sys.stdout.flush()
            die(f"{self._state.path} cannot be written: {error.strerror or error}.", 1)

    def _start(self, effect: ev.Start) -> None:
        assert self._server is not None
        generation, place = effect.generation, None
        if generation is not None:
            place = Place(
                generation,
                effect.local_rank,
                self._processes,
                effect.members,
                gpus.count(self._environ),
                gpus.has_none(self._environ),
            )
        process_env = trainer_env(
            self._environ,
            socket_path=self._server.path,
            local_rank=effect.local_rank,
            processes=self._processes,
            incarnation=effect.incarnation,
            restarts=effect.restarts,
            place=place,
        )
        if effect.generation is not None:  # a session tells its progress itself
            process_env = self._reporting(effect, process_env)
        self._trainers.start(effect.local_rank, effect.incarnation, process_env)

    def _reporting(self, effect: ev.Start, process_env: dict[str, str]) -> dict[str, str]:
        """Return a script's environment with the place where it can report its progress."""
        if not self._reports.url:
            return process_env
        try:
            token_file = self._reports.issue(effect.local_rank, effect.incarnation)
        except OSError as error:
            log(f"Process {effect.local_rank} cannot report its progress to the agent: {error.strerror or error}.")
            return process_env
        return reporting_env(process_env, self._reports.url, token_file)

    def _told(self, local_rank: int, incarnation: int, way: str, words: Words) -> None:
        # The last lines of a process are read while its exit is handled, before the core hears of the exit.
        self._feed(ev.Told(local_rank, incarnation, way, words))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self._core.due_s
        if due_s is not None:
            delay_s = max(0.0, due_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._feed, ev.Tick())

    def _later(self, event: ev.Event) -> None:
        asyncio.get_running_loop().call_soon(self._feed, event)

    def _from_trainer(self, local_rank: int, incarnation: int, message: Any) -> None:
        if isinstance(message, local.Left) and message.cause is not None and self._processes > 1:
            # A dying sibling breaks the group before it can be reaped. Detached first, so that this is one incident and not two.
            for rank, of in self._trainers.dying():
                self._feed(ev.Detached(rank, of))
        self._feed(ev.FromTrainer(local_rank, incarnation, message))

    def _label(self, local_rank: int) -> bytes:
        """Return the label before each line of a process, in a worker of several processes."""
        rank = self._core.rank_of(local_rank)
        return f"[process {local_rank}] ".encode() if rank is None else f"[rank {rank}] ".encode()

    def _exited(self, local_rank: int, incarnation: int, code: int, words: LastWords) -> None:
        memory = self._memory.newly_killed(time.monotonic()) if code != 0 else None
        if env.SNAPSHOT_DIR in self._environ:
            # The process's last message about its snapshot may still be in the socket, or was never sent.
            self._feed(ev.Held(local_rank, _snapshot(self._environ, local_rank)))
        self._feed(ev.Exited(local_rank, incarnation, code, words.line, words.tail, memory))

    def _look_at_memory(self) -> None:
        """Read the counter of kills regularly, so that a kill without an exit does not explain a later exit."""
        if self._memory.look(time.monotonic()) is not None:
            asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look_at_memory)

    def _saved(self) -> None:
        """Take in a completed checkpoint. Called by the thread that watches the directory."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._feed, ev.Saved())

    def _take_store(self, generation: int) -> socket.socket | None:
        if not self._core.gives_store(generation):
            return None
        taken = self._store.take()
        self._later(ev.StoreOpened(self._store.port))
        return taken

    def _finish(self, code: int) -> None:
        if self._exit_code is not None and not self._exit_code.done():
            self._exit_code.set_result(code)


def log(text: str) -> None:
    """Write one line of the agent's own to the container's log."""
    OUTPUT.say(text)


def die(text: str, code: int) -> NoReturn:
    """End the agent with one sentence, which is written to the log and to the kubelet's termination log."""
    log(text)
    try:
        if Path(TERMINATION_LOG).exists():
            Path(TERMINATION_LOG).write_text(text, encoding="utf-8")
    except OSError:
        pass
    leave(code)


def leave(code: int) -> NoReturn:
    """Exit once the log is written.

    A normal exit waits for asyncio's threads, and a look-up of the operator's name may hang in one for minutes.
    """
    STDOUT.flush()
    OUTPUT.flush()
    os._exit(code)


def _launcher(command: Sequence[str], environ: Mapping[str, str]) -> tuple[LauncherCommand | None, str]:
    """Return the launcher that the command begins with, and a sentence if the table of its options refuses the command."""
    try:
        return launchers.read(command, environ), ""
    except launchers.LauncherError as error:
        return None, str(error)


def _needs_mpi(launcher: LauncherCommand, python: PythonCommand, environ: Mapping[str, str]) -> str:
    try:
        source = "" if python.script is None else python.script.read_text(errors="replace")
    except OSError:
        return ""
    return program.needs_mpi(launcher.launcher, source, environ) or ""


def _settings(python: PythonCommand, environ: Mapping[str, str]) -> ScriptSettings:
    """Return the variables that the command's script sets before it imports torch. A file that is not found sets none."""
    environ = {**environ, **python.environ}
    for path in python.files(environ.get("PYTHONPATH", "")):
        try:
            return script_settings(path.read_bytes(), environ)
        except OSError:
            continue
    return ScriptSettings()


def _pattern(
    environ: Mapping[str, str], on_words: Callable[[int, int, Words], None], on_given_up: Callable[[], None]
) -> ProgressPattern | None:
    """Return the pattern of spec.progress.log; None: there is none, or this version of Python cannot use it, which is logged."""
    text = environ.get(env.PROGRESS_LOG)
    if not text:
        return None
    try:
        return ProgressPattern(compile_pattern(text), log, on_words, on_given_up)
    except PatternError as error:
        log(f"spec.progress.log {error}")
        on_given_up()
        return None


def _snapshots(environ: Mapping[str, str], processes: int) -> dict[int, snapshot.Snapshot]:
    """Return the memory snapshots that an earlier container of this pod has left, by local rank."""
    found = {local_rank: _snapshot(environ, local_rank) for local_rank in range(processes)}
    return {local_rank: held for local_rank, held in found.items() if held is not None}


def _snapshot(environ: Mapping[str, str], local_rank: int) -> snapshot.Snapshot | None:
    directory = environ.get(env.SNAPSHOT_DIR)
    if not directory:
        return None
    held = snapshot.held(snapshot.directory_of(Path(directory), local_rank), environ[env.JOB_UID])
    return next(iter(held), None)


def _positive(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "1")
    if not text.isdigit() or int(text) < 1:
        raise LaunchError(f"{name} is {text!r}; it must be a number of processes, at least 1.")
    return int(text)


NEEDED = (
    env.OPERATOR_URL, env.NAMESPACE, env.POD_NAME, env.POD_UID, env.POD_IP, env.JOB_UID, env.CA_FILE, env.TOKEN_FILE,
    env.STATE_DIR,
)  # fmt: skip


def _check_environ(environ: Mapping[str, str]) -> None:
    missing = [name for name in NEEDED if not environ.get(name)]
    if missing:
        raise LaunchError(
            f"{', '.join(missing)} must be set: the operator, or `regroup run`, starts the agent with them."
        )


def temporary_directory(state_dir: str) -> dict[str, str]:
    """Return the variable that names a directory for temporary files, if the container has none. torch needs one to be imported.

    The root of the container may be read-only, without a volume at /tmp.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        directory = Path(state_dir, "tmp")
        directory.mkdir(exist_ok=True)
        tempfile.tempdir = str(directory)
        return {"TMPDIR": str(directory)}
    return {}


def user_name() -> dict[str, str]:
    """Return the variable that names the user, if the user id has no account. The name is the id.

    torch 2.11 asks for a name when it is imported, as other packages do, and a pod may run under any user id.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):  # KeyError before Python 3.13
        return {"LOGNAME": str(os.getuid())}
    return {}


def _socket_path(state_dir: str) -> tuple[str, str]:
    """Return the path of the agent's socket and the temporary directory that was made for it.

    The directory is "" if `state_dir` is short enough to hold the socket itself.
    """
    path = os.path.join(state_dir, "agent.sock")
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        return path, ""
    made = tempfile.mkdtemp(prefix="regroup-")
    return os.path.join(made, "agent.sock"), made


def main(argv: Sequence[str] | None = None) -> None:
    """Run the agent; the zipapp calls this. Exits with the agent's code, or 2 for a command or environment that cannot work."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args == ["--check-imports"]:
        print("\n".join(sorted(sys.modules)))
        return
    try:
        if not args or args[0] != "--":
            raise LaunchError("Usage: agent.pyz -- COMMAND ARGUMENT...")
        check_command(args[1:])
        _check_environ(os.environ)
    except LaunchError as error:
        die(str(error), 2)
    asyncio.run(_run(args[1:]))


async def _run(command: Sequence[str]) -> None:
    try:
        agent = Agent(command, os.environ)
    except (LaunchError, OSError, ValueError) as error:
        die(str(error), 2)
    leave(await agent.run())
