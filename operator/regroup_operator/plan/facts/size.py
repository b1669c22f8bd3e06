"""Decide how many workers the job has now. Pure.

`spec.replicas` may be any number inside spec.elasticPolicy, as an autoscaler writes it. The job has the largest size below it that
`spec.elasticPolicy.sizes` or `sizeMultipleOf` permits, and pods for no more. docs/design/adr/0081-sizes-of-a-script.md

`spec.elasticPolicy.growthCooldownSeconds` counts from the last change of `spec.replicas` that took effect. The job does not grow
before it is over. An autoscaler reads noisy numbers, and each growth interrupts training for a moment. The operator holds back
pods, not members, so that no GPU waits for the end of the time. A replacement is no growth: it takes a slot that the job had
already. docs/design/adr/0055-size-of-an-elastic-job.md
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from regroup_operator.api import Job
from regroup_operator.api.spec import ElasticPolicy, largest_size
from regroup_operator.api.status import MAX_REFUSED_SIZES, EarlierRefusal, Growth, JobStatus, RefusedSize
from regroup_operator.model.plan import Clock, seconds_of, timestamp


@dataclass(frozen=True)
class Size:
    """`replicas`: workers that the job has now. `growth`: status.growth; None: the status has none. `words`: why that is fewer than
    are wanted; empty: it is not. `due_s`: when the job grows."""

    replicas: int
    wanted: int
    """The largest permitted size that is at most spec.replicas, or the size that the job went back to."""
    growth: Growth | None = None
    words: str = ""
    due_s: float | None = None
    refused: RefusedSize | None = None
    """The script's refusal of a size, while it holds."""


def standing_refusal(job: Job, *, suspended: bool) -> RefusedSize | None:
    """Return the script's refusal of a size for as long as it holds; None: there is none.

    It ends once the job wants another number of workers, and with a suspension, in which people repair what stops a job. It also
    ends once the sizes no longer permit the refused number, or the one that the job went back to. An autoscaler may come back to a
    refused number. Then the refusal holds again, and the job trains with the last good number.
    """
    stored, policy = job.status.refused_size, job.spec.elastic_policy
    if policy is None or suspended:
        return None
    if stored is not None and stored.wanted == job.wanted:
        return stored if _are_permitted(policy, stored.workers, stored.back_to) else None
    good = job.status.last_good_size
    earlier = next((one for one in earlier_refusals(job, suspended=suspended) if one.workers == job.wanted), None)
    if earlier is None or good is None or not _are_permitted(policy, good):
        return None
    return RefusedSize(
        workers=job.wanted,
        back_to=good,
        wanted=job.wanted,
        generation=0 if stored is None else stored.generation,
        at=earlier.at,
        message=f"The script refused {job.wanted} worker{'' if job.wanted == 1 else 's'} at {earlier.at}.",
    )


def earlier_refusals(job: Job, *, suspended: bool) -> list[EarlierRefusal]:
    """Return the numbers of workers that the job does not try again, because the script has refused them."""
    policy, status = job.spec.elastic_policy, job.status
    if policy is None or suspended:
        return []
    stored = status.refused_sizes or []
    return [one for one in stored if one.workers != status.last_good_size and _are_permitted(policy, one.workers)]


def with_refusal(status: JobStatus, refused: RefusedSize | None) -> list[EarlierRefusal] | None:
    """Return the refusals with a new one, of which the newest MAX_REFUSED_SIZES are kept. None: there are none."""
    stored = status.refused_sizes or []
    if refused is not None:
        others = [one for one in stored if one.workers != refused.workers]
        stored = [*others, EarlierRefusal(workers=refused.workers, at=refused.at)]
    return stored[-MAX_REFUSED_SIZES:] or None


def tried_sizes(
    permitted: Sequence[int] | None, refusals: Collection[EarlierRefusal], smallest: int, size: int, per_group: int
) -> Sequence[int] | None:
    """Return the permitted numbers of workers without those that the script has refused, ascending; None: every number.

    `size` is the number that the job is to have, which stays. `smallest` is the job's minimum.
    """
    refused = {one.workers for one in refusals} - {size}
    if not refused:
        return permitted
    return [n for n in permitted or range(smallest, size + 1, per_group) if n not in refused]


def _are_permitted(policy: ElasticPolicy, *sizes: int) -> bool:
    return all(policy.min_replicas <= size == largest_size(policy.permitted, size) for size in sizes)


def decide_size(
    job: Job, known: Growth | None, clock: Clock, *, runs: bool, refused: RefusedSize | None = None
) -> Size:
    """Return the size. `known`: status.growth as stored; `runs`: the job has a generation and is not suspended. Before that it has
    nothing to interrupt, and each size is its first. `refused`: the refusal that holds; the job goes back at once."""
    if refused is None:
        return _with_cooldown(job, known, clock, runs=runs)
    if refused.size == job.wanted:
        return replace(_with_cooldown(job, known, clock, runs=runs), refused=refused)
    if known is not None and known.replicas != refused.size:
        known = Growth(replicas=refused.size, changed_at=clock.timestamp())
    return Size(refused.size, refused.size, known, refused=refused)


def _with_cooldown(job: Job, known: Growth | None, clock: Clock, *, runs: bool) -> Size:
    """Return the wanted size, or a smaller one until spec.elasticPolicy.growthCooldownSeconds is over."""
    wanted, policy = job.wanted, job.spec.elastic_policy
    if policy is None or not policy.growth_cooldown_seconds:
        return Size(wanted, wanted)
    if known is None or not runs:
        return Size(wanted, wanted, Growth(replicas=wanted))
    before, changed_at = known.replicas, known.changed_at
    if wanted == before:
        return Size(wanted, wanted, known)
    # A clock that was set back does not stop the job from growing for longer than the time itself.
    left_s = 0.0
    if changed_at is not None:
        left_s = min(
            seconds_of(changed_at) + policy.growth_cooldown_seconds - clock.wall, policy.growth_cooldown_seconds
        )
    now = largest_size(policy.permitted, max(before, policy.min_replicas))
    if wanted <= now or left_s <= 0:
        return Size(wanted, wanted, Growth(replicas=wanted, changed_at=clock.timestamp()))
    at = timestamp(round(clock.wall + left_s))
    growth = known if now == before else Growth(replicas=now, changed_at=clock.timestamp())
    words = f"the job grows from {now} to {wanted} workers at {at} (spec.elasticPolicy.growthCooldownSeconds)"
    return Size(now, wanted, growth, words, clock.now_s + left_s)
