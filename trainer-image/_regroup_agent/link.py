"""The way to the operator: one connection for reports and commands, again and again.

The link owns connecting (TLS, the operator's name verified, no proxies), the hello, the back-off, and the faults that are reported
again (faults.py). It decides nothing. It asks for the worker's condition at each report (`envelope`).
A refusal by the operator is a condition, said once per distinct sentence, and tried again; never a crash.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import ssl
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from regroup.protocol import MAX_REPORT_BYTES, VERSION, codec, wire

from . import http
from .faults import Faults, Kept

FIRST_WAIT_S, LAST_WAIT_S = 0.05, 2.0
RESOLVE_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 1.5
"""The kernel of an operator that is there answers at once, unless thousands of connections wait to be accepted. The address of one
that has just gone answers nothing, and a Service may lead there for a moment after an upgrade. A lost packet is sent again after a
second."""
HANDSHAKE_TIMEOUT_S = 5.0
"""A new leader has the handshakes of all agents to do, and the kernel of a frozen one still accepts connections."""
ANSWER_TIMEOUT_S = 10.0
MAX_SAID = 100
"""So many sentences are known to have been said; then it begins anew."""
MAX_LINE_BYTES = 16 << 20
"""A generation document of 5000 members has about a megabyte."""

T = TypeVar("T")


@dataclass(frozen=True)
class Endpoint:
    """Address of the operator, and the name of this worker there."""

    url: str
    ca_file: str
    token_file: str
    namespace: str
    pod: str
    boot: str


class _BrokenError(Exception):
    """This connection cannot go on; the text says why."""


_TROUBLES = (OSError, EOFError, http.HttpError, _BrokenError, asyncio.TimeoutError, codec.ProtocolError, ValueError)
"""Errors that end a connection, which is then opened again."""


class Link:
    """`envelope(body)` builds a report of this moment; `on_up`, `on_down`, `on_command`, `on_pace` are called from the loop.

    `on_pace(factor)`: the operator wants progress so many times as seldom as usual (wire.Answered)."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        envelope: Callable[[Any], wire.Report],
        on_up: Callable[[], None],
        on_down: Callable[[], None],
        on_command: Callable[[wire.Command], None],
        on_pace: Callable[[float], None],
        processes: int,
        log: Callable[[str], None],
    ) -> None:
        self._endpoint, self._envelope, self._processes, self._log = endpoint, envelope, processes, log
        self._on_up, self._on_down, self._on_command, self._on_pace = on_up, on_down, on_command, on_pace
        url = urllib.parse.urlsplit(endpoint.url)
        self._host, self._port = url.hostname or "", url.port or 443
        self._host_header = url.netloc.rpartition("@")[2]
        self._path = f"/v1/namespaces/{endpoint.namespace}/pods/{endpoint.pod}/stream"
        self._writer: asyncio.StreamWriter | None = None
        # Times of the reports on this stream that have no answer yet, each with the fault that it says, if that is kept.
        self._unanswered: deque[tuple[float, Kept | None]] = deque()
        self._num_answered = 0
        self._faults = Faults()
        self._up = self._is_closing = False
        self._said: set[str] = set()

    async def run(self) -> None:
        """Keep a connection to the operator until cancelled, or flushed."""
        wait_s = FIRST_WAIT_S
        while not self._is_closing:
            try:
                await self._session()
            except _TROUBLES as error:
                self._say_once(_sentence(error, self._endpoint.url))
            finally:
                was_up, self._up = self._up, False
                self._drop()
                if was_up:
                    self._on_down()
            wait_s = FIRST_WAIT_S if was_up else min(wait_s * 2, LAST_WAIT_S)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))

    def send(self, report: wire.Report) -> None:
        """Write a report at once where the operator is connected. A fault is kept; anything else is in the condition that the next
        hello says."""
        body = report.body
        kept = self._faults.add(body, time.monotonic()) if isinstance(body, wire.Fault) else None
        if self._up:
            self._post(self._line(report), kept)

    async def flush(self, timeout_s: float) -> None:
        """End the reports. Return when the operator has taken them all and has ended its side, or after `timeout_s`."""
        if not self._up or self._writer is None:
            return
        self._is_closing = True
        self._writer.write(http.chunk(b""))
        deadline = time.monotonic() + timeout_s
        while self._up and time.monotonic() < deadline:
            await asyncio.sleep(0.005)

    # --- one session -----------------------------------------------------------------------------------------------

    async def _session(self) -> None:
        reader, self._writer = await self._dial()
        # The faults come with the hello: the operator's first plan that sees the worker connected knows of its exits.
        faults = self._faults_again(anew=True)
        hello = self._line(self._envelope(wire.Hello(VERSION, self._processes, len(faults))))
        self._writer.write(
            http.request("POST", self._host_header, self._path, self._token()) + http.chunk(hello or b"")
        )
        for line, kept in faults:
            self._post(line, kept)
        answer = await asyncio.wait_for(http.read_head(reader), ANSWER_TIMEOUT_S)
        if answer.status != 200:
            body = await asyncio.wait_for(http.read_body(reader, answer), ANSWER_TIMEOUT_S)
            raise _BrokenError(_refusal(answer.status, http.sentence(body)))
        self._up = True
        self._said.clear()
        self._log(f"Connected to the operator at {self._endpoint.url}.")
        self._on_up()
        for line, kept in self._faults_again(anew=False):  # those of the meantime
            self._post(line, kept)
        tasks = {asyncio.ensure_future(work) for work in (self._read_stream(reader, answer), self._bound_answers())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _read_stream(self, reader: asyncio.StreamReader, answer: http.Answer) -> None:
        async for line in http.read_lines(reader, answer, MAX_LINE_BYTES):
            if not line.strip():
                continue
            if line.startswith(wire.Answered.START):
                self._take_answer(line)
                continue
            try:
                command = wire.Command.decode(line)
            except codec.ProtocolError as error:
                self._say_once(f"The operator sent an invalid command: {error}")
                continue
            self._on_command(command)
        if not self._is_closing:
            raise _BrokenError("The operator ended the stream.")

    def _take_answer(self, line: bytes) -> None:
        """Note which reports have been taken. Raises _BrokenError where the operator takes no further ones."""
        try:
            answered = wire.Answered.decode(line)
        except codec.ProtocolError as error:  # the answers after it would be taken for those of other reports
            raise _BrokenError(f"The operator sent an invalid answer: {error}") from None
        kept: Kept | None = None
        while self._num_answered < answered.reports and self._unanswered:
            self._num_answered += 1
            _, kept = self._unanswered.popleft()
            if kept is not None and (self._num_answered < answered.reports or answered.status == 204):
                self._faults.answered(kept, time.monotonic())
        if answered.status == 204:
            self._on_pace(answered.progress_factor)
            return
        refusal = _refusal(answered.status, answered.error)
        if answered.status not in (400, 413):
            raise _BrokenError(refusal)
        self._say_once(refusal)
        if kept is not None:
            self._faults.refused(kept)

    async def _bound_answers(self) -> None:
        """Give the connection up when a report has waited too long. The kernel of a frozen operator takes what is written and
        answers keepalives. Its agents would never look for the operator that replaces it."""
        while True:
            since_s = self._unanswered[0][0] if self._unanswered else time.monotonic()
            left_s = since_s + ANSWER_TIMEOUT_S - time.monotonic()
            if left_s <= 0:
                raise _BrokenError(f"The operator has not answered a report for {ANSWER_TIMEOUT_S:g} s.")
            await asyncio.sleep(left_s)

    def _line(self, report: wire.Report) -> bytes | None:
        """Return a report as a line of the stream, None if it is too long for the operator."""
        data = codec.line(report)
        if len(data) <= MAX_REPORT_BYTES:
            return data
        self._say_once(f"A report of {len(data)} bytes is not sent: the operator reads at most {MAX_REPORT_BYTES}.")
        return None

    def _post(self, line: bytes | None, kept: Kept | None = None) -> None:
        if self._writer is None or line is None or self._is_closing:
            return
        self._unanswered.append((time.monotonic(), kept))
        self._writer.write(http.chunk(line))  # asyncio hands it to the kernel at once where it takes it

    def _faults_again(self, *, anew: bool) -> list[tuple[bytes, Kept]]:
        """Return the faults that are to be reported now, as lines."""
        on_their_way = {kept for _, kept in self._unanswered if kept is not None}
        due = self._faults.again(time.monotonic(), anew=anew, on_their_way=on_their_way)
        lines = [(self._line(self._envelope(fault)), kept) for kept, fault in due]
        return [(line, kept) for line, kept in lines if line is not None]

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_verify_locations(self._endpoint.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise _BrokenError(f"The CA file {self._endpoint.ca_file} cannot be used: {error}.") from None
        sock = await _connect(self._host, self._port)
        return await asyncio.open_connection(
            sock=sock,
            ssl=context,
            server_hostname=self._host,
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
            limit=http.MAX_HEAD_BYTES,
        )

    def _token(self) -> str:
        return Path(self._endpoint.token_file).read_text(encoding="ascii").strip()

    def _drop(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        self._writer = None
        self._unanswered.clear()
        self._num_answered = 0

    def _say_once(self, sentence: str) -> None:
        """Log a sentence, unless it was said since the last connection. Its numbers may be ages, which differ each time."""
        said = re.sub(r"(?<!answered )(?<!\d)\d+", "#", sentence)
        if said in self._said:
            return
        if len(self._said) >= MAX_SAID:
            self._said.clear()
        self._said.add(said)
        self._log(sentence)


async def _connect(host: str, port: int) -> socket.socket:
    """Return a TCP connection to one of the host's addresses. Raises OSError or asyncio.TimeoutError."""
    loop = asyncio.get_running_loop()
    try:
        found = await _within(loop.getaddrinfo(host, port, type=socket.SOCK_STREAM), RESOLVE_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise _BrokenError(f"The name {host} was not resolved within {RESOLVE_TIMEOUT_S:g} s.") from None
    trouble: Exception = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in found:
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:  # of a family that this machine does not have
            trouble = error
            continue
        try:
            sock.setblocking(False)
            _notice_a_dead_peer(sock)
            await _within(loop.sock_connect(sock, address), CONNECT_TIMEOUT_S)
            return sock
        except (OSError, asyncio.TimeoutError) as error:
            sock.close()
            trouble = error
        except BaseException:
            sock.close()
            raise
    raise trouble


async def _within(work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Return what `work` returns. Raises asyncio.TimeoutError. Before Python 3.12 asyncio.wait_for can swallow that its caller is
    cancelled; this does not."""
    task = asyncio.ensure_future(work)
    # A caller that is cancelled asks for neither, and asyncio would complain.
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    if task.cancelled():
        raise asyncio.TimeoutError
    return task.result()


def _notice_a_dead_peer(sock: socket.socket) -> None:
    """Have the kernel find a peer that is gone within five seconds: the stream is the heartbeat."""
    for level, option, value in (
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 2),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", 5000),
    ):
        sock.setsockopt(level, getattr(socket, option), value)


def _refusal(status: int, sentence: str) -> str:
    return f"The operator answered {status}: {sentence}" if sentence else f"The operator answered {status}."


def _sentence(error: BaseException, url: str) -> str:
    if isinstance(error, _BrokenError):
        return str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"The operator at {url} is not trusted: {error.verify_message}."
    # A handshake that takes too long is an aborted connection to asyncio.
    if isinstance(error, (asyncio.TimeoutError, ConnectionAbortedError)):
        return f"The operator at {url} does not answer."
    if isinstance(error, EOFError):
        return f"The operator at {url} closed the connection."
    return f"The operator at {url} cannot be reached: {error}."
