"""Dashboards and alerts ask for metrics and labels that the operator has. A real Prometheus answers them in tests/api."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from manifests import dashboards
from regroup_operator.metrics import Metrics
from tests.builders.jobs import stored_job

ROOT = Path(__file__).resolve().parents[2]
ALERTS = (ROOT / "helm/regroup/templates/monitoring.yaml").read_text()
DCGM = {
    "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_SM_CLOCK",
    "DCGM_FI_DEV_XID_ERRORS",
}  # fmt: skip
"""Names in the default list of dcgm-exporter (etc/default-counters.csv)."""


def queries() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each query."""
    for one in dashboards.DASHBOARDS:
        for panel in one.panels:
            yield from ((f"{one.uid}: {panel.title}", query) for query in panel.queries.values())
        yield from ((f"{one.uid}: ${variable.name}", variable.query) for variable in one.variables)
    yield from (("alert", query) for query in re.findall(r"expr: (.*)", ALERTS))


def names() -> dict[str, set[str]]:
    """Return the labels of each series that the operator's registry can have."""
    metrics = Metrics()
    metrics.follow(
        queue_depth=lambda: 0, connected_agents=lambda: 0, out_of_reach=lambda: 0, dropped_reports=lambda: 0, leading=lambda: 1
    )  # fmt: skip
    metrics.generation_issued("forced")
    metrics.api_request("get", "pods", 200, 0.1)
    metrics.observe_reconcile(0.1, succeeded=True)
    metrics.incidents.labels("Hung")
    metrics.recovery_part_seconds.labels("form")
    status = {
        "phase": "Running", "progress": {"step": 1, "loss": 1.0, "samplesPerSecond": 1.0}, "readyReplicas": 1,
        "membership": {"generation": 1}, "restarts": {"total": 0}, "goodput": {"percent": 90},
        "conditions": [{"type": "Accepted", "status": "False", "reason": "InvalidSpec"}],
    }  # fmt: skip
    metrics.follow_jobs(lambda: [{**stored_job(), "status": status}], per_job=True)
    found: dict[str, set[str]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_files_of_the_chart_are_what_the_module_makes() -> None:
    for path, text in dashboards.files().items():
        assert path.read_text() == text, "run `python -m manifests.dashboards`"
    assert set(dashboards.DIRECTORY.iterdir()) == dashboards.files().keys()


@pytest.mark.parametrize(("place", "query"), list(queries()))
def test_query_asks_for_what_the_operator_has(place: str, query: str) -> None:
    known, asked = names(), set(re.findall(r"\b(regroup_\w+|DCGM_\w+)", query))
    assert asked, place
    assert asked <= known.keys() | DCGM, place
    if asked <= DCGM:
        return
    labels = set(re.findall(r'(\w+)=~?"', query))
    labels |= {word.strip() for by in re.findall(r"by \(([^)]*)\)", query) for word in by.split(",")}
    labels |= set(re.findall(r"label_values\(.*, (\w+)\)", query))
    assert all(labels <= known[metric] for metric in asked), place


def test_every_metric_of_the_operator_is_in_a_dashboard() -> None:
    """A metric that nobody sees would be written for nothing."""
    shown = " ".join(query for _, query in queries())
    parts = ("_created", "_sum", "_count", "_bucket", "_total")
    families = {re.sub(f"({'|'.join(parts)})$", "", name) for name in names()}
    assert {name for name in families if name not in shown} == set()


def test_a_unit_is_one_of_grafanas() -> None:
    units = {panel.unit for one in dashboards.DASHBOARDS for panel in one.panels}
    assert units <= {
        "short",
        "none",
        "s",
        "percent",
        "percentunit",
        "ops",
        "reqps",
        "wps",
        "decmbytes",
        "watt",
        "celsius",
    }
