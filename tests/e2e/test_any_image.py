"""Jobs in images that have nothing of ours: the init container brings agent and library, and `import regroup` works.

The script runs a session and imports the library in child interpreters, too. Among the images are one without pip, one with a
read-only root, and a user id without account; the torches and Pythons are the oldest and the newest that Regroup supports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster.kubectl import Kubectl, wait_until
from harness import installation
from harness.job import JobView
from tests.e2e import pythons
from tests.long import only_long

SCRIPT = Path(__file__).parents[1] / "trainer" / "bare_job.py"
NOTES = "/notes"
LIBRARY = "/regroup/state/library/packages/regroup/__init__.py"
READ_ONLY: Mapping[str, Any] = {"readOnlyRootFilesystem": True}
NO_ACCOUNT: Mapping[str, Any] = {"runAsUser": 23456, "runAsGroup": 34567}


def run(
    k: Kubectl, namespace: str, name: str, image: str, security: Mapping[str, Any], python: str = ""
) -> dict[str, str]:
    """Run the job to its end. Return where each interpreter has found the library.

    `python` is the claim of a volume with a Python that comes before the image's.
    """
    notes = installation.volume(k, namespace, f"{name}-notes")
    code = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": namespace}}
    k.apply({**code, "data": {"train.py": SCRIPT.read_text()}})
    volumes: list[dict[str, Any]] = [
        {"name": "code", "configMap": {"name": name}},
        {"name": "notes", "persistentVolumeClaim": {"claimName": f"{name}-notes"}},
    ]
    mounts = [{"name": "code", "mountPath": "/code"}, {"name": "notes", "mountPath": NOTES}]
    env = [{"name": "WHERE", "value": NOTES}]
    if python:
        volumes.append({"name": "python", "persistentVolumeClaim": {"claimName": python, "readOnly": True}})
        mounts.append({"name": "python", "mountPath": "/python"})
        env.append({"name": "PATH", "value": "/python/bin:/usr/bin:/bin"})
        env.append({"name": "LD_LIBRARY_PATH", "value": "/python/lib"})  # pyenv's libpython is where it was built
    trainer = {
        "name": "trainer",
        "image": image,
        "command": ["python3", "-u", "/code/train.py"],
        "env": env,
        "volumeMounts": mounts,
        "resources": {"requests": {"cpu": "100m", "memory": "300Mi"}, "limits": {"memory": "3Gi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, **security},
    }
    pod = {
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": 5,
        "volumes": volumes,
        "containers": [trainer],
    }
    metadata = {"name": name, "namespace": namespace}
    spec = {"replicas": 2, "template": {"spec": pod}}
    k.apply(
        {"apiVersion": "regroup.dev/v1alpha1", "kind": "DistributedTrainingJob", "metadata": metadata, "spec": spec}
    )
    view = JobView(k, namespace, name)
    wait_until(lambda: _state(view) in ("Succeeded", "Failed"), f"{name} trains to its end", timeout_s=240)
    said = [condition["message"] for condition in view.status()["conditions"]]
    logs = "\n".join(view.logs(pod["metadata"]["name"])[-2000:] for pod in view.pods())
    assert _state(view) == "Succeeded", f"{said}\n{logs}"
    return {path.name: path.read_text() for path in notes.iterdir()}


def _state(job: JobView) -> str:
    return str((job.status().get("summary") or {}).get("state"))


def shows(notes: dict[str, str]) -> None:
    found = {who: notes[who] for who in ("trainer", "subprocess", "spawn")}
    assert set(found.values()) == {LIBRARY}, json.dumps(notes)


@pytest.mark.parametrize(
    ("name", "security"),
    [
        pytest.param("without-pip", {}, id="without pip"),
        pytest.param("read-only", {**READ_ONLY, **NO_ACCOUNT}, id="a read-only root and a user id without account"),
    ],
)
def test_job_trains_in_an_image_that_has_nothing_of_ours(
    operator: Kubectl, train_namespace: str, torch_image: str, name: str, security: Mapping[str, Any]
) -> None:
    shows(run(operator, train_namespace, name, torch_image, security))


REST = only_long("the oldest and the newest pair of Python and torch")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "torch"),
    [
        ("3.10", "2.11.0"),
        ("3.13", "2.13.0"),
        pytest.param("3.10", "2.13.0", marks=REST),
        pytest.param("3.11", "2.11.0", marks=REST),
        pytest.param("3.11", "2.13.0", marks=REST),
        pytest.param("3.12", "2.11.0", marks=REST),
        pytest.param("3.12", "2.13.0", marks=REST),
        pytest.param("3.13", "2.11.0", marks=REST),
    ],
)
def test_library_runs_under_every_supported_python_and_torch(
    operator: Kubectl, train_namespace: str, torch_image: str, version: str, torch: str
) -> None:
    name = f"python{version}-torch{torch}".replace(".", "-")
    directory = installation.volume(operator, train_namespace, f"{name}-python")
    pythons.put(directory, version, torch)
    notes = run(operator, train_namespace, name, torch_image, NO_ACCOUNT, python=f"{name}-python")
    shows(notes)
    assert notes["versions"] == f"{version} {torch}"
