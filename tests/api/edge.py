"""The network between two programs, in the hands of a test: it forwards HTTP, can keep one request back until later, and fails in
the ways in which an API server and the network to it do."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

_PER_HOP = {"connection", "content-encoding", "content-length", "host", "keep-alive", "transfer-encoding"}


class _Body(aiohttp.payload.AsyncIterablePayload):
    """The body of a stream. What comes before it is sent at once: an agent sends its hello with it, and waits for the answer."""

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        writer.send_headers()
        await super().write_with_length(writer, content_length)


@dataclass
class Passed:
    """A request that came by, and how it was answered."""

    method: str
    path: str
    body: bytes
    status: int = 0
    """0: not answered yet."""
    answer: bytes = b""
    """Empty for a stream."""
    is_watch: bool = False
    is_stream: bool = False
    """Of an agent, whose body and answer are lines without an end (adr/0068)."""


@dataclass
class Fault:
    """What happens to the next `times` requests that fit.

    `how`: status (answered with `status`, forwarded to nobody), reset (the connection breaks before the request), lost (it breaks
    before the answer: the request took effect), never (no answer comes, and the connection stays), silent (a watch begins, and no
    event comes), expired (a watch ends with the event ERROR 410), then (forwarded; `then` is called before the answer goes back).
    """

    fits: Callable[[Passed], bool]
    how: str
    times: int = 1
    status: int = 500
    then: Callable[[], None] | None = None
    hit: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    """Whoever asked has given up a watch that is silent."""


_REASONS = {409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}


def _refusal(status: int) -> dict[str, object]:
    """Return the body with which an API server refuses a request."""
    kind = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": status}
    return {**kind, "reason": _REASONS[status], "message": f"A test answers {status}."}


@dataclass
class Held:
    """The first request that fits is kept back, whole, from when `arrived` is set until `let_go`."""

    fits: Callable[[Passed], bool]
    arrived: threading.Event = field(default_factory=threading.Event)
    answered: threading.Event = field(default_factory=threading.Event)
    request: Passed | None = None
    _gate: asyncio.Event = field(default_factory=asyncio.Event)
    _loop: asyncio.AbstractEventLoop | None = None

    def let_go(self) -> None:
        """Have the request go on to its target, whether or not its sender is still there."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._gate.set)

    async def wait(self, request: Passed) -> None:
        """Keep the request."""
        self.request, self._loop = request, asyncio.get_running_loop()
        self.arrived.set()
        await self._gate.wait()


