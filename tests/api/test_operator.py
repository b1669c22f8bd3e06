"""The whole operator as a process, under the chart's own rights, against a bare API server: no nodes, no agents."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from typing import Any

import pytest

from cluster import binaries
from harness.polling import until
from harness.replica import Replica
from manifests import render
from regroup_cli import plugin
from regroup_operator.api.crd import UNSEEN_STATUS
from regroup_operator.endpoint.certificates import Authority
from tests.api.conftest import Api
from tests.api.edge import Passed, edge_to
from tests.api.replicas import Replicas, ca_of, replicas
from tests.builders.jobs import make_job, role

DEADLINE_S = 40.0


@pytest.fixture(scope="module")
def operators(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    with replicas(api, tmp_path_factory.mktemp("operators")) as started:
        yield started


@pytest.fixture(scope="module")
def leader(operators: Replicas) -> Iterator[Replica]:
    """A replica that leads."""
    replica = operators("first")
    until(replica.ready, "ready")
    until(replica.leads, "leading")
    yield replica
    replica.stop()


def create(api: Api, namespace: str, name: str = "digits", **spec: Any) -> None:
    job = make_job(name, **spec)
    job["metadata"]["namespace"] = namespace
    api.done("create", "--filename=-", document=job)


def status(api: Api, namespace: str, name: str = "digits") -> dict[str, Any]:
    """Return what an operator has written: the CRD's default, which says that none has, is nothing."""
    found: dict[str, Any] = api.get("dtj", name, f"--namespace={namespace}").get("status", {})
    return {} if found == UNSEEN_STATUS else found


def condition(api: Api, namespace: str, type: str) -> dict[str, Any] | None:
    return next((c for c in status(api, namespace).get("conditions", []) if c["type"] == type), None)


def leaders_label(api: Api) -> str:
    return api.done(
        "get", "pods", f"--namespace={render.NAMESPACE}", "--selector=regroup.dev/leader=true", "-oname"
    ).strip()


def test_job_gets_its_pods_service_and_bundle(api: Api, namespace: str, leader: Replica) -> None:
    create(api, namespace)
    names = until(
        lambda: len(n := api.done("get", "pods", f"--namespace={namespace}", "--output=name").split()) == 3 and n,
        "pods",
    )
    assert names == [f"pod/digits-worker-{slot}-0" for slot in range(3)]
    assert api.get("service", "digits", f"--namespace={namespace}")["spec"]["clusterIP"] == "None"
    accepted = until(lambda: condition(api, namespace, "Accepted"), "a status")
    assert accepted["status"] == "True"
    summary = status(api, namespace)["summary"]
    assert summary["ready"] == "0/3"
    assert summary["state"] == "Pending"
    bundle = api.get("configmap", "digits-regroup", f"--namespace={namespace}")["data"]["ca.crt"]
    code, text = leader.agent_call(bundle)
    assert (code, "bearer token" in text) == (401, True), text
    assert leader.agent_call()[0] == 0, "without the bundle the endpoint must not be trusted"


@pytest.mark.parametrize("kind", ["service", "configmap"])
def test_what_a_job_has_once_comes_back_within_seconds(api: Api, namespace: str, leader: Replica, kind: str) -> None:
    """Pods that start meanwhile would wait for it without a word."""
    create(api, namespace)
    until(lambda: len(pod_names(api, namespace)) == 3, "three pods")
    select = (kind, f"--namespace={namespace}", "--selector=regroup.dev/job-name=digits")

    def uids() -> list[str]:
        return [item["metadata"]["uid"] for item in api.get(*select)["items"]]

    (before,) = uids()
    api.done("delete", *select, "--wait=false")
    until(lambda: uids() not in ([], [before]), f"another {kind}", timeout_s=10.0)
    assert leader.page("/healthz")[0] == 200


