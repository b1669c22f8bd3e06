"""The endpoint over real TLS on loopback: what an agent may do, and every bad call: one clear sentence, nothing changed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from _regroup_agent import http
from harness.polling import until_async
from regroup.protocol import MAX_REPORT_BYTES, codec
from regroup.protocol.wire import Hello, Report, Welcome
from regroup_operator.endpoint.certificates import Authority, reload
from regroup_operator.endpoint.server import ACCEPTS, MAX_CONNECTIONS, Callers
from tests.unit.endpoint.reports import JOB_UID, POD_UID, hello, make_report
from tests.unit.endpoint.serving import (
    DEADLINE_S,
    OTHER,
    PATH,
    POD,
    Server,
    connect,
    with_server,
)


def line(report: Report) -> bytes:
    return codec.line(report)


def changed_line(**fields: Any) -> bytes:
    """Return a hello whose JSON has other fields; None removes one."""
    data = codec.to_json(hello())
    for name, value in fields.items():
        if value is None:
            del data[name]
        else:
            data[name] = value
    return json.dumps(data).encode()


async def _chunks() -> AsyncIterator[bytes]:
    for _ in range(70):
        yield b" " * 1024


FULL = line(hello())
OPEN = http.request("POST", "x", PATH, "token-0") + http.chunk(FULL)
BAD: list[Any] = [
    pytest.param(FULL, {"token": None}, 401, "The request has no bearer token.", id="no token"),
    pytest.param(FULL, {"token": "expired"}, 401, "The token is not valid.", id="wrong token"),
    pytest.param(FULL, {"token": "token-1"}, 403, "bound to pod digits-worker-1-0, not to", id="another pod's token"),
    pytest.param(FULL, {"token": "unreachable"}, 503, "The API server does not answer", id="API server down"),
    pytest.param(FULL, {"token": "bug"}, 500, "The operator failed to answer", id="a bug of ours"),
    pytest.param(FULL, {"path": "/v2/else"}, 404, "Not Found: POST /v2/else.", id="another path"),
    pytest.param(b" " * (MAX_REPORT_BYTES + 1), {}, 413, "has more than the 65536 bytes that are read", id="over 64 KiB"),
    pytest.param("chunked", {}, 413, "has more than the 65536 bytes that are read", id="over 64 KiB in chunks"),
    pytest.param(b"hello", {}, 400, "The message is not JSON", id="not JSON"),
    pytest.param(b"\xff\xfe{}", {}, 400, "The message is not JSON", id="not text"),
    pytest.param(b"[" * 20_000, {}, 400, "The message is not JSON", id="JSON without end"),
    pytest.param(b"", {}, 400, "The message is not JSON", id="nothing"),
    pytest.param(b"[]", {}, 400, "report must be a JSON object, not list.", id="not an object"),
    pytest.param(changed_line(boot=None), {}, 400, "report.boot is missing.", id="missing field"),
    pytest.param(
        changed_line(storePort="x"), {}, 400, "report.storePort must be an integer, not str.", id="wrong type"
    ),
    pytest.param(changed_line(body={"type": "sing"}), {}, 400, "Unknown message type 'sing'", id="unknown report"),
    pytest.param(changed_line(body={"type": "hello", "protocol": 2, "processes": 1}), {}, 400,
                 "Protocol version 2 is not supported; this operator supports 1.", id="wrong protocol version"),
    pytest.param(changed_line(body={"type": "progress", "step": 1, "checkpoint": {"step": 1}}), {}, 400,
                 "progress.checkpoint.generation is missing.", id="a checkpoint without a generation"),
    pytest.param(changed_line(body={"type": "progress", "step": 1, "loss": float("nan")}), {}, 400,
                 "NaN is not a JSON value", id="a loss that is not a number"),
    pytest.param(changed_line(podUid="other-uid"), {}, 403, "The report is of pod UID other-uid", id="pod UID mismatch"),
    pytest.param(changed_line(jobUid="other"), {}, 403, "The report is of job UID other", id="job UID mismatch"),
    pytest.param(changed_line(body={"type": "hello", "protocol": 1, "processes": 1, "faults": 201}), {}, 400,
                 "hello.faults (201) is more than the 200 that are taken.", id="more faults than an agent keeps"),
    pytest.param(line(make_report()), {}, 409, "The first line of a stream must be a hello.", id="no hello"),
    pytest.param(line(make_report(boot="second")), {}, 409, "The first line of a stream must be a hello.", id="of another process"),
    pytest.param(line(hello(boot="second", incarnation=0)), {}, 409, "The report is of another agent process than", id="delayed"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "call", "status", "says"), BAD)
def test_bad_call_gets_one_sentence_and_changes_nothing(data: Any, call: Any, status: int, says: str) -> None:
    async def test(server: Server) -> None:
        await server.post(FULL)
        await until_async(lambda: not server.session().connected, "the stream is closed", every_s=0.001)
        before, enqueued = server.session(), len(server.enqueued)
        got, said = await server.post(_chunks() if data == "chunked" else data, **call)
        assert (got, says in said, "\n" in said) == (status, True, False), said
        told = server.registry.refusals([POD])  # a version is a condition of the job: it is looked at
        assert (server.registry.num_connected(), bool(told)) == (0, "Protocol version" in says)
        if "faults" not in says:  # that hello is one, and says where the worker is
            assert (server.session(), len(server.enqueued) - len(told)) == (before, enqueued)
        assert await server.post(FULL) == (200, "")  # and the next good call is served

    with_server(test)


def test_message_of_64_kib_is_read() -> None:
    async def test(server: Server) -> None:
        assert await server.post(FULL.strip().ljust(MAX_REPORT_BYTES)) == (200, "")

    with_server(test)


@pytest.mark.parametrize(
    "begins",
    [
        pytest.param(b'{"boot":', id="half of it"),
        pytest.param(line(Report("job-uid", POD_UID, "boot", hello().condition, None, 0, Hello(1, 1, 1))), id="a fault is missing"),
    ],
)  # fmt: skip
def test_hello_that_does_not_end_is_given_up(begins: bytes) -> None:
    async def scenario(server: Server) -> None:
        never = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            yield begins
            await never.wait()

        status, says = await server.post(body())
        assert (status, says) == (408, "The hello has not come within 0.2 s. Call again.")
        assert server.registry.num_connected() == 0
        assert await server.post(line(hello())) == (200, ""), "others are served"

    with_server(scenario, hello_timeout_s=0.2)


@pytest.mark.parametrize(
    ("is_leader", "status", "says"),
    [(False, 503, "This operator does not lead; other does."), (True, 403, "Pod digits-worker-0-0 is gone.")],
    ids=["another one leads", "the pod is gone"],
)
def test_hello_that_comes_late_is_judged_by_what_holds_then(is_leader: bool, status: int, says: str) -> None:
    async def scenario(server: Server) -> None:
        async def body() -> AsyncIterator[bytes]:
            yield b" "
            await until_async(lambda: server.tokens.num_authenticated, "the token is checked", every_s=0.001)
            if is_leader:
                server.tokens.workers.remove(POD)
            else:
                server.leader[0] = "other"
            yield line(hello())

        assert await server.post(body()) == (status, says)
        assert server.registry.num_connected() == 0

    with_server(scenario)


def test_non_leader_names_the_leader() -> None:
    async def test(server: Server) -> None:
        server.leader[0] = "regroup-7d9-b"
        assert await server.post(FULL) == (503, "This operator does not lead; regroup-7d9-b does.")
        server.leader[0] = ""
        assert await server.post(FULL) == (503, "This operator does not lead.")
        assert server.session() is None

    with_server(test)


def test_serving_key_is_renewed_without_a_restart_and_strangers_are_not_trusted() -> None:
    async def test(server: Server) -> None:
        reload(server.context, *server.authority.issue(["localhost"], ["127.0.0.1"]))
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=ssl.create_default_context(cadata=server.authority.ca_pem.decode()))
        ) as fresh:
            async with fresh.post(server.url + PATH, data=FULL, headers={"Authorization": "Bearer token-0"}) as answer:
                assert answer.status == 200
        stranger = Authority.create()
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=ssl.create_default_context(cadata=stranger.ca_pem.decode()))
        ) as untrusting:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await untrusting.post(server.url + PATH, data=FULL)

    with_server(test)


def test_certificate_carries_its_names_only() -> None:
    async def test(server: Server) -> None:
        reload(server.context, *server.authority.issue(["regroup.regroup-system.svc"]))
        trusted = ssl.create_default_context(cadata=server.authority.ca_pem.decode())
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusted)) as http:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await http.post(server.url + PATH, data=FULL)
            async with http.post(
                server.url + PATH,
                data=FULL,
                headers={"Authorization": "Bearer token-0"},
                server_hostname="regroup.regroup-system.svc",
            ) as answer:
                assert answer.status == 200

    with_server(test)


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"POST /v1/names", id="half a request line"),
        pytest.param(b"POST /v1 HTTP/1.1\r\nHost: x\r\nX: ", id="half of the headers"),
    ],
)
def test_connection_that_asks_for_nothing_is_closed_and_others_are_served(first: bytes) -> None:
    """Bytes that come one after the other are no request either."""

    async def scenario(server: Server) -> None:
        assert await server.post(line(hello())) == (200, "")
        reader, writer = await connect(server)
        writer.write(first)

        async def trickle() -> None:
            while first:
                writer.write(b"a")
                await asyncio.sleep(0.05)

        trickling = asyncio.create_task(trickle())
        agent, agent_writer = await connect(server)
        agent_writer.write(OPEN)
        await until_async(lambda: server.session().connected, "the stream is open", every_s=0.001)
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            server.registry.tell(POD_UID, JOB_UID, 3, Welcome("Session"))
            assert await agent.readuntil(b'"welcome"'), "the agent's stream stays"
        trickling.cancel()
        writer.close()
        agent_writer.close()

    with_server(scenario, request_timeout_s=0.4)


@pytest.mark.parametrize(
    ("token", "leader", "status"),
    [("wrong", None, b"401"), ("token-1", None, b"403"), ("token-0", "other", b"503"), ("bug", None, b"500")],
)
def test_stranger_gets_one_answer_on_a_connection(token: str, leader: str | None, status: bytes) -> None:
    """So does everybody from a standby, which holds thousands of connections for nobody."""

    async def scenario(server: Server) -> None:
        server.leader[0] = leader
        reader, writer = await connect(server)
        request = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: 2\r\n\r\n{{}}"
        writer.write(request.encode())
        async with asyncio.timeout(DEADLINE_S):
            answer = await reader.read()
        assert answer.split(b" ")[1] == status
        writer.close()

    with_server(scenario)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00" * 5000,
        b"GET " + b"/" * 9000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20000 + b"\r\n",
    ],
)
def test_garbage_is_answered_or_cut_off_and_others_are_served(garbage: bytes) -> None:
    async def scenario(server: Server) -> None:
        reader, writer = await connect(server)
        with contextlib.suppress(ConnectionError):
            writer.write(garbage)
            await writer.drain()
            async with asyncio.timeout(DEADLINE_S):
                answer = await reader.read()
            assert answer == b"" or answer.split(b" ")[1][:1] == b"4"
        writer.close()
        assert await server.post(line(hello())) == (200, "")

    with_server(scenario, request_timeout_s=0.4)


def test_connection_without_a_handshake_is_closed() -> None:
    async def scenario(server: Server) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()
        assert await server.post(line(hello())) == (200, "")

    with_server(scenario, handshake_timeout_s=0.3)


def test_pod_has_no_more_than_some_connections_and_the_oldest_goes() -> None:
    """Whatever runs in a pod can read its token."""

    async def call(server: Server, token: str, path: str, report: bytes) -> tuple[asyncio.StreamReader, Any]:
        reader, writer = await connect(server)
        writer.write(http.request("POST", "x", path, token) + http.chunk(report))
        async with asyncio.timeout(DEADLINE_S):
            assert (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1] == b"200"
        return reader, writer

    async def scenario(server: Server) -> None:
        other = (server, "token-1", PATH.replace("worker-0", "worker-1"), line(replace(hello(), pod_uid=OTHER.uid)))
        calls = [await call(*other)]
        calls += [await call(server, "token-0", PATH, line(hello())) for _ in range(3 * MAX_CONNECTIONS)]
        async with asyncio.timeout(DEADLINE_S):
            for reader, _ in calls[1:-MAX_CONNECTIONS]:
                with contextlib.suppress(ConnectionError):
                    await reader.read()
                assert reader.at_eof()
        for reader, writer in (calls[0], *calls[-MAX_CONNECTIONS:]):
            assert not reader.at_eof()
            writer.close()

    with_server(scenario)


def test_connections_that_have_ended_are_not_kept() -> None:
    callers, connections = Callers(), [cast(web.RequestHandler, object()) for _ in range(MAX_CONNECTIONS)]
    for connection in [*connections, *connections]:
        callers.called("uid", connection)  # none is closed: these are as many as may be
    callers.forget(connections[1:])
    assert callers._by_pod == {"uid": connections[1:]}
    callers.forget([])
    assert callers._by_pod == {}


def test_many_silent_connections_at_once_keep_no_agent_out() -> None:
    async def scenario(server: Server) -> None:
        silent = [await connect(server) for _ in range(200)]
        assert await server.post(line(hello())) == (200, "")
        async with asyncio.timeout(DEADLINE_S):
            for reader, _ in silent:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
        for _, writer in silent:
            writer.close()
        assert await server.post(line(hello())) == (200, "")

    with_server(scenario, request_timeout_s=0.5)


def test_storm_of_connections_is_queued_by_the_kernel_and_accepted_in_small_parts() -> None:
    async def test(server: Server) -> None:
        def num_open() -> int:
            return sum(1 for _ in Path("/proc/self/fd").iterdir())

        num_agents = 6 * ACCEPTS
        before = num_open()
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        # The loop does not run meanwhile: a queue that is too short answers nobody.
        agents = [socket.create_connection(address, DEADLINE_S) for _ in range(num_agents)]
        try:
            accepted = [num_open() - before - num_agents]
            while accepted[-1] < num_agents:
                await asyncio.sleep(0)
                accepted.append(num_open() - before - num_agents)
            parts = [after - earlier for earlier, after in itertools.pairwise(accepted)]
            assert (accepted[0], max(parts) <= ACCEPTS) == (0, True), accepted
        finally:
            for agent in agents:
                agent.close()

    with_server(test)
