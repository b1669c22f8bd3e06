"""The whole operator as a process, under the chart's own rights, against a bare API server: no nodes, no agents."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import apiserver
from harness.polling import until
from manifests import render
from regroup_operator.membership.certificates import Authority
from tests.api.conftest import Api
from tests.builders.jobs import make_job

DEADLINE_S = 40.0


class Replica:
    """One operator process."""

    def __init__(self, name: str, kubeconfig: Path, log: Path) -> None:
        self.name, self.log = name, log
        self.agents, self.ops = apiserver.free_port(), apiserver.free_port()
        settings = {
            "NAMESPACE": render.NAMESPACE,
            "MEMBERSHIP_HOST": "127.0.0.1",
            "MEMBERSHIP_PORT": str(self.agents),
            "OPS_HOST": "127.0.0.1",
            "OPS_PORT": str(self.ops),
            "POD_NAME": name,
            "LEASE_DURATION_SECONDS": "3",
            "LEASE_RENEW_DEADLINE_SECONDS": "2",
            "LEASE_RETRY_SECONDS": "0.3",
        }
        environ = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        environ |= {f"REGROUP_SETTINGS_{key}": value for key, value in settings.items()}
        self.process = subprocess.Popen([sys.executable, "-m", "regroup_operator"], env=environ, stderr=log.open("w"))

    def page(self, path: str) -> tuple[int, str]:
        """Return status and text of a page of the ops port; (0, "") while nobody listens."""
        return get(f"http://127.0.0.1:{self.ops}{path}")

    def agent_call(self, ca: str | None = None) -> tuple[int, str]:
        """Return what an agent without a token is told; (0, why) where TLS or TCP fail."""
        context = ssl.create_default_context(cadata=ca)
        context.check_hostname = False  # the certificate is for the Service's name, which only a cluster resolves
        return get(f"https://127.0.0.1:{self.agents}/v1/namespaces/n/pods/p/commands", context)

    def ready(self) -> bool:
        """Whether it says so; fails if it ended."""
        assert self.process.poll() is None, self.log.read_text()
        return self.page("/readyz")[0] == 200

    def leads(self) -> bool:
        """Whether it says so; fails if it ended."""
        assert self.process.poll() is None, self.log.read_text()
        return "regroup_leader 1.0" in self.page("/metrics")[1]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it, wait for its end, return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)


def get(url: str, context: ssl.SSLContext | None = None) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


Start = Callable[[str], Replica]


@pytest.fixture(scope="module")
def operators(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts replicas by name as the chart's service account; pods of those names stand for theirs."""
    api.done("apply", "--server-side", "--force-conflicts", f"--filename={render.INSTALL}")
    directory = tmp_path_factory.mktemp("operators")
    token = api.done("create", "token", "regroup", f"--namespace={render.NAMESPACE}").strip()
    config = yaml.safe_load(api.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    kubeconfig = directory / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))
    replicas: list[Replica] = []

    def start(name: str) -> Replica:
        template = api.get("deployment", "regroup-operator", f"--namespace={render.NAMESPACE}")["spec"]["template"]
        metadata = {"name": name, "namespace": render.NAMESPACE, "labels": template["metadata"]["labels"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        if api.kubectl("get", "pod", name, f"--namespace={render.NAMESPACE}").code:
            api.done("create", "--filename=-", document=pod)
        replica = Replica(name, kubeconfig, directory / f"{name}-{len(replicas)}.log")
        replicas.append(replica)
        return replica

    yield start
    for replica in replicas:
        replica.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def leader(operators: Start) -> Iterator[Replica]:
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
    found: dict[str, Any] = api.get("dtj", name, f"--namespace={namespace}").get("status", {})
    return found


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


def test_scaled_job_gets_more_pods(api: Api, namespace: str, leader: Replica) -> None:
    create(api, namespace)
    until(lambda: api.done("get", "pods", f"--namespace={namespace}", "-oname").count("\n") == 3, "three pods")
    api.done("scale", "dtj", "digits", "--replicas=5", f"--namespace={namespace}")
    until(lambda: api.done("get", "pods", f"--namespace={namespace}", "-oname").count("\n") == 5, "five pods")
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
    until(lambda: status(api, namespace), "a status")
    text = leader.page("/metrics")[1]
    for name in (
        "regroup_queue_depth", "regroup_reconcile_seconds_count", "regroup_generations_total", "regroup_incidents_total",
        "regroup_recovery_seconds_bucket", "regroup_connected_agents 0.0", "regroup_leader 1.0",
        "regroup_dropped_reports_total 0.0", "regroup_status_writes_total",
    ):  # fmt: skip
        assert re.search(f"^(# TYPE )?{name.removesuffix('_total')}", text, re.MULTILINE), name


def test_second_replica_waits_and_takes_over_from_one_that_ends(api: Api, operators: Start, leader: Replica) -> None:
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


def test_replica_that_takes_over_serves_and_hands_out_the_ca_of_now(api: Api, namespace: str, operators: Start) -> None:
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


def ca_of(api: Api) -> str:
    secret = api.get("secret", "regroup-ca", f"--namespace={render.NAMESPACE}")
    return base64.b64decode(secret["data"]["ca.crt"]).decode()


def test_unusable_settings_are_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "regroup_operator"],
        env={**os.environ, "REGROUP_SETTINGS_OPS_PORT": "many"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("regroup-operator: REGROUP_SETTINGS_OPS_PORT (many) is refused:")
    assert "Traceback" not in done.stderr
