"""Decide what is done about a worker that holds up its job: wait, restart its processes in place, replace its pod. Pure.

No standing lasts for ever (protocol.md, "What must hold"). A worker is late if it has not left an earlier generation, not entered
the newest one or not finished its start. Late workers are restarted in place, and replaced if that does not help. A worker that
cannot be reached is replaced, too: its pod may serve nobody for ever on a node that is Ready.

A script may take its time for some things (allowances.py). They do not make its worker late.

The worker that may be the only one to hold the newest state gets ONLY_HOLDER times as long. Its state is lost with its processes,
and training then goes on from an older one. If the user has said what a hang is (spec.recovery.hangSeconds), no late worker gets
longer than a hang of the only holder may last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from regroup.protocol.document import PLANNED
from regroup.protocol.state import Phase
from regroup_operator.api.members import MemberId
from regroup_operator.model.plan import Setback, Spell
from regroup_operator.model.records import AgentSession, Settings
from regroup_operator.model.worker import Current, Standing, Worker
from regroup_operator.plan.facts.allowances import allowances, entry_s
from regroup_operator.plan.facts.groups import by_position
from regroup_operator.plan.facts.stalls import is_unresponsive

BEHIND, START, UNREACHABLE = "behind", "start", "unreachable"
"""Values of Spell.kind: has not come to the newest generation; its processes start; its agent does not answer."""
LATE_STEPS = 20
"""A worker in the middle of a long step comes late without being at fault: so many of the job's steps are allowed."""
START_FACTOR = 4
"""Starts may take so many times the longest one that was seen: imports on a busy node, an image's first read."""
MAX_START_GROWTH = 64
"""Each pod of a slot has twice as long to start as the one before it, up to so many times. A start that takes long may thus succeed
in the end."""
ENTER_S = 5.0
"""So long a worker has to enter a generation that names it again, however long it was missed before."""
ONLY_HOLDER = 5
SETBACK_S = (60.0, 600.0)
"""Seconds for which a worker that kept a generation from forming joins no other one: the first time, doubled each time up to the
second."""
MAX_SETBACKS = 5
"""So many setbacks in a row, `late_timeout_s` after the first, and the worker is replaced: its node or its link may be at fault."""
NOBODY_FACTOR = 10
"""Factor of the wait for a replacement if no agent of the job can be reached, or so many of all jobs (model/reach.py). The
operator's own network is then the likelier cause, and new pods would not help."""


@dataclass(frozen=True)
class Lateness:
    """`restart`: (worker, sentence), each once a spell. `replace`: pod UIDs that serve their slot no longer. `spells`: to be
    remembered. `due_s`: when the next of these is due; None: nobody is late."""

    restart: tuple[tuple[Worker, str], ...] = ()
    replace: frozenset[str] = frozenset()
    spells: Mapping[str, Spell] | None = None
    due_s: float | None = None


@dataclass(frozen=True)
class _Holders:
    """Workers of one position that can be reached and hold a state, as far as is known. `prompt` has those that are not behind."""

    first: MemberId | None
    all: frozenset[MemberId]
    prompt: frozenset[MemberId]

    @staticmethod
    def among(workers: Iterable[Worker], behind: Collection[MemberId]) -> _Holders:
        ids = [w.id for w in workers if w.connected and w.may_hold]
        return _Holders(ids[0] if ids else None, frozenset(ids), frozenset(ids).difference(behind))

    def others(self, member: MemberId) -> bool:
        """Return whether another worker holds a state. If all holders are late, the first one counts as the only one. Otherwise all
        would be restarted together, and the state would be gone."""
        if member not in self.all:
            return bool(self.all)
        return len(self.prompt) > (member in self.prompt) or member != self.first


