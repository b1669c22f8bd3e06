"""The agent's connection to an operator that stops answering: real TLS, on this test's own event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from _regroup_agent import link
from _regroup_agent.link import Endpoint, Link
from regroup.protocol import wire
from regroup.protocol.state import Condition, Phase
from tests.trainer.agent_edge import JOB_UID, POD, POD_UID, OperatorEdge


def report(body: Any) -> wire.Report:
    return wire.Report(JOB_UID, POD_UID, "boot", Condition(1, 0, Phase.READY), None, 0, body)


async def happens(what: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline_s, "did not happen in time"
        await asyncio.sleep(0.005)


def test_operator_that_freezes_is_given_up_and_told_the_fault_by_the_next_connection(
    operator: OperatorEdge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "ANSWER_TIMEOUT_S", 0.5)
    events: list[str] = []
    said: list[str] = []
    commands: list[wire.Command] = []
    url = f"https://127.0.0.1:{operator.port}"
    endpoint = Endpoint(url, str(operator.ca_file), str(operator.token_file), "ns", POD, "boot")
    one = Link(
        endpoint,
        envelope=report,
        on_up=lambda: events.append("up"),
        on_down=lambda: events.append("down"),
        on_command=commands.append,
        processes=1,
        log=said.append,
    )

    async def scene() -> None:
        running = asyncio.ensure_future(one.run())
        await happens(lambda: events == ["up"])
        for number in range(3):  # answered, each
            one.send(report(wire.Changed()))
            await happens(lambda number=number: len(operator.heard) == 2 + number)
        operator.frozen = True
        one.send(report(wire.Fault("exit", "lost?")))
        await happens(lambda: events == ["up", "down"])
        assert "The operator has not answered a report for 0.5 s." in said
        operator.frozen = False
        await happens(lambda: events == ["up", "down", "up"])
        await happens(lambda: any(isinstance(h.body, wire.Fault) for h in operator.heard))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scene())