def test_scaled_job_gets_more_pods(api: Api, namespace: str, leader: Replica) -> None:
    create(api, namespace)
    until(lambda: api.done("get", "pods", f"--namespace={namespace}", "-oname").count("\n") == 3, "three pods")
    api.done("scale", "dtj", "digits", "--replicas=5", f"--namespace={namespace}")
    until(lambda: api.done("get", "pods", f"--namespace={namespace}", "-oname").count("\n") == 5, "five pods")
    assert leader.page("/healthz")[0] == 200


def pod_names(api: Api, namespace: str) -> list[str]:
    return api.done("get", "pods", f"--namespace={namespace}", "-oname").split()


def is_at(api: Api, namespace: str, state: str, pods: int) -> bool:
    found = status(api, namespace).get("summary", {}).get("state")
    return found == state and len(pod_names(api, namespace)) == pods


def test_suspended_job_gives_its_pods_back_and_gets_new_ones(api: Api, namespace: str, leader: Replica) -> None:
    create(api, namespace)
    until(lambda: len(pod_names(api, namespace)) == 3, "three pods")
    for suspended, pods, state in (("true", 0, "Suspended"), ("false", 3, "Pending")):
        patch = f'{{"spec":{{"runPolicy":{{"suspend":{suspended}}}}}}}'
        api.done("patch", "dtj", "digits", f"--namespace={namespace}", "--type=merge", f"--patch={patch}")
        until(partial(is_at, api, namespace, state, pods), f"{state} with {pods} pods")
    assert leader.page("/healthz")[0] == 200


def test_job_that_misses_its_start_fails_and_expires(api: Api, namespace: str, leader: Replica) -> None:
    create(api, namespace, runPolicy={"startDeadlineSeconds": 2, "ttlSecondsAfterFinished": 4})
    failed = until(lambda: condition(api, namespace, "Failed"), "the end")
    assert (failed["reason"], failed["message"].split(" within")[0]) == (
        "StartDeadlineExceeded",
        "0 of the 2 workers that the job needs were ready",
    )
    assert "completionTime" in status(api, namespace)
    until(lambda: api.done("get", "dtj", f"--namespace={namespace}", "-oname") == "", "its deletion")
    assert leader.page("/healthz")[0] == 200


def test_job_that_is_resumed_after_its_deadline_has_its_whole_time_again(
    api: Api, namespace: str, leader: Replica
) -> None:
    create(api, namespace, runPolicy={"suspend": True, "startDeadlineSeconds": 10})
    until(partial(is_at, api, namespace, "Suspended", 0), "it is suspended")
    made = time.monotonic()
    until(lambda: time.monotonic() > made + 11.0, "its deadline would be over")
    api.done(
        "patch",
        "dtj",
        "digits",
        f"--namespace={namespace}",
        "--type=merge",
        '-p={"spec":{"runPolicy":{"suspend":false}}}',
    )
    until(partial(is_at, api, namespace, "Pending", 3), "its pods are made")
    failed = until(lambda: condition(api, namespace, "Failed"), "it misses its start now")
    resumed = condition(api, namespace, "Suspended")
    assert resumed is not None
    assert (resumed["reason"], failed["reason"]) == ("Resumed", "StartDeadlineExceeded")
    times = [datetime.fromisoformat(c["lastTransitionTime"]) for c in (resumed, failed)]
    assert (times[1] - times[0]).total_seconds() >= 9.0
    assert leader.page("/healthz")[0] == 200


