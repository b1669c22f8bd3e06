"""The CustomResourceDefinition, made from the models. Pure.

Owns what only the CRD has: structural schema, columns, scale subresource, and the rule that reads metadata. Bounds on
template lists exist because CEL's cost is estimated from them; without them the API server refuses the CRD.
"""

from __future__ import annotations

from typing import Any

from regroup_operator.api.base import cel
from regroup_operator.api.changes import CHANGE_RULES
from regroup_operator.api.names import MAX_JOB_NAME
from regroup_operator.api.spec import JobSpec
from regroup_operator.api.status import JobStatus

GROUP = "regroup.dev"
VERSION = "v1alpha1"
KIND = "DistributedTrainingJob"
PLURAL = "distributedtrainingjobs"
SINGULAR = "distributedtrainingjob"

_KEPT = (
    "type",
    "description",
    "default",
    "enum",
    "format",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "required",
)

OBJECT_RULES = [
    cel(
        f"self.metadata.name.size() <= {MAX_JOB_NAME} && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        f"metadata.name must have at most {MAX_JOB_NAME} characters, start with a letter and contain only a-z, 0-9 "
        "and -. Choose another name.",
        f"'metadata.name (' + self.metadata.name + ') must have at most {MAX_JOB_NAME} characters, start with a "
        "letter and contain only a-z, 0-9 and -. Choose another name.'",
    ),
    *CHANGE_RULES,
]


def _column(name: str, type: str, path: str, description: str, *, wide: bool = False) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": type, "jsonPath": path, "description": description}
    if wide:
        column["priority"] = 1
    return column


COLUMNS = [
    _column("State", "string", ".status.summary.state", "What the job is doing, or why it was rejected."),
    _column("Ready", "string", ".status.summary.ready", "Ready and wanted workers."),
    _column(
        "Step",
        "string",
        ".status.summary.step",
        "Last step that the failure of a worker cannot undo; of a script without the library the step that it says, or + and the "
        "number of optimizer steps since its start.",
    ),
    _column("Progress", "string", ".status.summary.progress", "Share of committed steps."),
    _column("Loss", "string", ".status.summary.loss", "Loss of the last reported step."),
    _column("Restarts", "integer", ".status.restarts.total", "Restarted training processes and replaced pods."),
    _column("ETA", "string", ".status.summary.eta", "Estimated time left; empty unless Running."),
    _column("Age", "date", ".metadata.creationTimestamp", "Time since the job was created."),
    _column("Seen", "date", ".status.observedAt", "Time since the operator last wrote this line."),
    _column("Generation", "integer", ".status.membership.generation", "Number of the newest generation.", wide=True),
    _column("Samples/s", "number", ".status.progress.samplesPerSecond", "Committed samples per second.", wide=True),
]

UNSEEN_STATUS = {"summary": {"state": "AwaitingOperator"}}
"""Status of a job that no operator has looked at yet. Never stored; the first write replaces it."""


def object_schema() -> dict[str, Any]:
    """Return the structural schema of the whole object."""
    return {
        "type": "object",
        "description": "A PyTorch training job that survives failures and can be resized while it runs.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural(JobSpec.model_json_schema(by_alias=True)),
            # What the operator leaves out of a status is absent there, not filled in by the API server.
            "status": {
                **_without_defaults(structural(JobStatus.model_json_schema(by_alias=True))),
                "default": UNSEEN_STATUS,
            },
        },
        "x-kubernetes-validations": OBJECT_RULES,
    }


def custom_resource_definition() -> dict[str, Any]:
    """Return the CRD as a dict for YAML."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": ["trainingjobs", "trainingjob", "dtj"],
                "categories": ["training"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": object_schema()},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": COLUMNS,
                }
            ],
        },
    }


def structural(schema: dict[str, Any]) -> dict[str, Any]:
    """Return pydantic's JSON schema as Kubernetes wants it: references inlined, null left out, extensions kept."""
    return _structural(schema, schema.get("$defs", {}))


def _structural(node: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    node = _resolve(node, defs)
    result: dict[str, Any] = {key: node[key] for key in _KEPT if key in node and node[key] is not None}
    if "description" in result:
        result["description"] = " ".join(str(result["description"]).split())
    result.update({key: value for key, value in node.items() if key.startswith("x-kubernetes-")})
    if "properties" in node:
        result["properties"] = {name: _structural(child, defs) for name, child in node["properties"].items()}
    extra = node.get("additionalProperties")
    if extra is True:
        result["x-kubernetes-preserve-unknown-fields"] = True
    elif isinstance(extra, dict):
        result["additionalProperties"] = _structural(extra, defs)
    if "items" in node:
        result["items"] = _structural(node["items"], defs)
    return result


def _without_defaults(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_defaults(child) for key, child in node.items() if key != "default"}
    if isinstance(node, list):
        return [_without_defaults(child) for child in node]
    return node


def _resolve(node: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """Inline a reference and drop the null of an optional; what the field says wins over what its type says."""
    node = dict(node)
    if "anyOf" in node:
        (only,) = [option for option in node.pop("anyOf") if option.get("type") != "null"]
        node = {**_resolve(only, defs), **node}
    if "$ref" in node:
        name = node.pop("$ref").rsplit("/", 1)[-1]
        node = {**_resolve(defs[name], defs), **node}
    return node
