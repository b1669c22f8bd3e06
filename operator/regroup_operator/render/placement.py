"""Placement of a worker: apart from the others, and not on a node that the plan avoids. Both are preferences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MAX_WEIGHT = 100


def spread(pod_spec: dict[str, Any], labels: dict[str, str]) -> None:
    """Prefer other nodes than those of the job's other workers, unless the template has its own opinion."""
    own_affinity = (pod_spec.get("affinity") or {}).get("podAntiAffinity")
    if own_affinity or pod_spec.get("topologySpreadConstraints"):
        return
    pod_spec["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": labels},
        }
    ]


def avoid(pod_spec: dict[str, Any], nodes: Sequence[str]) -> None:
    """Prefer other nodes than `nodes` (names), beside whatever the template says. Never more than a preference: where no other
    node has room, the worker runs there.

    By name, not by the hostname label: a node's label may differ from its name. A field selector takes one value, hence
    one entry per node.
    """
    if not nodes:
        return
    others = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    affinity = pod_spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    preferred = affinity.setdefault("preferredDuringSchedulingIgnoredDuringExecution", [])
    affinity["preferredDuringSchedulingIgnoredDuringExecution"] = [
        *preferred,
        {"weight": MAX_WEIGHT, "preference": {"matchFields": others}},
    ]