def test_started_job_that_breaks_a_newer_rule_keeps_its_workers(api: Api, namespace: str, leader: Replica) -> None:
    """The operator refuses it; then the test says that an operator without that rule had started it. Its pods are replaced as
    ever."""
    mounts = {"volumeMounts": [{"name": "x", "mountPath": "/regroup/x"}]}
    container = {"name": "trainer", "image": "example/trainer:1", "command": ["python", "train.py"], **mounts}
    volumes = [{"name": "x", "emptyDir": {}}]
    create(api, namespace, template={"spec": {"containers": [container], "volumes": volumes}})
    refused = until(lambda: condition(api, namespace, "Accepted"), "a verdict")
    assert (refused["status"], pod_names(api, namespace)) == ("False", [])
    job = api.get("dtj", "digits", f"--namespace={namespace}")
    job["status"] |= {"startTime": "2026-01-01T00:00:00Z", "acceptedSpec": {"replicas": job["spec"]["replicas"]}}
    api.done("replace", "--subresource=status", "--filename=-", document=job)
    until(lambda: len(pod_names(api, namespace)) == 3, "three pods")
    accepted = condition(api, namespace, "Accepted")
    assert accepted is not None
    assert (accepted["status"], accepted["reason"]) == ("False", "InvalidSpec")
    until(lambda: status(api, namespace).get("summary", {}).get("state") == "Pending", "its state")
    assert leader.page("/healthz")[0] == 200


def test_job_whose_workers_have_finished_waits_for_its_role(api: Api, namespace: str, leader: Replica) -> None:
    """There are no agents here: the test says that the workers have finished, as an operator before this one would have."""
    create(api, namespace, roles=[role("eval") | {"requiredForCompletion": True}])
    until(lambda: len(pod_names(api, namespace)) == 4, "three workers and the role")
    job = api.get("dtj", "digits", f"--namespace={namespace}")
    at = "2026-01-01T00:00:00Z"
    job["status"] |= {"startTime": at, "finished": {"generation": 1, "workers": 3, "at": at}}
    api.done("replace", "--subresource=status", "--filename=-", document=job)
    until(partial(is_at, api, namespace, "Completing", 1), "it waits, without its workers")
    complete = condition(api, namespace, "Complete")
    assert complete is not None
    assert (complete["status"], complete["reason"]) == ("False", "WaitingForRoles")
    scaled = api.done("scale", "dtj", "digits", "--replicas=5", f"--namespace={namespace}")
    assert "scaled" in scaled
    found = api.get("dtj", "digits", f"--namespace={namespace}", "--subresource=scale")
    until(lambda: status(api, namespace)["observedGeneration"] == 2, "it has looked at the new size")
    assert (found["spec"]["replicas"], found["status"]["replicas"], len(pod_names(api, namespace))) == (5, 0, 1)
    ended = ["patch", "pod", "digits-eval-0-0", f"--namespace={namespace}", "--subresource=status", "--type=merge"]
    api.done(*ended, '--patch={"status":{"phase":"Succeeded"}}')
    until(lambda: status(api, namespace)["summary"]["state"] == "Succeeded", "the end")
    assert status(api, namespace)["roles"] == [
        {"name": "eval", "replicas": 1, "ready": 0, "succeeded": [0], "awaited": 0}
    ]
    assert leader.page("/healthz")[0] == 200


