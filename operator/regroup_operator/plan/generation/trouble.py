"""Find the member that broke the newest generation, or that keeps it from forming; or say that this is not clear yet.

Pure. A member that is lost or has died comes first, then one that hangs, then one that reported a failed collective. A
generation that is not adopted is given up at its deadline for whoever is late (rule DEADLINE, adr/0014). Whom the incident names
is decided in culprit.py, and what follows in forced.py.
"""

from __future__ import annotations

from regroup.protocol.document import PLANNED
from regroup.protocol.state import Phase
from regroup_operator.api.members import MemberId
from regroup_operator.model.records import Settings
from regroup_operator.model.worker import Current, Standing, Wait, Worker
from regroup_operator.plan.facts.allowances import entry_s, partings
from regroup_operator.plan.generation.answers import pod_uids, silent_since
from regroup_operator.plan.generation.target import count

_GONE = (Standing.LOST, Standing.DIED)
_OUTSIDE = (Standing.PENDING, Standing.SILENT, Standing.STARTING)
LATE = (*_OUTSIDE, Standing.FORMING)
"""Standings of a member that a generation is given up for at its deadline."""
MAX_GROWTH = 64
"""A deadline grows to so many times its first length, with generations that fail in a row."""
KILL_S = 15.0
"""A process that hangs and that SIGKILL has not ended by then waits for a disk or a volume: the others go on without it."""


def find_trouble(
    current: Current, members: tuple[Worker, ...], deadline_s: float, now_s: float, settings: Settings
) -> Worker | Wait | None:
    """Return the worker that broke the group, a Wait while that is unclear, or None for a group that stands."""
    hung = [w for w in members if w.standing == Standing.HUNG]
    culprits = [w for w in members if w.standing in _GONE]
    culprits += [w for w in hung if now_s >= w.since_s + KILL_S]
    if culprits:
        return min(culprits, key=lambda w: w.since_s)
    if hung:
        until_s = min(w.since_s for w in hung) + KILL_S
        return Wait("Hung", f"The hanging processes of {count(hung, 'worker')} are being restarted.", until_s)
    broken = [w for w in members if w.standing == Standing.BROKEN]
    if broken:
        first = min(broken, key=lambda w: w.since_s)
        others = [w for w in members if w.standing not in (Standing.BROKEN, Standing.SILENT)]
        if others and now_s < first.since_s + settings.settle_s:
            return Wait(
                "Settling",
                f"{count(broken, 'member')} reported a failed collective; looking for the cause.",
                first.since_s + settings.settle_s,
                ask=pod_uids(silent_since(others, first.since_s)),
            )
        return first
    if current.adopted:
        return None
    if not current.has_document:
        deaf = [
            w for w in members if w.connected and w.session is not None and w.session.condition.heard < current.number
        ]
        if deaf:
            return deaf[0]
    if now_s >= deadline_s:
        # Whoever has not entered is named before those that wait for it.
        late = [w for w in members if w.standing in LATE]
        return min(late, key=lambda w: (not _has_not_entered(current, w), w.standing == Standing.FORMING,
                                        not w.is_on_its_way, w.id), default=None)  # fmt: skip
    return None


def find_overdue(current: Current, members: tuple[Worker, ...]) -> set[MemberId]:
    """Return the members that hold the others up.

    A member that has not arrived at the store is one of them if others have arrived. If no member has, the store or the network may
    be at fault, and the next generation has another store.
    """
    waited_for = any(w.standing == Standing.FORMING and not w.is_on_its_way for w in members)
    return {w.id for w in members if _has_not_entered(current, w) or (waited_for and w.is_on_its_way)}


def _has_not_entered(current: Current, worker: Worker) -> bool:
    """Return whether a late member did not answer. A member that trains in the generation before a planned one may not have been
    told of that yet (rule JOIN). Or it has heard of it and waits for the others (rule CUTALL)."""
    if worker.standing in (Standing.SILENT, Standing.STARTING):
        return True
    if worker.standing != Standing.PENDING:
        return False
    if current.kind != PLANNED or worker.session is None or not worker.trains:
        return True
    session = worker.session
    heard = session.condition.heard >= current.number
    finished = session.condition.phase in (Phase.FINISHED, Phase.DONE)  # it enters forced generations only
    return not (heard or finished or session.told_generation < current.number)


def deadline_of(current: Current, members: tuple[Worker, ...], step_s: float, settings: Settings) -> float:
    """Return when a generation that is not adopted yet is given up.

    Every member has a time to enter it, which is longer while the planned end of a script's processes may take longer. Then all of
    them have one to form, then one to adopt. The last two double with each generation in a row that did not form: a slow one forms
    in the end. A member that hangs is found, because it does not enter the next one.
    """
    entered_s = current.announced_at_s + entry_s(current.kind, step_s, settings)
    if any(w.standing == Standing.STARTING for w in members) and current.launches:
        entered_s = max(entered_s, current.announced_at_s + settings.start_timeout_s)
    for worker in members:
        if worker.standing == Standing.STARTING and worker.session is not None:
            entered_s = max([entered_s, *(began_s + most_s for began_s, most_s in partings(worker.session))])
    forming = [w for w in members if w.standing == Standing.FORMING]
    if not forming or any(w.standing in _OUTSIDE for w in members):
        return entered_s
    growth: int = min(MAX_GROWTH, 2 ** max(0, current.attempts - 1))
    since_s = max(w.since_s for w in forming)
    adopts = all(w.session is not None and w.session.condition.phase == Phase.ADOPTING for w in forming)
    return since_s + growth * (settings.adopt_timeout_s if adopts else settings.form_timeout_s)
