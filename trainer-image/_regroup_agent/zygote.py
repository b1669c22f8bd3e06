"""The agent's side of the zygote: starts it, asks it for forks, and starts it again when it dies.

Owns the zygote process and its socket; `zygote_child` runs in it. If the preload cannot be imported, `spawn` returns None,
processes are exec'd, and one sentence in the log says so.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .group_hook_files import source_of
from .launch.command import PythonCommand
from .posix import die_with_parent

MAX_IMPORT_S = 300.0
"""Longest import of the preload; after it processes are exec'd. On a cold network disk torch takes a minute or two."""
MAX_FORK_S = 30.0
"""Time after which a zygote that does not answer is killed. A fork takes milliseconds."""
READ_SOURCE = "import os, sys; exec(os.read(int(sys.argv[1]), 1 << 20))"
"""The Python that starts the zygote, as `ps` shows it. It reads zygote_child.py from the socket, since no image has that file."""
MAX_DEATHS = 3
"""Number of deaths in a row, without a fork in between, after which processes are exec'd."""


class Zygote:
    """The zygote of one command. All methods are called on the event loop's thread."""

    def __init__(
        self,
        python: PythonCommand,
        preload: Sequence[str],
        environ: Mapping[str, str],
        log: Callable[[str], None],
        on_imported: Callable[[], None],
        settings: Mapping[str, str | None] | None = None,
    ) -> None:
        """Prepare a zygote that imports `preload`; `start` starts it.

        - `settings`: variables that the script sets before its imports, which the preload needs; None: it removes the variable
        - `on_imported`: called when an import has ended, and when there will be none. Processes can be started then.
        """
        self._on_imported = on_imported
        self._overdue: asyncio.TimerHandle | None = None
        self._python, self._preload = python, list(preload)
        self._environ, self._log, self._settings = dict(environ), log, dict(settings or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._ready: asyncio.Future[bool] | None = None
        self._waiting: dict[int, asyncio.Future[int | None]] = {}
        self._next_id = 0
        self._deaths = 0
        self._usable = True
        self._renews = False
        """The agent has killed the zygote to have another one (`renew`)."""
        self.import_s: float | None = None
        """Duration of the preload's import in seconds; None: it is not over."""

    @property
    def pid(self) -> int | None:
        """The zygote's process id, by which `Trainers.reap` knows it."""
        return self._process.pid if self._process else None

    @property
    def usable(self) -> bool:
        """False once it has been given up, and processes are exec'd."""
        return self._usable

    @property
    def imports(self) -> bool:
        """True while the zygote imports and a process that waits in `spawn` cannot have been forked.

        False while an answer to a fork is on its way or not yet taken, even if the next zygote imports already.
        """
        return self._usable and not self._waiting and (self._ready is None or not self._ready.done())

    def start(self) -> None:
        """Start the zygote. Returns at once, while the import goes on in it."""
        setup = {
            **run_of(self._python),
            "environ": dict(self._python.environ),
            "preload": self._preload,
            "hook": source_of("group_hook.py"),
            "settings": self._settings,
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        ours.setblocking(False)
        argv = [
            self._python.argv[0],
            "-u",
            "-c",
            READ_SOURCE,
            str(theirs.fileno()),
            "regroup-zygote",
            *self._python.argv,
        ]
        self._ready = asyncio.get_running_loop().create_future()
        texts = [source_of("zygote_child.py").encode(), json.dumps(setup).encode()]
        try:
            for text in texts:
                ours.send(text)  # the socket keeps both until the process reads them
        except OSError as error:
            ours.close()
            theirs.close()
            why = f"({sum(map(len, texts))} bytes: {error.strerror or error})"
            self._give_up(f"the command and the variables that it sets do not fit on the zygote's socket {why}")
            return
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                env={**self._environ, **self._python.environ},
                cwd=self._python.directory,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            ours.close()
            self._give_up(f"{self._python.argv[0]} cannot be started ({error.strerror or error})")
            return
        finally:
            theirs.close()
        self._channel = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._read)
        self._cancel_overdue()
        self._overdue = asyncio.get_running_loop().call_later(MAX_IMPORT_S, self._hangs, self._process)

    async def spawn(
        self, env: Mapping[str, str], fds: Sequence[int], run: Mapping[str, Any] | None = None
    ) -> int | None:
        """Fork a trainer process and return its pid; None: the caller must exec it. Waits until the import is over.

        `fds` become its stderr and, if there is a second one, its stdout. `run` replaces parts of what the fork runs (`run_of`), or
        is a text of the agent's: {"code": text, "args": [...]}.
        """
        while self._usable:
            if self._process is None:
                self.start()
            ready = self._ready
            assert ready is not None
            if not await asyncio.shield(ready) or self._ready is not ready or self._channel is None:
                continue  # failed for good, or died while importing and is started again
            self._next_id = request_id = self._next_id + 1
            answer: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
            self._waiting[request_id] = answer
            overdue = asyncio.get_running_loop().call_later(MAX_FORK_S, self._is_silent, self._process)
            try:
                socket.send_fds(
                    self._channel,
                    [json.dumps({"id": request_id, "env": dict(env), "run": dict(run or {})}).encode()],
                    list(fds),
                )
                pid = await answer
            except (OSError, _DiedError) as error:
                if isinstance(error, OSError):
                    self._log(f"The zygote does not take a request ({error.strerror}); the process is exec'd.")
                    return None
                continue
            finally:
                self._waiting.pop(request_id, None)
                overdue.cancel()
            if pid is not None:
                self._deaths = 0
            return pid
        return None

    def renew(self, environ: Mapping[str, str]) -> None:
        """Have the zygote import again under an environment with these variables, which libraries read as they are loaded."""
        self._environ.update(environ)
        if self._usable and self._process is not None:
            self._renews = True
            self._ended()

    def died(self) -> None:
        """Take in that the zygote was reaped, and start another one, or give up after MAX_DEATHS."""
        if self._process is not None:
            self._process.returncode = -1  # the agent has reaped it, not subprocess
        while self._channel is not None and self._read():
            pass  # takes the pids of forks that live; a fork that has not sent its pid yet finds no reader, and ends
        self._drop_channel()
        self._process = None
        for answer in self._waiting.values():  # each waiting `spawn` removes its own entry
            if not answer.done():
                answer.set_exception(_DiedError())
        if not self._usable:
            return
        self._deaths += not self._renews
        if self._deaths >= MAX_DEATHS:
            self._give_up(f"it died {self._deaths} times")
            return
        if not self._renews:
            self._log("The zygote died; it is started again.")
        self._renews = False
        before = self._ready
        self.start()
        if before is not None and not before.done():
            before.set_result(False)

    def _read(self) -> bool:
        """Take in a message of the zygote or of a fork. Returns False if there is none at the moment."""
        assert self._channel is not None
        try:
            data = self._channel.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionResetError:
            return True  # the zygote left a request unread; its earlier messages and its end can still be read
        except OSError:
            data = b""
        if not data:
            self._ended()
            return False
        self._take(json.loads(data))
        return True

    def _take(self, message: Mapping[str, Any]) -> None:
        if "id" in message:
            if "unforked" in message:
                self._log(f"The zygote cannot fork ({message['unforked']}); the process is exec'd.")
            answer = self._waiting.get(message["id"])
            if answer is not None and not answer.done():
                answer.set_result(message.get("pid"))
        elif "ready" in message:
            self.import_s = message["ready"]
            self._cancel_overdue()
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(True)
            self._on_imported()
        else:
            self._give_up(f"importing {', '.join(self._preload)} failed ({message.get('failed')})")

    def _ended(self) -> None:
        """Take in that the channel's other end is closed. `spawn` waits until the process is reaped and `died` is called."""
        self._drop_channel()
        if self._process is not None:
            _kill(self._process)  # a living zygote without a channel is of no use
        if self._ready is not None and self._ready.done() and self._usable:
            self._ready = asyncio.get_running_loop().create_future()

    def _drop_channel(self) -> None:
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()
            self._channel = None

    def _hangs(self, process: subprocess.Popen[bytes]) -> None:
        """Give up, because the import has not ended in time."""
        if self._process is process and self._usable:
            self._give_up(f"importing {', '.join(self._preload)} takes more than {MAX_IMPORT_S:.0f} s")
            _kill(process)

    def _is_silent(self, process: subprocess.Popen[bytes] | None) -> None:
        """Kill a zygote that has not answered a fork in time. `died` then starts another one, which is asked again."""
        if process is not None and self._process is process:
            self._log(f"The zygote has not answered for {MAX_FORK_S:g} s; it is killed.")
            _kill(process)

    def _cancel_overdue(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _give_up(self, why: str) -> None:
        self._usable = False
        self._cancel_overdue()
        self._log(f"No zygote: {why}. Processes are started by exec, so each of them repeats the imports.")
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(False)
        self._on_imported()


def run_of(python: PythonCommand) -> dict[str, Any]:
    """Return the part of a zygote's setup that says what its forks run."""
    return {
        "command": list(python.argv),
        "file": python.file,
        "module": python.module,
        "args": list(python.args),
    }


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that is not reaped yet. Popen.kill would reap a dead one, and `Trainers.reap` would miss its end."""
    if process.returncode is None:
        os.kill(process.pid, signal.SIGKILL)


class _DiedError(Exception):
    """The zygote died before it answered."""
