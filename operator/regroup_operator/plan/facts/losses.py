"""Date the losses of members of the newest generation: an outage begins with its first loss, however long it lasts. Pure.

While too few workers are there, the job waits. The session of a lost member goes with its pod, so later plans know less of it. The
operator therefore keeps what the first plan saw.

A new operator has seen no begin. For it the group has stood still since its last commit, which members report again and the status
tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from regroup_operator.api.status import Progress
from regroup_operator.model.plan import Clock, seconds_of
from regroup_operator.model.worker import Announce, Current, Standing, Worker
from regroup_operator.plan.facts.stalls import Reported


def see_losses(
    before: Mapping[str, float],
    members: Iterable[Worker],
    current: Current | None,
    newest: Reported | None,
    progress: Progress | None,
    term_started_s: float,
    clock: Clock,
) -> dict[str, float]:
    """Return by member since when it is lost (monotonic). `before`: as of the plan before; `newest`: what the members have
    reported, `progress`: status.progress."""
    lost = [w for w in members if w.standing == Standing.LOST]
    if current is None or not lost:
        return {}
    stood_s = clock.now_s
    if current.adopted and (newest is None or newest.at_s < term_started_s):
        said = None if progress is None else progress.at
        told_s = None if said is None else clock.at_s(seconds_of(said))
        stood_s = max(
            (at_s for at_s in (told_s, None if newest is None else newest.at_s) if at_s is not None),
            default=clock.now_s,
        )
    return {str(w.id): min(before.get(str(w.id), stood_s), w.since_s) for w in lost}


def dated(decision: Announce, losses: Mapping[str, float]) -> Announce:
    """Return the decision with the begin of the outage that it ends, if that was before what it was detected by."""
    began_s = losses.get(decision.culprit)
    return decision if began_s is None else replace(decision, detected_at_s=min(began_s, decision.detected_at_s))