def test_pods_with_a_notice_are_replaced_elsewhere_before_anybody_deletes_them(
    api: Api, namespace: str, leader: Replica
) -> None:
    """One by a taint of its node, one by its condition. There is no scheduler here: the test places the first one."""
    create(api, namespace)
    until(lambda: len(pod_names(api, namespace)) == 3, "three pods")
    node = f"node-{namespace}"
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    api.done("create", "--filename=-", document={"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
    api.done("patch", "node", node, "--subresource=status", "--type=merge", f"--patch={json.dumps({'status': ready})}")
    target = {"apiVersion": "v1", "kind": "Node", "name": node}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "digits-worker-0-0"}, "target": target}
    path = f"/api/v1/namespaces/{namespace}/pods/digits-worker-0-0/binding"
    api.done("create", f"--raw={path}", "--filename=-", document=binding)
    api.done("taint", "node", node, "karpenter.sh/disrupted:NoSchedule")
    until(lambda: "pod/digits-worker-0-1" in pod_names(api, namespace), "a successor")
    successor = api.get("pod", "digits-worker-0-1", f"--namespace={namespace}")["spec"]
    (avoided,) = successor["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert avoided["preference"]["matchFields"][0]["values"] == [node]

    def is_deleted() -> bool:
        pod = api.get("pods", f"--namespace={namespace}")["items"]
        return any("deletionTimestamp" in p["metadata"] for p in pod if p["metadata"]["name"] == "digits-worker-0-0")

    until(is_deleted, "the deletion of the pod that leaves")
    condition_of = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    patch = json.dumps({"status": {"conditions": [condition_of]}})
    ask = ["patch", "pod", "digits-worker-1-0", f"--namespace={namespace}", "--subresource=status", "--type=merge"]
    api.done(*ask, f"--patch={patch}")
    until(lambda: "pod/digits-worker-1-1" in pod_names(api, namespace), "its successor")
    until(lambda: "pod/digits-worker-1-0" not in pod_names(api, namespace), "its end")

    def told() -> set[str]:
        events = api.get("events", f"--namespace={namespace}")["items"]
        return {e.get("note") or e["message"] for e in events if e["reason"] == "WorkerLeaving"}

    wanted = {
        f"Worker 0 is asked to leave: its node {node} has taint karpenter.sh/disrupted.",
        "Worker 1 is asked to leave: its condition DisruptionTarget says PreemptionByScheduler.",
    }
    until(lambda: told() == wanted, "the events")
    assert "restarts" not in status(api, namespace)
    assert leader.page("/healthz")[0] == 200


def test_kubectl_regroup_over_a_real_kubectl(
    api: Api, namespace: str, leader: Replica, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", f"{binaries.ensure()}:{os.environ['PATH']}")
    where = ["--namespace", namespace, "--kubeconfig", str(api.kubeconfig)]
    create(api, namespace, runPolicy={"startDeadlineSeconds": 6})
    until(lambda: len(pod_names(api, namespace)) == 3, "three pods")
    until(lambda: condition(api, namespace, "PodsReady"), "a status")
    assert plugin.main(["why", "digits", *where]) == 0
    first, second = capfd.readouterr().out.splitlines()[:2]
    assert first == "digits is Pending."
    assert second.startswith("PodsReady is False (Starting): 0 of 3 worker pods run")
    assert plugin.main(["scale", "digits", "5", *where]) == 0
    assert plugin.main(["watch", "digits", *where]) == 1, "it misses its start"
    assert capfd.readouterr().out.splitlines()[-1].split("  ")[1] == "Failed"
    assert plugin.main(["scale", "digits", "5", *where]) == 1
    assert "The job digits has ended (Failed): it cannot be resized." in capfd.readouterr().err
    assert plugin.main([*where, "status", "digits", "-o", "json"]) == 0
    assert json.loads(capfd.readouterr().out)["state"] == "Failed"
    assert plugin.main(["list", *where]) == 0
    assert capfd.readouterr().out.splitlines()[1].split()[:3] == ["digits", "Failed", "-"]
    assert plugin.main(["why", "digits", *where]) == 0
    assert "StartDeadlineExceeded: 0 of the 2 workers" in capfd.readouterr().out
    assert plugin.main(["why", "nobody", *where]) == 1
    assert '"nobody" not found' in capfd.readouterr().err
    assert plugin.main(["delete", "digits", *where]) == 0
    until(lambda: not api.get("trainingjobs", f"--namespace={namespace}")["items"], "its end")
    assert leader.page("/healthz")[0] == 200


def test_job_of_another_controller_is_left_alone(api: Api, namespace: str, leader: Replica) -> None:
    create(api, namespace, "theirs", runPolicy={"managedBy": "example.com/another"})
    mounts = {"volumeMounts": [{"name": "x", "mountPath": "/regroup/x"}]}
    container = {"name": "trainer", "image": "example/trainer:1", "command": ["python", "train.py"], **mounts}
    theirs = {"managedBy": "example.com/another"}
    create(api, namespace, "broken", runPolicy=theirs, template={"spec": {"containers": [container]}})
    create(api, namespace, "ours", runPolicy={"managedBy": "regroup.dev/operator"})
    until(lambda: len(pod_names(api, namespace)) == 3, "three pods")
    until(lambda: status(api, namespace, "ours").get("phase"), "a status")
    assert all(name.startswith("pod/ours-") for name in pod_names(api, namespace))
    assert status(api, namespace, "theirs") == status(api, namespace, "broken") == {}
    assert leader.page("/healthz")[0] == 200


@pytest.mark.parametrize(
    ("trainer", "reason", "sentence"),
    [
        pytest.param({"imagePulPolicy": "Always"}, "InvalidTemplate", "imagePulPolicy", id="what only a dry run finds"),
        pytest.param(
            {"volumeMounts": [{"name": "x", "mountPath": "/regroup/x"}]},
            "InvalidSpec",
            "/regroup",
            id="what only Python finds",
        ),
    ],
)
def test_job_that_cannot_run_says_why_everywhere_and_gets_nothing(
    api: Api, namespace: str, leader: Replica, trainer: dict[str, Any], reason: str, sentence: str
) -> None:
    container = {"name": "trainer", "image": "example/trainer:1", "command": ["python", "train.py"], **trainer}
    create(api, namespace, template={"spec": {"containers": [container]}})
    accepted = until(lambda: condition(api, namespace, "Accepted"), "a verdict")
    assert (accepted["status"], accepted["reason"]) == ("False", reason)
    assert sentence in accepted["message"]
    shown = api.done("get", "dtj", "digits", f"--namespace={namespace}")
    assert reason in shown
    described = until(
        lambda: (
            text if sentence in (text := api.done("events", "--for=dtj/digits", f"--namespace={namespace}")) else ""
        ),
        "an event",
    )
    assert reason in described
    assert api.done("get", "pods", f"--namespace={namespace}", "-oname") == ""
    assert leader.process.poll() is None


PROBES = {
    "pods": {"kind": "Pod", "spec": {"containers": [{"name": "c", "image": "i"}]}},
    "services": {"kind": "Service", "spec": {"ports": [{"port": 1}]}},
}


def limit(api: Api, namespace: str, resource: str) -> None:
    """Have a quota refuse every object of a kind. Admission goes by the quota's status, which nobody else writes here."""
    probe = {"apiVersion": "v1", "metadata": {"name": "probe", "namespace": namespace}, **PROBES[resource]}
    metadata = {"name": "full", "namespace": namespace}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": {"hard": {resource: "0"}}}
    api.done("create", "--filename=-", document=quota)
    full = json.dumps({"status": {"hard": {resource: "0"}, "used": {resource: "0"}}})
    api.done("patch", "quota", "full", f"--namespace={namespace}", "--subresource=status", "--type=merge", f"-p={full}")
    until(
        lambda: "exceeded quota" in api.kubectl("create", "--dry-run=server", "--filename=-", document=probe).error,
        "the quota is known",
    )


def test_job_whose_service_a_quota_refuses_says_so_and_starts_once_there_is_room(
    api: Api, namespace: str, leader: Replica
) -> None:
    limit(api, namespace, "services")
    create(api, namespace)
    accepted = until(lambda: condition(api, namespace, "Accepted"), "a verdict")
    assert (accepted["status"], accepted["reason"]) == ("False", "CreateFailed")
    assert "quota" in accepted["message"]
    until(lambda: "quota" in api.done("events", "--for=dtj/digits", f"--namespace={namespace}"), "an event")
    assert api.done("get", "pods", f"--namespace={namespace}", "-oname") == ""
    api.done("delete", "quota", "full", f"--namespace={namespace}")
    until(lambda: api.done("get", "pods", f"--namespace={namespace}", "-oname").count("\n") == 3, "three pods")
    until(lambda: (condition(api, namespace, "Accepted") or {})["status"] == "True", "the job is accepted")
    assert leader.process.poll() is None


def test_pods_that_a_quota_refuses_are_told_once_and_come_when_there_is_room(
    api: Api, namespace: str, leader: Replica
) -> None:
    limit(api, namespace, "pods")
    create(api, namespace)
    told = until(
        lambda: [line for line in api.done("events", "--for=dtj/digits", f"--namespace={namespace}").splitlines()
                 if "quota" in line],
        "an event",
    )  # fmt: skip
    assert len(told) == 1
    assert "CreateFailed" in told[0]
    api.done("delete", "quota", "full", f"--namespace={namespace}")
    until(lambda: api.done("get", "pods", f"--namespace={namespace}", "-oname").count("\n") == 3, "three pods")
    assert leader.process.poll() is None


def test_metrics_are_there(api: Api, namespace: str, leader: Replica) -> None:
    create(api, namespace)
    until(lambda: len(pod_names(api, namespace)) == 3 and status(api, namespace), "pods and a status")
    text = leader.page("/metrics")[1]
    for name in (
        "regroup_queue_depth", "regroup_reconcile_seconds_count", "regroup_generations_total", "regroup_incidents_total",
        "regroup_recovery_seconds_bucket", "regroup_connected_agents 0.0", "regroup_leader 1.0",
        "regroup_dropped_reports_total 0.0", "regroup_status_writes_total",
    ):  # fmt: skip
        assert re.search(f"^(# TYPE )?{name.removesuffix('_total')}", text, re.MULTILINE), name
    for line in (
        r'regroup_jobs\{phase="Pending"\} [1-9]',
        r'regroup_api_requests_total\{code="201",resource="pods",verb="create"\} \d+',
        r'regroup_api_requests_total\{code="200",resource="distributedtrainingjobs",verb="update"\} \d+',
        r'regroup_api_request_seconds_count\{verb="watch"\} \d+',
        r"regroup_queue_wait_seconds_count [1-9]",
    ):
        assert re.search(f"^{line}", text, re.MULTILINE), line
    assert "regroup_job_" not in text, "no series for each job unless asked for"


def test_looks_at_a_job_cost_no_requests(api: Api, namespace: str, leader: Replica) -> None:
    """Its pods change, and each change leads to a look: the job is read once, at the first."""
    create(api, namespace)
    until(lambda: len(pod_names(api, namespace)) == 3, "three pods")
    looks = "regroup_reconcile_seconds_count"
    gets = r'regroup_api_requests_total\{code="200",resource="distributedtrainingjobs",verb="get"\}'
    before = leader.page("/metrics")[1]
    assert num_of(before, gets) >= 1
    for n in range(4):
        for pod in pod_names(api, namespace):
            body = json.dumps({"status": {"phase": "Running", "podIP": f"10.0.0.{n + 1}"}})
            where = (f"--namespace={namespace}", "--subresource=status", "--type=merge")
            api.done("patch", pod, *where, f"--patch={body}")
    until(lambda: num_of(leader.page("/metrics")[1], looks) >= num_of(before, looks) + 6, "looks")
    assert num_of(leader.page("/metrics")[1], gets) == num_of(before, gets)


def num_of(page: str, name: str) -> float:
    """Return the sum of a metric's series."""
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE))


