"""Reports and commands on one connection, over real TLS: what is answered, what ends the stream, what disturbs nobody."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import StreamReader, web
from aiohttp.base_protocol import BaseProtocol

from _regroup_agent import http
from _regroup_agent.link import Endpoint as Agent
from _regroup_agent.link import Link
from harness.polling import until_async
from regroup.protocol import MAX_REPORT_BYTES, VERSION, codec
from regroup.protocol.wire import Answered, Command, Fault, Hello, Progress, Report, Welcome
from regroup_operator.endpoint.server import Callers, Endpoint, _Answers
from regroup_operator.model.records import Pod
from tests.unit.endpoint.reports import JOB_UID, POD_UID, hello, make_report
from tests.unit.endpoint.serving import DEADLINE_S, PATH, POD, Server, connect, serving, with_server
from tests.unit.endpoint.test_fuzz import BODIES, mutated

HEAD = http.request("POST", "x", PATH, "token-0")
OPEN = HEAD + http.chunk(codec.line(hello()))
CHANGED = codec.line(make_report())
FAULT = codec.line(make_report(Fault("collective", "Lost.", generation=1)))
SOON_S = 0.01
"""How long reports wait for their answer here."""


class Caller:
    """An agent's end of the connection, byte by byte."""

    def __init__(self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.server, self.reader, self.writer = server, reader, writer
        self._lines: AsyncIterator[bytes] | None = None

    async def head(self) -> http.Answer:
        """Return the answer to the request for the stream."""
        async with asyncio.timeout(DEADLINE_S):
            answer = await http.read_head(self.reader)
        self._lines = http.read_lines(self.reader, answer, 1 << 20)
        return answer

    async def line(self) -> Any:
        """Return the next line of the stream, or None: it has ended."""
        assert self._lines is not None
        async with asyncio.timeout(DEADLINE_S):
            text = await anext(self._lines, None)
        if text is None:
            return None
        return Answered.decode(text) if text.startswith(Answered.START) else Command.decode(text)

    async def says(self, data: bytes) -> Any:
        """Send a line and return what comes next."""
        self.writer.write(http.chunk(data))
        return await self.line()

    async def closed(self) -> None:
        await until_async(lambda: not self.server.session().connected, "the stream is closed", every_s=0.001)


@asynccontextmanager
async def calling(**limits: float) -> AsyncIterator[Caller]:
    """A stream that is open."""
    async with serving(**{"answer_within_s": SOON_S} | limits) as server:
        reader, writer = await connect(server)
        try:
            caller = Caller(server, reader, writer)
            writer.write(OPEN)
            assert (await caller.head()).status == 200
            await until_async(lambda: server.session().connected, "the stream is open", every_s=0.001)
            yield caller
        finally:
            writer.transport.abort()


def with_caller(test: Callable[[Caller], Awaitable[None]], **limits: float) -> None:
    async def run() -> None:
        async with calling(**limits) as caller:
            await test(caller)

    asyncio.run(run())


def test_hello_and_its_faults_come_before_the_stream_opens() -> None:
    """The first plan that sees the worker connected knows how its processes have ended."""

    async def scenario(server: Server) -> None:
        reader, writer = await connect(server)
        exits = [codec.line(make_report(Fault("exit", exit_code=1, ended=number, generation=1))) for number in (1, 2)]
        writer.write(HEAD + http.chunk(codec.line(make_report(Hello(VERSION, 1, faults=2)))) + http.chunk(exits[0]))
        await until_async(
            lambda: server.session() and server.session().num_exits == 1, "the first is there", every_s=0.001
        )
        assert not server.session().connected
        writer.write(http.chunk(exits[1]) + http.chunk(codec.line(make_report(Progress(7)))))
        caller = Caller(server, reader, writer)
        assert (await caller.head()).status == 200
        assert [await caller.line() for _ in range(3)] == [Answered(1), Answered(2), Answered(3)]
        assert (server.session().num_exits, server.session().progress.step) == (2, 7)
        server.registry.tell(POD_UID, JOB_UID, 3, Welcome("Session"))
        command = await caller.line()
        assert isinstance(command, Command)
        assert (command.generation, command.body) == (3, Welcome("Session"))
        writer.transport.abort()
        await caller.closed()
        assert set(server.enqueued) == {("team", "digits")}

    with_server(scenario, answer_within_s=SOON_S)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        pytest.param([Progress(7)], "hello.faults (1) counts a report that is no fault.", id="another report"),
        pytest.param([], "ended before the faults that its hello announces (1).", id="the stream ends"),
    ],
)
def test_hello_that_announces_other_faults_than_follow_is_refused(lines: list[Any], says: str) -> None:
    async def scenario(server: Server) -> None:
        reports = [make_report(Hello(VERSION, 1, faults=1)), *map(make_report, lines)]
        status, sentence = await server.post(b"".join(map(codec.line, reports)))
        assert status == 400
        assert says in sentence
        assert server.registry.num_connected() == 0

    with_server(scenario)


