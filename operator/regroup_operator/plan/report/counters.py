"""Keep status.restarts: how often processes, pods and the group have started again. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from regroup_operator.api.status import JudgedExits, Restarts, SeenExits
from regroup_operator.plan.failures.restarts import Recent, with_recent


def restarts_status(
    stored: Restarts | None,
    *,
    processes: Mapping[str, int],
    pods: Mapping[str, int],
    generations: int,
    recent: Recent | None,
    ignored: int = 0,
    judged: JudgedExits | None = None,
    exits: SeenExits | None = None,
) -> Restarts | None:
    """Return status.restarts with the new counts; None: nothing was ever counted.

    `processes` and `pods` have the number of restarts by cause. `recent` has the failures that count against maxRestarts (None:
    unchanged). `ignored` is the number of new failures that a rule ignores. `judged` is the field of that name (None: the
    status has none). `exits` is the field of that name (None: unchanged).
    """
    new = (processes, pods, generations, ignored, recent is not None, judged is not None, exits is not None)
    if stored is None and not any(new):
        return None
    before = stored or Restarts()
    restarts = before.with_fields(
        processes=before.processes + sum(processes.values()),
        pods=before.pods + sum(pods.values()),
        generations=before.generations + generations,
        ignored=(before.ignored or 0) + ignored or None,
        judged=judged,
        exits=exits or before.exits,
    )
    if processes or pods:
        causes = Counter(before.causes) + Counter(processes) + Counter(pods)
        restarts = restarts.with_fields(total=restarts.processes + restarts.pods, causes=dict(sorted(causes.items())))
    return restarts if recent is None else with_recent(restarts, recent)