def test_second_replica_waits_and_takes_over_from_one_that_ends(api: Api, operators: Replicas, leader: Replica) -> None:
    second = operators("second")
    until(second.ready, "leadership is not readiness")
    assert until(lambda: leaders_label(api), "a label") == "pod/first"
    code, text = second.agent_call(ca_of(api))
    assert code == 503
    assert "first" in json.loads(text)["error"]

    assert leader.stop() == 0, leader.log.read_text()
    until(second.leads, "the second one leads")
    until(lambda: leaders_label(api) == "pod/second", "the label moves")
    until(lambda: second.agent_call(ca_of(api))[0] == 401, "the second one answers agents")

    third = operators("first")
    until(third.ready, "ready")
    second.stop(signal.SIGKILL)
    until(third.leads, "the first one leads again after a kill")
    until(lambda: leaders_label(api) == "pod/first", "the label is taken from the dead")
    assert third.stop() == 0, third.log.read_text()
    lease = api.get("lease", "regroup", f"--namespace={render.NAMESPACE}")
    assert not lease["spec"].get("holderIdentity"), "the lease is released"


def test_replica_that_takes_over_serves_and_hands_out_the_ca_of_now(
    api: Api, namespace: str, operators: Replicas
) -> None:
    """It has stood by while the CA changed, and looks at the Secret every five minutes only."""
    first = operators("first")
    until(first.leads, "the first one leads")
    second = operators("second")
    until(second.ready, "the second one stands by")
    old, new = ca_of(api), Authority.create()
    pair = {"old-ca.crt": old.encode(), "ca.crt": new.ca_pem, "ca.key": new.key_pem}
    change = {"data": {key: base64.b64encode(value).decode() for key, value in pair.items()}}
    patch = f"--patch={json.dumps(change)}"
    api.done("patch", "secret", "regroup-ca", f"--namespace={render.NAMESPACE}", "--type=merge", patch)
    assert first.stop() == 0, first.log.read_text()
    until(second.leads, "the second one leads")
    create(api, namespace)
    until(lambda: status(api, namespace), "a status")
    bundle = api.get("configmap", "digits-regroup", f"--namespace={namespace}")["data"]["ca.crt"]
    assert bundle == new.ca_pem.decode() + old
    assert second.agent_call(new.ca_pem.decode())[0] == 401
    assert second.stop() == 0, second.log.read_text()


