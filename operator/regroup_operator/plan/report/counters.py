"""Keep status.restarts: how often processes, pods and the group have started again. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any


def restarts_status(
    known: Mapping[str, Any] | None,
    *,
    processes: Mapping[str, int],
    pods: Mapping[str, int],
    generations: int,
    recent: Mapping[str, Any] | None,
    ignored: int = 0,
    judged: Mapping[str, Any] | None = None,
    exits: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Return status.restarts with the new counts; None: nothing was ever counted.

    `processes` and `pods` have the number of restarts by cause. `recent` has the fields for failures that count against maxRestarts
    (None: unchanged). `ignored` is the number of new failures that a rule ignores. `judged` is the field of that name (None: the
    status has none). `exits` is the field of that name (None: unchanged).
    """
    new = (processes, pods, generations, ignored, recent is not None, judged is not None, exits is not None)
    if known is None and not any(new):
        return None
    restarts: dict[str, Any] = {"total": 0, "processes": 0, "pods": 0, "generations": 0, "recent": [], **(known or {})}
    restarts["processes"] += sum(processes.values())
    restarts["pods"] += sum(pods.values())
    restarts["generations"] += generations
    if processes or pods:
        restarts["total"] = restarts["processes"] + restarts["pods"]
        restarts["causes"] = dict(
            sorted((Counter(restarts.get("causes")) + Counter(processes) + Counter(pods)).items())
        )
    if recent is not None:
        restarts.pop("recentCounts", None)
        restarts |= recent
    if ignored:
        restarts["ignored"] = (restarts.get("ignored") or 0) + ignored
    if exits is not None:
        restarts["exits"] = dict(exits)
    restarts.pop("judged", None)
    if judged is not None:
        restarts["judged"] = dict(judged)
    return restarts
