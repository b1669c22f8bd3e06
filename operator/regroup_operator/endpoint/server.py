"""The HTTP edge of the membership endpoint: one request of an agent, whose body has reports and whose answer has commands.

The messages are those of protocol.wire. A refusal has a body {"error": sentence}, and its connection ends. A standby answers 503
with the leader's name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import TypeGuard

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from regroup.protocol import MAX_REPORT_BYTES, OLDEST, VERSION
from regroup.protocol.codec import ProtocolError
from regroup.protocol.text import shorten
from regroup.protocol.wire import Answered, Fault, Hello, Report
from regroup_operator.api import UnavailableError
from regroup_operator.endpoint.registry import Registry, Stream
from regroup_operator.model.ports import Authenticator, Forbidden, Unauthorized
from regroup_operator.model.records import Pod

KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 2, 1, 3
USER_TIMEOUT_MS = 5000
TLS_BUFFER_BYTES = 4096
"""asyncio allocates so much for each connection, 256 KiB by default. An idle connection costs 35 KiB with 4 KiB, 47 with 16, and
281 with the default (measured)."""

HELLO_TIMEOUT_S = 10.0
"""Seconds within which the hello of a stream has to come, with the faults that it reports again. The agent gives up after as
long."""
REQUEST_TIMEOUT_S = 10.0
"""Seconds within which the first request of a connection has to come, headers and all."""
HANDSHAKE_TIMEOUT_S = 20.0
"""Seconds within which a TLS handshake has to end, 60 by asyncio's default. After a fail-over thousands are under way at once,
each of about a millisecond."""
LINGERING_S = 1.0
"""Seconds for which the rest of a refused stream is read, so that its agent sees the refusal."""
ANSWER_WITHIN_S = 2.0
"""Seconds after which reports that are neither faults nor refused are answered together: far less than an agent waits
(_regroup_agent.link.ANSWER_TIMEOUT_S)."""
MAX_FAULTS = 200
"""Faults that follow a hello at most. An agent keeps fewer (_regroup_agent.faults)."""
MAX_CONNECTIONS = 4
"""Connections of one pod; the newest stay. An agent has one, and those before may not have ended yet. Everything in a pod can read
its token."""
BACKLOG = 8192
"""Connections that wait to be accepted: after a fail-over all agents call within a second or two. The kernel has its own bound."""
ACCEPTS = 32
"""Connections that are accepted in one turn of the event loop. asyncio takes its `backlog` for both. A turn with thousands of
handshakes, each of about a millisecond, would keep everything else waiting."""

HELLO_FIRST = "The first line of a stream must be a hello."
OTHER_PROCESS = "The report is of another agent process than the one that said hello last."
TOO_LONG = f"The message has more than the {MAX_REPORT_BYTES} bytes that are read."
MAX_SENTENCE = 500
"""Characters of a refusal: some quote what was sent."""
BUG = "The operator failed to answer; its log says why. Try again."

log = logging.getLogger(__name__)


def unsupported(version: int) -> str | None:
    """Return the sentence for an agent of a protocol version that this operator does not serve; None: it does."""
    if OLDEST <= version <= VERSION:
        return None
    served = f"{VERSION}" if OLDEST == VERSION else f"{OLDEST} to {VERSION}"
    return f"Protocol version {version} is not supported; this operator supports {served}. Use an agent of the operator's release."


class _Refusal(Exception):
    """Refuses a report, or the whole stream, with a status of HTTP and one sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(shorten(sentence, MAX_SENTENCE))
        self.status = status


