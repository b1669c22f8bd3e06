"""The operator's edge for tests of a real agent: real TLS, real HTTP, one worker; the test is the operator.

Also starts the agent as its own process, from a zipapp, with the environment that render would write.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aiohttp import StreamReader, web

from harness.polling import until
from regroup.protocol import VERSION, codec, env, wire
from regroup.protocol.document import Document, Member, Store
from regroup_operator.endpoint.certificates import Authority, server_context

JOB_UID, POD_UID, POD = "job-uid", "pod-uid", "digits-worker-0-0"
RAW_TRAINER = Path(__file__).with_name("raw_trainer.py")


@dataclass(frozen=True)
class Heard:
    at_s: float
    report: wire.Report

    @property
    def body(self) -> Any:
        return self.report.body


class OperatorEdge:
    """Takes reports, streams commands. `refuse` answers every stream and report with a status and sentence while it is set.

    While `frozen` is set it answers nothing, but its kernel takes what is sent.
    """

    def __init__(self, directory: Path) -> None:
        authority = Authority.create()
        self.ca_file, self.token_file = directory / "ca.crt", directory / "token"
        self.ca_file.write_bytes(authority.ca_pem)
        self.token_file.write_text("first-token\n")
        self._context = server_context(*authority.issue(["localhost"], ["127.0.0.1"]))
        self.heard: list[Heard] = []
        self.tokens: list[str] = []
        """Of each stream that was asked for."""
        self.refuse: tuple[int, str] | None = None
        self.frozen = False
        self.holds_streams = False
        """Whoever asks for a stream waits while this is set."""
        self.progress_factor = 1.0
        self.opened: list[float] = []
        """When each stream was."""
        self.newest = 0
        self.port = 0
        self._news = threading.Condition()
        self._streams: list[asyncio.Queue[bytes | None]] = []
        self._open = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner: web.AppRunner | None = None
        self.up()

    def up(self) -> None:
        """Serve, on the same port as before."""
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(10)

    def down(self) -> None:
        """Close all connections and the port."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)

    def close(self) -> None:
        self.down()
        asyncio.run_coroutine_threadsafe(self._end_rest(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def tell(self, body: Any, **changed: Any) -> None:
        """Send a command on the open stream; `changed` fields of its envelope."""
        if isinstance(body, wire.Generation):
            self.newest = max(self.newest, body.number)
        command = replace(wire.Command(JOB_UID, POD_UID, 0, self.newest, body), **changed)
        self.send_raw(codec.line(command))

    def send_raw(self, line: bytes) -> None:
        self._loop.call_soon_threadsafe(self._streams[-1].put_nowait, line)

    def wait(self, what: Callable[[Heard], Any], timeout_s: float = 15.0, after: int = 0) -> Heard:
        """Return the first report from index `after` on that satisfies `what`. Fails after `timeout_s`."""

        def there() -> Heard | None:
            with self._news:
                return next((heard for heard in self.heard[after:] if what(heard)), None)

        def last() -> str:
            return "The last reports:\n" + "\n".join(str(h.report) for h in self.heard[-5:])

        found = until(there, "such a report", timeout_s=timeout_s, every_s=0.005, details=last)
        assert found is not None
        return found

    def wait_phase(self, phase: str, timeout_s: float = 15.0, after: int = 0) -> Heard:
        return self.wait(lambda h: h.report.condition.phase == phase, timeout_s, after)

    def wait_body(self, cls: type[Any], timeout_s: float = 15.0, after: int = 0) -> Heard:
        return self.wait(lambda h: isinstance(h.body, cls), timeout_s, after)

    @property
    def streams(self) -> int:
        """How many streams have been opened so far."""
        return len(self._streams)

    def wait_stream(self, timeout_s: float = 15.0) -> None:
        """Return once a stream of commands is open."""
        with self._news:
            assert self._news.wait_for(lambda: self._open > 0, timeout_s), "the agent opened no stream"

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_post(f"/v1/namespaces/ns/pods/{POD}/stream", self._stream)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._context, reuse_address=True)
        await site.start()
        self.port = int(self._runner.addresses[0][1])

    async def _close(self) -> None:
        for stream in self._streams:
            stream.put_nowait(None)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @staticmethod
    async def _end_rest() -> None:
        """End the requests that the server has given up, but that have not ended: nobody runs them once the loop is closed."""
        rest = asyncio.all_tasks() - {task for task in [asyncio.current_task()] if task is not None}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _thawed(self) -> None:
        while self.frozen:
            await asyncio.sleep(0.005)

    def _hear(self, line: bytes) -> wire.Report:
        report = wire.Report.decode(line)
        with self._news:
            self.heard.append(Heard(time.monotonic(), report))
            self._news.notify_all()
        return report

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        await self._thawed()
        self.tokens.append(request.headers["Authorization"])
        line = await request.content.readline()
        if self.refuse is not None:
            return web.json_response({"error": self.refuse[1]}, status=self.refuse[0])
        hello = self._hear(line).body
        assert isinstance(hello, wire.Hello)
        assert hello.protocol == VERSION
        for _ in range(hello.faults):
            self._hear(await request.content.readline())
        while self.holds_streams:
            await asyncio.sleep(0.005)
        response, lines = web.StreamResponse(), asyncio.Queue[bytes | None]()
        await response.prepare(request)
        with self._news:
            self._streams.append(lines)
            self.opened.append(time.monotonic())
            self._open += 1
            self._news.notify_all()
        reading = asyncio.ensure_future(self._read(request.content, lines, hello.faults))
        try:
            while (answer := await lines.get()) is not None:
                await response.write(answer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            reading.cancel()
            with self._news:
                self._open -= 1
        return response

    async def _read(self, content: StreamReader, lines: asyncio.Queue[bytes | None], number: int) -> None:
        """Take the reports of a stream, and answer each."""
        if number:
            lines.put_nowait(wire.Answered(number).line())
        while line := await content.readline():
            await self._thawed()
            number += 1
            if self.refuse is not None:
                lines.put_nowait(wire.Answered(number, *self.refuse).line())
                continue
            self._hear(line)
            lines.put_nowait(wire.Answered(number, progress_factor=self.progress_factor).line())
        lines.put_nowait(None)


class Worker:
    """One agent process and what its raw trainers say of themselves."""

    def __init__(self, directory: Path, operator: OperatorEdge, zipapp: Path, processes: int) -> None:
        self.directory, self.operator, self.zipapp, self.processes = directory, operator, zipapp, processes
        self.state_dir, self.notes = directory / "state", directory / "notes"
        self.state_dir.mkdir()
        self.notes.mkdir()
        self.stderr = directory / "stderr"
        self.stdout = directory / "stdout"
        self.log_fd: int | None = None
        """What the agent's stderr is instead of that file."""
        self.agent: subprocess.Popen[bytes] | None = None
        self.python = sys.executable

    def start(self, *command: str, **environ: str) -> None:
        """Start the agent with this command; REGROUP_PRELOAD=json keeps the zygote small."""
        values = {
            **{k: v for k, v in os.environ.items() if not k.startswith("REGROUP_")},
            env.OPERATOR_URL: f"https://127.0.0.1:{self.operator.port}",
            env.NAMESPACE: "ns",
            env.POD_NAME: POD,
            env.POD_UID: POD_UID,
            env.POD_IP: "127.0.0.1",
            env.JOB_NAME: "digits",
            env.JOB_UID: JOB_UID,
            env.PROCESSES: str(self.processes),
            env.CA_FILE: str(self.operator.ca_file),
            env.TOKEN_FILE: str(self.operator.token_file),
            env.STATE_DIR: str(self.state_dir),
            env.MAX_RESTARTS: "10",
            env.PRELOAD: "json",
            "NOTES": str(self.notes),
            # A proxy that does not exist: whoever asked it would hear nothing.
            "https_proxy": "http://127.0.0.1:9",
            **environ,
        }
        with self.stderr.open("ab") as err, self.stdout.open("ab") as out:
            argv = [self.python, "-I", str(self.zipapp), "--", *command]
            log = err if self.log_fd is None else self.log_fd
            self.agent = subprocess.Popen(argv, env=values, stderr=log, stdout=out, start_new_session=True)

    def start_raw(self, *args: str, **environ: str) -> None:
        """Start the agent with the raw trainer as its command."""
        self.start(sys.executable, str(RAW_TRAINER), *args, **{"PATH": os.environ["PATH"], **environ})

    def log(self) -> str:
        return self.stderr.read_text()

    def noted(self, what: str | None = None) -> list[dict[str, Any]]:
        """Return what the trainers noted, oldest first."""
        out = []
        for path in self.notes.iterdir():
            out += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        out.sort(key=lambda note: note["at"])
        return [note for note in out if what in (None, note["what"])]

    def wait_noted(self, what: str, number: int = 1, timeout_s: float = 15.0) -> list[dict[str, Any]]:
        """Return the notes of a kind once there are at least `number`."""
        until(
            lambda: len(self.noted(what)) >= number,
            f"{number} notes {what!r} of the trainers",
            timeout_s=timeout_s,
            every_s=0.005,
            details=lambda: f"{self.noted()}\n{self.log()}",
        )
        return self.noted(what)

    def wait_disconnected(self) -> None:
        """Return once the agent has noticed that the operator is gone."""
        until(
            lambda: "The operator" in self.log().rsplit("Connected to the operator", 1)[-1],
            "the agent has lost the operator",
            details=self.log,
        )

    def close(self) -> None:
        if self.agent is not None and self.agent.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.agent.send_signal(signal.SIGKILL)
            self.agent.wait(10)


@contextlib.contextmanager
def operator_edge(directory: Path) -> Iterator[OperatorEdge]:
    edge = OperatorEdge(directory)
    try:
        yield edge
    finally:
        edge.close()


def generation(number: int, port: int, processes: int = 1, **changed: Any) -> tuple[wire.Generation, Document]:
    """Return a generation of this worker alone, and its document."""
    member = Member(0, POD, POD_UID, 1, "127.0.0.1", processes)
    store = Store("127.0.0.1", port, POD_UID)
    document = Document(number, f"uid{number}", JOB_UID, changed.get("kind", "forced"), (member,), store)
    command = wire.Generation(
        number=number,
        uid=document.uid,
        kind=document.kind,
        member=True,
        rank_offset=0,
        world_size=processes,
        slot=0,
        group_rank=0,
        store_host="127.0.0.1",
        store_port=port,
        store_prefix=document.store_prefix(),
        hosts_store=True,
        document_digest=document.digest(),
    )
    return replace(command, **changed), document
