"""Where a worker may run: apart from its fellows if possible, never on a node that the plan avoids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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
    """Forbid `nodes` (names) in the required node affinity, beside whatever the template requires.

    The terms of a node selector are alternatives, so each gets the exclusion. By name, not by the hostname label: a
    node's label may differ from its name. A field selector takes one value, hence one entry per node.
    """
    if not nodes:
        return
    excluded = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    affinity = pod_spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {"nodeSelectorTerms": [{}]})
    for term in required["nodeSelectorTerms"]:
        term["matchFields"] = [*term.get("matchFields", []), *excluded]
