"""The end of a job's steps: the members whose scripts have returned 0, and the workers that have their places (rule END). Pure.

`status.finished` is the memory of it. In tier Session it is written once every member has committed the last step, and before any
member is told to leave its loop. In tier Script it is written once the first member's script has returned 0.

A member cannot run its end alone if its script does not use the library, or if the model is split over the members. A failure then
takes the end back: all members run theirs again, in an ordinary generation. `status.endTakenBack` keeps the time from which the
deadline for the end counts, until steps are trained again.

Only `status.finished.members` says which pods have a place. A pod that is named there keeps its place for as long as it may run.
Then a pod that was made for its slot is named instead, before that pod is told anything. The first write names the members of the
generation and releases all other pods. Of two pods of one slot (a hand-over) only a member stays. A pod that comes back after its
place was given away is released, and its report of its script does not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from regroup.protocol.document import PLANNED
from regroup.protocol.state import Phase
from regroup_operator.api.members import MemberId, parse_members
from regroup_operator.model.worker import Standing, Worker
from regroup_operator.plan.facts.facts import Facts
from regroup_operator.plan.facts.finished import Finished, says_done

_COMMITTED = (Phase.FINISHED, Phase.FINISHING, Phase.DONE)
"""Phases of a worker whose processes have committed the last step."""
_LEFT = (Phase.FINISHING, Phase.DONE)
"""Phases of a worker that has been told to leave its loop."""
_BAD = (Standing.LOST, Standing.DIED, Standing.HUNG, Standing.BROKEN)


def see_finished(facts: Facts, workers: Sequence[Worker]) -> Finished | None:
    """Return who has finished and who is done, None: the job still has steps to train. What the status says stays, and only grows.

    `workers`: as they stand after hangs were looked for."""
    end = facts.finished
    all_again = not facts.ends_alone and (end is None or end.open)
    if all_again and any(w.is_member and w.standing in _BAD for w in workers):
        return None  # those that have returned 0 run again, too
    if end is None:
        seen = _first_returned if facts.tier == "Script" else _last_step_committed
        end = seen(facts, workers)
        before = facts.taken_back
        if end is not None and before is not None and end.step == before.step:
            end = replace(end, at=before.at)  # all run their end again, and trained no step for that
    elif facts.ends_alone:
        end = taken_over(end, workers, facts.released)
    if end is None:
        return None
    done = {member for member, worker in places_of(end, workers).items() if says_done(worker, end.generation)}
    return replace(end, done=end.done | done)


def taken_over(finished: Finished, workers: Iterable[Worker], released: Collection[str]) -> Finished:
    """Return the end with new pods in the places of those that can run no more. Another pod of the slot takes the place, the oldest
    first, and none that is `released` (pod UIDs)."""
    there = {w.id: w.uid for w in workers if w.pod is not None and may_run(w)}
    free: dict[int, list[MemberId]] = defaultdict(list)
    for one in sorted(there.keys() - set(finished.members), reverse=True):
        if there[one] not in released:
            free[one.slot].append(one)
    gone = frozenset(member for member in finished.open if member not in there)
    members = tuple(
        free[member.slot].pop() if member in gone and free[member.slot] else member for member in finished.members
    )
    return replace(finished, members=members)


def places_of(finished: Finished, workers: Iterable[Worker]) -> dict[MemberId, Worker]:
    """Return the workers that have the places of the members that are not done. A place without one needs a pod."""
    there = {w.id: w for w in workers if may_run(w)}
    return {member: there[member] for member in finished.open if member in there}


def may_run(worker: Worker) -> bool:
    """Return whether a worker's pod may still run its script. One on a node that nobody can reach may, for as long as the API has
    it: that it is being deleted there ends nothing."""
    return worker.pod is not None and worker.pod.alive


def _first_returned(facts: Facts, workers: Sequence[Worker]) -> Finished | None:
    """Return the newest generation of a script once one of its members has returned 0."""
    current = facts.current
    if current is None or not any(w.is_member and says_done(w, current.number) for w in workers):
        return None
    return Finished(current.number, current.members, at=facts.inputs.clock.timestamp())


def _last_step_committed(facts: Facts, workers: Sequence[Worker]) -> Finished | None:
    """Return the generation whose members have all committed the last step.

    That may be the one before the newest: a planned one that nobody has entered came too late, and finished ranks ignore it.

    A worker leaves its loop only after the end was written. If the status lacks the end then, it comes from a backup.
    The end is written again, since such a worker enters no other generation (rule END, WRITTEN)."""
    current, members = facts.current, [w for w in workers if w.is_member]
    if current is None or facts.membership is None:
        return None
    at = facts.inputs.clock.timestamp()
    left = [w for w in workers if _has_left(w, current.number)]
    if facts.ends_alone and left and _step(left) > 0:
        end = Finished(current.number, current.members, _step(left), at=at)
        return taken_over(end, [w for w in workers if w.is_member or w in left], facts.released)
    if not members:
        return None
    if all(_has_committed(w, current.number) for w in members):
        return Finished(current.number, current.members, _step(members), at=at)
    if current.adopted or current.kind != PLANNED or len(current.older) != 1:
        return None
    before = current.older[0]
    uids = frozenset(before.pod_uids)
    earlier = [w for w in workers if w.uid in uids]
    if len(earlier) < len(uids) or not all(_has_committed(w, before.number) for w in earlier):
        return None
    spelled = next(o.members for o in facts.membership.older if o.uid == before.uid)
    return Finished(before.number, parse_members(spelled), _step(earlier), at=at)


def _has_committed(worker: Worker, generation: int) -> bool:
    """Return whether a member has said that it has committed the last step. What it has said stays true, whether it can be reached
    or not."""
    condition = worker.session.condition if worker.session is not None else None
    said = condition is not None and condition.phase in _COMMITTED and condition.generation == generation
    return said and worker.pod is not None and worker.pod.phase != "Failed"


def _has_left(worker: Worker, generation: int) -> bool:
    """Return whether a worker says that it has left its loop after the last step of a generation."""
    condition = worker.session.condition if worker.session is not None else None
    return condition is not None and condition.phase in _LEFT and condition.generation == generation


def _step(members: Iterable[Worker]) -> int:
    return max(w.session.condition.step for w in members if w.session is not None)
