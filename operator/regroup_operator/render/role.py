"""The pod of a role: the user's template with a name, an address and a few variables. There is no agent in it."""

from __future__ import annotations

import json
from typing import Any

from regroup.protocol import env, frameworks
from regroup_operator.api import Job
from regroup_operator.api.frameworks import EVALUATOR
from regroup_operator.api.job import role_digest
from regroup_operator.api.names import (
    ANNOTATION_SPEC_DIGEST,
    LABEL_ATTEMPT,
    LABEL_SLOT,
    role_host_name,
    role_labels,
    role_pod_name,
)
from regroup_operator.render.objects import app_labels, metadata, name_in_dns, resolve_names

ROLE_NAME, ROLE_INDEX = "REGROUP_ROLE", "REGROUP_ROLE_INDEX"
"""Environment variables of a role's containers: which role, and which of its pods."""


def role_pod(job: Job, role: str, index: int, attempt: int) -> dict[str, Any]:
    """Return the pod that is the `attempt`-th made for a place of a role."""
    template = job.role_template(role)
    user = template.get("metadata") or {}
    labels = {**role_labels(job.name, role), LABEL_SLOT: str(index), LABEL_ATTEMPT: str(attempt)}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata(job, role_pod_name(job.name, role, index, attempt), labels),
        "spec": template["spec"],
    }
    component = {"app.kubernetes.io/component": role}
    pod["metadata"]["labels"] = {**app_labels(job), **component, **(user.get("labels") or {}), **labels}
    pod["metadata"]["annotations"] = {**(user.get("annotations") or {}), ANNOTATION_SPEC_DIGEST: role_digest(job, role)}
    spec: dict[str, Any] = pod["spec"]
    spec.setdefault("restartPolicy", "OnFailure")
    spec.setdefault("automountServiceAccountToken", False)
    name_in_dns(spec, job, role_host_name(job.name, role, index))
    resolve_names(spec)
    ours = {env.JOB_NAME: job.name, ROLE_NAME: role, ROLE_INDEX: str(index)}
    if (job.spec.framework, role) == (frameworks.TENSORFLOW, EVALUATOR):
        # An evaluator is outside of the cluster, in TensorFlow as here: it reads checkpoints.
        ours["TF_CONFIG"] = json.dumps({"cluster": {}, "task": {"type": EVALUATOR, "index": index}})
    for container in spec["containers"]:
        given = [{"name": name, "value": value} for name, value in ours.items()]
        container["env"] = [*given, *(container.get("env") or [])]
    return pod
