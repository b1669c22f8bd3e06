"""Metrics of the operator, and the port that Prometheus and the kubelet ask.

The module owns the metrics' names and the three pages /healthz, /readyz and /metrics. Rooms below do not import it:
they are given callables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from regroup.protocol.document import FORCED, PLANNED
from regroup_operator.api import JobStatus
from regroup_operator.api.status import POD_CAUSES, PROCESS_CAUSES, Incident
from regroup_operator.job_metrics import JobMetrics, Jobs, one_of
from regroup_operator.model.worker import CAUSES, PLANNED_CAUSES

PARTS = ("detect", "decide", "persist", "form", "transfer", "firstStep", "start")
"""Parts of a recovery, labels of regroup_recovery_part_seconds."""
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """All metrics of one operator, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.queue_depth = Gauge("regroup_queue_depth", "Jobs that wait to be reconciled.", registry=self.registry)
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
            "regroup_incidents", "Membership changes, by cause.", ["cause"], registry=self.registry
        )
        self.recovery_seconds = Histogram(
            "regroup_recovery_seconds",
            "From a failure to the first step committed after it; tier Script: until all processes run again. Planned changes "
            "are left out.",
            buckets=(0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 60),
            registry=self.registry,
        )
        self.recovery_part_seconds = Histogram(
            "regroup_recovery_part_seconds",
            "The parts of a recovery: detect, decide, persist, form, transfer, firstStep; tier Script: start.",
            ["part"],
            buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
            registry=self.registry,
        )
        self.restarts = Counter(
            "regroup_restarts",
            "What had to start again, by kind (process, pod) and cause.",
            ["kind", "cause"],
            registry=self.registry,
        )
        for kind, causes in (("process", PROCESS_CAUSES), ("pod", POD_CAUSES)):
            for cause in causes:
                self.restarts.labels(kind, cause)  # a series that appears with its first count has no rate
        for generation_kind in (PLANNED, FORCED):
            self.generations.labels(generation_kind)
        for incident_cause in CAUSES:
            self.incidents.labels(incident_cause)
        for part in PARTS:
            self.recovery_part_seconds.labels(part)
        self.queue_wait_seconds = Histogram(
            "regroup_queue_wait_seconds",
            "From the event that calls for a look at a job to that look.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.api_requests = Counter(
            "regroup_api_requests",
            "Requests to the API server, by verb, resource and HTTP status (0: no answer).",
            ["verb", "resource", "code"],
            registry=self.registry,
        )
        self.api_request_seconds = Histogram(
            "regroup_api_request_seconds",
            "Duration of a request to the API server; of a watch, until it is open.",
            ["verb"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.connected_agents = Gauge("regroup_connected_agents", "Open streams of agents.", registry=self.registry)
        self.agents_out_of_reach = Gauge(
            "regroup_agents_out_of_reach",
            "Agents without a stream on nodes that are ready, while they are so many that the operator suspects itself; else 0.",
            registry=self.registry,
        )
        self.leader = Gauge("regroup_leader", "1 while this operator leads, else 0.", registry=self.registry)
        self.status_writes = Counter("regroup_status_writes", "Statuses written.", registry=self.registry)

    def follow(
        self,
        *,
        queue_depth: Callable[[], float],
        connected_agents: Callable[[], float],
        out_of_reach: Callable[[], float],
        dropped_reports: Callable[[], float],
        leading: Callable[[], float],
    ) -> None:
        """Have these callables read whenever the metrics are asked for."""
        self.queue_depth.set_function(queue_depth)
        self.connected_agents.set_function(connected_agents)
        self.agents_out_of_reach.set_function(out_of_reach)
        self.leader.set_function(leading)
        self.registry.register(_Dropped(dropped_reports))

    def follow_jobs(self, jobs: Jobs, *, per_job: bool) -> None:
        """Have the jobs read whenever the metrics are asked for. With `per_job` each job has series of its own."""
        self.registry.register(JobMetrics(jobs, per_job=per_job))

    def api_request(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """Count a request to the API server. Called as kube.client.Observe."""
        self.api_requests.labels(verb, resource, str(code)).inc()
        self.api_request_seconds.labels(verb).observe(seconds)

    def generation_issued(self, kind: str) -> None:
        """Count a generation."""
        self.generations.labels(kind).inc()

    def status_written(self, before: JobStatus, after: JobStatus) -> None:
        """Count a status write, and the incidents and restarts that are new in it."""
        self.status_writes.inc()
        known = {incident.generation: incident for incident in before.incidents}
        for incident in after.incidents:
            old = known.get(incident.generation)
            if old is None:
                self.incidents.labels(one_of(CAUSES, incident.cause or "Unknown")).inc()
            if _recovered(incident) and not (old is not None and _recovered(old)):
                parts_s = recovery_parts_s(incident)
                self.recovery_seconds.observe(sum(parts_s.values()))
                for part, part_s in parts_s.items():
                    self.recovery_part_seconds.labels(part).observe(part_s)
        counted, counts = (
            (status.restarts.causes if status.restarts is not None else None) or {} for status in (before, after)
        )
        for cause, count in counts.items():
            kind = "pod" if cause in POD_CAUSES else "process"
            self.restarts.labels(kind, one_of((*PROCESS_CAUSES, *POD_CAUSES), cause)).inc(
                max(0, count - counted.get(cause, 0))
            )

    def observe_reconcile(self, seconds: float, succeeded: bool) -> None:
        """Count one reconciliation."""
        self.reconcile_seconds.labels("success" if succeeded else "error").observe(seconds)


class _Dropped(Collector):
    """A counter whose value is kept elsewhere."""

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        text = "Reports of agents that were ignored, because they came from another pod, incarnation or generation."
        yield CounterMetricFamily("regroup_dropped_reports", text, value=self._read())


def _recovered(incident: Incident) -> bool:
    """Return whether a failure is over: the incident's generation has committed a step, or in tier Script its processes run."""
    if incident.cause in PLANNED_CAUSES:
        return False
    return incident.first_step_ms is not None or incident.start_ms is not None


def recovery_parts_s(incident: Incident) -> dict[str, float]:
    """Return the known parts of a recovery, in seconds. They last from the failure to the first step after it, or in tier Script
    until its processes run."""
    measured_ms = (
        incident.detect_ms,
        incident.decide_ms,
        incident.persist_ms,
        incident.form_ms,
        incident.transfer_ms,
        incident.first_step_ms,
        incident.start_ms,
    )
    return {part: part_ms / 1000 for part, part_ms in zip(PARTS, measured_ms, strict=True) if part_ms is not None}


async def serve(metrics: Metrics, host: str, port: int, is_ready: Callable[[], str | None]) -> web.AppRunner:
    """Serve /healthz, /readyz and /metrics. Return the runner, whose `cleanup()` ends it.

    `is_ready()` returns None, or a sentence that says why the operator is not ready. A standby is ready, too. /healthz
    only shows that the process answers.
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
