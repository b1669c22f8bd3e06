"""What Prometheus sees of the operator, and the port where it and the kubelet ask.

Owns the metrics' names and the three pages /healthz, /readyz, /metrics. Rooms below do not import this module:
they are given callables.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """All metrics of one operator, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.queue_depth = Gauge("regroup_queue_depth", "Jobs that wait to be reconciled now.", registry=self.registry)
        self.reconcile_seconds = Histogram(
            "regroup_reconcile_seconds",
            "Duration of one reconciliation.",
            ["result"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.generations = Counter(
            "regroup_generations", "Generations issued, by kind (planned, forced).", ["kind"], registry=self.registry
        )
        self.incidents = Counter(
            "regroup_incidents", "Changes of membership, by cause.", ["cause"], registry=self.registry
        )
        self.recovery_seconds = Histogram(
            "regroup_recovery_seconds",
            "From the sight of a failure to the first step committed after it.",
            buckets=(0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 60),
            registry=self.registry,
        )
        self.connected_agents = Gauge("regroup_connected_agents", "Open command streams.", registry=self.registry)
        self.leader = Gauge("regroup_leader", "1 while this operator leads, else 0.", registry=self.registry)
        self.dropped_reports = Counter(
            "regroup_dropped_reports",
            "Reports of agents that were not acted on, by reason.",
            ["reason"],
            registry=self.registry,
        )

    def observe_reconcile(self, seconds: float, succeeded: bool) -> None:
        """Count one reconciliation."""
        self.reconcile_seconds.labels("success" if succeeded else "error").observe(seconds)


async def serve(metrics: Metrics, host: str, port: int, is_ready: Callable[[], str | None]) -> web.AppRunner:
    """Serve /healthz, /readyz and /metrics; return the runner, whose `cleanup()` ends it.

    `is_ready()` returns None, or the sentence why not. Leadership is no part of it. Answering at all is health.
    """

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        why = is_ready()
        return web.Response(text=f"{why or 'ok'}\n", status=503 if why else 200)

    async def show(_: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=generate_latest(metrics.registry), headers=headers)

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", show)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host or None, port).start()
    return runner
