"""The agent's connection to an operator that stops answering: real TLS, on this test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from _regroup_agent import link
from _regroup_agent.link import Endpoint, Link
from harness.polling import until_async
from regroup.protocol import wire
from regroup.protocol.state import Condition, Phase
from tests.trainer.agent_edge import JOB_UID, POD, POD_UID, OperatorEdge


def report(body: Any) -> wire.Report:
    return wire.Report(JOB_UID, POD_UID, "boot", Condition(1, 0, Phase.READY), None, 0, body)


def link_to(
    operator: OperatorEdge,
    events: list[str],
    said: list[str],
    on_pace: Callable[[float], None] = lambda _: None,
) -> Link:
    url = f"https://127.0.0.1:{operator.port}"
    endpoint = Endpoint(url, str(operator.ca_file), str(operator.token_file), "ns", POD, "boot")
    return Link(
        endpoint,
        envelope=report,
        on_up=lambda: events.append("up"),
        on_down=lambda: events.append("down"),
        on_command=lambda _: None,
        on_pace=on_pace,
        processes=1,
        log=said.append,
    )


def test_answer_says_how_often_progress_is_wanted(operator: OperatorEdge) -> None:
    events, said, factors = list[str](), list[str](), list[float]()
    one = link_to(operator, events, said, factors.append)

    async def scene() -> None:
        running = asyncio.ensure_future(one.run())
        await until_async(lambda: events == ["up"], "the connection")
        operator.progress_factor = 4.2
        one.send(report(wire.Progress(7)))
        await until_async(lambda: factors, "the answer")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scene())
    assert factors == [4.2]
    assert len(operator.tokens) == 1, "one request for everything"


def test_one_answer_is_for_all_reports_before_it(operator: OperatorEdge) -> None:
    """A fault among them that is no exit is not reported again, and one that is refused neither."""
    events, said = list[str](), list[str]()
    one = link_to(operator, events, said)

    async def scene() -> None:
        running = asyncio.ensure_future(one.run())
        await until_async(lambda: events == ["up"], "the connection")
        operator.frozen = True
        for body in (wire.Changed(), wire.Fault("collective"), wire.Changed(), wire.Fault("witness")):
            one.send(report(body))
        operator.send_raw(wire.Answered(4, 400, "No.").line())
        await until_async(lambda: not one._unanswered, "the answer")
        operator.frozen = False
        await asyncio.to_thread(operator.down)
        await until_async(lambda: events[-1] == "down", "the operator is gone")
        before = len(operator.heard)
        await asyncio.to_thread(operator.up)
        await until_async(lambda: events == ["up", "down", "up"], "the next connection")
        one.send(report(wire.Progress(7)))
        await until_async(lambda: isinstance(operator.heard[-1].body, wire.Progress), "the next report")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert [type(heard.body).__name__ for heard in operator.heard[before:]] == ["Hello", "Progress"]

    asyncio.run(scene())
    assert "The operator answered 400: No." in said


def test_flushed_link_has_its_reports_taken_and_ends(operator: OperatorEdge) -> None:
    events, said = list[str](), list[str]()
    one = link_to(operator, events, said)

    async def scene() -> None:
        running = asyncio.ensure_future(one.run())
        await until_async(lambda: events == ["up"], "the connection")
        one.send(report(wire.Progress(7)))
        await one.flush(5.0)
        assert isinstance(operator.heard[-1].body, wire.Progress)
        await asyncio.wait_for(running, 5.0)

    asyncio.run(scene())
    assert events == ["up", "down"]
    assert said == [f"Connected to the operator at https://127.0.0.1:{operator.port}."], "an end that was wanted"


def test_fault_while_the_stream_opens_is_reported_once_it_is_open(operator: OperatorEdge) -> None:
    operator.holds_streams = True
    events, said = list[str](), list[str]()
    one = link_to(operator, events, said)

    async def scene() -> None:
        running = asyncio.ensure_future(one.run())
        await until_async(lambda: operator.heard, "hello")
        one.send(report(wire.Fault("exit", exit_code=1, ended=1)))
        operator.holds_streams = False
        await until_async(lambda: events == ["up"], "the connection")
        one.send(report(wire.Progress(7)))
        await until_async(lambda: isinstance(operator.heard[-1].body, wire.Progress), "the next report")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scene())
    assert [type(heard.body).__name__ for heard in operator.heard] == ["Hello", "Fault", "Progress"]


def test_answer_that_cannot_be_read_ends_the_session(operator: OperatorEdge) -> None:
    """The answers after it would be taken for those of other reports."""
    events, said = list[str](), list[str]()
    one = link_to(operator, events, said)

    async def scene() -> None:
        running = asyncio.ensure_future(one.run())
        await until_async(lambda: events == ["up"], "the connection")
        operator.send_raw(b'{"answered":{"reports":1,"status":"x"}}\n')
        await until_async(lambda: events == ["up", "down", "up"], "another one")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scene())
    assert any("answered.status must be an integer" in sentence for sentence in said)


@pytest.mark.parametrize(
    ("status", "stays"),
    [(400, True), (413, True), (401, False), (403, False), (409, False), (500, False), (503, False)],
)
def test_report_that_is_refused_on_the_stream(operator: OperatorEdge, status: int, stays: bool) -> None:
    """A message that cannot be used is said in the log, and the next one is sent; an operator that takes none is called again."""
    events, said = list[str](), list[str]()
    one = link_to(operator, events, said)

    async def scene() -> None:
        running = asyncio.ensure_future(one.run())
        await until_async(lambda: events == ["up"], "the connection")
        operator.refuse = (status, "No.")
        one.send(report(wire.Fault("exit", exit_code=1, ended=1)))
        await until_async(lambda: f"The operator answered {status}: No." in said, "the refusal")
        operator.refuse = None
        if not stays:
            await until_async(lambda: events == ["up", "down", "up"], "another connection")
        one.send(report(wire.Progress(7)))
        await until_async(lambda: isinstance(operator.heard[-1].body, wire.Progress), "the next report")
        if stays:
            operator.down()
            operator.up()
            await until_async(lambda: events == ["up", "down", "up"], "another connection")
            one.send(report(wire.Progress(8)))
            await until_async(lambda: isinstance(operator.heard[-1].body, wire.Progress), "and the next")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scene())
    bodies = [type(heard.body).__name__ for heard in operator.heard]
    again = ["Hello", "Progress"]
    assert bodies == ([*again, *again] if stays else ["Hello", "Hello", "Fault", "Progress"])


@pytest.fixture
def dead_port() -> Iterator[int]:
    """A port of this machine where nobody answers, as at the address of a pod that is gone: the queue of its socket is full."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        port = int(listening.getsockname()[1])
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        yield port


