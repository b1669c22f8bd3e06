"""The files made from the models are in the repository as the models say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from regroup_operator.api.crd import custom_resource_definition
from regroup_operator.generate import drifted, main

ROOT = Path(__file__).resolve().parents[2]


def test_generated_files_have_not_drifted() -> None:
    assert drifted(ROOT) == [], "run `python -m regroup_operator.generate`"


def test_check_fails_on_a_changed_file_and_generation_mends_it(tmp_path: Path) -> None:
    assert main(["--check", "--root", str(tmp_path)]) == 1
    assert main(["--root", str(tmp_path)]) == 0
    assert main(["--check", "--root", str(tmp_path)]) == 0
    path = tmp_path / "crds" / "regroup.dev_distributedtrainingjobs.yaml"
    path.write_text(path.read_text().replace("maximum: 5000", "maximum: 5", 1))
    assert main(["--check", "--root", str(tmp_path)]) == 1


def test_chart_keeps_the_definition_when_it_is_uninstalled() -> None:
    chart = yaml.safe_load((ROOT / "helm/regroup/templates/crd.yaml").read_text())
    assert chart["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert chart == custom_resource_definition()


def test_spec_has_exactly_the_fields_that_have_behaviour() -> None:
    spec = _schema()["properties"]["spec"]["properties"]
    assert {name: sorted(node.get("properties", {})) for name, node in spec.items()} == {
        "replicas": [],
        "elasticPolicy": [
            "growAt",
            "growthCooldownSeconds",
            "maxReplicas",
            "minReplicas",
            "pendingTimeoutSeconds",
            "sizeMultipleOf",
            "sizes",
        ],
        "processesPerWorker": [],
        "framework": [],
        "workersPerGroup": [],
        "template": ["metadata", "spec"],
        "roles": [],
        "checkpoint": ["everySeconds", "keep", "path", "resumeFrom", "volumeClaim"],
        "memorySnapshot": ["everySeconds", "sizeLimit"],
        "progress": ["log"],
        "recovery": [
            "disconnectSeconds",
            "gracefulStop",
            "hangSeconds",
            "maxRestarts",
            "onExit",
            "rejoinSeconds",
            "spares",
            "windowSeconds",
        ],
        "network": ["podNames"],
        "runPolicy": [
            "activeDeadlineSeconds",
            "cleanPodPolicy",
            "finishSeconds",
            "managedBy",
            "startDeadlineSeconds",
            "suspend",
            "ttlSecondsAfterFinished",
        ],
    }


def test_every_field_is_described_for_kubectl_explain() -> None:
    bare = [path for path, node in _walk("", _schema()) if path.count(".") > 1 and not node.get("description")]
    assert bare == []


def _schema() -> dict[str, Any]:
    schema: dict[str, Any] = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def _walk(path: str, node: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found = [(path, node)]
    for name, child in node.get("properties", {}).items():
        found += _walk(f"{path}.{name}", child)
    if node.get("items", {}).get("properties"):
        found += [
            pair for name, child in node["items"]["properties"].items() for pair in _walk(f"{path}[].{name}", child)
        ]
    return found
