"""Write the Grafana dashboards of the chart: `python -m manifests.dashboards [--check]`.

A panel is one line here and thirty in Grafana's JSON. The unit tests compare every metric with the operator's registry.
tests/api/test_prometheus.py asks a real Prometheus each query.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DIRECTORY = ROOT / "helm" / "regroup" / "dashboards"
_ACROSS, _WIDTH, _HEIGHT = 3, 8, 7
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_JOB = '{namespace="$namespace",job="$job"}'


@dataclass(frozen=True)
class Panel:
    """A panel with one graph, or with one number if `is_number`."""

    title: str
    queries: Mapping[str, str]
    """Maps legends to queries."""
    unit: str = "short"
    """Grafana's name of a unit."""
    is_number: bool = False
    about: str = ""


@dataclass(frozen=True)
class Variable:
    """A list at the top of a dashboard, whose values Prometheus has."""

    name: str
    query: str


@dataclass(frozen=True)
class Dashboard:
    """A file of the chart."""

    uid: str
    title: str
    panels: Sequence[Panel]
    variables: Sequence[Variable] = field(default_factory=tuple)


def _quantiles(metric: str, by: str = "", *, window: str = "$__rate_interval") -> dict[str, str]:
    """Return the queries for the median and the 99th percentile of a histogram, for each value of the label `by`."""
    labels, legend = (f"le, {by}", f"{{{{{by}}}}} ") if by else ("le", "")
    return {
        f"{legend}{name}": f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket[{window}])))"
        for name, share in (("median", 0.5), ("99 %", 0.99))
    }


OPERATOR = Dashboard(
    "regroup-operator",
    "Regroup / operator",
    (
        Panel(
            "Leader",
            {"leaders": "sum(regroup_leader)"},
            is_number=True,
            about="1. Without a leader nothing is recovered or resized.",
        ),
        Panel("Goodput of running jobs", {"mean": "regroup_goodput_ratio"}, "percentunit", is_number=True),
        Panel("Connected agents", {"agents": "sum(regroup_connected_agents)"}, is_number=True),
        Panel("Jobs by phase", {"{{phase}}": "max by (phase) (regroup_jobs) > 0"}),
        Panel("Jobs in trouble", {"{{condition}} {{reason}}": "max by (condition, reason) (regroup_jobs_in_trouble)"}),
        Panel(
            "Agents out of reach",
            {"agents": "max(regroup_agents_out_of_reach)"},
            about="Above 0 so many agents have no connection that the operator suspects itself, and replaces pods later.",
        ),
        Panel(
            "Changes of membership in an hour, by cause",
            {"{{cause}}": "sum by (cause) (increase(regroup_incidents_total[1h]))"},
        ),
        Panel(
            "Restarts in an hour",
            {"{{kind}} {{cause}}": "sum by (kind, cause) (increase(regroup_restarts_total[1h])) > 0"},
        ),
        Panel("Generations in an hour", {"{{kind}}": "sum by (kind) (increase(regroup_generations_total[1h]))"}),
        Panel(
            "Recovery",
            _quantiles("regroup_recovery_seconds", window="1h"),
            "s",
            about="From a failure to the first step after it; without the library: until all processes run again.",
        ),
        Panel(
            "Mean of a recovery's parts",
            {
                "{{part}}": "sum by (part) (rate(regroup_recovery_part_seconds_sum[1h]))"
                " / sum by (part) (rate(regroup_recovery_part_seconds_count[1h]))"
            },
            "s",
        ),
        Panel(
            "Reports that were ignored",
            {"a second": "sum(rate(regroup_dropped_reports_total[$__rate_interval]))"},
            "reqps",
            about="They came from another pod, incarnation or generation. Some are normal after a failure.",
        ),
        Panel("Wait in the queue", _quantiles("regroup_queue_wait_seconds"), "s"),
        Panel("Jobs in the queue", {"jobs": "sum(regroup_queue_depth)"}),
        Panel(
            "Reconciliations",
            {"{{result}}": "sum by (result) (rate(regroup_reconcile_seconds_count[$__rate_interval]))"},
            "ops",
        ),
        Panel("Duration of a reconciliation", _quantiles("regroup_reconcile_seconds"), "s"),
        Panel(
            "Requests to the API server",
            {"{{code}}": "sum by (code) (rate(regroup_api_requests_total[$__rate_interval]))"},
            "reqps",
            about="Code 0: no answer.",
        ),
        Panel(
            "Requests by kind",
            {"{{verb}} {{resource}}": "sum by (verb, resource) (rate(regroup_api_requests_total[$__rate_interval]))"},
            "reqps",
        ),
        Panel("Duration of a request", _quantiles("regroup_api_request_seconds", "verb"), "s"),
        Panel("Status writes", {"a second": "sum(rate(regroup_status_writes_total[$__rate_interval]))"}, "wps"),
    ),
)

