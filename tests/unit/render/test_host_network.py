"""Pods on their nodes' network, workers and roles alike."""

from __future__ import annotations

from typing import Any

import pytest

from regroup_operator.api import parse_job
from regroup_operator.render import RenderSettings, worker_pod
from regroup_operator.render.role import role_pod
from tests.builders.jobs import role, stored_job, with_pod

SETTINGS = RenderSettings(operator_url="https://regroup.regroup-system.svc:8443", agent_image="example/operator:1")


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({}, None),
        ({"hostNetwork": False}, None),
        ({"hostNetwork": True}, "ClusterFirstWithHostNet"),
        ({"hostNetwork": True, "dnsPolicy": "Default"}, "Default"),
    ],
)
def test_pod_on_its_nodes_network_resolves_the_clusters_names(given: dict[str, Any], policy: str | None) -> None:
    raw, one = stored_job(), role("ps")
    with_pod(**given)(raw)
    one["template"]["spec"] |= given
    raw["spec"]["roles"] = [one]
    job = parse_job(raw)
    assert worker_pod(job, 0, 0, settings=SETTINGS)["spec"].get("dnsPolicy") == policy
    assert role_pod(job, "ps", 0, 0)["spec"].get("dnsPolicy") == policy
