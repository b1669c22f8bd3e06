"""What `bench.scale` makes of audit logs, histograms and measurements."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.scale import audit
from bench.scale.audit import AuditLog, Key
from bench.scale.histogram import milliseconds
from bench.scale.install import call_at, configure
from bench.scale.load import Measured, figures
from bench.scale.meter import Use
from bench.scale.operator import Regroup
from bench.scale.peers import JobSet
from bench.scale.plane import JOB_CONTROLLER, JOB_CONTROLLER_USER
from bench.scale.report import COUNTERPART, result, tables
from regroup_operator.api import parse_job

OURS = "system:serviceaccount:ns:ours"


def line(user: str, verb: str, resource: str, subresource: str = "", code: int = 200) -> bytes:
    of = {"resource": resource, **({"subresource": subresource} if subresource else {})}
    event = {"user": {"username": user}, "verb": verb, "objectRef": of, "responseStatus": {"code": code}}
    return json.dumps(event).encode() + b"\n"


def test_audit_log_counts_each_line_once_while_it_grows(tmp_path: Path) -> None:
    """Half a line counts when the rest of it is there."""
    file = tmp_path / "audit.log"
    log = AuditLog(file)
    assert log.requests() == {}  # no request yet, no file
    half = line("b", "update", "pods", "status", 409)
    file.write_bytes(line("a", "create", "pods", code=201) * 2 + half[:30])
    assert log.requests() == {Key("a", "create", "pods"): 2}
    with file.open("ab") as more:
        more.write(half[30:])
    assert log.requests() == {Key("a", "create", "pods"): 2, Key("b", "update", "pods/status"): 1}
    assert log.refused() == {(Key("b", "update", "pods/status"), 409): 1}


def test_audit_policy_writes_a_watch_when_it_begins_and_else_the_end() -> None:
    watch, other = audit.policy()["rules"][-2:]
    assert (watch["verbs"], watch["omitStages"]) == (["watch"], ["ResponseComplete"])
    assert ("verbs" in other, other["omitStages"]) == (False, ["ResponseStarted"])


def test_audit_sums() -> None:
    before = {Key("a", "get", "pods"): 5, Key("a", "list", "pods"): 1}
    now = {Key("a", "get", "pods"): 7, Key("a", "list", "pods"): 1, Key("b", "get", "pods"): 3}
    new = audit.since(now, before)
    assert new == {Key("a", "get", "pods"): 2, Key("b", "get", "pods"): 3}
    assert audit.by_user(new) == {"b": 3, "a": 2}
    assert audit.by_verb(new) == {"get pods": 5}
    assert audit.of_users(new, ["a"]) == {Key("a", "get", "pods"): 2}


def test_quantiles_are_over_all_series_with_the_labels() -> None:
    page = "# TYPE t histogram\n" + "".join(
        f't_bucket{{controller="{name}",le="{bound}"}} {count}\n'
        for name, counts in (("a", (10, 20, 20)), ("other", (0, 0, 99)))
        for bound, count in zip(("0.1", "0.2", "+Inf"), counts)
    )
    assert milliseconds(page, "t", controller="a") == {"p50": 100.0, "p99": 198.0}
    assert milliseconds(page, "t", controller="none") is None


def measured(*, jobs: int, requests: dict[Key, int], own: dict[str, Use], pods_s: float = 10.0) -> Measured:
    return Measured(
        jobs=jobs,
        pods=jobs * 8,
        began_s=100.0,
        created_s=[101.0],
        pods_running_s=[105.0, 100.0 + pods_s],
        jobs_running_s=[112.0],
        requests=requests,
        refused={},
        use={JOB_CONTROLLER: Use(0.8, 120.0), "kube-apiserver": Use(9.0, 400.0), **own},
        own_users=[OURS] if own else [],
        own_processes=list(own),
    )


SCHEDULER = {Key("system:kube-scheduler", "create", "pods/binding"): 80}
OWN = {Key(OURS, "create", "pods"): 80, Key(OURS, "patch", "jobs/status"): 10}
JOBS = {Key(JOB_CONTROLLER_USER, "create", "pods"): 80}
WATCH = {Key(JOB_CONTROLLER_USER, "watch", "jobs"): 1}


@pytest.mark.parametrize(
    ("requests", "own", "want"),
    [
        pytest.param({**OWN, **SCHEDULER}, {"ours": Use(0.4, 90.0)}, (2.12, 1.12, 5.0, 90.0), id="a system of its own"),
        pytest.param({**OWN, **WATCH}, {"ours": Use(0.4, 90.0)}, (1.14, 1.12, 5.0, 90.0), id="an idle Job controller"),
        pytest.param(
            {**OWN, **JOBS}, {"ours": Use(0.4, 90.0)}, (2.12, 2.12, 15.0, 90.0), id="a system that makes Jobs"
        ),
        pytest.param({**JOBS, **SCHEDULER}, {}, (2.0, 1.0, 10.0, 120.0), id="plain Jobs"),
    ],
)
def test_what_is_a_systems_own(requests: dict[Key, int], own: dict[str, Use], want: tuple[float, ...]) -> None:
    found = figures(measured(jobs=10, requests=requests, own=own))
    got = tuple(found[key] for key in ("requests_per_pod", "own_requests_per_pod", "cpu_ms_per_pod", "rss_mib"))
    assert got == want
    assert (found["pods_per_s"], found["status_s"]) == (8.0, 12.0)  # 80 pods in 10 s; the last status came 2 s later


def test_report_has_growth_and_ratio() -> None:
    def size(jobs: int, cpu_s: float, name: str, seconds: float) -> dict[str, Any]:
        return figures(measured(jobs=jobs, requests=OWN, own={name: Use(cpu_s, 90.0)}, pods_s=seconds))

    found = result(
        {
            "regroup": {50: size(50, 0.4, "regroup", 4.0), 500: size(500, 8.0, "regroup", 20.0)},
            "jobset": {500: size(500, 24.0, "jobset", 40.0)},
            "jobset_by_ip": {500: size(500, 16.0, "jobset", 20.0)},
        },
        {"regroup": "Regroup", "jobset": "JobSet 0.12", "jobset_by_ip": "JobSet without names"},
        {"regroup": "", "jobset": "Webhooks are local.", "jobset_by_ip": ""},
        {"steady": {"cores": 0.25, "requests": {"get pods": 7}}},
        {"trainer, 50 jobs": "It did not start."},
        {"pods_per_job": 8, "cpus": 2, "load_before": 0.1, "load_after": 3.0},
    )
    assert found["regroup"]["pods_per_s"] == 200.0
    assert found["regroup"]["growth"]["cpu_ms_per_pod"] == 2.0
    assert found["regroup"]["fewer"]["50"]["jobs"] == 50
    assert found["jobset"]["ratio"]["pods_per_s"] == 0.5
    assert found["jobset"]["growth"] == {}
    assert "ratio" not in found["jobset_by_ip"], (
        "like is compared with like, and Regroup without names was not measured"
    )
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(tables(found))
    text = console.export_text()
    assert "JobSet 0.12" in text
    assert "steady: cores" in text
    assert "trainer, 50 jobs failed: It did not start." in text
    assert "get pods" not in text.partition("Regroup alone")[2]


def test_delivered_configuration_keeps_all_but_addresses() -> None:
    delivered = {"clientConnection": {"qps": 50}, "leaderElection": {"leaderElect": True}, "certManagement": {"a": 1}}
    got = configure(delivered, certificates="certManagement", namespace="ns", webhook=1, health=2, metrics=3)
    assert got["clientConnection"] == {"qps": 50}
    assert got["leaderElection"] == {"leaderElect": True, "resourceNamespace": "ns"}
    assert got["certManagement"] == {"enable": False}
    assert got["webhook"] == {"port": 1, "host": "127.0.0.1"}


def test_webhooks_are_called_at_an_address() -> None:
    hook = {"name": "h", "failurePolicy": "Fail", "clientConfig": {"service": {"name": "s", "path": "/p"}}}
    got = call_at({"kind": "K", "webhooks": [hook]}, "https://127.0.0.1:9", "YQ==")
    assert got["webhooks"] == [{**hook, "clientConfig": {"url": "https://127.0.0.1:9/p", "caBundle": "YQ=="}}]


@pytest.mark.parametrize("pod_names", [True, False])
def test_systems_are_compared_with_and_without_names_of_pods(tmp_path: Path, pod_names: bool) -> None:
    ours, theirs = Regroup(tmp_path, pod_names=pod_names), JobSet(pod_names=pod_names)
    assert COUNTERPART[theirs.name] == ours.name
    assert parse_job(ours.submit(0, 8).body).spec.network.pod_names == pod_names
    assert theirs.submit(0, 8).body["spec"]["network"] == {"enableDNSHostnames": pod_names}
