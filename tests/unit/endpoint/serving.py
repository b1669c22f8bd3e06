"""An endpoint over real TLS on loopback, with two workers that it knows, for the tests of what it answers."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
from aiohttp import web

from regroup_operator.api import UnavailableError
from regroup_operator.endpoint.certificates import Authority, server_context
from regroup_operator.endpoint.registry import Registry
from regroup_operator.endpoint.server import serve
from regroup_operator.model.ports import Forbidden, Unauthorized
from regroup_operator.model.records import Key, Pod
from tests.unit.endpoint.reports import JOB_UID, POD_UID

POD = Pod("team", "digits-worker-0-0", POD_UID, "digits", JOB_UID, 0, 0)
OTHER = replace(POD, name="digits-worker-1-0", uid="other-uid", slot=1)
PATH = "/v1/namespaces/team/pods/digits-worker-0-0/stream"
TOKENS = {"token-0": POD, "token-1": OTHER}
DEADLINE_S = 5.0


class Tokens:
    """The Authenticator port with two workers."""

    def __init__(self) -> None:
        self.workers = [POD, OTHER]
        self.num_authenticated = 0
        self.num_asked = 0
        """How many reports on streams."""

    async def authenticate(self, token: str, namespace: str, pod_name: str) -> Pod:
        if token == "unreachable":
            raise UnavailableError("The API server does not answer; try again.")
        if token == "bug":
            raise ZeroDivisionError
        self.num_authenticated += 1
        pod = TOKENS.get(token)
        if pod is None:
            raise Unauthorized("The token is not valid.")
        if (pod.namespace, pod.name) != (namespace, pod_name):
            raise Forbidden(f"The token is bound to pod {pod.name}, not to {pod_name}.")
        return pod

    def known(self, pod: Pod) -> Pod:
        self.num_asked += 1
        if pod not in self.workers:
            raise Forbidden(f"Pod {pod.name} is gone.")
        return pod


@dataclass
class Server:
    registry: Registry
    http: aiohttp.ClientSession
    url: str
    context: ssl.SSLContext
    authority: Authority
    enqueued: list[Key]
    leader: list[str | None]
    tokens: Tokens
    runner: web.AppRunner

    async def post(self, data: Any, token: str | None = "token-0", path: str = PATH) -> tuple[int, str]:
        """Send a stream that ends after `data`. Returns (status, sentence or empty)."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        async with self.http.post(self.url + path, data=data, headers=headers) as answer:
            return await sentence(answer)

    def session(self) -> Any:
        return self.registry.sessions([POD]).get(POD_UID)


async def sentence(answer: aiohttp.ClientResponse) -> tuple[int, str]:
    text = await answer.text()
    if answer.status < 300:
        return answer.status, ""
    assert answer.content_type == "application/json"
    body = json.loads(text)
    assert list(body) == ["error"]
    return answer.status, body["error"]


@asynccontextmanager
async def serving(factor: float = 1.0, **limits: float) -> AsyncIterator[Server]:
    authority = Authority.create()
    context = server_context(*authority.issue(["localhost"], ["127.0.0.1"]))
    loop = asyncio.get_running_loop()
    enqueued: list[Key] = []
    leader: list[str | None] = [None]
    tokens = Tokens()
    registry = Registry(loop.time, enqueued.append, lambda key, _: enqueued.append(key), lambda _: factor)
    runner, port = await serve(registry, tokens, context, host="127.0.0.1", port=0, leader=lambda: leader[0], **limits)
    trusted = ssl.create_default_context(cadata=authority.ca_pem.decode())
    connector = aiohttp.TCPConnector(ssl=trusted)
    try:
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(DEADLINE_S)) as http:
            yield Server(
                registry, http, f"https://127.0.0.1:{port}", context, authority, enqueued, leader, tokens, runner
            )
    finally:
        await runner.cleanup()


def with_server(test: Callable[[Server], Awaitable[None]], **limits: float) -> None:
    async def run() -> None:
        async with serving(**limits) as server:
            await test(server)

    asyncio.run(run())


async def connect(
    server: Server, sock: socket.socket | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection that has asked for nothing yet."""
    trusted = ssl.create_default_context(cadata=server.authority.ca_pem.decode())
    trusted.check_hostname = False
    if sock is not None:
        return await asyncio.open_connection(sock=sock, ssl=trusted, server_hostname="localhost")
    return await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]), ssl=trusted)