def test_fault_that_is_refused_with_the_hello_refuses_the_stream() -> None:
    async def scenario(server: Server) -> None:
        foreign = replace(make_report(Fault("exit", exit_code=1, ended=1)), pod_uid="other-uid")
        lines = [make_report(Hello(VERSION, 1, faults=1)), foreign]
        status, says = await server.post(b"".join(map(codec.line, lines)))
        assert (status, "The report is of pod UID other-uid" in says) == (403, True)
        assert server.registry.num_connected() == 0

    with_server(scenario)


def test_faults_are_answered_at_once_and_everything_else_together() -> None:
    async def scenario(caller: Caller) -> None:
        caller.writer.write(http.chunk(CHANGED * 5))
        assert await caller.says(FAULT) == Answered(6, progress_factor=2.5), "and what came before it"
        for _ in range(2):
            await asyncio.sleep(0)
        assert caller.server.session().fault is not None

    with_caller(scenario, factor=2.5, answer_within_s=1000.0)


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_answer_says_how_often_progress_is_wanted(factor: float) -> None:
    async def scenario(caller: Caller) -> None:
        caller.writer.write(http.chunk(codec.line(make_report(Progress(7))) + CHANGED))
        assert await caller.line() == Answered(2, progress_factor=factor), "one for both"

    with_caller(scenario, factor=factor)


def test_lines_are_taken_however_they_are_cut() -> None:
    async def scenario(caller: Caller) -> None:
        text = b"".join(codec.line(make_report(Progress(step))) for step in (1, 2, 3)) + FAULT
        for at in range(0, len(text), 7):
            caller.writer.write(http.chunk(text[at : at + 7]))
            await caller.writer.drain()
        assert await caller.line() == Answered(4)
        assert caller.server.session().progress.step == 3

    with_caller(scenario, answer_within_s=1000.0)


def _padded(size: int) -> bytes:
    """Return a report of so many bytes, newline included."""
    return CHANGED.strip().ljust(size - 1) + b"\n"


def changed(**fields: Any) -> bytes:
    return json.dumps({**codec.to_json(make_report()), **fields}).encode() + b"\n"


@pytest.mark.parametrize(
    ("data", "status", "says", "goes_on"),
    [
        pytest.param(_padded(MAX_REPORT_BYTES), 204, "", True, id="64 KiB"),
        pytest.param(_padded(MAX_REPORT_BYTES + 1), 413, "more than the 65536 bytes", False, id="over 64 KiB"),
        pytest.param(b"x" * (1 << 20), 413, "more than the 65536 bytes", False, id="a line without end"),
        pytest.param(b"hello\n", 400, "The message is not JSON", True, id="not JSON"),
        pytest.param(b"\n", 400, "The message is not JSON", True, id="nothing"),
        pytest.param(changed(storePort="x"), 400, "report.storePort must be an integer", True, id="wrong type"),
        pytest.param(changed(body={"type": "hello", "protocol": 2, "processes": 1}), 400, "version 2", True, id="version"),
        pytest.param(changed(podUid="other-uid"), 403, "The report is of pod UID other-uid", False, id="another pod's"),
        pytest.param(changed(jobUid="other"), 403, "The report is of job UID other", False, id="another job's"),
        pytest.param(changed(boot="second"), 409, "The report is of another agent process", False, id="another process's"),
    ],
)  # fmt: skip
def test_line_that_cannot_be_used_gets_one_sentence(data: bytes, status: int, says: str, goes_on: bool) -> None:
    async def scenario(caller: Caller) -> None:
        answer = await caller.says(data)
        assert (answer.status, says in answer.error, "\n" in answer.error) == (status, True, False), answer
        if goes_on:
            assert await caller.says(CHANGED) == Answered(2)
        else:
            assert await caller.line() is None
            await caller.closed()

    with_caller(scenario)


def test_operator_that_leads_no_more_takes_nothing_and_ends_the_stream() -> None:
    async def scenario(caller: Caller) -> None:
        caller.server.leader[0] = "regroup-7d9-b"
        before = caller.server.session()
        answer = await caller.says(codec.line(make_report(Progress(9))))
        assert answer == Answered(1, 503, "This operator does not lead; regroup-7d9-b does.")
        assert await caller.line() is None
        await caller.closed()
        assert caller.server.session().progress == before.progress

    with_caller(scenario)


