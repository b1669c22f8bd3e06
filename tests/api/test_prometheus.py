"""Alerts and dashboards of the chart in Debian's Prometheus: promtool fires each alert, and a real operator answers each query."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import re
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import prometheus
from cluster.apiserver import free_port
from harness.polling import until
from manifests import dashboards
from tests.api.conftest import Api
from tests.api.test_chart import rendered
from tests.api.trained import JOB, Kubelet, World, trained
from tests.builders.jobs import make_job
from tests.long import only_long

WINDOW = "60s"
"""Stands for Grafana's $__rate_interval, and for an hour: Prometheus asks every second here."""
DCGM_PAGE = "".join(
    f'{name}{{gpu="0",UUID="GPU-1",namespace="NAMESPACE",pod="{JOB}-worker-0-0",container="trainer"}} 1\n'
    for name in sorted(set(re.findall(r"DCGM_\w+", json.dumps(dashboards.grafana(dashboards.GPUS)))))
)
"""What dcgm-exporter shows of a pod's GPU, in its format."""

STEADY = "0+0x100"
FIRES: Mapping[str, tuple[dict[str, str], dict[str, str]]] = {
    "RegroupNoLeader": ({'regroup_leader{pod="a"}': "0x100"}, {'regroup_leader{pod="a"}': "1x100"}),
    "RegroupQueueSlow": (
        {'regroup_queue_wait_seconds_bucket{le="5"}': STEADY, 'regroup_queue_wait_seconds_bucket{le="10"}': "0+60x100",
         'regroup_queue_wait_seconds_bucket{le="+Inf"}': "0+60x100"},
        {'regroup_queue_wait_seconds_bucket{le="1"}': "0+60x100", 'regroup_queue_wait_seconds_bucket{le="+Inf"}': "0+60x100"},
    ),
    "RegroupReconcileErrors": (
        {'regroup_reconcile_seconds_count{result="error"}': "0+20x100",
         'regroup_reconcile_seconds_count{result="success"}': "0+80x100"},
        {'regroup_reconcile_seconds_count{result="error"}': "0+5x100",
         'regroup_reconcile_seconds_count{result="success"}': "0+80x100"},
    ),
    "RegroupApiErrors": (
        {'regroup_api_requests_total{code="0"}': "0+10x100", 'regroup_api_requests_total{code="503"}': "0+10x100",
         'regroup_api_requests_total{code="200"}': "0+80x100"},
        {'regroup_api_requests_total{code="409"}': "0+50x100", 'regroup_api_requests_total{code="200"}': "0+80x100"},
    ),
    "RegroupJobsRecovering": ({'regroup_jobs{phase="Recovering"}': "1x100"}, {'regroup_jobs{phase="Running"}': "1x100"}),
    "RegroupJobsWaiting": ({'regroup_jobs{phase="Waiting"}': "1x100"}, {'regroup_jobs{phase="Waiting"}': "0x100"}),
    "RegroupRecoverySlow": (
        {'regroup_recovery_seconds_bucket{le="20"}': STEADY, 'regroup_recovery_seconds_bucket{le="60"}': "0+1x100",
         'regroup_recovery_seconds_bucket{le="+Inf"}': "0+1x100"},
        {'regroup_recovery_seconds_bucket{le="1"}': "0+1x100", 'regroup_recovery_seconds_bucket{le="+Inf"}': "0+1x100"},
    ),
    "RegroupGoodputLow": ({"regroup_goodput_ratio": "0.7x100"}, {"regroup_goodput_ratio": "0.9x100"}),
    "RegroupCheckpointsNotSaved": (
        {'regroup_jobs_in_trouble{condition="CheckpointsSaved",reason="NotSaved"}': "1x100"},
        {'regroup_jobs_in_trouble{condition="CheckpointsSaved",reason="Waiting"}': "1x100"},
    ),
    "RegroupAgentsOutOfReach": ({"regroup_agents_out_of_reach": "40x100"}, {"regroup_agents_out_of_reach": "0x100"}),
}  # fmt: skip
"""Series, one value a minute, with which an alert fires, and with which it does not."""


@functools.cache
def rules() -> dict[str, Any]:
    """Return the spec of the chart's PrometheusRule, which is the content of a rule file of Prometheus."""
    documents = yaml.safe_load_all(rendered('metrics={"rules":{"enabled":true}}'))
    (found,) = (d for d in documents if d and d["kind"] == "PrometheusRule")
    spec: dict[str, Any] = found["spec"]
    return spec


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for group in rules()["groups"] for rule in group["rules"]}


def promtool(*arguments: str | Path) -> str:
    """Run promtool, which must succeed."""
    done = subprocess.run(
        [str(prometheus.ensure() / "promtool"), *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_alert_fires_and_is_silent_where_all_is_well(tmp_path: Path) -> None:
    assert FIRES.keys() == alerts().keys()
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules()))
    assert f"{len(FIRES)} rules found" in promtool("check", "rules", tmp_path / "rules.yaml")
    tests = []
    for name, series in FIRES.items():
        rule = alerts()[name]
        fired = {"exp_labels": rule["labels"], "exp_annotations": rule["annotations"]}
        for given, expected in zip(series, ([fired], []), strict=True):
            # RegroupNoLeader fires without any series, too, so the others have a leader.
            leads = {} if name == "RegroupNoLeader" else {'regroup_leader{pod="a"}': "1x100"}
            tests.append(
                {
                    "name": f"{name}: {'fires' if expected else 'is silent'}",
                    "interval": "1m",
                    "input_series": [{"series": one, "values": text} for one, text in {**leads, **given}.items()],
                    "alert_rule_test": [{"eval_time": "90m", "alertname": name, "exp_alerts": expected}],
                }
            )
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests}))
    promtool("test", "rules", tmp_path / "tests.yaml")


