"""Keep the pods of spec.roles running beside the workers. Pure.

A role's pods are never members and never cause a generation. Each place of a role has one pod. It is replaced once it has failed or
is gone, never beside another one: a parameter server, say, must not run twice. That is a StatefulSet's rule, and like there a pod
on a node without power keeps its place until somebody deletes it by force. They run while the job trains, or waits for some of
them to succeed, and end with it.
docs/design/adr/0053-roles.md, docs/design/adr/0058-roles-that-the-job-waits-for.md
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from regroup.protocol.text import shorten
from regroup_operator.api import Job
from regroup_operator.api.job import role_digest
from regroup_operator.api.names import role_place
from regroup_operator.api.status import RoleStatus
from regroup_operator.api.template import Role
from regroup_operator.model.plan import Clock, earliest
from regroup_operator.model.pod_row import REPLACED, PodRow
from regroup_operator.model.ports import EventNote
from regroup_operator.model.records import Pod, PodPlace
from regroup_operator.plan.facts.roles import awaited, succeeded
from regroup_operator.plan.facts.set_up import not_set_up

MAX_MESSAGE = 400
"""Characters of a message in status.roles. A command in it has names of up to 63 characters, and has to be whole."""
NOBODY: Mapping[str, str] = MappingProxyType({})
LASTED_S = 60.0
"""A pod that has run for so long ends a row of failed ones."""


@dataclass(frozen=True)
class RoleChanges:
    """`create`: role, index, attempt. `status`: status.roles; None: the job has none. `rows`: by place, failed pods in a row, for
    the memory."""

    rows: Mapping[PodPlace, PodRow]
    create: tuple[tuple[str, int, int], ...] = ()
    delete: tuple[Pod, ...] = ()
    status: list[RoleStatus] | None = None
    due_s: float | None = None
    notes: tuple[EventNote, ...] = ()


NO_ROLES = RoleChanges({})


def plan_roles(
    *,
    job: Job,
    pods: tuple[Pod, ...],
    rows: Mapping[PodPlace, PodRow],
    active: bool,
    cleans: bool,
    clock: Clock,
) -> RoleChanges:
    """Return what to make and to delete. `active`: the job wants its pods; `cleans`: once it
    does not, pods that have ended are deleted, too."""
    now_s = clock.now_s
    if not active:
        unwanted = tuple(p for p in pods if not p.terminating and (cleans or p.alive))
        return RoleChanges({}, delete=unwanted, status=_status(job, pods, now_s))
    wanted = {role_place(role.name, i): (role.name, i) for role in job.spec.roles for i in range(role.replicas)}
    of_place: dict[PodPlace, list[Pod]] = {}
    for pod in sorted(pods, key=lambda p: p.attempt):
        of_place.setdefault(pod.place, []).append(pod)
    outdated = _outdated(job, pods)
    # A place whose template was corrected before the start begins anew.
    rows = {
        place: row for place, row in rows.items() if not (there := of_place.get(place)) or there[-1].uid not in outdated
    }
    current = {place: [p for p in there if p.uid not in outdated] for place, there in of_place.items()}
    before, rows = rows, _note(rows, current, wanted, now_s)
    notes = tuple(
        _words(place, row) for place, row in rows.items() if place not in before or before[place].count < row.count
    )
    done = {role_place(name, i) for name, indices in succeeded(job, pods).items() for i in indices}
    create: list[tuple[str, int, int]] = []
    delete = [p for p in pods if p.place not in wanted or p.uid in outdated]
    dues_s: list[float] = []
    held: dict[str, str] = {}
    for place, (name, index) in wanted.items():
        there = of_place.get(place, [])
        # Of those that failed the newest stays, for its log.
        delete += [p for p in there[:-1] if p.phase == "Failed" and p.uid not in outdated]
        if place in done or any(p.alive or p.terminating or p.uid in outdated for p in there):
            continue
        due_s = rows[place].held_until_s(REPLACED) if place in rows else now_s
        if due_s > now_s:
            dues_s.append(due_s)
            held.setdefault(name, _held(place, there, rows[place], clock.stamp(due_s)))
        else:
            # A failed pod that somebody has deleted stays in the row: a number of before would not count.
            newest = max(there[-1].attempt if there else -1, rows[place].attempt if place in rows else -1)
            create.append((name, index, newest + 1))
    dues_s += [p.running_since_s + LASTED_S for p in pods if p.place in rows and p.running_since_s is not None]
    going = tuple(p for p in delete if not p.terminating)
    status = _status(job, pods, now_s, held)
    return RoleChanges(rows, tuple(create), going, status, earliest(dues_s, after_s=now_s), notes)


def _outdated(job: Job, pods: Iterable[Pod]) -> frozenset[str]:
    """Return the UIDs of pods that were made from an earlier template, before the job has started."""
    if job.status.start_time is not None:
        return frozenset()
    digests = {role.name: role_digest(job, role.name) for role in job.spec.roles}
    return frozenset(p.uid for p in pods if p.role in digests and p.spec_digest != digests[p.role])


def _words(place: PodPlace, row: PodRow) -> EventNote:
    pause_s = row.pause_s(REPLACED)
    when = "at once" if pause_s == 0 else f"after {pause_s:.0f} s"
    return EventNote("Warning", "RolePodFailed", f"The pod of role {place} has failed; it is replaced {when}.")


def _note(
    rows: Mapping[PodPlace, PodRow],
    of_place: Mapping[PodPlace, Sequence[Pod]],
    wanted: Collection[PodPlace],
    now_s: float,
) -> dict[PodPlace, PodRow]:
    """Return by place how many pods in a row have failed; one that has lasted ends the row."""
    out = {place: row for place, row in rows.items() if place in wanted}
    for place, pods in of_place.items():
        for pod in pods:
            row = out.get(place)
            if pod.phase == "Failed" and (row is None or pod.attempt > row.attempt):
                out[place] = PodRow.after(row, pod.attempt, now_s)
            elif row is not None and pod.attempt > row.attempt and _has_lasted(pod, now_s):
                del out[place]
    return out


def _has_lasted(pod: Pod, now_s: float) -> bool:
    return pod.alive and pod.running_since_s is not None and now_s >= pod.running_since_s + LASTED_S


def _held(place: PodPlace, pods: Sequence[Pod], row: PodRow, next_at: str) -> str:
    """Return why a place has no pod for a while."""
    failed = next((p for p in pods if p.attempt == row.attempt and p.phase == "Failed"), None)
    how = ""
    if failed is not None and failed.last_exit_code is not None:
        how = f" with exit code {failed.last_exit_code}"
    elif failed is not None and failed.status_reason:
        how = f" ({failed.status_reason})"
    return f"{place}: its pod failed{how}, {row.count} in a row; the next one is made at {next_at}"


def _status(
    job: Job,
    pods: Sequence[Pod],
    now_s: float,
    held: Mapping[str, str] = NOBODY,
) -> list[RoleStatus] | None:
    """Return status.roles. `held`: by role, why a place has no pod for a while."""
    done = succeeded(job, pods)
    waits = awaited(job, done)
    return [
        _of_role(role, [p for p in pods if p.role == role.name], done[role.name], waits.get(role.name), held, now_s)
        for role in job.spec.roles
    ] or None


def _of_role(
    role: Role, pods: list[Pod], done: frozenset[int], awaited: int | None, held: Mapping[str, str], now_s: float
) -> RoleStatus:
    ready = [p for p in pods if p.usable and p.phase == "Running" and p.running_since_s is not None and p.node_ready]
    message = _stuck(pods, now_s) or held.get(role.name)
    return RoleStatus(
        name=role.name,
        replicas=role.replicas,
        ready=len(ready),
        succeeded=sorted(done) or None,
        awaited=awaited,
        message=shorten(message, MAX_MESSAGE) if message else None,
    )


def _stuck(pods: Iterable[Pod], now_s: float) -> str:
    """Return why the first pod that does not run does not; empty: they all do."""
    for pod in pods:
        if pod.usable and (pod.waiting_reason or pod.unschedulable):
            return f"{pod.name}: " + (f"{pod.waiting_reason} {pod.waiting_message}".strip() or pod.unschedulable)
        if pod.usable and (words := not_set_up(pod, now_s)):
            return f"{pod.name}: {words}"
        if pod.alive and not pod.node_ready:
            # Until the API has it no more a process of it may be alive there.
            return f"{pod.name}: its node {pod.node} is not ready; bring the node back, or delete the pod by force if it is off"
    return ""