@dataclass(frozen=True, kw_only=True)
class Attendance:
    """The workers of a job, and by what it is judged whether they are late."""

    workers: Sequence[Worker]
    current: Current | None
    spells: Mapping[str, Spell]
    """Spells by pod UID, as the plan before has left them."""
    setbacks: Mapping[str, Setback]
    """Setbacks by pod UID, as `with_setbacks` returns them."""
    released: frozenset[str]
    step_s: float
    """The duration of a step; 0: not known."""
    now_s: float
    settings: Settings
    alone_s: float | None = None
    """Seconds for which the only worker with the newest state may hang; None: the user has not said."""
    longest_start_s: float = 0.0
    """The longest start of a worker so far; 0: none has been seen."""
    per_group: int = 1
    """Workers in a group: each position holds its part of the state."""
    at_fault: bool = False
    """The operator cannot reach so many agents of all jobs that it is the likelier cause."""

    @cached_property
    def missed(self) -> frozenset[str]:
        """Pod UIDs of those that have not come to earlier generations."""
        return frozenset(uid for uid, spell in self.spells.items() if spell.kind == BEHIND and uid in self.setbacks)

    @cached_property
    def kinds(self) -> dict[MemberId, tuple[str, float | None]]:
        """Maps each worker to how it is late, as `_kind` says."""
        forming = [w.is_on_its_way for w in self.workers if w.standing == Standing.FORMING]
        # Where all are on their way, processes of one worker may wait for each other: one of them has not come with the rest.
        waited_for = not all(forming) or len(forming) == sum(w.is_member for w in self.workers)
        excused = _excuse(self.current, self.missed, self.step_s, self.now_s, self.settings)
        return {
            w.id: _kind(w, self.current, waited_for=waited_for, excused=excused, now_s=self.now_s) for w in self.workers
        }

    @cached_property
    def _holders(self) -> list[_Holders]:
        behind = frozenset(member for member, (kind, _) in self.kinds.items() if kind == BEHIND)
        return [_Holders.among(alike, behind) for alike in by_position(self.workers, self.per_group)]

    @cached_property
    def _reaches_some(self) -> bool:
        return any(w.connected and not _is_unreachable(w, self.now_s) for w in self.workers)

    def due_s(self, worker: Worker, spell: Spell) -> float:
        """Return when something is done about a late worker: its processes are restarted, or its pod is replaced.

        The pod is replaced if a restart has not helped or is not possible. A process may not be killed, an agent may not have
        heard, or the start hangs again.
        """
        if spell.kind == UNREACHABLE:
            return self._unreachable_s(worker, spell.since_s)
        since_s = spell.since_s if spell.restarted_s is None else spell.restarted_s
        if spell.kind == START:  # after a restart the new processes may rehearse, too
            return self.excused_s(worker, since_s, self._start_bound_s(worker))
        enter_s = 0.0
        if worker.is_member and self.current is not None:
            enter_s = self.current.announced_at_s + ENTER_S
        if spell.restarted_s is not None:
            return max(since_s + self.settings.late_timeout_s, enter_s)
        return max(self.excused_s(worker, since_s, self._behind_bound_s(worker)), enter_s)

    def excused_s(self, worker: Worker, since_s: float, bound_s: float) -> float:
        """Return when `bound_s` is over for a worker that is missed since `since_s`. It has longer where its script rehearses, is
        in its first step, in a pause, or waits for a checkpoint. What began after `since_s` counts from there: one pause after the
        other excuses nobody for ever."""
        allowed = allowances(worker.session, self.settings) if worker.session is not None else ()
        return max((since_s + bound_s, *(min(began_s, since_s) + allowed_s for began_s, allowed_s in allowed)))

    def _unreachable_s(self, worker: Worker, since_s: float) -> float:
        """Return when the pod of a worker that cannot be reached is replaced."""
        is_ours = not self._reaches_some or (self.at_fault and worker.pod is not None and worker.pod.node_ready)
        return since_s + self.settings.replace_after_s * (NOBODY_FACTOR if is_ours else 1)

    def _start_bound_s(self, worker: Worker) -> float:
        """Return how long the processes of a worker may start."""
        least_s = self.settings.late_timeout_s if self.longest_start_s else self.settings.start_timeout_s
        growth: int = min(MAX_START_GROWTH, 2**worker.id.attempt)
        return growth * max(least_s, START_FACTOR * self.longest_start_s)

    def _behind_bound_s(self, worker: Worker) -> float:
        """Return how long a worker may be behind the newest generation."""
        least_s, alone_s = self.settings.late_timeout_s, self.alone_s
        bound_s = max(least_s, LATE_STEPS * self.step_s)
        if alone_s is not None:
            # `step_s` may include time that was not a step, such as a blocked log.
            bound_s = min(bound_s, max(least_s, alone_s))
        if self._holders[worker.id.slot % self.per_group].others(worker.id):
            return bound_s
        longest_s = ONLY_HOLDER * bound_s
        return longest_s if alone_s is None else min(longest_s, max(bound_s, alone_s))


