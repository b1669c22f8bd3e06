"""The renderer is what kube/ asks for, and reads the CA bundle at each call."""

from __future__ import annotations

from regroup_operator.api import parse_job
from regroup_operator.kube.cluster_workers import Rendering
from regroup_operator.render import Renderer, RenderSettings
from tests.builders.jobs import stored_job


def test_renderer_uses_the_bundle_of_the_moment() -> None:
    bundles = iter(["old", "old and new"])
    settings = RenderSettings(operator_url="https://regroup.ns.svc:8443", agent_image="example/operator:1")
    renderer: Rendering = Renderer(settings, lambda: next(bundles))
    job = parse_job(stored_job())
    assert renderer.config_map(job)["data"]["ca.crt"] == "old"
    assert renderer.config_map(job)["data"]["ca.crt"] == "old and new"
    assert renderer.pod(job, 3, 0, ())["metadata"]["name"] == "digits-worker-3-0"
    assert renderer.trial_pod(job)["metadata"]["generateName"] == "digits-dry-run-"
    service = renderer.service(job)
    assert service is not None
    assert service["metadata"]["name"] == "digits"
