"""Decide how many workers the job has now. Pure.

`spec.elasticPolicy.growthCooldownSeconds` counts from the last change of `spec.replicas` that took effect. The job does not grow
before it is over. An autoscaler reads noisy numbers, and each growth interrupts training for a moment. The operator holds back
pods, not members, so that no GPU waits for the end of the time. A replacement is no growth: it takes a slot that the job had
already. docs/design/adr/0055-size-of-an-elastic-job.md
"""

from __future__ import annotations

from dataclasses import dataclass

from regroup_operator.api import Job
from regroup_operator.api.status import Growth
from regroup_operator.model.plan import Clock, seconds_of, timestamp


@dataclass(frozen=True)
class Size:
    """`growth`: status.growth; None: the status has none. `words`: why there are fewer workers than spec.replicas; empty: there
    are not. `due_s`: when the job grows."""

    replicas: int
    growth: Growth | None = None
    words: str = ""
    due_s: float | None = None


def decide_size(job: Job, known: Growth | None, clock: Clock, *, runs: bool) -> Size:
    """Return the size. `known`: status.growth as stored; `runs`: the job has a generation and is not suspended. Before that it has
    nothing to interrupt, and each size is its first."""
    wanted, policy = job.spec.replicas, job.spec.elastic_policy
    if policy is None or not policy.growth_cooldown_seconds:
        return Size(wanted)
    if known is None or not runs:
        return Size(wanted, Growth(replicas=wanted))
    before, changed_at = known.replicas, known.changed_at
    if wanted == before:
        return Size(wanted, known)
    # A clock that was set back does not stop the job from growing for longer than the time itself.
    left_s = 0.0
    if changed_at is not None:
        left_s = min(
            seconds_of(changed_at) + policy.growth_cooldown_seconds - clock.wall, policy.growth_cooldown_seconds
        )
    now = max(before, policy.min_replicas)
    if wanted <= now or left_s <= 0:
        return Size(wanted, Growth(replicas=wanted, changed_at=clock.timestamp()))
    at = timestamp(round(clock.wall + left_s))
    growth = known if now == before else Growth(replicas=now, changed_at=clock.timestamp())
    words = f"the job grows from {now} to {wanted} workers at {at} (spec.elasticPolicy.growthCooldownSeconds)"
    return Size(now, growth, words, clock.now_s + left_s)