class Prometheus:
    """A Prometheus that asks an operator, and a page like dcgm-exporter's, every second."""

    def __init__(self, directory: Path, operator: int, dcgm: int) -> None:
        self._url = f"http://127.0.0.1:{free_port()}"
        at_once = [{**rule, "for": "0s", "alert": f"{rule['alert']}AtOnce"} for rule in alerts().values()]
        (directory / "rules.yaml").write_text(yaml.safe_dump(rules()))
        (directory / "at-once.yaml").write_text(yaml.safe_dump({"groups": [{"name": "at-once", "rules": at_once}]}))
        exporter = {"targets": [f"127.0.0.1:{dcgm}"], "labels": {"namespace": "gpu-operator", "pod": "dcgm-exporter"}}
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml", "at-once.yaml"],
            "scrape_configs": [
                {
                    "job_name": "regroup",
                    "honor_labels": True,
                    "static_configs": [{"targets": [f"127.0.0.1:{operator}"]}],
                },
                {"job_name": "dcgm", "honor_labels": True, "static_configs": [exporter]},
                {"job_name": "dcgm-renamed", "static_configs": [exporter]},
            ],
        }
        (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
        promtool("check", "config", directory / "prometheus.yaml")
        with (directory / "prometheus.log").open("w") as log:
            self._process = subprocess.Popen(
                [str(prometheus.ensure() / "prometheus"), f"--config.file={directory / 'prometheus.yaml'}",
                 f"--storage.tsdb.path={directory / 'data'}", f"--web.listen-address={self._url.removeprefix('http://')}"],
                stderr=log,
            )  # fmt: skip
        until(self._ready, "Prometheus is ready", timeout_s=60)

    def _ready(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(urllib.request.urlopen(f"{self._url}/-/ready", timeout=5).status == 200)
        return False

    def ask(self, path: str, **query: str) -> Any:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        return json.load(urllib.request.urlopen(url, timeout=10))["data"]

    def answer(self, query: str) -> list[dict[str, Any]]:
        """Return the series of an instant query."""
        found: list[dict[str, Any]] = self.ask("query", query=query)["result"]
        return found

    def firing(self) -> set[str]:
        return {one["labels"]["alertname"] for one in self.ask("alerts")["alerts"] if one["state"] == "firing"}

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)


@contextlib.contextmanager
def serving(text: str) -> Iterator[int]:
    """Serve one page on a port of its own, and yield the port."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()


@pytest.fixture
def job(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, Kubelet]]:
    with trained(api, tmp_path_factory.mktemp("prometheus"), "prometheus") as both:
        yield both


@only_long("tests/unit/test_dashboards.py compares metrics and labels with the operator's registry")
def test_real_operator_answers_every_query_and_an_alert_fires_without_it(
    api: Api, job: tuple[World, Kubelet], tmp_path: Path
) -> None:
    world, kubelet = job
    world.leader.stop()
    world.start_again(settings={"PER_JOB_METRICS": "true", "JOIN_QUIET_SECONDS": "3"})
    world.be_led()
    api.done("create", "service", "clusterip", "taken", "--tcp=80:80", "--namespace=prometheus")
    taken = make_job("taken")
    taken["metadata"]["namespace"] = "prometheus"
    api.done("create", "--filename=-", document=taken)
    with serving(DCGM_PAGE.replace("NAMESPACE", "prometheus")) as dcgm:
        server = Prometheus(tmp_path, world.leader.ops, dcgm)
        try:
            until(lambda: server.answer("regroup_leader == 1"), "the operator is asked", timeout_s=30)
            generation = world.trains(2)["generation"]
            kubelet.kill_a_trainer()
            world.trains(2, after=generation)
            variables = {"$namespace": "prometheus", "$job": JOB, "$__rate_interval": WINDOW, "[1h]": f"[{WINDOW}]"}
            texts = [query for one in dashboards.DASHBOARDS for panel in one.panels for query in panel.queries.values()]
            texts = [
                functools.reduce(lambda text, name: text.replace(name, variables[name]), variables, t) for t in texts
            ]

            (query,) = (text for text in texts if "GPU_UTIL" in text)

            def unanswered() -> list[str]:
                """Return the queries that have had no answer so far: a rate is one while something happens."""
                texts[:] = [text for text in texts if all(s["value"][1] == "NaN" for s in server.answer(text))]
                return texts

            until(
                lambda: not unanswered(), "every query has an answer", timeout_s=60,
                details=lambda: json.dumps([texts, world.status().get("incidents")], indent=1),
            )  # fmt: skip
            assert {(s["metric"]["pod"], s["metric"]["job"]) for s in server.answer(query)} == {
                (f"{JOB}-worker-0-0", "dcgm"), (f"{JOB}-worker-0-0", "dcgm-renamed")
            }  # fmt: skip
            loaded = {rule["name"]: rule for group in server.ask("rules")["groups"] for rule in group["rules"]}
            assert loaded.keys() >= alerts().keys()
            assert {rule["health"] for rule in loaded.values()} == {"ok"}
            assert "RegroupNoLeaderAtOnce" not in server.firing()
            world.leader.stop()
            until(lambda: "RegroupNoLeaderAtOnce" in server.firing(), "the alert fires", timeout_s=30)
        finally:
            server.stop()
            if world.leader.process.poll() is not None:
                world.start_again()
                world.be_led()
