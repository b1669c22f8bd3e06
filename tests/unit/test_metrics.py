"""What is counted, and what the ops port answers."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry

from regroup_operator import metrics as ops
from regroup_operator.api import Job, parse_job
from regroup_operator.model.records import Key
from tests.builders.jobs import stored_job

AT = "2025-11-21T13:00:00Z"


def incident(generation: int, **fields: Any) -> dict[str, Any]:
    return {"generation": generation, "at": AT, "decision": "went on with 2", "cause": "ProcessExited", **fields}


class Store:
    """A store that keeps nothing."""

    async def get(self, key: Key) -> Job | None:  # noqa: ARG002
        return None

    async def write_status(self, job: Job, status: dict[str, Any]) -> Job:  # noqa: ARG002
        return job

    async def confirm(self, job: Job, within_s: float) -> None:
        pass

    async def remove(self, job: Job) -> None:
        pass


def write(metrics: ops.Metrics, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    job = parse_job(stored_job(status={"incidents": before}))
    asyncio.run(ops.ObservedStore(Store(), metrics).write_status(job, {"incidents": after}))


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(name, labels) or 0.0


def test_incident_is_counted_once_and_its_recovery_when_the_first_step_is_known() -> None:
    metrics = ops.Metrics()
    began = incident(2, detectMs=20, persistMs=10)
    ended = {**began, "formMs": 50, "transferMs": 20, "firstStepMs": 100}
    write(metrics, [], [began])
    write(metrics, [began], [began])
    assert value(metrics.registry, "regroup_recovery_seconds_count") == 0
    write(metrics, [began], [ended])
    write(metrics, [ended], [ended, incident(3, cause="Resized")])
    assert value(metrics.registry, "regroup_incidents_total", cause="ProcessExited") == 1
    assert value(metrics.registry, "regroup_incidents_total", cause="Resized") == 1
    assert value(metrics.registry, "regroup_recovery_seconds_count") == 1
    assert abs(value(metrics.registry, "regroup_recovery_seconds_sum") - 0.2) < 1e-9


def test_recovery_of_a_script_is_counted_once_its_processes_run() -> None:
    metrics = ops.Metrics()
    began = incident(2, detectMs=20, persistMs=10)
    ended = {**began, "startMs": 1970}
    write(metrics, [], [began])
    write(metrics, [began], [ended])
    write(metrics, [ended], [ended])
    assert value(metrics.registry, "regroup_recovery_seconds_count") == 1
    assert abs(value(metrics.registry, "regroup_recovery_seconds_sum") - 2.0) < 1e-9


def test_ops_port_answers_health_readiness_and_metrics() -> None:
    async def scenario() -> None:
        metrics = ops.Metrics()
        metrics.follow(
            queue_depth=lambda: 3, connected_agents=lambda: 8, dropped_reports=lambda: 2, leading=lambda: True
        )
        why: list[str | None] = ["The pods have not been listed yet."]
        runner = await ops.serve(metrics, "127.0.0.1", 0, lambda: why[0])
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/readyz") as answer:
                assert (answer.status, (await answer.text()).strip()) == (503, why[0])
            why[0] = None
            for path in ("/readyz", "/healthz"):
                async with session.get(url + path) as answer:
                    assert (answer.status, await answer.text()) == (200, "ok\n")
            async with session.get(f"{url}/metrics") as answer:
                lines = (await answer.text()).splitlines()
        await runner.cleanup()
        for line in (
            "regroup_queue_depth 3.0", "regroup_connected_agents 8.0", "regroup_dropped_reports_total 2.0", "regroup_leader 1.0",
        ):  # fmt: skip
            assert line in lines

    asyncio.run(scenario())