def test_pod_that_is_gone_reports_nothing_more() -> None:
    async def scenario(caller: Caller) -> None:
        caller.server.tokens.workers.remove(POD)
        assert await caller.says(CHANGED) == Answered(1, 403, f"Pod {POD.name} is gone.")
        assert await caller.line() is None
        await caller.closed()
        assert caller.server.session().progress is None

    with_caller(scenario)


def test_leader_that_ends_ends_the_stream() -> None:
    async def scenario(caller: Caller) -> None:
        caller.server.registry.close_all()
        assert await caller.line() is None
        await caller.closed()

    with_caller(scenario)


class Slow(web.StreamResponse):
    """The answer to an agent that reads when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go, self.written = asyncio.Event(), list[bytes]()

    async def write(self, data: Any) -> None:
        await self.may_go.wait()
        self.written.append(data)


@asynccontextmanager
async def reading(server: Server, response: Slow, lines: list[bytes]) -> AsyncIterator[Callable[[], int]]:
    """The operator's side reads these lines. Yields how many it has taken."""
    taken = list[Report]()

    def take(_: Pod, report: Report) -> bool:
        taken.append(report)
        return True

    server.registry.report = take  # type: ignore[method-assign, assignment]
    content = StreamReader(BaseProtocol(asyncio.get_running_loop()), 1 << 20, loop=asyncio.get_running_loop())
    content.feed_data(b"".join(lines))
    content.feed_eof()
    stream = server.registry.open(POD)
    endpoint = Endpoint(server.registry, server.tokens, lambda: None, Callers())
    answers = _Answers(response, stream, lambda: 1.0, 1000.0)
    task = asyncio.ensure_future(endpoint._read_reports(content, POD, answers, stream))
    try:
        yield lambda: len(taken)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_endpoint_that_is_shut_down_tells_the_agents_first() -> None:
    """They call the next operator at once, and nothing is waited for."""

    async def scenario(caller: Caller) -> None:
        caller.server.runner._shutdown_timeout = 60.0  # what is not told ends no sooner
        shutting = asyncio.ensure_future(caller.server.runner.cleanup())
        async with asyncio.timeout(DEADLINE_S):
            assert await caller.reader.readuntil(b"0\r\n\r\n")
        await shutting
        assert not caller.server.session().connected

    with_caller(scenario)


@pytest.mark.parametrize("is_ended", [False, True], ids=["the kernel gives it up", "the operator leads no more"])
def test_connection_of_an_agent_that_reads_nothing_ends(is_ended: bool) -> None:
    number = 20_000

    async def scenario(server: Server) -> None:
        sock = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        _, writer = await connect(server, sock=sock)
        writer.write(OPEN)
        await until_async(lambda: server.session() and server.session().connected, "the stream is open", every_s=0.001)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(http.chunk(changed(body={"type": "x" * 80})) * number)
        await until_async(lambda: server.tokens.num_asked > 1000, "some are taken", every_s=0.001)
        if is_ended:
            server.registry.close_all()
        await until_async(lambda: not server.session().connected, "the stream is closed", every_s=0.01)
        assert server.tokens.num_asked < number
        writer.transport.abort()

    with_server(scenario)


def test_answer_is_written_before_the_next_report_is_taken() -> None:
    async def scenario(server: Server) -> None:
        await server.post(codec.line(hello()))
        response = Slow()
        async with reading(server, response, [FAULT] * 1000) as taken:
            await until_async(lambda: taken() == 1, "the first report is taken", every_s=0.001)
            for _ in range(100):
                await asyncio.sleep(0)
            assert taken() == 1
            response.may_go.set()
            await until_async(lambda: taken() == 1000, "the others, once it reads", every_s=0.001)
            want = [Answered(number).line() for number in range(1, 1001)]
            await until_async(lambda: response.written == want, "the answers", every_s=0.001)

    with_server(scenario)


def test_many_reports_at_once_keep_nobody_else_waiting() -> None:
    async def scenario(server: Server) -> None:
        await server.post(codec.line(hello()))
        response = Slow()
        response.may_go.set()
        async with reading(server, response, [CHANGED] * 1000) as taken:
            while taken() < 1000:
                before = taken()
                await asyncio.sleep(0)
                assert taken() <= before + 1

    with_server(scenario)


def test_compressed_reports_are_not_unpacked() -> None:
    """A few bytes may stand for millions."""

    async def scenario(server: Server) -> None:
        reader, writer = await connect(server)
        writer.write(OPEN.replace(b"Transfer-Encoding", b"Content-Encoding: gzip\r\nTransfer-Encoding"))
        caller = Caller(server, reader, writer)
        assert (await caller.head()).status == 200
        answer = await caller.says(gzip.compress(CHANGED) + b"\n")
        assert answer.status == 400
        writer.transport.abort()
        await caller.closed()

    with_server(scenario)


