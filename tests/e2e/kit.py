"""What end-to-end tests share: the cluster as they see it, and pods that Pod Security "restricted" admits."""

import os
from dataclasses import dataclass
from typing import Any

from cluster import lifecycle
from cluster.kubectl import Kubectl


def trials(short: int, *, long: int) -> int:
    """Return how often a test breaks something: `short` in `make test`, `long` in `make test-all`."""
    return long if os.environ.get("REGROUP_LONG") else short


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
        result = {}
        for item in self.kubectl.get("nodes")["items"]:
            result[item["metadata"]["name"]] = any(
                c["type"] == "Ready" and c["status"] == "True" for c in item["status"]["conditions"]
            )
        return result


def restricted_pod(namespace: str, name: str, image: str, command: list[str], **spec: Any) -> dict[str, Any]:
    """Return a pod with one container that Pod Security "restricted" admits; `spec` adds to the pod's spec."""
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "Never",
        "command": command,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
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
