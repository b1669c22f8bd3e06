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
    """Return status.restarts with what is new, None where there is none and nothing was. `processes`, `pods`: by cause, how many
    had to start again; `recent`: the fields for those that count against maxRestarts; None: as they were; `ignored`: new failures
    that a rule ignores; `judged`: as in the status, None: it has none; `exits`: as in the status, None: as they were."""
    new = (processes, pods, generations, ignored, recent is not None, judged is not None, exits is not None)
    if known is None and not any(new):
        return None
    restarts: dict[str, Any] = {"total": 0, "processes": 0, "pods": 0, "generations": 0, "recent": [], **(known or {})}
    restarts["processes"] += sum(processes.values())
    restarts["pods"] += sum(pods.values())
    restarts["generations"] += generations
    if processes or pods:
        restarts["total"] = restarts["processes"] + restarts["pods"]  # made anew: an older operator wrote none
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