def test_exit_that_cannot_be_used_does_not_keep_the_agent_from_its_next_stream(tmp_path: Path) -> None:
    """The agent itself, against the operator's side."""

    async def scenario(server: Server) -> None:
        (tmp_path / "ca.crt").write_bytes(server.authority.ca_pem)
        (tmp_path / "token").write_text("token-0")
        events, said = list[str](), list[str]()
        agent = Link(
            Agent(server.url, str(tmp_path / "ca.crt"), str(tmp_path / "token"), POD.namespace, POD.name, "boot"),
            envelope=make_report,
            on_up=lambda: events.append("up"),
            on_down=lambda: events.append("down"),
            on_command=lambda _: None,
            on_pace=lambda _: None,
            processes=1,
            log=said.append,
        )
        running = asyncio.ensure_future(agent.run())
        try:
            await until_async(lambda: events == ["up"], "the first stream")
            for number in (2**60, 2**60 + 1, 1):
                agent.send(make_report(Fault("exit", exit_code=1, ended=number, generation=1)))
            await until_async(lambda: server.session().num_exits == 1, "the good one is counted")
            server.registry.close_all()
            await until_async(lambda: events == ["up", "down", "up"], "the next stream")
            assert server.session().num_exits == 1
            assert any("fault.ended" in sentence for sentence in said)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    with_server(scenario)


def test_bug_of_ours_is_answered_and_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(caller: Caller) -> None:
        def fail(*_: Any) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(caller.server.registry, "report", fail)
            assert (await caller.says(CHANGED)).status == 500
        assert await caller.line() is None
        await caller.closed()

    with_caller(scenario)


@pytest.mark.parametrize(
    "last",
    [
        pytest.param(b"0\r\n\r\n", id="the end"),
        pytest.param(b"5\r\nab", id="half a chunk, then the connection ends"),
        pytest.param(b"", id="the connection ends"),
    ],
)
def test_stream_ends_with_what_the_agent_says(last: bytes) -> None:
    async def scenario(caller: Caller) -> None:
        caller.writer.write(last)
        await caller.writer.drain()
        if not last.endswith(b"\n"):
            caller.writer.transport.abort()
        await caller.closed()
        assert caller.server.registry.num_connected() == 0
        assert await caller.server.post(codec.line(hello())) == (200, ""), "and the agent may call again"

    with_caller(scenario)


def test_next_stream_of_the_same_agent_ends_the_one_before() -> None:
    async def scenario(caller: Caller) -> None:
        reader, writer = await connect(caller.server)
        writer.write(OPEN)
        second = Caller(caller.server, reader, writer)
        assert (await second.head()).status == 200
        assert await caller.line() is None
        assert await second.says(FAULT) == Answered(1)
        assert caller.server.registry.num_connected() == 1
        writer.transport.abort()
        await second.closed()

    with_caller(scenario)


def test_stream_of_a_newer_process_ends_the_one_before() -> None:
    async def scenario(caller: Caller) -> None:
        reader, writer = await connect(caller.server)
        writer.write(HEAD + http.chunk(codec.line(hello(boot="second"))))
        second = Caller(caller.server, reader, writer)
        assert (await second.head()).status == 200
        assert await caller.line() is None
        caller.server.registry.tell(POD_UID, JOB_UID, 1, Welcome("Script"))
        assert (await second.line()).body == Welcome("Script")
        assert (caller.server.registry.num_connected(), caller.server.session().boot) == (1, "second")
        writer.transport.abort()
        await second.closed()

    with_caller(scenario)


@pytest.mark.parametrize("seed", range(3))
def test_odd_lines_get_an_answer_each_and_are_no_bug(seed: int) -> None:
    rng, statuses = random.Random(seed), set[int]()
    valid = [codec.to_json(make_report(body)) for body in BODIES]

    async def scenario(caller: Caller) -> None:
        for _ in range(300):
            text = json.dumps(mutated(rng, rng.choice(valid))).encode()
            noise = rng.randbytes(50).replace(b"\n", b"")
            answer = await caller.says(rng.choices([text, noise], [9, 1])[0] + b"\n")
            statuses.add(answer.status)
            assert answer.status < 500, answer
            if answer.status not in (204, 400):
                assert await caller.line() is None
                await caller.closed()
                caller.writer.transport.abort()
                caller.reader, caller.writer = await connect(caller.server)
                caller.writer.write(OPEN)
                assert (await caller.head()).status == 200

    with_caller(scenario, answer_within_s=0.0)
    assert statuses >= {204, 400, 403}
