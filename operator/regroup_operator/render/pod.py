"""A worker's pod: the user's template, and the agent in it.

The trainer container keeps image, args, resources and everything else; its command becomes the agent's, with the
original behind `--`. The agent arrives by an init container from the operator's image, so that a training image needs
nothing but Python. If the template passes Pod Security "restricted", so does the pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regroup.protocol import env
from regroup_operator.api import Job, processes_per_worker, worker_digest
from regroup_operator.api.launcher import trainer_of
from regroup_operator.api.names import (
    ANNOTATION_SPEC_DIGEST,
    ANNOTATION_TRAINER,
    LABEL_ATTEMPT,
    LABEL_SLOT,
    TRAINER_CONTAINER,
    config_map_name,
    worker_labels,
    worker_pod_name,
)
from regroup_operator.api.spec import CHECKPOINT_DIR
from regroup_operator.model.records import Settings
from regroup_operator.render.objects import app_labels, metadata, name_in_dns, resolve_names
from regroup_operator.render.placement import avoid, spread

AGENT_IN_IMAGE = "/regroup/agent.pyz"
"""Path of the agent in the operator's image."""
AGENT_DIR = "/regroup/bin"
AGENT_USER = 65532
"""The user of the operator's image (Dockerfile)."""
STATE_DIR = "/regroup/state"
SNAPSHOT_DIR = "/regroup/snapshot"
IDENTITY_DIR = "/var/run/secrets/regroup"
TOKEN_AUDIENCE = "regroup"
TOKEN_SECONDS = 3600


@dataclass(frozen=True)
class RenderSettings:
    """Settings of the operator that pods depend on."""

    operator_url: str
    """https://regroup.<operator namespace>.svc:8443"""

    agent_image: str
    """Image that holds the agent: the operator's own."""

    agent_image_pull_policy: str = "IfNotPresent"

    agent_image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets in the job's namespace, added to the template's."""

    checkpoint_wait_s: float = Settings.checkpoint_s
    """Seconds that a script waits for one checkpoint at most."""


def worker_pod(
    job: Job, slot: int, attempt: int, *, settings: RenderSettings, avoid_nodes: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the pod that is the `attempt`-th made for `slot`; `avoid_nodes` are names of nodes it must not run on."""
    template = job.pod_template()
    user_metadata = template.get("metadata") or {}
    labels = {**worker_labels(job.name), LABEL_SLOT: str(slot), LABEL_ATTEMPT: str(attempt)}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata(job, worker_pod_name(job.name, slot, attempt), labels),
        "spec": template["spec"],
    }
    pod["metadata"]["labels"] = {**app_labels(job), **(user_metadata.get("labels") or {}), **labels}
    trainer = _trainer(template["spec"])
    named = {} if trainer["name"] == TRAINER_CONTAINER else {ANNOTATION_TRAINER: trainer["name"]}
    pod["metadata"]["annotations"] = {
        "kubectl.kubernetes.io/default-container": trainer["name"],
        **(user_metadata.get("annotations") or {}),
        ANNOTATION_SPEC_DIGEST: worker_digest(job),
        **named,
    }
    spec: dict[str, Any] = pod["spec"]
    spec["restartPolicy"] = "OnFailure"
    # What admission would fill in; said here, because a projected token needs it.
    spec.setdefault("serviceAccountName", "default")
    spec.setdefault("automountServiceAccountToken", False)
    name_in_dns(spec, job, pod["metadata"]["name"])
    resolve_names(spec)
    _add_agent(spec, settings)
    _add_volumes(spec, job)
    _wrap_trainer(trainer, job, slot, settings)
    if avoid_nodes:
        # Without our spread: the node to avoid is often the empty one, and both preferences weigh the same.
        avoid(spec, avoid_nodes)
    else:
        spread(spec, worker_labels(job.name))
    return pod


def dry_run_pod(job: Job, *, settings: RenderSettings) -> dict[str, Any]:
    """Return a pod to try against the API server: a worker's, under a name that no worker has."""
    pod = worker_pod(job, 0, 0, settings=settings)
    del pod["metadata"]["name"]
    pod["metadata"]["generateName"] = f"{job.name}-dry-run-"
    return pod


