"""The HTTP edge of the membership endpoint: hello and the stream, JSON, TLS. See protocol.wire for the messages.

Every answer that is not 2xx has a body {"error": sentence}. A non-leader answers 503 with the leader's name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from regroup.protocol import MAX_REPORT_BYTES, OLDEST, VERSION, codec
from regroup.protocol.codec import ProtocolError
from regroup.protocol.text import shorten
from regroup.protocol.wire import Accepted, Answered, Greeted, Hello, Progress, Report
from regroup_operator.api import UnavailableError
from regroup_operator.endpoint.registry import Registry, Stream
from regroup_operator.model.ports import Authenticator, Forbidden, Unauthorized
from regroup_operator.model.records import Pod

KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 2, 1, 3
USER_TIMEOUT_MS = 5000
TLS_BUFFER_BYTES = 4096
"""asyncio allocates so much for each connection, 256 KiB by default. An idle connection costs 35 KiB with 4 KiB, 47 with 16, and
281 with the default (measured)."""

BODY_TIMEOUT_S = 10.0
"""For so long the rest of a message is waited for. The agent gives up after as long."""
REQUEST_TIMEOUT_S = 10.0
"""For so long the first request of a connection is waited for, headers and all. Who is not an agent of ours is not waited for
again: the connection closes with the answer."""
HANDSHAKE_TIMEOUT_S = 20.0
"""For so long a TLS handshake is waited for, 60 s by asyncio's default. After a fail-over thousands are under way at once, each of
about a millisecond."""
MAX_CONNECTIONS = 4
"""Of one pod, the newest. An agent has one, of an earlier release two, and one more while it says hello; those before may not have
ended yet. Everything in a pod can read its token."""
BACKLOG = 8192
"""Connections that wait to be accepted: after a fail-over all agents call within a second or two. The kernel has its own bound."""
ACCEPTS = 32
"""Connections that are accepted in one turn of the event loop. asyncio takes its `backlog` for both, and a turn with thousands of
handshakes, each of about a millisecond, would keep everything else waiting."""

HELLO_FIRST = "The agent must send hello first: this operator does not know its process yet."
TOO_LONG = f"The message has more than the {MAX_REPORT_BYTES} bytes that are read."
MAX_SENTENCE = 500
"""Characters of a refusal: some quote what was sent."""
BUG = "The operator failed to answer; its log says why. Try again."
TAKEN = Answered(204).line()

log = logging.getLogger(__name__)


def unsupported(version: int) -> str | None:
    """Return the sentence for an agent of a protocol version that this operator does not serve; None: it does."""
    if OLDEST <= version <= VERSION:
        return None
    served = f"{VERSION}" if OLDEST == VERSION else f"{OLDEST} to {VERSION}"
    return f"Protocol version {version} is not supported; this operator supports {served}. Use an agent of the operator's release."


class _Answer(Exception):
    """Ends a request with a status and one sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(shorten(sentence, MAX_SENTENCE))
        self.status = status


