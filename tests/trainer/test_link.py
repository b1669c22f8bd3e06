"""The agent's connection to an operator that stops answering: real TLS, on this test's own event loop."""

from __future__ import annotations

import asyncio
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