def test_replica_that_stands_by_queues_nothing_and_begins_without_the_jobs_that_are_gone(
    api: Api, namespace: str, operators: Replicas
) -> None:
    """It hears of every pod, and nothing is taken from its queue until it leads."""
    first = operators("first")
    until(first.leads, "the first one leads")
    vanished: set[str] = set()

    def hear(event: dict[str, Any]) -> None:
        if event["type"] == "DELETED" and event["object"]["metadata"].get("namespace") == namespace:
            vanished.add(event["object"]["metadata"]["name"])

    with edge_to(api.kubeconfig) as wire:
        wire.on_event = hear
        second = operators("second", wire.url)
        until(second.ready, "the second one stands by")
        create(api, namespace, "stays")
        gone = ("first-gone", "second-gone")
        for name in gone:
            create(api, namespace, name)
        until(lambda: len(pod_names(api, namespace)) == 9, "the pods of three jobs")
        api.done("delete", "dtj", *gone, f"--namespace={namespace}")
        selector = f"--selector=regroup.dev/job-name in ({','.join(gone)})"
        api.done("delete", "pods", selector, "--force", "--grace-period=0", f"--namespace={namespace}")
        until(lambda: len(vanished) == 6, "the second one has heard of that")
        assert num_of(second.page("/metrics")[1], "regroup_queue_depth") == 0

        jobs = f"/namespaces/{namespace}/distributedtrainingjobs/"
        seen, *unseen = (wire.fail(partial(is_read_of, f"{jobs}{name}"), "then") for name in ("stays", *gone))
        assert first.stop() == 0, first.log.read_text()
        until(second.leads, "the second one leads")
        create(api, namespace, "new")
        until(lambda: len(pod_names(api, namespace)) == 6, "the new job has its pods")
        assert seen.hit.is_set(), "each job is read when a term begins"
        assert not any(read.hit.is_set() for read in unseen), "it has looked at a job that is gone"
        assert second.stop() == 0, second.log.read_text()


def is_read_of(path: str, request: Passed) -> bool:
    return request.method == "GET" and request.path.endswith(path)


def test_unusable_settings_are_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "regroup_operator"],
        env={**os.environ, "REGROUP_SETTINGS_OPS_PORT": "many"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("regroup-operator: REGROUP_SETTINGS_OPS_PORT (many) is refused:")
    assert "Traceback" not in done.stderr
