"""What end-to-end tests share: the cluster as they see it, pods that Pod Security "restricted" admits, and pods of roles."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cluster import binaries, lifecycle, nodes, paths
from cluster.kubectl import Kubectl
from harness import faults
from harness.job import JobView
from harness.traced_job import IMAGE

SERVES = "import http.server as h; h.ThreadingHTTPServer(('', 8080), h.SimpleHTTPRequestHandler).serve_forever()"
"""Python for a role that goes on until the job ends."""
_SECURE = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@dataclass(frozen=True)
class Cluster:
    """A cluster whose nodes are Ready."""

    kubectl: Kubectl
    context: str | None
    """The existing cluster's context; None: the cluster is ours, and its nodes can be switched off."""

    def power_off(self, node: str) -> None:
        """Cut a node's power; ClusterError in a cluster that is not ours."""
        lifecycle.power_off(node)

    def power_on(self, node: str) -> None:
        """Give a node its power back and wait until it is Ready."""
        lifecycle.power_on(node)

    def nodes(self) -> dict[str, bool]:
        """Return by name whether each node is Ready."""
        return nodes.ready(self.kubectl)


class Power:
    """The nodes' power switches. A node that gets its power back is waited for only by who needs all of them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._coming: list[Future[None]] = []

    @contextmanager
    def off(self, node: str) -> Iterator[float]:
        """Cut a node's power for the length of the block; yield when, in seconds since the epoch."""
        cut = faults.power_off(node)
        try:
            yield cut
        finally:
            self._coming.append(self._pool.submit(faults.power_on, node))

    def all_on(self) -> None:
        """Return once every node is Ready again."""
        while self._coming:
            self._coming.pop().result()


def restricted_pod(namespace: str, name: str, image: str, command: list[str], **spec: Any) -> dict[str, Any]:
    """Return a pod with one container that Pod Security "restricted" admits; `spec` adds to the pod's spec."""
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "Never",
        "command": command,
        "securityContext": _SECURE,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            **spec,
        },
    }


def role(name: str, *command: str, **pod: Any) -> dict[str, Any]:
    """Return a role that runs this Python; `pod` adds to its pods' spec."""
    container = {
        "name": "main", "image": IMAGE, "imagePullPolicy": "Never", "command": ["python", "-c", *command],
        "workingDir": "/tmp", "securityContext": _SECURE,
    }  # fmt: skip
    context = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {"securityContext": context, "terminationGracePeriodSeconds": 1, "containers": [container], **pod}
    return {"name": name, "template": {"spec": spec}}


def pods_of(job: JobView, name: str) -> list[dict[str, Any]]:
    """Return the pods of a role."""
    selector = f"--selector=regroup.dev/job-name={job.name},regroup.dev/role={name}"
    found: list[dict[str, Any]] = json.loads(
        job.kubectl.run("--namespace", job.namespace, "get", "pods", selector, "-o", "json")
    )["items"]
    return found


@contextmanager
def with_kubectl() -> Iterator[None]:
    """Have our kubectl first on the PATH, as a user of the client has one."""
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{binaries.ensure()}:{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


def kubectl_regroup(namespace: str, *words: str, code: int = 0) -> str:
    """Run `kubectl regroup` as a user does, and return what it prints: on stderr if it ends with another code than 0."""
    with with_kubectl():
        done = subprocess.run(
            [sys.executable, "-m", "regroup_cli.plugin", f"--kubeconfig={paths.kubeconfig()}", "-n", namespace, *words],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == code, done.stdout[-2000:] + done.stderr
    assert code or not done.stderr, done.stderr
    return done.stderr if code else done.stdout
