"""The sample manifests show the fields of the resource: what a user may copy is there, and says what it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from regroup_operator.api.crd import custom_resource_definition

ROOT = Path(__file__).parents[2]
SAMPLES = sorted((ROOT / "manifests" / "samples").glob("*.yaml"))
NOT_SHOWN: Mapping[str, str] = {
    "spec.checkpoint.path": "volumeClaim is there; exactly one of them is allowed",
    "spec.checkpoint.resumeFrom": "it names a checkpoint that an earlier job has left; docs/how-to/continue-a-job.md shows it",
    "spec.elasticPolicy.sizeMultipleOf": "sizes is there; at most one of them is allowed",
    "spec.processesPerWorker": "the default is one for each GPU",
    "spec.recovery.disconnectSeconds": "the default suits most networks",
    "spec.recovery.gracefulStop.signal": "the script of the sample has no handler for a signal; a comment shows it",
    "spec.recovery.hangSeconds": "the default is learned from the job's own steps",
    "spec.recovery.rejoinSeconds": "the default continues at once, which most jobs want",
    "spec.runPolicy.managedBy": "with another value this operator leaves the job alone",
    "spec.workersPerGroup": "for models that are split over workers: docs/how-to/model-groups.md",
}
"""Fields that no sample has, and why."""


def fields(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """Return the fields of a schema, each element of a list as its list. A pod's template is Kubernetes' own."""
    if path.endswith(".template"):
        return
    inner = {**schema, **schema.get("items", {})}.get("properties")
    if inner is None:
        yield path
    for name, one in (inner or {}).items():
        yield from fields(one, f"{path}.{name}")


def shown(value: object, path: str) -> Iterator[str]:
    """Return the fields that a manifest has, as `fields` does."""
    if path.endswith(".template"):
        return
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        for one in value:
            yield from shown(one, path)
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from shown(one, f"{path}.{name}")
    else:
        yield path


def jobs() -> list[dict[str, Any]]:
    found = [document for path in SAMPLES for document in yaml.safe_load_all(path.read_text())]
    return [document for document in found if document["kind"] == "DistributedTrainingJob"]


def argvs(value: object) -> Iterator[list[str]]:
    """Return every command and its arguments in a manifest, those of init containers and roles included."""
    if isinstance(value, dict):
        if "command" in value or "args" in value:
            yield [*value.get("command", ()), *value.get("args", ())]
        for one in value.values():
            yield from argvs(one)
    elif isinstance(value, list):
        for one in value:
            yield from argvs(one)


def test_samples_need_no_bash() -> None:
    """Slim images have none, and the sentence of the runtime that misses it names no line of the manifest."""
    found = [argv for job in jobs() for argv in argvs(job)]
    assert len(found) >= len(SAMPLES)
    assert [argv for argv in found if any("bash" in word for word in argv)] == []


def test_samples_show_every_field_of_the_spec() -> None:
    (version,) = custom_resource_definition()["spec"]["versions"]
    known = set(fields(version["schema"]["openAPIV3Schema"]["properties"]["spec"], "spec"))
    assert {"spec.replicas", "spec.roles.requiredForCompletion", "spec.recovery.onExit.exitCodes.values"} <= known
    seen = {field for job in jobs() for field in shown(job["spec"], "spec")}
    assert known - seen == set(NOT_SHOWN)
    assert seen <= known


def test_page_on_writing_a_job_leads_to_every_sample() -> None:
    page = (ROOT / "docs/how-to/write-a-job.md").read_text()
    assert [path.name for path in SAMPLES if f"| `manifests/samples/{path.name}` |" not in page] == []