_OF_A_JOB = (
    Variable("namespace", "label_values(regroup_job_ready_workers, namespace)"),
    Variable("job", 'label_values(regroup_job_ready_workers{namespace="$namespace"}, job)'),
)
JOB = Dashboard(
    "regroup-job",
    "Regroup / job",
    (
        Panel("Step", {"step": f"max(regroup_job_step{_JOB})"}, "none", is_number=True),
        Panel("Ready workers", {"workers": f"max(regroup_job_ready_workers{_JOB})"}, "none", is_number=True),
        Panel(
            "Goodput",
            {"share of the time": f"max(regroup_job_goodput_ratio{_JOB})"},
            "percentunit",
            is_number=True,
            about="Share of the job's time that went into steps that count.",
        ),
        Panel("Loss", {"loss": f"max(regroup_job_loss{_JOB})"}, "none"),
        Panel("Samples a second", {"samples": f"max(regroup_job_samples_per_second{_JOB})"}),
        Panel("Steps a second", {"steps": f"max(deriv(regroup_job_step{_JOB}[5m])) >= 0"}),
        Panel("Workers", {"ready": f"max(regroup_job_ready_workers{_JOB})"}, "none"),
        Panel(
            "Generation",
            {"generation": f"max(regroup_job_generation{_JOB})"},
            "none",
            about="Each step up is a change of membership.",
        ),
        Panel("Restarts", {"processes and pods": f"max(regroup_job_restarts{_JOB})"}, "none"),
    ),
    _OF_A_JOB,
)


def _of_pods(metric: str) -> str:
    """Return the query for a metric of dcgm-exporter, of the pods of one job.

    The pod is in `pod` where Prometheus honours the exporter's labels, else in `exported_pod`.
    """
    direct = f'{metric}{{namespace="$namespace",pod=~"$job-worker-.+"}}'
    renamed = f'{metric}{{exported_namespace="$namespace",exported_pod=~"$job-worker-.+"}}'
    return f'{direct} or label_replace({renamed}, "pod", "$1", "exported_pod", "(.+)")'


_GPU = "{{pod}} GPU {{gpu}}"
GPUS = Dashboard(
    "regroup-gpus",
    "Regroup / GPUs of a job",
    (
        Panel("Utilisation", {_GPU: _of_pods("DCGM_FI_DEV_GPU_UTIL")}, "percent"),
        Panel("Memory used", {_GPU: _of_pods("DCGM_FI_DEV_FB_USED")}, "decmbytes"),
        Panel("Power", {_GPU: _of_pods("DCGM_FI_DEV_POWER_USAGE")}, "watt"),
        Panel("Temperature", {_GPU: _of_pods("DCGM_FI_DEV_GPU_TEMP")}, "celsius"),
        Panel(
            "SM clock",
            {_GPU: _of_pods("DCGM_FI_DEV_SM_CLOCK")},
            "none",
            about="In MHz. It falls where the GPU is throttled.",
        ),
        Panel(
            "Last XID error", {_GPU: _of_pods("DCGM_FI_DEV_XID_ERRORS")}, "none", about="0: none. docs/how-to/gpu.md"
        ),
    ),
    _OF_A_JOB,
)
DASHBOARDS = (OPERATOR, JOB, GPUS)


def grafana(dashboard: Dashboard) -> dict[str, Any]:
    """Return Grafana's JSON of a dashboard."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["regroup"],
        "schemaVersion": 38,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_source_list(), *map(_variable, dashboard.variables)]},
        "panels": [_panel(number, panel) for number, panel in enumerate(dashboard.panels)],
    }


def _source_list() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _variable(variable: Variable) -> dict[str, Any]:
    return {
        "name": variable.name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": variable.query, "refId": variable.name},
        "refresh": 2,  # whenever the time range changes: jobs come and go
        "sort": 1,
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, _ACROSS)
    defaults: dict[str, Any] = {"unit": panel.unit}
    if not panel.is_number:
        defaults |= {"custom": {"fillOpacity": 8, "showPoints": "never"}}
    return {
        "id": number + 1,
        "type": "stat" if panel.is_number else "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + n), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
            for n, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def files() -> dict[Path, str]:
    """Return the text of each file of the chart."""
    return {DIRECTORY / f"{one.uid}.json": f"{json.dumps(grafana(one), indent=1)}\n" for one in DASHBOARDS}


def main() -> int:
    """Write the files, or return 1 with --check if one differs."""
    if "--check" not in sys.argv:
        DIRECTORY.mkdir(exist_ok=True)
        for path, text in files().items():
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [
        path.name for path, text in files().items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if stale:
        print(f"{', '.join(stale)} in helm/regroup/dashboards differ. Run `python -m manifests.dashboards`.")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
