"""Puts Regroup into the cluster as a user would: images, `helm upgrade --install`, a namespace, a volume."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from cluster import binaries, lifecycle, paths, progress
from cluster.kubectl import Kubectl, wait_until
from cluster.settings import Settings
from harness.job import RESOURCE

CHART = paths.REPOSITORY / "helm" / "regroup"
SYSTEM = "regroup-system"
RESTRICTED = "pod-security.kubernetes.io/enforce"


def kubectl() -> Kubectl:
    """Return kubectl for the cluster in use: the one-machine cluster, or the one that REGROUP_CONTEXT names."""
    existing = lifecycle.context()
    return Kubectl(None, context=existing) if existing else Kubectl(paths.kubeconfig())


def cluster_up() -> Kubectl:
    """Bring the cluster up, build and load the images. Idempotent: a second call takes seconds."""
    lifecycle.up(Settings())
    lifecycle.build_images(["trainer", "operator"])
    return kubectl()


def install(k: Kubectl, **values: Any) -> None:
    """Install or upgrade the chart. Return when an operator leads and all operators run the newest loaded image.

    `values` are dotted chart values.
    """
    was_there = k.run("--namespace", SYSTEM, "get", "deployments", "--output=name", "--ignore-not-found")
    with progress.step("helm upgrade --install regroup", "start", expected_s=10):
        command = [str(binaries.ensure() / "helm"), "upgrade", "--install", "regroup", str(CHART)]
        command += ["--namespace", SYSTEM, "--create-namespace", "--wait", "--timeout", "120s"]
        existing = lifecycle.context()
        command += ["--kube-context", existing] if existing else ["--kubeconfig", str(paths.kubeconfig())]
        for name, value in values.items():
            command += ["--set", f"{name}={value}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"helm could not install the chart: {done.stderr.strip()[-800:]}")
        if was_there:
            _restart_operators(k)
        wait_until(lambda: leader(k), "an operator holds the lease", timeout_s=60)


def _restart_operators(k: Kubectl) -> None:
    k.run("--namespace", SYSTEM, "rollout", "restart", "deployment/regroup-operator")
    k.run("--namespace", SYSTEM, "rollout", "status", "deployment/regroup-operator", "--timeout=90s", timeout_s=100)


def leader(k: Kubectl) -> dict[str, Any] | None:
    """Return the leading operator's pod, or None while there is none."""
    pods = json.loads(k.read(f"/api/v1/namespaces/{SYSTEM}/pods", labelSelector="regroup.dev/leader=true"))["items"]
    alive = [p for p in pods if "deletionTimestamp" not in p["metadata"] and p["status"].get("phase") == "Running"]
    return alive[0] if alive else None


def namespace(k: Kubectl, name: str) -> None:
    """Make a namespace that enforces Pod Security "restricted"."""
    k.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": {RESTRICTED: "restricted"}}})


def volume(k: Kubectl, namespace: str, claim: str) -> Path:
    """Make a volume of a directory on this machine, bound to `claim`. Return the directory, which is empty.

    The one-machine cluster has no provisioner: all its nodes share this file system.
    """
    directory = paths.cache() / "volumes" / namespace / claim
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    name = f"{namespace}-{claim}"
    size = {"storage": "100Mi"}
    spec = {
        "capacity": size,
        "accessModes": ["ReadWriteMany"],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "",
        "hostPath": {"path": str(directory)},
        "claimRef": {"namespace": namespace, "name": claim},
    }
    wanted = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "",
        "resources": {"requests": size},
        "volumeName": name,
    }
    k.apply(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim, "namespace": namespace},
            "spec": wanted,
        },
    )
    return directory


def remove_namespace(k: Kubectl, name: str) -> None:
    """Delete a namespace with its objects, and its volumes. Jobs and pods go at once; the rest is not waited for."""
    if k.run("get", "namespace", name, "--ignore-not-found", "--output=name"):
        k.run("--namespace", name, "delete", RESOURCE, "--all", "--wait=false")
        k.run("--namespace", name, "delete", "pods", "--all", "--grace-period=0", "--force", "--wait=false")
    k.run("delete", "namespace", name, "--ignore-not-found", "--wait=false")
    volumes = [v["metadata"]["name"] for v in k.get("persistentvolumes")["items"]]
    ours = [v for v in volumes if v.startswith(f"{name}-")]
    if ours:
        k.run("delete", "persistentvolume", *ours, "--wait=false", "--ignore-not-found")  # they may be on their way