class Endpoint:
    """The one call. `leader` returns None where this process leads, else the leader's name (perhaps empty)."""

    def __init__(
        self,
        registry: Registry,
        authenticator: Authenticator,
        leader: Callable[[], str | None],
        callers: Callers,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
        answer_within_s: float = ANSWER_WITHIN_S,
    ) -> None:
        self._hello_timeout_s, self._answer_within_s, self._callers = hello_timeout_s, answer_within_s, callers
        self._registry = registry
        self._authenticator = authenticator
        self._leader = leader

    def application(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(middlewares=[_errors])
        app.router.add_post("/v1/namespaces/{namespace}/pods/{pod}/stream", self.stream)
        return app

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """POST: reports come and commands go on one connection. Open for as long as the agent lives: it is the heartbeat."""
        pod = await self._authenticated(request)
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                taken = await self._take_hello(pod, request.content)
        except TimeoutError:
            raise _Refusal(408, f"The hello has not come within {self._hello_timeout_s:g} s. Call again.") from None
        except LineTooLong:
            raise _Refusal(413, TOO_LONG) from None
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise _Refusal(400, f"The body cannot be read: {error}.") from None
        _keep_alive(request)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        response.force_close()  # the connection ends with its stream
        await response.prepare(request)
        stream = self._registry.open(pod)
        answers = _Answers(response, stream, lambda: self._registry.progress_factor, self._answer_within_s)
        reading = asyncio.ensure_future(self._read_reports(request.content, pod, answers, stream, taken))
        try:
            with contextlib.suppress(ConnectionError):
                while (line := await stream.get()) is not None:
                    await response.write(line)
        finally:
            reading.cancel()  # where it waits to write, aiohttp closes the connection: that agent does not read
            self._registry.close(pod, stream)
        return response

    async def _take_hello(self, pod: Pod, content: StreamReader) -> list[_Refusal | None]:
        """Take the hello of a stream, and the faults that it reports again. Raises _Refusal.

        Returns for each fault why it is refused, or None. The faults themselves are not kept: a stream may last for months.
        """
        line = await content.readline(max_line_length=MAX_REPORT_BYTES)
        self._check_leads()  # the hello may have come late
        hello = self._take(self._authenticator.known(pod), line, is_first=True)
        if not self._registry.knows(pod.uid, hello.boot):
            raise _Refusal(409, OTHER_PROCESS)
        if hello.body.faults > MAX_FAULTS:
            raise _Refusal(400, f"hello.faults ({hello.body.faults}) is more than the {MAX_FAULTS} that are taken.")
        taken: list[_Refusal | None] = []
        while len(taken) < hello.body.faults:
            line = await content.readline(max_line_length=MAX_REPORT_BYTES)
            if not line:
                raise _Refusal(
                    400, f"The stream ended before the faults that its hello announces ({hello.body.faults})."
                )
            outcome = self._take_line(pod, line)
            if _ends_stream(outcome):
                raise outcome
            if isinstance(outcome, Report) and not isinstance(outcome.body, Fault):
                raise _Refusal(400, f"hello.faults ({hello.body.faults}) counts a report that is no fault.")
            taken.append(outcome if isinstance(outcome, _Refusal) else None)
        self._check_leads()
        if not self._registry.knows(self._authenticator.known(pod).uid, hello.boot):
            raise _Refusal(409, OTHER_PROCESS)
        return taken

    async def _read_reports(
        self,
        content: StreamReader,
        pod: Pod,
        answers: _Answers,
        stream: Stream,
        taken: Sequence[_Refusal | None] = (),
    ) -> None:
        """Take the reports of a stream until it ends, or until a refusal ends it. Ends the commands, too. `taken`: what became of
        the faults that came with the hello."""
        try:
            for one in taken:
                await answers.give(one)
            # The answer to a refused report is written before the next line is read. So an agent that reads none holds about 1 MiB
            # here, until the kernel gives the connection up after USER_TIMEOUT_MS.
            while line := await content.readline(max_line_length=MAX_REPORT_BYTES):
                outcome = self._take_line(pod, line)
                await answers.give(outcome)
                if _ends_stream(outcome):
                    break
                await asyncio.sleep(0)  # many lines that have come at once keep nobody else waiting
        except LineTooLong:
            with contextlib.suppress(OSError):
                await answers.give(_Refusal(413, TOO_LONG))
        except (OSError, web.RequestPayloadError, HttpProcessingError) as error:
            log.debug("Pod %s/%s: its stream has ended: %r.", pod.namespace, pod.name, error)
        except Exception:
            log.exception("Pod %s/%s: its stream ends by a bug of ours.", pod.namespace, pod.name)
        finally:
            answers.end()
            stream.put(None)

    def _take_line(self, pod: Pod, line: bytes) -> Report | _Refusal:
        """Return the report of a line, which the registry has taken, or why it is refused."""
        try:
            self._check_leads()
            return self._take(self._authenticator.known(pod), line)
        except _Refusal as refusal:
            return refusal
        except Forbidden as error:
            return _Refusal(403, str(error))
        except Exception:
            log.exception("Pod %s/%s, a report on its stream: a bug of ours.", pod.namespace, pod.name)
            return _Refusal(500, BUG)

    def _take(self, pod: Pod, text: bytes, *, is_first: bool = False) -> Report:
        """Return the report of this pod, which the registry has taken. Raises _Refusal."""
        try:
            report = Report.decode(text)
        except ProtocolError as error:
            raise _Refusal(400, str(error)) from None
        if report.pod_uid != pod.uid:
            raise _Refusal(
                403, f"The report is of pod UID {report.pod_uid}, the token is of pod {pod.name} ({pod.uid})."
            )
        if report.job_uid != pod.job_uid:
            raise _Refusal(
                403,
                f"The report is of job UID {report.job_uid}, pod {pod.name} belongs to job {pod.job} ({pod.job_uid}).",
            )
        if isinstance(report.body, Hello):
            refusal = unsupported(report.body.protocol)
            if refusal is not None:
                self._registry.refuse(pod, refusal)
                raise _Refusal(400, refusal)
        elif is_first or not self._registry.knows(pod.uid, report.boot):
            raise _Refusal(409, HELLO_FIRST if is_first else OTHER_PROCESS)
        self._registry.report(pod, report)
        return report

    def _check_leads(self) -> None:
        leader = self._leader()
        if leader is not None:
            raise _Refusal(503, f"This operator does not lead{f'; {leader} does' if leader else ''}.")

    async def _authenticated(self, request: web.Request) -> Pod:
        self._check_leads()
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not token:
            raise _Refusal(401, "The request has no bearer token.")
        pod = await self._authenticator.authenticate(token, request.match_info["namespace"], request.match_info["pod"])
        self._callers.called(pod.uid, request.protocol)
        return pod


def _ends_stream(outcome: Report | _Refusal) -> TypeGuard[_Refusal]:
    """Return whether a refusal ends the stream. After 400 the agent goes on with its next report."""
    return isinstance(outcome, _Refusal) and outcome.status != 400


class _Answers:
    """The answers to the reports of one stream. A fault and a refusal are answered at once, everything else together."""

    def __init__(
        self, response: web.StreamResponse, stream: Stream, factor: Callable[[], float], within_s: float
    ) -> None:
        self._response, self._stream, self._factor, self._within_s = response, stream, factor, within_s
        self._num_reports = 0
        self._due: asyncio.TimerHandle | None = None

    async def give(self, outcome: Report | _Refusal | None) -> None:
        """Answer one report more, now or later. None is a fault that was taken with the hello."""
        self._num_reports += 1
        if isinstance(outcome, _Refusal):
            self.end()
            await self._response.write(self._line(outcome.status, str(outcome)))
        elif outcome is None or isinstance(outcome.body, Fault):
            self.end()
            await self._response.write(self._line())
        elif self._due is None:
            self._due = asyncio.get_running_loop().call_later(self._within_s, self._put)

    def end(self) -> None:
        """Forget an answer that waits for its time."""
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _put(self) -> None:
        self._due = None
        self._stream.put(self._line())

    def _line(self, status: int = 204, error: str = "") -> bytes:
        return Answered(self._num_reports, status, error, self._factor()).line()


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer with a sentence, and end the connection: an agent of ours calls again."""
    try:
        return await handler(request)
    except _Refusal as refusal:
        return _sentence(refusal.status, str(refusal))
    except Unauthorized as error:
        return _sentence(401, str(error))
    except Forbidden as error:
        return _sentence(403, str(error))
    except UnavailableError as error:
        return _sentence(503, str(error))
    except web.HTTPException as error:
        return _sentence(error.status, f"{error.reason}: {request.method} {request.path}.")
    except Exception:
        log.exception("%s %s: a bug of ours.", request.method, request.path)
        return _sentence(500, BUG)


def _sentence(status: int, sentence: str) -> web.Response:
    answer = web.Response(status=status, text=json.dumps({"error": sentence}), content_type="application/json")
    answer.force_close()
    return answer


def _keep_alive(request: web.Request) -> None:
    """Have the kernel notice a dead peer within five seconds: the stream is the heartbeat."""
    transport = request.transport
    sock = transport.get_extra_info("socket") if transport else None
    if sock is None:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


class Callers:
    """The connections of each pod, of which it has at most MAX_CONNECTIONS: the oldest one is closed for another."""

    def __init__(self) -> None:
        self._by_pod: dict[str, list[web.RequestHandler]] = {}

    def called(self, pod_uid: str, connection: web.RequestHandler) -> None:
        """Note that the pod has asked for something on a connection."""
        mine = self._by_pod.setdefault(pod_uid, [])
        if connection not in mine:
            mine.append(connection)
        while len(mine) > MAX_CONNECTIONS:
            mine.pop(0).force_close()

    def forget(self, connections: Collection[web.RequestHandler]) -> None:
        """Keep what is among the connections that there are."""
        there = set(connections)
        kept = {uid: [c for c in mine if c in there] for uid, mine in self._by_pod.items()}
        self._by_pod = {uid: mine for uid, mine in kept.items() if mine}


class Strangers:
    """Connections that have not asked for anything yet. Each holds memory and a descriptor, and aiohttp sets no bound to the time
    until the first request."""

    def __init__(self, timeout_s: float, callers: Callers) -> None:
        self._timeout_s, self._callers = timeout_s, callers
        self._asked: set[object] = set()
        self._since_s: dict[object, float] = {}

    @web.middleware
    async def greet(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Note that a connection has asked."""
        self._asked.add(request.protocol)
        return await handler(request)

    def overdue(self, connections: Collection[web.RequestHandler], now_s: float) -> list[web.RequestHandler]:
        """Return the connections that have had their time, and forget those that are gone."""
        there = set(connections)
        self._asked &= there
        self._since_s = {c: self._since_s.get(c, now_s) for c in there if c not in self._asked}
        return [c for c in there if now_s >= self._since_s.get(c, now_s) + self._timeout_s]

    async def sweep(self, connections: Callable[[], Collection[web.RequestHandler]]) -> None:
        """Close overdue connections until cancelled, and let go of those that have ended."""
        while True:
            await asyncio.sleep(self._timeout_s / 4)
            self._callers.forget(connections())
            for connection in self.overdue(connections(), asyncio.get_running_loop().time()):
                connection.force_close()


class _Site(web.BaseSite):
    """A site of TLS with `ACCEPTS`, `BACKLOG` and a bound for the handshake, which web.TCPSite does not take."""

    def __init__(
        self, runner: web.AppRunner, host: str, port: int, context: ssl.SSLContext, handshake_timeout_s: float
    ) -> None:
        super().__init__(runner)
        self._host, self._port, self._context, self._handshake_timeout_s = host, port, context, handshake_timeout_s

    @property
    def name(self) -> str:
        return f"https://{self._host}:{self._port}"

    async def start(self) -> None:
        await super().start()
        assert self._runner.server is not None
        self._server = server = await asyncio.get_running_loop().create_server(
            self._runner.server,
            self._host,
            self._port,
            ssl=self._context,
            backlog=ACCEPTS,
            ssl_handshake_timeout=self._handshake_timeout_s,
        )
        for listening in server.sockets:
            with listening.dup() as same:
                same.listen(BACKLOG)  # the last call counts: asyncio's had the small number


async def serve(  # noqa: PLR0913 - the arguments of a server, each named by its caller
    registry: Registry,
    authenticator: Authenticator,
    ssl_context: ssl.SSLContext,
    *,
    host: str,
    port: int,
    leader: Callable[[], str | None],
    hello_timeout_s: float = HELLO_TIMEOUT_S,
    answer_within_s: float = ANSWER_WITHIN_S,
    request_timeout_s: float = REQUEST_TIMEOUT_S,
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> tuple[web.AppRunner, int]:
    """Start the endpoint and return its runner (call `cleanup()`) and port (of use where `port` is 0)."""
    with contextlib.suppress(AttributeError):
        asyncio.sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES  # type: ignore[attr-defined]
    callers = Callers()
    app = Endpoint(registry, authenticator, leader, callers, hello_timeout_s, answer_within_s).application()
    strangers = Strangers(request_timeout_s, callers)
    app.middlewares.insert(0, strangers.greet)

    async def sweeping(_: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(strangers.sweep(lambda: runner.server.connections if runner.server else ()))
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def end_streams(_: web.Application) -> None:
        """Let the agents know at once; the server would wait for the streams to end first."""
        registry.close_all()

    app.on_shutdown.append(end_streams)
    app.cleanup_ctx.append(sweeping)
    runner = web.AppRunner(
        app,
        access_log=None,
        handle_signals=False,
        shutdown_timeout=1.0,
        lingering_time=LINGERING_S,
        auto_decompress=False,  # no agent compresses, and a few bytes may stand for millions
        handler_cancellation=True,  # or nobody would hear that an idle stream is gone, and the stream is the heartbeat
    )
    await runner.setup()
    site = _Site(runner, host, port, ssl_context, handshake_timeout_s)
    await site.start()
    return runner, int(runner.addresses[0][1])
