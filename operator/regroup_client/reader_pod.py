"""The pod that reads a job's checkpoint claim for `regroup checkpoint pull`: its manifest, and what its status means. No I/O.

Pods that have ended cannot be entered, and a claim has no other door. The pod runs in the job's own image, which is on the nodes
and has python3 (adr/0093). It mounts the claim read-only, has no token, and fits the Pod Security standard restricted.

The pod ends by itself in three ways. Its process ends once nobody has read for IDLE_S, Kubernetes ends it after LONGEST_S, and the
garbage collector deletes it with its job.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regroup_client.errors import PullError

Object = dict[str, Any]
LABEL = "regroup.dev/pull-of"
"""Label of such a pod: the job's name. The operator and the lists of a job's workers know another label, and so not this pod."""
CONTAINER = "reader"
MOUNT = "/checkpoint"
IDLE_S = 60
LONGEST_S = 6 * 3600
NOBODY = 65534
"""The user id of the reading pod if the job's template names none. It reads what everyone may read."""
_TRAINER = "trainer"
# A process that kubectl exec starts is in the same PID namespace. Nothing else runs there.
_WAIT = f"""\
import os, time
idle = 0
while idle < {IDLE_S}:
    time.sleep(1)
    idle = 0 if sum(name.isdigit() for name in os.listdir("/proc")) > 1 else idle + 1
"""
_FINAL_WAITS = frozenset({"InvalidImageName", "CreateContainerConfigError", "ErrImageNeverPull"})
"""Reasons for which a container waits and that time does not change."""


@dataclass(frozen=True)
class Volume:
    """The claim with a job's checkpoints, and the directory in it."""

    claim: str
    sub_path: str = ""


@dataclass(frozen=True)
class Reader:
    """The choices for one reading pod."""

    name: str

    node: str = ""
    """The only node on which the claim can be mounted now. Empty: the scheduler chooses."""

    user: int | None = None
    """User id that the user gave. None: that of the job's template."""


def volume_of(job: Object) -> Volume:
    """Return where a job's checkpoints are. Raises PullError if they are on no claim."""
    name, checkpoint = job["metadata"]["name"], (job.get("spec") or {}).get("checkpoint") or {}
    if claim := checkpoint.get("volumeClaim"):
        return Volume(claim)
    path = checkpoint.get("path")
    if not path:
        raise PullError(f"The job {name} has no spec.checkpoint, so that no volume holds its checkpoints.")
    pod = _template(job)
    mounts = [one for one in _trainer(pod).get("volumeMounts") or () if _below(path, one["mountPath"]) is not None]
    mount = max(mounts, key=lambda one: len(one["mountPath"]), default=None)
    volumes = {one["name"]: one for one in pod.get("volumes") or ()}
    source = {} if mount is None else volumes.get(mount["name"], {})
    if mount is None or "persistentVolumeClaim" not in source:
        raise PullError(
            f"spec.checkpoint.path ({path}) of the job {name} is on no volume claim, and pull can mount nothing else. Copy the "
            "files from where the volume is."
        )
    below = _below(path, mount["mountPath"]) or ""
    return Volume(source["persistentVolumeClaim"]["claimName"], posixpath.join(mount.get("subPath") or "", below))


def _below(path: str, mount: str) -> str | None:
    """Return `path` relative to a mount, or None if it is not in it."""
    whole, top = posixpath.normpath(path), posixpath.normpath(mount)
    if whole == top:
        return ""
    return whole[len(top.rstrip("/")) + 1 :] if whole.startswith(top.rstrip("/") + "/") else None


def only_node(claim: Object, pods: Iterable[Object]) -> str:
    """Return the node on which a claim must be mounted because its pods there hold it, or "". Raises PullError if nobody else may.

    `claim` is the PersistentVolumeClaim, `pods` are those of its namespace.
    """
    name = claim["metadata"]["name"]
    modes = {
        *((claim.get("spec") or {}).get("accessModes") or ()),
        *((claim.get("status") or {}).get("accessModes") or ()),
    }
    if modes & {"ReadWriteMany", "ReadOnlyMany"}:
        return ""
    holders = [pod for pod in pods if name in _claims(pod) and _holds(pod)]
    if holders and "ReadWriteOncePod" in modes:
        raise PullError(
            f"The claim {name} is ReadWriteOncePod, and the pod {holders[0]['metadata']['name']} has it. Pull once that pod has "
            "ended."
        )
    return next((pod["spec"]["nodeName"] for pod in holders), "")


def _holds(pod: Object) -> bool:
    placed = (pod.get("spec") or {}).get("nodeName")
    return bool(placed) and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")


def _claims(pod: Object) -> Iterator[str]:
    for volume in (pod.get("spec") or {}).get("volumes") or ():
        if "persistentVolumeClaim" in volume:
            yield volume["persistentVolumeClaim"]["claimName"]


