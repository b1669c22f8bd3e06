"""The Python client against a real API server, through a real kubectl proxy. Nothing runs the pods: the tests write the status."""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from cluster import binaries
from harness.polling import until
from regroup_client import Client, ClientError, JobError, TimedOut, access
from tests.api.conftest import Api

JOB = "dtj/train"


@pytest.fixture
def client(api: Api, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv("PATH", f"{binaries.ensure()}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hi')\n")
    with Client(namespace, kubeconfig=str(api.kubeconfig)) as made:
        yield made


def status(api: Api, namespace: str, state: str, **condition: str) -> None:
    made: dict[str, Any] = {"summary": {"state": state}}
    if condition:
        made["conditions"] = [{"lastTransitionTime": "2026-01-01T00:00:00Z", **condition}]
    patch = json.dumps({"status": made})
    api.done("patch", JOB, f"--namespace={namespace}", "--subresource=status", "--type=merge", f"--patch={patch}")


def test_job_is_submitted_waited_for_changed_and_deleted(client: Client, api: Api, namespace: str) -> None:
    job = client.submit("train.py", ["--lr", 0.1], image="torch", workers=2, max=4, env={"A": "B"})
    assert [one.name for one in client.jobs()] == ["train"]
    assert job.status().state == "AwaitingOperator"
    with pytest.raises(TimedOut, match=r"is not training after 0\.5 s"):
        job.wait("training", timeout=0.5)
    training = {"type": "Training", "status": "True", "reason": "Running", "message": "Two workers train."}
    later = threading.Timer(0.5, status, (api, namespace, "Running"), training)
    later.start()
    assert job.wait("training", timeout=30).state == "Running"
    job.scale(3)
    job.suspend()
    spec = api.get(JOB, f"--namespace={namespace}")["spec"]
    assert (spec["replicas"], spec["runPolicy"]["suspend"]) == (3, True)
    job.resume()
    assert api.get(JOB, f"--namespace={namespace}")["spec"]["runPolicy"]["suspend"] is False
    with pytest.raises(ClientError, match=r"spec\.replicas"):
        job.scale(-1)
    status(api, namespace, "Succeeded")
    assert job.wait(timeout=30).state == "Succeeded"
    with pytest.raises(JobError, match=r"The job train has ended \(Succeeded\): it cannot be resized\."):
        job.scale(2)
    with pytest.raises(ClientError, match="exists and has ended"):
        client.submit("train.py", image="torch")
    job.delete()
    assert client.jobs() == []
    with pytest.raises(ClientError, match='"train" not found'):
        job.wait()
    assert client.submit("train.py", image="torch").name == "train", "the name is free again"


def test_refusal_of_the_api_server_is_the_message_and_leaves_nothing(client: Client) -> None:
    with pytest.raises(ClientError, match=r"spec\.framework"):
        client.submit("train.py", image="torch", framework="Cobol")
    assert client.jobs() == []


def _rule(group: str, resources: list[str], *verbs: str) -> dict[str, Any]:
    return {"apiGroups": [group], "resources": resources, "verbs": list(verbs)}


RIGHTS = [
    _rule("regroup.dev", ["distributedtrainingjobs"], "get", "list", "create", "patch", "delete"),
    _rule("regroup.dev", ["distributedtrainingjobs/scale"], "patch"),
    _rule("", ["configmaps"], "create", "patch"),
    _rule("", ["pods", "pods/log", "events"], "get", "list"),
    _rule("", ["persistentvolumeclaims"], "get", "create", "patch"),
]
"""The rights that docs/how-to/use-from-python.md names."""


def test_client_in_a_pod_has_the_rights_of_its_service_account(
    api: Api, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubeconfig = yaml.safe_load(api.kubeconfig.read_text())["clusters"][0]["cluster"]
    where = urlsplit(kubeconfig["server"])
    given = kubeconfig.get("certificate-authority-data")
    trusted = base64.b64decode(given) if given else Path(kubeconfig["certificate-authority"]).read_bytes()
    api.done("create", "serviceaccount", "driver", f"--namespace={namespace}")
    token = api.done("create", "token", "driver", f"--namespace={namespace}")
    for name, content in (("ca.crt", trusted), ("token", token.encode()), ("namespace", namespace.encode())):
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(access, "ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", str(where.hostname))
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(where.port))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")  # no kubectl is needed
    monkeypatch.delenv("KUBECONFIG", raising=False)
    (tmp_path / "train.py").write_text("print('hi')\n")
    with Client() as client:
        with pytest.raises(ClientError, match=rf'"system:serviceaccount:{namespace}:driver" cannot list'):
            client.jobs()
        metadata = {"name": "driver", "namespace": namespace}
        role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata, "rules": RIGHTS}
        api.done("apply", "--filename=-", document=role)
        binding = ["--role=driver", f"--serviceaccount={namespace}:driver", f"--namespace={namespace}"]
        api.done("create", "rolebinding", "driver", *binding)
        until(lambda: _is_allowed(client), "the rights")
        job = client.submit(tmp_path / "train.py", image="torch", max=3, checkpoint="new:1Gi")
        assert job.status().namespace == namespace
        job.scale(2)
        job.suspend()
        assert list(job.logs()) == []
        job.delete()


def _is_allowed(client: Client) -> bool:
    try:
        return client.jobs() == []
    except ClientError:
        return False