class Edge:
    """Forwards to `target`, which may change; `url` is where it listens."""

    def __init__(self, target: str, upstream: ssl.SSLContext, serving: ssl.SSLContext | None = None) -> None:
        self.target = target
        self.passed: list[Passed] = []
        """Everything but what is only read, in the order of arrival."""
        self.hasty: list[Passed] = []
        """Status writes that came sooner after a 429 than it had asked for."""
        self._again_s: dict[tuple[str, str], float] = {}
        """By method and path: when the last 429 wants to be asked again, on the loop's clock."""
        self.on_event: Callable[[dict[str, Any]], None] | None = None
        """Called in the edge's thread with each event of a watch that whoever asked has been sent."""
        self._upstream, self._serving = upstream, serving
        self._held: Held | None = None
        self._faults: list[Fault] = []
        self._is_down = False
        self._streams: set[asyncio.BaseTransport] = set()
        """Connections of those to whom an answer is being streamed."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self.url = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(10)

    def hold(self, fits: Callable[[Passed], bool]) -> Held:
        """Keep the next request back that fits; the ones after it pass."""
        self._held = Held(fits)
        return self._held

    def fail(self, fits: Callable[[Passed], bool], how: str, **given: Any) -> Fault:
        """Have the next requests that fit fail in this way (see Fault)."""
        fault = Fault(fits, how, **given)
        self._faults.append(fault)
        return fault

    def heal(self) -> None:
        """Have nothing fail any more."""
        self._faults.clear()
        self._is_down = False

    def go_down(self) -> None:
        """Break every connection and refuse every request until `heal`."""
        self._is_down = True
        self.turn_to(self.target)

    def turn_to(self, target: str) -> None:
        """Forward to another target from now on; what is open to the one before is closed."""
        self.target = target
        asyncio.run_coroutine_threadsafe(self._renew_session(), self._loop).result(10)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self) -> str:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._forward)
        await self._renew_session()
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self._serving)
        await site.start()
        scheme = "http" if self._serving is None else "https"
        return f"{scheme}://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _renew_session(self) -> None:
        connector = aiohttp.TCPConnector(ssl=self._upstream, limit=0)
        new = aiohttp.ClientSession(connector=connector, auto_decompress=False, timeout=aiohttp.ClientTimeout())
        old, self._session = self._session, new
        for stream in self._streams.copy():
            stream.close()
        if old is not None:
            await old.close()

    async def _close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()
        # Streams whose two ends are both gone; nobody else would end them.
        rest = asyncio.all_tasks() - {task for task in [asyncio.current_task()] if task is not None}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        is_stream = request.method == "POST" and request.path.endswith("/stream")
        passed = Passed(
            request.method,
            request.path,
            b"" if is_stream else await request.read(),
            is_watch=request.query.get("watch", "") in ("1", "true"),
            is_stream=is_stream,
        )
        held = self._held
        if request.method != "GET":
            self.passed.append(passed)
        due_s = self._again_s.get((passed.method, passed.path), 0.0)
        if passed.method == "PUT" and passed.path.endswith("/status") and asyncio.get_running_loop().time() < due_s:
            self.hasty.append(passed)
        fault = next((f for f in self._faults if f.times > 0 and f.fits(passed)), None)
        if self._is_down or fault is not None:
            refused = await self._fail(request, passed, fault)
            if refused is not None:
                return refused
        if held is not None and held.fits(passed):
            self._held = None
            await held.wait(passed)
        else:
            held = None
        assert self._session is not None
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _PER_HOP}
        url = f"{self.target}{request.path_qs}"
        body = _Body(request.content.iter_any()) if is_stream else passed.body or None
        try:
            async with self._session.request(request.method, url, headers=headers, data=body) as answer:
                passed.status = answer.status
                if fault is not None and fault.how in ("lost", "then"):
                    passed.answer = await answer.read()
                    if fault.then is not None:
                        fault.then()
                    fault.hit.set()
                    if fault.how == "lost":
                        return self._cut(request)
                    return web.Response(status=answer.status, body=passed.answer, content_type="application/json")
                return await self._answer(request, passed, answer)
        except aiohttp.ClientError as error:
            raise web.HTTPBadGateway(text=str(error)) from None
        finally:
            if held is not None:
                held.answered.set()

    async def _fail(self, request: web.Request, passed: Passed, fault: Fault | None) -> web.StreamResponse | None:
        """Do what a fault does before a request is forwarded; None: it is forwarded."""
        if fault is None:
            return self._cut(request)
        fault.times -= 1
        if fault.how in ("lost", "then"):
            return None
        fault.hit.set()
        if fault.how == "reset":
            return self._cut(request)
        if fault.how == "silent":
            await web.StreamResponse(headers={"Content-Type": "application/json"}).prepare(request)
            while request.transport is not None and not request.transport.is_closing():
                await asyncio.sleep(0.1)
            fault.over.set()
            return self._cut(request)
        if fault.how == "never":
            await asyncio.Event().wait()  # until the edge closes: whoever asked has a bound of its own
        body = _refusal(fault.status)
        if fault.how == "expired":
            event = json.dumps({"type": "ERROR", "object": _refusal(410)}) + "\n"
            return web.Response(status=200, text=event, content_type="application/json")
        passed.status = fault.status
        headers = {}
        if fault.status == 429:
            headers["Retry-After"] = "1"
            self._again_s[passed.method, passed.path] = asyncio.get_running_loop().time() + 1.0
        return web.json_response(body, status=fault.status, headers=headers)

    @staticmethod
    def _cut(request: web.Request) -> web.Response:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    async def _answer(self, request: web.Request, passed: Passed, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        headers = {k: v for k, v in answer.headers.items() if k.lower() not in _PER_HOP - {"content-encoding"}}
        if request.method != "GET" and not passed.is_stream:
            passed.answer = await answer.read()
            return web.Response(status=answer.status, headers=headers, body=passed.answer)
        response = web.StreamResponse(status=answer.status, headers=headers)
        await response.prepare(request)
        stream = request.transport
        if stream is not None:
            self._streams.add(stream)
        try:
            rest = b""
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
                if passed.is_watch and self.on_event is not None:
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        self.on_event(json.loads(line))
        except ConnectionError:  # whoever asked is gone
            pass
        finally:
            if stream is not None:
                self._streams.discard(stream)
        return response


@contextmanager
def edge(target: str, upstream: ssl.SSLContext, serving: ssl.SSLContext | None = None) -> Iterator[Edge]:
    """Forward for as long as the block lasts."""
    made = Edge(target, upstream, serving)
    try:
        yield made
    finally:
        made.close()


def edge_to(kubeconfig: Path) -> AbstractContextManager[Edge]:
    """Forward to the API server of a kubeconfig, whose CA lies beside it, for as long as the block lasts."""
    server = yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
    return edge(server, ssl.create_default_context(cafile=str(kubeconfig.parent / "ca.crt")))
