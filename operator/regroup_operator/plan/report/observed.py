"""Say when the operator last looked: `status.observedAt`, kubectl's column Seen. Pure.

A status that nobody writes looks the same whether nothing happens or no operator is there (its node is cut off, the API
server is down). So each write carries its time, and a job with a generation is written again when that is `every_s` old, at
the same low priority as progress: what a reader sees tells how old it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from regroup_operator.model.plan import Clock

FIELD = "observedAt"


def observe(status: Mapping[str, Any], stored: Mapping[str, Any], clock: Clock, *, ended: bool, every_s: float) -> str:
    """Return status.observedAt: now if anything else has changed or the stored time is due, else that."""
    known: str | None = stored.get(FIELD)
    same = {k: v for k, v in status.items() if k != FIELD} == {k: v for k, v in stored.items() if k != FIELD}
    if known is None or not same:
        return clock.timestamp()
    due_s = due_in_s(stored, clock, ended=ended, every_s=every_s)
    return clock.timestamp() if due_s is not None and due_s <= 0.0 else known


def due_in_s(status: Mapping[str, Any], clock: Clock, *, ended: bool, every_s: float) -> float | None:
    """Return in how many seconds the time is written again although nothing has changed; None: not before a change."""
    known = status.get(FIELD)
    if known is None or ended or status.get("membership") is None:
        return None
    age_s = clock.wall - datetime.fromisoformat(known).timestamp()
    return min(every_s, every_s - age_s)  # a clock that was set back does not stop it
