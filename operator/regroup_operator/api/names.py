"""Names and labels of everything that belongs to a job. One function builds each, and one reads it back.

Pure strings; which pod holds which slot is decided by the generation, never by these labels.
"""

from __future__ import annotations

import re

LABEL_JOB_NAME = "regroup.dev/job-name"
LABEL_ROLE = "regroup.dev/role"
LABEL_SLOT = "regroup.dev/slot"
LABEL_ATTEMPT = "regroup.dev/attempt"
"""Label that says, with the slot, what a worker's pod was made as: for selectors and people. The operator reads both from the
pod's name, which nobody can change (adr/0049)."""
LABEL_LEADER = "regroup.dev/leader"
"""Label of the operator's own pods: "true" on the leader; the membership Service selects it."""
ANNOTATION_SPEC_DIGEST = "regroup.dev/spec-digest"
"""Annotation of a worker's pod: `api.job.worker_digest` of the job that it was made from."""
ANNOTATION_TRAINER = "regroup.dev/trainer-container"
"""Annotation of a worker's pod: the name of the trainer's container, if it is not `trainer`. A webhook may have added further
containers to the pod."""

ROLE_WORKER = "worker"
TRAINER_CONTAINER = "trainer"
"""Name of the trainer's container, unless the template has only one container."""

MAX_JOB_NAME = 45
"""Leaves room in a 63 character label for `-worker-<slot>-<n>`."""

_WORKER = re.compile(r"^(?P<job>.+)-worker-(?P<slot>0|[1-9]\d*)-(?P<attempt>0|[1-9]\d*)$")


def worker_pod_name(job_name: str, slot: int, attempt: int) -> str:
    """Return the name of the pod that is the `attempt`-th (from 0) made for `slot`."""
    return f"{job_name}-worker-{slot}-{attempt}"


def parse_worker_pod_name(pod_name: str) -> tuple[str, int, int] | None:
    """Return (job name, slot, attempt) of a worker's pod name, or None when it is not one."""
    found = _WORKER.match(pod_name)
    if found is None:
        return None
    return found["job"], int(found["slot"]), int(found["attempt"])


ROLE_PATTERN = "^[a-z][a-z0-9]{0,11}$"
"""A role's name: short and without a hyphen, so that `<job>-<role>-<index>` fits into a host name and can be read back."""
_ROLE_POD = re.compile(r"^(?P<job>.+)-(?P<role>[a-z][a-z0-9]{0,11})-(?P<index>0|[1-9]\d*)-(?P<attempt>0|[1-9]\d*)$")


def role_pod_name(job_name: str, role: str, index: int, attempt: int) -> str:
    """Return the name of the pod that is the `attempt`-th (from 0) made for a place of a role."""
    return f"{role_host_name(job_name, role, index)}-{attempt}"


def role_place(role: str, index: int) -> str:
    """Return the name of a place of a role within its job."""
    return f"{role}-{index}"


def role_host_name(job_name: str, role: str, index: int) -> str:
    """Return the host name of a place of a role: the same for each of its pods."""
    return f"{job_name}-{role_place(role, index)}"


def parse_role_pod_name(pod_name: str) -> tuple[str, str, int, int] | None:
    """Return (job name, role, index, attempt) of the name of a role's pod, or None when it is not one. A worker's is none."""
    found = _ROLE_POD.match(pod_name)
    if found is None or found["role"] == ROLE_WORKER:
        return None
    return found["job"], found["role"], int(found["index"]), int(found["attempt"])


def role_labels(job_name: str, role: str) -> dict[str, str]:
    """Return the labels that select the pods of one role of a job."""
    return {LABEL_JOB_NAME: job_name, LABEL_ROLE: role}


def service_name(job_name: str) -> str:
    """Return the name of the job's headless Service."""
    return job_name


def config_map_name(job_name: str) -> str:
    """Return the name of the ConfigMap that carries the membership endpoint's CA bundle to the agents."""
    return f"{job_name}-regroup"


def worker_labels(job_name: str) -> dict[str, str]:
    """Return the labels that select the workers of one job; `selector()` is their string form."""
    return {LABEL_JOB_NAME: job_name, LABEL_ROLE: ROLE_WORKER}


def selector(job_name: str) -> str:
    """Return `status.selector`: what an autoscaler uses to find the job's workers."""
    return ",".join(f"{key}={value}" for key, value in worker_labels(job_name).items())