def manifest(job: Object, volume: Volume, reader: Reader) -> Object:
    """Return the pod that reads `volume` for a job."""
    template, metadata = _template(job), job["metadata"]
    trainer = _trainer(template)
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": metadata["name"], "uid": metadata["uid"]}
    mount = {"name": "checkpoint", "mountPath": MOUNT, "readOnly": True}
    container: Object = {
        "name": CONTAINER,
        "image": trainer["image"],
        "command": ["python3", "-I", "-c", _WAIT],
        "workingDir": "/",
        "volumeMounts": [mount | ({"subPath": volume.sub_path} if volume.sub_path else {})],
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    if "imagePullPolicy" in trainer:
        container["imagePullPolicy"] = trainer["imagePullPolicy"]
    spec: Object = {
        "containers": [container],
        # Not read-only in the volume itself: some drivers would attach it anew for that, while the job has it attached.
        "volumes": [{"name": "checkpoint", "persistentVolumeClaim": {"claimName": volume.claim}}],
        "restartPolicy": "Never",
        "activeDeadlineSeconds": LONGEST_S,
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _identity(template, trainer, reader.user),
    }
    for field in ("imagePullSecrets", "nodeSelector", "serviceAccountName", "tolerations"):
        if template.get(field):
            spec[field] = template[field]
    if reader.node:
        # By affinity and not by nodeName: the scheduler then finds the room, and says if there is none.
        term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [reader.node]}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
        spec["affinity"] = {"nodeAffinity": required}
    labels = {LABEL: metadata["name"]}
    pod = {"name": reader.name, "namespace": metadata["namespace"], "labels": labels, "ownerReferences": [owner]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": pod, "spec": spec}


def _template(job: Object) -> Object:
    found: Object = (((job.get("spec") or {}).get("template")) or {}).get("spec") or {}
    return found


def _trainer(pod: Object) -> Object:
    containers = pod.get("containers") or [{}]
    found: Object = next((one for one in containers if one.get("name") == _TRAINER), containers[0])
    return found


def _identity(pod: Object, trainer: Object, user: int | None) -> Object:
    """Return the security context of the pod: the job's user and groups, because they may read what the job has written."""
    given = {**(pod.get("securityContext") or {}), **(trainer.get("securityContext") or {})}
    names = ("runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy", "supplementalGroups", "seLinuxOptions")
    kept = {name: given[name] for name in names if name in given}
    chosen = user if user is not None else kept.get("runAsUser") or NOBODY
    if chosen != kept.get("runAsUser"):
        kept.pop("runAsGroup", None)
    return {
        **kept,
        "runAsUser": chosen,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def is_ready(pod: Object) -> bool:
    """Return whether the reading process runs. Raises PullError if it never will."""
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    container = _status_of_container(pod)
    state = container.get("state") or {}
    if status.get("phase") in ("Succeeded", "Failed") or "terminated" in state:
        raise PullError(f"The pod {name}, which reads the checkpoints, ended at once: {_end(status, state)}")
    waiting = state.get("waiting") or {}
    if waiting.get("reason") in _FINAL_WAITS:
        raise PullError(f"The pod {name}, which reads the checkpoints, cannot start: {_joined(waiting)}")
    return "running" in state


def _status_of_container(pod: Object) -> Object:
    found = (pod.get("status") or {}).get("containerStatuses") or ()
    return next(iter(found), {})


def _end(status: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    ended = state.get("terminated") or {}
    said = _joined(ended or status)
    if ended.get("reason") in ("StartError", "ContainerCannotRun") or ended.get("exitCode") in (126, 127, 128):
        return f"{said} The job's image must have python3."
    return said


def _joined(about: Mapping[str, Any]) -> str:
    reason, message = about.get("reason") or "it gave no reason", " ".join((about.get("message") or "").split())
    return f"{reason}: {message.rstrip('.')}." if message else f"{reason}."


def late(pod: Object, events: Sequence[Object], reader: Reader, waited_s: float) -> str:
    """Return the sentence for a pod that has not started in time: what it waits for, and what to do."""
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    begin = f"The pod {name}, which reads the checkpoints, did not start in {waited_s:.0f} s"
    placed: Object = next((one for one in status.get("conditions") or () if one["type"] == "PodScheduled"), {})
    if placed.get("status") == "False":
        if reader.node:
            return (
                f"{begin}: the claim can be mounted on node {reader.node} only, where a pod has it, and there is no room "
                f"({_joined(placed).rstrip('.')}). Pull once that pod has ended."
            )
        return f"{begin}: {_joined(placed)} Make room, or try again with a longer --wait."
    waiting = (_status_of_container(pod).get("state") or {}).get("waiting") or {}
    said = [one for one in events if one.get("type") == "Warning" and one.get("message")]
    if waiting.get("reason") in (None, "ContainerCreating", "PodInitializing") and said:
        return f"{begin}: {_joined(said[-1])} Try again with a longer --wait."
    what = _joined(waiting) if waiting else "no kubelet has begun with it."
    return f"{begin}: {what} Try again with a longer --wait."
