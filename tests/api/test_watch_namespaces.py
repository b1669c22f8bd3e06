"""An operator that serves some namespaces only, with the rights that the chart gives it for them."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster import apiserver, binaries
from harness.polling import until
from manifests import render
from tests.api.conftest import CRD, ROOT, Api
from tests.api.replicas import Replica
from tests.api.test_operator import create, status


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[Api]:
    """An API server with the chart for namespace `team`; there is also a namespace `other`."""
    with apiserver.running(tmp_path / "server") as server:
        api = Api(server.kubeconfig)
        for namespace in (render.NAMESPACE, "team", "other"):
            api.done("create", "namespace", namespace)
        api.done("apply", "--server-side", f"--filename={CRD}")
        api.done("wait", "--for=condition=Established", f"--filename={CRD}", "--timeout=30s")
        chart = subprocess.run(
            [str(binaries.ensure() / "helm"), "template", "regroup", "helm/regroup", f"--namespace={render.NAMESPACE}",
             "--kube-version=1.36.3", "--set=watchNamespaces={team}"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        (tmp_path / "chart.yaml").write_text(chart)
        api.done("apply", "--server-side", "--force-conflicts", f"--filename={tmp_path / 'chart.yaml'}")
        yield api


def test_jobs_of_these_namespaces_are_served_and_no_others(
    narrow: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = yaml.safe_load(narrow.kubeconfig.read_text())
    token = narrow.done("create", "token", "regroup", f"--namespace={render.NAMESPACE}").strip()
    config["users"][0]["user"] = {"token": token}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("REGROUP_SETTINGS_WATCH_NAMESPACES", "team")
    create(narrow, "other")
    operator = Replica("", tmp_path / "kubeconfig", tmp_path / "log")
    try:
        until(operator.ready, "ready")
        create(narrow, "team")
        pods = until(lambda: narrow.get("pods", "--namespace=team")["items"], "pods")
        until(lambda: status(narrow, "team"), "a status")
    finally:
        operator.stop(signal.SIGTERM)
    assert len(pods) >= 1
    assert status(narrow, "other") == {}
    asked = [
        "auth",
        "can-i",
        "list",
        "pods",
        "--namespace=other",
        f"--as=system:serviceaccount:{render.NAMESPACE}:regroup",
    ]
    assert narrow.kubectl(*asked).out.strip() == "no"
