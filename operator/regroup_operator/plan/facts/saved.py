"""Decide whether the growth of a script waits for its next checkpoint (spec.elasticPolicy.growAt: Checkpoint). Pure.

A script starts again from its own checkpoint at each change of size. Right after a checkpoint nothing is lost. Only growth waits:
lost workers and smaller sizes do not. The wait has no end of its own, because a script that never saves would lose all by growing.
Condition Degraded says what it waits for. docs/design/adr/0081-sizes-of-a-script.md
"""

from __future__ import annotations

from collections.abc import Iterable

from regroup_operator.api.spec import ElasticPolicy
from regroup_operator.model.worker import Worker

GROW_WITHIN_S = 5.0
"""The job grows within so many seconds after a checkpoint. An operator that was away then waits for the next one."""


def newest_save_s(members: Iterable[Worker], since_s: float = 0.0) -> float | None:
    """Return when the script last completed a checkpoint, by what the agents of its members have seen; None: they saw none.

    The first member whose agent has seen one since `since_s`, the start of the generation, is believed. Another node may show the
    same checkpoint much later. If there is none, the newest one counts.
    """
    seen = [w.session.saved_at_s for w in members if w.session is not None]
    times_s = [at_s for at_s in seen if at_s is not None]
    return next((at_s for at_s in times_s if at_s >= since_s > 0), max(times_s, default=None))


def waits_for_save(
    policy: ElasticPolicy | None, tier: str | None, members: Iterable[Worker], now_s: float, *, since_s: float = 0.0
) -> bool:
    """Return whether a job may not grow now. A session loses nothing by growing. `since_s`: the start of its generation."""
    if policy is None or policy.grow_at != "Checkpoint" or tier != "Script":
        return False
    saved_s = newest_save_s(members, since_s)
    return saved_s is None or now_s > saved_s + GROW_WITHIN_S


def save_words(members: Iterable[Worker], num_ready: int, directory: str) -> str:
    """Return what workers that are ready wait for."""
    one = num_ready == 1
    who = f"{num_ready} more worker{' is' if one else 's are'} ready and join{'s' if one else ''}"
    words = f"{who} after the script's next checkpoint (spec.elasticPolicy.growAt)."
    if newest_save_s(members) is None:
        words += f" None has been seen in {directory} since the agents of its first two workers began to look."
    return words