class Endpoint:
    """The calls. `leader` returns None where this process leads, else the leader's name (perhaps empty)."""

    def __init__(
        self,
        registry: Registry,
        authenticator: Authenticator,
        leader: Callable[[], str | None],
        callers: Callers,
        body_timeout_s: float = BODY_TIMEOUT_S,
    ) -> None:
        self._body_timeout_s, self._callers = body_timeout_s, callers
        self._registry = registry
        self._authenticator = authenticator
        self._leader = leader

    def application(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(client_max_size=MAX_REPORT_BYTES, middlewares=[_errors])
        path = "/v1/namespaces/{namespace}/pods/{pod}/"
        app.router.add_post(path + "reports", self.reports)
        app.router.add_post(path + "stream", self.stream)
        app.router.add_get(path + "commands", self.commands)
        return app

    async def reports(self, request: web.Request) -> web.Response:
        """POST: one report. By an agent of this release hello, and the exits that it reports again."""
        pod = await self._authenticated(request)
        if (request.content_length or 0) > MAX_REPORT_BYTES:
            raise _Answer(
                413, f"The message has {request.content_length} bytes; at most {MAX_REPORT_BYTES} are allowed."
            )
        try:
            async with asyncio.timeout(self._body_timeout_s):
                body = await request.read()
        except TimeoutError:
            raise _Answer(408, f"The message has not come within {self._body_timeout_s:g} s. Send it again.") from None
        except web.HTTPRequestEntityTooLarge:
            raise _Answer(413, TOO_LONG) from None
        report = self._take(pod, body)
        if isinstance(report.body, Hello):
            greeted = Greeted(counts_once=True, one_connection=True)
            return web.Response(body=codec.line(greeted), content_type="application/json")
        factor = self._registry.progress_factor
        if isinstance(report.body, Progress) and factor > 1.0:
            return web.Response(body=codec.line(Accepted(factor)), content_type="application/json")
        return web.Response(status=204)

    def _take(self, pod: Pod, text: bytes) -> Report:
        """Return the report of this pod, which the registry has taken. Raises _Answer."""
        try:
            report = Report.decode(text)
        except ProtocolError as error:
            raise _Answer(400, str(error)) from None
        if report.pod_uid != pod.uid:
            raise _Answer(
                403, f"The report is of pod UID {report.pod_uid}, the token is of pod {pod.name} ({pod.uid})."
            )
        if report.job_uid != pod.job_uid:
            raise _Answer(
                403,
                f"The report is of job UID {report.job_uid}, pod {pod.name} belongs to job {pod.job} ({pod.job_uid}).",
            )
        if isinstance(report.body, Hello):
            self._check_version(pod, report.body.protocol)
        elif not self._registry.knows(pod.uid, report.boot):
            raise _Answer(409, HELLO_FIRST)
        self._registry.report(pod, report)
        return report

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """POST: reports come and commands go on one connection. Open for as long as the agent lives: it is the heartbeat."""
        pod, boot = await self._stream_asked_for(request)
        response = await _start(request)
        stream = self._registry.open(pod, boot)
        reading = asyncio.ensure_future(self._read_reports(request.content, pod, response, stream))
        try:
            await _send_lines(response, stream)
        finally:
            reading.cancel()  # where it waits to write, aiohttp closes the connection: that agent does not read
            self._registry.close(pod, stream)
        return response

    async def _read_reports(
        self, content: StreamReader, pod: Pod, response: web.StreamResponse, stream: Stream
    ) -> None:
        """Take the reports of a stream until it ends, or until a refusal ends it. Ends the commands, too."""
        try:
            # An answer is written before the next line is read. So an agent that reads none holds about 1 MiB here, until the
            # kernel gives the connection up after USER_TIMEOUT_MS.
            while line := await content.readline(max_line_length=MAX_REPORT_BYTES):
                answer = self._answer_line(pod, line)
                await response.write(TAKEN if answer == Answered(204) else answer.line())
                if answer.status not in (204, 400):  # after 400 the agent goes on with its next report
                    break
                await asyncio.sleep(0)  # many lines that have come at once keep nobody else waiting
        except LineTooLong:
            with contextlib.suppress(OSError):
                await response.write(Answered(413, TOO_LONG).line())
        except (OSError, web.RequestPayloadError, HttpProcessingError) as error:
            log.debug("Pod %s/%s: its stream has ended: %r.", pod.namespace, pod.name, error)
        except Exception:
            log.exception("Pod %s/%s: its stream ends by a bug of ours.", pod.namespace, pod.name)
        finally:
            stream.put(None)

    def _answer_line(self, pod: Pod, line: bytes) -> Answered:
        """Take a report of a stream and return what it is answered with."""
        try:
            self._check_leads()
            report = self._take(self._authenticator.known(pod), line)
        except _Answer as answer:
            return Answered(answer.status, str(answer))
        except Forbidden as error:
            return Answered(403, str(error))
        except Exception:
            log.exception("Pod %s/%s, a report on its stream: a bug of ours.", pod.namespace, pod.name)
            return Answered(500, BUG)
        return Answered(204, "", self._registry.progress_factor if isinstance(report.body, Progress) else 1.0)

    async def commands(self, request: web.Request) -> web.StreamResponse:
        """GET: the stream of commands alone, for an agent of an earlier release."""
        pod, boot = await self._stream_asked_for(request)
        response = await _start(request)
        stream = self._registry.open(pod, boot)
        try:
            await _send_lines(response, stream)
        finally:
            self._registry.close(pod, stream)
        return response

    async def _stream_asked_for(self, request: web.Request) -> tuple[Pod, str]:
        """Return whose stream is asked for: the pod and its agent's boot id. Raises _Answer."""
        pod = await self._authenticated(request)
        version = request.query.get("protocol", "")
        self._check_version(pod, int(version) if version.isdecimal() and len(version) < 10 else -1)
        boot = request.query.get("boot", "")
        if not boot:
            raise _Answer(400, "The query parameter boot is missing: the agent's boot id names the stream.")
        if not self._registry.knows(pod.uid, boot):
            raise _Answer(409, HELLO_FIRST)
        return pod, boot

    def _check_version(self, pod: Pod, version: int) -> None:
        refusal = unsupported(version)
        if refusal is not None:
            self._registry.refuse(pod, refusal)
            raise _Answer(400, refusal)

    def _check_leads(self) -> None:
        leader = self._leader()
        if leader is not None:
            raise _Answer(503, f"This operator does not lead{f'; {leader} does' if leader else ''}.")

    async def _authenticated(self, request: web.Request) -> Pod:
        self._check_leads()
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not token:
            raise _Answer(401, "The request has no bearer token.")
        pod = await self._authenticator.authenticate(token, request.match_info["namespace"], request.match_info["pod"])
        self._callers.called(pod.uid, request.protocol)
        return pod


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer with a sentence. A connection is kept for a worker that sent one message that cannot be used, and for what passes by
    itself: an agent that has to say hello first, or the API server that does not answer. Everybody else has had an answer, and an
    agent of ours connects again."""
    try:
        return await handler(request)
    except _Answer as answer:
        return _sentence(answer.status, str(answer), keep=answer.status in (400, 409))
    except Unauthorized as error:
        return _sentence(401, str(error))
    except Forbidden as error:
        return _sentence(403, str(error))
    except UnavailableError as error:
        return _sentence(503, str(error), keep=True)
    except web.HTTPException as error:
        return _sentence(error.status, f"{error.reason}: {request.method} {request.path}.")
    except Exception:
        log.exception("%s %s: a bug of ours.", request.method, request.path)
        return _sentence(500, BUG)


def _sentence(status: int, sentence: str, *, keep: bool = False) -> web.Response:
    answer = web.Response(status=status, text=json.dumps({"error": sentence}), content_type="application/json")
    if not keep:
        answer.force_close()
    return answer


async def _start(request: web.Request) -> web.StreamResponse:
    """Begin the answer to who asks for a stream; its lines follow."""
    _keep_alive(request)
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    return response


async def _send_lines(response: web.StreamResponse, stream: Stream) -> None:
    """Send the commands that are put into the stream until that or the connection ends."""
    with contextlib.suppress(ConnectionError):
        while (line := await stream.get()) is not None:
            await response.write(line)


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
    """Connections that have not asked for anything yet: each holds memory and a descriptor, and aiohttp waits for them as long as
    for an agent that is silent between two reports."""

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
    body_timeout_s: float = BODY_TIMEOUT_S,
    request_timeout_s: float = REQUEST_TIMEOUT_S,
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> tuple[web.AppRunner, int]:
    """Start the endpoint and return its runner (call `cleanup()`) and port (of use where `port` is 0)."""
    with contextlib.suppress(AttributeError):
        asyncio.sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES  # type: ignore[attr-defined]
    callers = Callers()
    app = Endpoint(registry, authenticator, leader, callers, body_timeout_s).application()
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
        keepalive_timeout=3600,
        shutdown_timeout=1.0,
        auto_decompress=False,  # no agent compresses, and a few bytes may stand for millions
        handler_cancellation=True,  # or nobody would hear that an idle stream is gone, and the stream is the heartbeat
    )
    await runner.setup()
    site = _Site(runner, host, port, ssl_context, handshake_timeout_s)
    await site.start()
    return runner, int(runner.addresses[0][1])