def test_address_of_an_operator_that_is_gone_holds_nobody_up(
    operator: OperatorEdge, dead_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "CONNECT_TIMEOUT_S", 0.3)
    events, said, dialed = list[str](), list[str](), list[int]()
    one = link_to(operator, events, said)

    async def scene() -> None:
        loop = asyncio.get_running_loop()

        async def resolve(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
            """Lead to the dead address, then to both, as a Service does by and by."""
            dialed.append(port)
            ports = [dead_port] if len(dialed) == 1 else [dead_port, port]
            return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, number)) for number in ports]

        monkeypatch.setattr(loop, "getaddrinfo", resolve)
        running = asyncio.ensure_future(one.run())
        await until_async(lambda: events == ["up"], "the connection", timeout_s=5)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scene())
    assert said[0] == f"The operator at https://127.0.0.1:{operator.port} does not answer."
    assert len(dialed) == 2


def test_operator_that_freezes_is_given_up_and_told_the_fault_by_the_next_connection(
    operator: OperatorEdge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "ANSWER_TIMEOUT_S", 0.5)
    events: list[str] = []
    said: list[str] = []
    one = link_to(operator, events, said)

    def heard(number: int) -> bool:
        return len(operator.heard) == number

    async def scene() -> None:
        running = asyncio.ensure_future(one.run())
        await until_async(lambda: events == ["up"], "the first connection")
        for number in range(3):  # answered, each
            one.send(report(wire.Changed()))
            await until_async(partial(heard, 2 + number), "the report is heard")
        operator.frozen = True
        one.send(report(wire.Fault("exit", "lost?")))
        await until_async(lambda: events == ["up", "down"], "the operator is given up")
        assert "The operator has not answered a report for 0.5 s." in said
        operator.frozen = False
        await until_async(lambda: events == ["up", "down", "up"], "the second connection")
        await until_async(lambda: any(isinstance(h.body, wire.Fault) for h in operator.heard), "the fault is heard")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scene())


