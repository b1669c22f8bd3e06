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
from harness.replica import Replica
from manifests import render
from tests.api.conftest import CRD, ROOT, Api
from tests.api.replicas import FAST_LEASE, Replicas
from tests.api.test_operator import create, leaders_label, status


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
        # A server that has just started may still refuse some kinds for a moment.
        request = ("apply", "--server-side", "--force-conflicts", f"--filename={tmp_path / 'chart.yaml'}")
        until(
            lambda: api.kubectl(*request).code == 0, "the chart is taken", details=lambda: api.kubectl(*request).error
        )
        yield api


def test_follower_of_a_leader_that_crashed_takes_its_label(
    narrow: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the rights of an installation that serves some namespaces: agents would find both."""
    monkeypatch.setenv("REGROUP_SETTINGS_WATCH_NAMESPACES", "team")
    operators = Replicas(narrow, tmp_path, tmp_path / "chart.yaml")
    try:
        first = operators("first")
        until(first.leads, "the first one leads")
        until(lambda: leaders_label(narrow) == "pod/first", "its label")
        second = operators("second")
        until(second.ready, "ready")
        first.stop(signal.SIGKILL)
        until(second.leads, "the second one leads")
        until(
            lambda: leaders_label(narrow) == "pod/second",
            "the label is the second one's alone",
            details=second.log.read_text,
        )
    finally:
        operators.stop()


def test_jobs_of_these_namespaces_are_served_and_no_others(
    narrow: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = yaml.safe_load(narrow.kubeconfig.read_text())
    token = narrow.done("create", "token", "regroup", f"--namespace={render.NAMESPACE}").strip()
    config["users"][0]["user"] = {"token": token}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("REGROUP_SETTINGS_WATCH_NAMESPACES", "team")
    create(narrow, "other")
    operator = Replica("", tmp_path / "kubeconfig", tmp_path / "log", namespace=render.NAMESPACE, settings=FAST_LEASE)
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