def _trainer(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trainer's container of a pod's spec, for the caller to change."""
    containers: list[dict[str, Any]] = spec["containers"]
    found = trainer_of(containers)
    return next(container for container in containers if container is found)


def _add_agent(spec: dict[str, Any], settings: RenderSettings) -> None:
    agent: dict[str, Any] = {
        "name": "regroup-agent",
        "image": settings.agent_image,
        "imagePullPolicy": settings.agent_image_pull_policy,
        "command": ["cp", AGENT_IN_IMAGE, f"{AGENT_DIR}/agent.pyz"],
        "volumeMounts": [{"name": "regroup-bin", "mountPath": AGENT_DIR}],
        "resources": _agent_resources(spec),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if (spec.get("securityContext") or {}).get("runAsUser") == 0:
        agent["securityContext"]["runAsUser"] = AGENT_USER  # else it inherits root, which runAsNonRoot refuses
    spec["initContainers"] = [agent, *(spec.get("initContainers") or [])]
    secrets = spec.get("imagePullSecrets") or []
    known = {secret.get("name") for secret in secrets}
    secrets += [{"name": name} for name in settings.agent_image_pull_secrets if name not in known]
    if secrets:
        spec["imagePullSecrets"] = secrets


def _agent_resources(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resources of the container that copies the agent: the trainer container's cpu and memory, as written."""
    # It ends before the trainer begins, and init containers count by their maximum: the pod asks for no more by that.
    # Numbers of our own would be refused by a LimitRange (min, maxLimitRequestRatio) that admits the user's, and would
    # change the QoS class. What the trainer does not say, the namespace's defaults fill in for both alike.
    trainer = _trainer(spec)
    given = trainer.get("resources") or {}
    copied = {
        kind: {name: amount for name, amount in (given.get(kind) or {}).items() if name in ("cpu", "memory")}
        for kind in ("requests", "limits")
    }
    return {kind: amounts for kind, amounts in copied.items() if amounts}


def _add_volumes(spec: dict[str, Any], job: Job) -> None:
    identity = {
        "sources": [
            {
                "serviceAccountToken": {
                    "audience": TOKEN_AUDIENCE,
                    "expirationSeconds": TOKEN_SECONDS,
                    "path": "token",
                }
            },
            {
                "configMap": {
                    "name": config_map_name(job.name),
                    "items": [{"key": "ca.crt", "path": "ca.crt"}],
                }
            },
        ]
    }
    volumes = [
        {"name": "regroup-bin", "emptyDir": {}},
        # On disk, not tmpfs, and the pod's, not the container's: what the agent promised outlives a container restart.
        {"name": "regroup-state", "emptyDir": {}},
        {"name": "regroup-identity", "projected": identity},
    ]
    trainer = _trainer(spec)
    mounts = [
        {"name": "regroup-bin", "mountPath": AGENT_DIR, "readOnly": True},
        {"name": "regroup-state", "mountPath": STATE_DIR},
        {"name": "regroup-identity", "mountPath": IDENTITY_DIR, "readOnly": True},
    ]
    users = trainer.get("volumeMounts") or []
    if not any(str(mount.get("mountPath")).rstrip("/") == "/dev/shm" for mount in users):
        # The runtime's own /dev/shm has 64 MiB, too little for data loaders and for gloo between processes.
        volumes.append({"name": "regroup-shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "regroup-shm", "mountPath": "/dev/shm"})
    checkpoint = job.spec.checkpoint
    if checkpoint is not None and checkpoint.volume_claim is not None:
        volumes.append({"name": "regroup-checkpoint", "persistentVolumeClaim": {"claimName": checkpoint.volume_claim}})
        mounts.append({"name": "regroup-checkpoint", "mountPath": CHECKPOINT_DIR})
    snapshot = job.spec.memory_snapshot
    if snapshot is not None:
        # In memory, and the pod's: it outlives the processes and the container.
        volumes.append({"name": "regroup-snapshot", "emptyDir": {"medium": "Memory", "sizeLimit": snapshot.size_limit}})
        mounts.append({"name": "regroup-snapshot", "mountPath": SNAPSHOT_DIR})
    spec["volumes"] = [*(spec.get("volumes") or []), *volumes]
    trainer["volumeMounts"] = [*users, *mounts]


def _wrap_trainer(trainer: dict[str, Any], job: Job, slot: int, settings: RenderSettings) -> None:
    # -I: neither the user's PYTHONPATH nor the working directory may change what the agent imports.
    trainer["command"] = ["python3", "-I", f"{AGENT_DIR}/agent.pyz", "--", *trainer["command"]]
    # Before the user's, so that theirs can refer to ours as $(NAME); none of theirs may have such a name.
    trainer["env"] = [*_environment(job, slot, settings), *(trainer.get("env") or [])]


def _agent_grace_s(job: Job) -> int:
    """Return the seconds that the agent may take to end: a sixth less than the kubelet's grace (25 of 30)."""
    grace = job.pod_template()["spec"].get("terminationGracePeriodSeconds")
    seconds = grace if isinstance(grace, int) and grace >= 0 else 30
    return seconds - seconds // 6


def stop_environment(job: Job) -> dict[str, str]:
    """Return the variables that tell the agent how a planned change ends a script. There are none without recovery.gracefulStop."""
    stop = job.spec.recovery.graceful_stop
    if stop is None:
        return {}
    told = {} if stop.signal is None else {env.STOP_SIGNAL: stop.signal}
    return {env.STOP_SECONDS: str(stop.seconds), **told}


def size_environment(job: Job) -> dict[str, str]:
    """Return the variable that tells the agent of an elastic job. There is none for a job of a fixed size."""
    return {env.ELASTIC: "1"} if job.elastic else {}


def _environment(job: Job, slot: int, settings: RenderSettings) -> list[dict[str, Any]]:
    processes = processes_per_worker(job)
    fields = {
        env.NAMESPACE: "metadata.namespace",
        env.POD_NAME: "metadata.name",
        env.POD_UID: "metadata.uid",
        env.POD_IP: "status.podIP",
    }
    values = {
        env.OPERATOR_URL: settings.operator_url,
        env.CA_FILE: f"{IDENTITY_DIR}/ca.crt",
        env.TOKEN_FILE: f"{IDENTITY_DIR}/token",
        env.STATE_DIR: STATE_DIR,
        env.JOB_NAME: job.name,
        env.JOB_UID: job.uid,
        env.PROCESSES: str(processes),
        env.FRAMEWORK: job.spec.framework,
        env.MAX_WORLD_SIZE: str(processes * job.max_replicas),
        env.MAX_RESTARTS: str(job.spec.recovery.max_restarts),
        env.GRACE_SECONDS: str(_agent_grace_s(job)),
    }
    values |= stop_environment(job) | size_environment(job)
    if job.spec.workers_per_group > 1:
        values[env.WORKERS_PER_GROUP] = str(job.spec.workers_per_group)
        values[env.GROUP_POSITION] = str(job.position(slot))
    checkpoint = job.spec.checkpoint
    if checkpoint is not None:
        values[env.CHECKPOINT_DIR] = checkpoint.directory
        if checkpoint.resume_path is not None:
            values[env.RESUME_FROM] = checkpoint.resume_path
        values[env.CHECKPOINT_EVERY_SECONDS] = str(checkpoint.every_seconds)
        values[env.CHECKPOINT_WAIT_SECONDS] = f"{settings.checkpoint_wait_s:g}"
    snapshot = job.spec.memory_snapshot
    if snapshot is not None:
        values[env.SNAPSHOT_DIR] = SNAPSHOT_DIR
        values[env.SNAPSHOT_BYTES] = str(snapshot.size_bytes)
        values[env.SNAPSHOT_EVERY_SECONDS] = str(snapshot.every_seconds)
    if job.progress_log is not None:
        values[env.PROGRESS_LOG] = job.progress_log.replace("$", "$$")  # the kubelet takes $(NAME) for a variable
    return [
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        *({"name": name, "value": value} for name, value in values.items()),
    ]