def test_exit_that_was_answered_is_said_again_to_the_next_operator_before_anything_is_heard_from_it(
    operator: OperatorEdge,
) -> None:
    """It may have died before it had written what it had heard. The next one decides with its first plan."""
    events, said = list[str](), list[str]()
    one = link_to(operator, events, said)
    exited = wire.Fault("exit", exit_code=-9, ended=1, generation=1, incarnation=1)

    async def scene() -> None:
        running = asyncio.ensure_future(one.run())
        await until_async(lambda: events == ["up"], "the first connection")
        one.send(report(exited))
        one.send(report(wire.Fault("collective", generation=1, incarnation=1)))
        await until_async(lambda: len(operator.heard) == 3, "both are heard")
        await until_async(lambda: not one._unanswered, "both are answered")
        for number in (2, 3):
            await asyncio.to_thread(operator.down)
            await until_async(lambda: events[-1] == "down", "the operator is gone")
            await asyncio.to_thread(operator.up)
            await until_async(lambda: events.count("up") == number, "the next connection")  # noqa: B023
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scene())
    bodies = [type(heard.body).__name__ for heard in operator.heard]
    assert bodies == ["Hello", "Fault", "Fault", "Hello", "Fault", "Hello", "Fault"]
    again = [heard.body for heard in operator.heard[4::2]]
    assert [(fault.cause, fault.ended, fault.generation) for fault in again] == [("exit", 1, 1)] * 2
    assert 0 < again[0].observed_ms < again[1].observed_ms
    assert operator.heard[4].at_s < operator.opened[1], "the stream was opened first"


def test_address_of_a_family_that_the_machine_does_not_have_is_left_out(
    operator: OperatorEdge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Service of two families, on a node without IPv6."""
    events, said = list[str](), list[str]()
    one = link_to(operator, events, said)

    async def scene() -> None:
        async def resolve(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
            unknown = (socket.AF_DECnet, socket.SOCK_STREAM, 0, "", ("::1", port, 0, 0))
            return [unknown, (socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port))]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
        running = asyncio.ensure_future(one.run())
        await until_async(lambda: events == ["up"], "the connection", timeout_s=5)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scene())
    assert said == [f"Connected to the operator at https://127.0.0.1:{operator.port}."]


@pytest.mark.parametrize(
    ("sentence", "num_said"),
    [
        pytest.param("The operator answered 401: The token expired {} s ago.", 1, id="an age"),
        pytest.param("The operator answered {}: No.", 300, id="another status"),
    ],
)
def test_refusal_whose_numbers_differ_is_said_once(
    operator: OperatorEdge, monkeypatch: pytest.MonkeyPatch, sentence: str, num_said: int
) -> None:
    events, said = list[str](), list[str]()
    one = link_to(operator, events, said)
    numbers = iter(range(200, 500))

    async def refused() -> None:
        number = next(numbers, None)
        if number is None:
            raise asyncio.CancelledError
        raise link._BrokenError(sentence.format(number))

    monkeypatch.setattr(one, "_session", refused)
    monkeypatch.setattr(link, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(link, "LAST_WAIT_S", 0.0)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(one.run())
    assert len(said) == num_said
    assert len(one._said) <= link.MAX_SAID


@pytest.mark.parametrize("ticks", range(8))
def test_who_is_cancelled_while_it_waits_is_cancelled_whenever_what_it_waits_for_ends(ticks: int) -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()

        async def work() -> int:
            return await ended

        waits = asyncio.ensure_future(link._within(work(), 5.0))
        await asyncio.sleep(0.01)
        ended.set_result(1)
        for _ in range(ticks):
            await asyncio.sleep(0)
        was_done = waits.done()
        waits.cancel()
        await asyncio.wait({waits})
        assert waits.cancelled() != was_done

    asyncio.run(scene())
