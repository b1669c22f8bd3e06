"""Count the pods of roles that have succeeded, and those for which a trained job still waits. Pure.

docs/design/adr/0053-roles.md, docs/design/adr/0058-roles-that-the-job-waits-for.md
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from regroup_operator.api import Job
from regroup_operator.model.records import Pod


def succeeded(job: Job, pods: Iterable[Pod]) -> dict[str, frozenset[int]]:
    """Return by role the indices whose pods have succeeded, by the status and by `pods`.

    A pod that is being deleted has not: a program that ends well on SIGTERM did not do all of its work. Before the job has started
    its templates can change, so that what earlier pods did is not remembered.
    """
    stored = job.status.roles if job.status.start_time is not None else None
    before = {one.name: one.succeeded or () for one in stored or ()}
    now: dict[str, set[int]] = {role.name: set(before.get(role.name, ())) for role in job.spec.roles}
    for pod in pods:
        if pod.role in now and pod.phase == "Succeeded" and not pod.terminating:
            now[pod.role].add(pod.slot)
    return {role.name: frozenset(i for i in now[role.name] if i < role.replicas) for role in job.spec.roles}


def awaited(job: Job, done: Mapping[str, frozenset[int]]) -> dict[str, int]:
    """Return by role how many pods still have to succeed before the job is Complete.

    Only roles for which the job waits are in it, those that are done with 0. `done` comes from `succeeded`.
    """
    return {
        role.name: role.replicas - len(done.get(role.name, ()))
        for role in job.spec.roles
        if role.required_for_completion
    }


def awaited_words(job: Job, awaited: Mapping[str, int]) -> str:
    """Return which roles the job waits for, and how far they are; empty: for none."""
    sizes = {role.name: role.replicas for role in job.spec.roles}
    parts = [
        f"role {name} ({sizes[name] - count} of {sizes[name]} pods have succeeded)"
        for name, count in awaited.items()
        if count
    ]
    return ", ".join(parts)
