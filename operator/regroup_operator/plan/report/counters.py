"""Keep status.restarts: how often processes, pods and the group have started again. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def restarts_status(
    known: Mapping[str, Any] | None, *, processes: int, pods: int, generations: int, recent: Sequence[str] | None
) -> dict[str, Any] | None:
    """Return status.restarts with what is new, None where there is none and nothing was. `recent`: the times of those that count
    against maxRestarts; None: as they were."""
    if known is None and not (processes or pods or generations or recent is not None):
        return None
    restarts: dict[str, Any] = {"total": 0, "processes": 0, "pods": 0, "generations": 0, "recent": [], **(known or {})}
    restarts["processes"] += processes
    restarts["pods"] += pods
    restarts["generations"] += generations
    if processes or pods:
        restarts["total"] = restarts["processes"] + restarts["pods"]  # made anew: an older operator wrote none
    if recent is not None:
        restarts["recent"] = list(recent)
    return restarts
