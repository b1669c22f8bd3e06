"""Say whether an unmodified script trains: whether the processes of the newest generation have passed init_process_group.

Pure. The agents say it (Condition.group); here their words become the job's. Why this and nothing else is Running in the
Script tier: docs/design/adr/0011-running-in-the-script-tier.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from regroup.protocol.document import PLANNED
from regroup.protocol.state import Group, Phase
from regroup_operator.model.records import AgentSession
from regroup_operator.model.worker import Current, Standing, Worker
from regroup_operator.plan.facts.allowances import partings


def script_group(current: Current | None, workers: Iterable[Worker], *, ran: bool) -> str:
    """Return the Group value of a Script job: that of the member that is least far.

    In a planned change the processes of the generation before train on until their agent hears of it. Then they do until their
    files are complete (adr/0080). Their group counts until they have ended.

    `ran`: the status says Running. It stands for members that have not called since the operator's start.
    """
    members = [w for w in workers if w.is_member]
    if current is None or not members:
        return Group.WAITING
    said = {
        w.session.condition.group or Group.WAITING
        for w in members
        if w.session is not None and (partings(w.session) or _has_yet_to_hear(w.session, current))
    }
    if not said and current.adopted:
        said = {_member_group(w, current, ran=ran) for w in members}
    if not said:
        return Group.WAITING
    return next(group for group in (Group.WAITING, Group.UNOBSERVED, Group.FORMED) if group in said)


def _has_yet_to_hear(session: AgentSession, current: Current) -> bool:
    """Return whether the processes of a group that formed train on, because their agent has not heard of the planned generation."""
    condition = session.condition
    trains = condition.phase == Phase.TRAINING and condition.group == Group.FORMED
    return current.kind == PLANNED and not current.adopted and trains and condition.generation < current.number


def passed(current: Current | None, workers: Iterable[Worker]) -> int:
    """Return how many members have passed init_process_group."""
    members = [w for w in workers if w.is_member]
    return sum(current is not None and _member_group(w, current, ran=False) == Group.FORMED for w in members)


def _member_group(worker: Worker, current: Current, *, ran: bool) -> str:
    if worker.session is None:
        return Group.FORMED if ran and worker.has_yet_to_call else Group.WAITING
    condition = worker.session.condition
    if worker.standing == Standing.FINISHED:
        return Group.FORMED
    if condition.generation != current.number:
        return Group.WAITING
    return condition.group or Group.WAITING  # a session has none: the job's tier will follow