def see_lateness(attendance: Attendance) -> Lateness:
    """Return who is to be restarted or replaced."""
    now_s = attendance.now_s
    kept: dict[str, Spell] = {}
    restart: list[tuple[Worker, str]] = []
    replaced: list[tuple[str, float]] = []
    dues: list[float] = []
    for worker in attendance.workers:
        pod, (kind, since_s) = worker.pod, attendance.kinds[worker.id]
        if pod is None or not pod.usable or pod.uid in attendance.released:
            continue
        setback = attendance.setbacks.get(pod.uid)
        if setback is not None and setback.count >= MAX_SETBACKS:
            replaced.append(
                (pod.uid, attendance.excused_s(worker, setback.since_s, attendance.settings.late_timeout_s))
            )
        before = attendance.spells.get(pod.uid)
        if not kind:
            if before and pod.uid in attendance.missed and not _has_come(worker, attendance.current):
                kept[pod.uid] = before  # it is left out because it did not come, which is no sign that it would
            continue
        spell = before if before and before.kind == kind else Spell(kind, now_s if since_s is None else since_s)
        if kind != UNREACHABLE and spell.restarted_s is None:
            late_s = attendance.due_s(worker, spell)
            if now_s >= late_s:
                restart.append((worker, _sentence(worker, attendance.current, kind, now_s - spell.since_s)))
                spell = replace(spell, restarted_s=now_s)
            else:
                dues.append(late_s)
        if kind == UNREACHABLE or spell.restarted_s is not None:
            replaced.append((pod.uid, attendance.due_s(worker, spell)))
        kept[pod.uid] = spell
    dues += [at_s for _, at_s in replaced if at_s > now_s]
    is_due = frozenset(uid for uid, at_s in replaced if at_s <= now_s)
    return Lateness(tuple(restart), is_due, kept, min(dues, default=None))


def longest_start(known_s: int | None, sessions: Iterable[AgentSession], settings: Settings) -> int | None:
    """Return the longest start of a worker so far in whole seconds, at least 1; None: none has been seen. It is kept for the life
    of the job, in the status, because sessions are lost with their pods and with the operator. So one that was stopped for hours
    counts as `start_timeout_s`."""
    seen = [known_s] if known_s is not None else []
    seen += [max(1, ceil(min(s.start_s, settings.start_timeout_s))) for s in sessions if s.start_s is not None]
    return max(seen, default=None)


