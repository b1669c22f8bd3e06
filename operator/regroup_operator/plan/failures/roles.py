"""Judge whether a pod of a role fails the job. Pure. docs/design/adr/0053-roles.md"""

from __future__ import annotations

from collections.abc import Iterable

from regroup_operator.api import Job
from regroup_operator.model.plan import Verdict
from regroup_operator.model.records import Pod

ROLE_FAILED = "RoleFailed"


def role_verdict(job: Job, pods: Iterable[Pod]) -> Verdict | None:
    """Return why a role fails the job: a pod of one that is not to be restarted has failed by itself. Pods that were evicted or
    deleted, or ended with their node (which a kubelet announces when it shuts down), are replaced."""
    never = {role.name for role in job.spec.roles if role.template.spec.restart_policy == "Never"}
    for pod in pods:
        failed = pod.role in never and pod.phase == "Failed" and pod.last_exit_code is not None
        outside = pod.terminating or pod.disrupted or pod.disruption or pod.end_unseen
        if failed and not outside:
            return Verdict(
                ROLE_FAILED,
                f"Pod {pod.name} of role {pod.role} ended with exit code {pod.last_exit_code}, and its restartPolicy is Never. "
                f"Log: kubectl logs --namespace={pod.namespace} {pod.name} --all-containers",
                pod=pod.name,
            )
    return None
