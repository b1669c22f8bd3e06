"""What `regroup convert` writes, on a real API server: the jobs are taken, and so are the pods that the operator makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from regroup_cli.convert.documents import as_yaml
from regroup_operator.api import parse_job
from regroup_operator.render import dry_run_pod
from regroup_operator.render.role import role_pod
from tests.api.conftest import Api
from tests.api.test_rendered import SETTINGS, STRICT
from tests.unit.cli.convert.golden import NAMES, made


@pytest.mark.parametrize("name", NAMES)
def test_converted_job_and_its_pods_are_accepted(api: Api, namespace: str, name: str) -> None:
    documents = list(yaml.safe_load_all(made(name)[0]))
    for document in documents:
        document["metadata"]["namespace"] = namespace
        api.done(*STRICT, document=document)
    priority = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "high"}, "value": 1}
    api.done("apply", "--filename=-", document=priority)
    (raw,) = api.get("dtj", f"--namespace={namespace}")["items"]
    job = parse_job(raw)
    for pod in (dry_run_pod(job, settings=SETTINGS), *(role_pod(job, role.name, 0, 0) for role in job.spec.roles)):
        api.done(*STRICT, "--dry-run=server", document=pod)


def test_texts_stay_texts_for_kubectl(api: Api, tmp_path: Path) -> None:
    """It reads YAML by other rules than PyYAML."""
    texts = ["1e-4", "y", "0o17", "+5e3", "12:30:45", "1_000", ".5", "No", "0b11", "1."]
    document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "texts"}, "data": {}}
    file = tmp_path / "texts.yaml"
    file.write_text(as_yaml([{**document, "data": {f"k{number}": one for number, one in enumerate(texts)}}]))
    read = api.done("label", "--local", f"--filename={file}", "--output=json", "a=b")
    assert list(json.loads(read)["data"].values()) == texts