def with_setbacks(
    setbacks: Mapping[str, Setback], workers: Iterable[Worker], set_back: frozenset[MemberId], now_s: float
) -> dict[str, Setback]:
    """Return who kept generations from forming, with those that did it now; forget who has adopted one since, and who is
    gone."""
    out: dict[str, Setback] = {}
    first_s, last_s = SETBACK_S
    for worker in workers:
        pod, session = worker.pod, worker.session
        if pod is None:
            continue
        before = setbacks.get(pod.uid)
        if worker.id in set_back:
            if before is None:
                out[pod.uid] = Setback(1, now_s, now_s + first_s, first_s)
            elif now_s < before.until_s:  # it was needed before its time
                out[pod.uid] = replace(before, count=before.count + 1)
            else:
                bar_s = min(last_s, 2 * before.bar_s)
                out[pod.uid] = Setback(before.count + 1, before.since_s, now_s + bar_s, bar_s)
        elif before is not None and not (session is not None and worker.standing == Standing.TRAINING):
            out[pod.uid] = before
    return out


def _excuse(
    current: Current | None, missed: Collection[str], step_s: float, now_s: float, settings: Settings
) -> Callable[[Worker], bool]:
    """Return the workers that a planned generation excuses while not all members have adopted it.

    A worker in the generation before is excused for as long as it trains there. If enough workers were left, a forced generation
    would have replaced this one. As long as there are too few, a restart would only end the worker that holds the state.

    Other workers are excused until the generation is given up for them (trouble.py). Those that were `missed` by earlier
    generations (pod UIDs) are not excused: they have ENTER_S.
    """
    if current is None or current.kind != PLANNED or current.adopted:
        return lambda _: False
    if now_s >= current.announced_at_s + entry_s(PLANNED, step_s, settings):
        return lambda worker: worker.trains
    return lambda worker: worker.trains or worker.uid not in missed


def _has_come(worker: Worker, current: Current | None) -> bool:
    """Return whether a worker has entered the newest generation and arrived at its store, whatever has come of it since."""
    session = worker.session
    entered = session is not None and current is not None and session.condition.entered >= current.number
    return entered and not worker.is_on_its_way


def _kind(
    worker: Worker, current: Current | None, *, waited_for: bool, excused: Callable[[Worker], bool], now_s: float
) -> tuple[str, float | None]:
    """Return how a worker is late, "" if it is not, and since when, where its session says so. `waited_for`: others wait
    at the newest generation's store, or nobody has arrived there and nobody else is missing."""
    session = worker.session
    if _is_unreachable(worker, now_s):
        return UNREACHABLE, None
    if session is None or not session.connected:
        return "", None
    condition = session.condition
    if condition.phase == Phase.STARTING:
        return START, session.condition_at_s
    if current is None or excused(worker):
        return "", None
    # Who has finished an older one waits in it, too, and comes to the newest as soon as it hears of it.
    is_inside = worker.is_in_group or condition.phase in (Phase.FINISHED, Phase.FINISHING, Phase.DONE)
    inside_older = is_inside and condition.generation < current.number
    # Another operator may have announced it and told nobody.
    is_told = current.has_document or condition.heard >= current.number
    is_pending = worker.standing == Standing.PENDING and is_told
    # Some of its processes wait for a newer generation and others have not left: without a seal its state is unknown.
    is_half_out = condition.phase == Phase.BROKEN and session.seal is None and condition.adopted > 0
    half_out_of_older = is_half_out and condition.generation < current.number <= condition.heard
    if inside_older or half_out_of_older or is_pending or (waited_for and worker.is_on_its_way):
        return BEHIND, None
    return "", None


def _is_unreachable(worker: Worker, now_s: float) -> bool:
    """Return whether a worker cannot be reached. A silent member may be proved alive by progress; a lost one is not. Who is
    asked has a moment to answer: everybody is, again and again, and another spell would begin with each question."""
    session = worker.session
    if worker.standing == Standing.LOST:
        return True
    if session is None or worker.is_member:
        return False
    return not session.connected or is_unresponsive(session, now_s)


def _sentence(worker: Worker, current: Current | None, kind: str, late_s: float) -> str:
    if kind == START:
        return f"its processes have not finished starting for {late_s:.0f} s."
    number = current.number if current else 0
    what = f"entered generation {number}" if worker.is_member else "left its earlier generation"
    return f"it has not {what} for {late_s:.0f} s."
