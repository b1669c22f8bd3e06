"""Find out whether a generation that trains hangs, and which of its processes do. Pure. The reasons: docs/design/adr/0012-hangs.md.

The clock runs from the last commit, the adoption or the end of a pause, whichever came last. When its time is over, the operator
asks every member where its processes are.

Ranks in a collective wait for the others. Those in no collective hang and are killed, so that the rest keep the state. If all ranks
are in collectives, they get new groups. If no rank waits for another, all would be killed, and no process would be left with the
state. That counts as a hang only after ALONE times as long, and even then one process is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from regroup.protocol.text import shorten
from regroup.protocol.wire import REPORT_EVERY_S, ProcessStack
from regroup_operator.api.members import MemberId
from regroup_operator.api.status import JobStatus
from regroup_operator.model.records import AgentSession, Settings
from regroup_operator.model.worker import Current, Standing, Worker
from regroup_operator.plan.facts.allowances import allowances
from regroup_operator.plan.failures.no_commit import first_without_commit

HUNG = "Hung"
"""Cause of an incident, reason of an event."""
STEPS = 20
"""A step may take so many times the median before it counts as a hang, ..."""
GAPS = 3
"""... and so many times the longest that was seen: evaluations come again, and a little longer."""
LEAST_STEPS = 3
"""spec.recovery.hangSeconds never means less than this many median steps."""
ALONE = 3
ANSWER_S = 10.0
"""An agent answers within 8 s (_regroup_agent.hangs); then it is decided without it, and it is asked again."""
KILL_AGAIN_S = 2.0
IN_A_ROW = 3
"""The third hang without a committed step in between fails the job."""
MAX_LINES = 16
MAX_LINE = 300

_INSIDE = (ProcessStack.COLLECTIVE, ProcessStack.WAITING)
_RankStack = tuple[int, Worker, ProcessStack]
"""A process by its rank and worker, and where it is."""


@dataclass(frozen=True)
class Culprit:
    """One worker's processes that hang."""

    incarnations: tuple[int, ...]
    message: str


@dataclass(frozen=True)
class Hang:
    """`message` is set once a commit is overdue. At most one of `culprits`, `together` and `failure` says what follows."""

    due_s: float | None = None
    """The time of the next look if nothing happens."""
    message: str = ""
    ask: tuple[Worker, ...] = ()
    """The workers whose stacks are asked for."""
    culprits: Mapping[MemberId, Culprit] = field(default_factory=dict)
    together: bool = False
    """Every rank is in a collective: new groups for the same members."""
    failure: str | None = None
    """The sentence that fails the job: it hung too often at the same step."""
    found_s: float = 0.0
    is_only_said: bool = False
    """Nothing follows but the message: the script may be slow, and its user has not said what a hang is."""


@dataclass(frozen=True)
class _Clock:
    """The times of a step that is being made."""

    began_s: float
    bound_s: float
    """Seconds that the step may take."""
    overdue_s: float
    """Time from which the step is overdue."""

    @property
    def alone_s(self) -> float:
        """Time from which the step counts as a hang although no rank waits for another."""
        return self.overdue_s + (ALONE - 1) * self.bound_s

    def says(self, at_s: float) -> str:
        return f"No step was committed for {at_s - self.began_s:.0f} s"


def find_hang(
    *,
    current: Current | None,
    workers: Iterable[Worker],
    processes: int,
    hang_seconds: float | None,
    in_a_row: int,
    now_s: float,
    settings: Settings,
    per_group: int = 1,
) -> Hang:
    """Return what is known of a hang of the newest generation, which all of its members have adopted.

    `processes` is the number of a worker's processes. `in_a_row` is the number of hangs before without a committed step.
    `per_group` workers are a group, whose processes hold one state together.
    """
    members = [w for w in workers if w.is_member]
    training = [w for w in members if w.standing == Standing.TRAINING]
    if current is None or len(training) + sum(w.standing == Standing.FINISHED for w in members) < len(members):
        return Hang()  # the group is broken or not formed yet: the stage of the generation decides what follows
    sessions = [w.session for w in training if w.session is not None]
    if not sessions:
        return Hang()
    clock = _clock(sessions, current, hang_seconds, settings)
    if now_s < clock.overdue_s:
        return Hang(due_s=clock.overdue_s)
    late = clock.says(clock.overdue_s)
    asked = ask_for_stacks(training, current, clock.overdue_s, late, now_s)
    if asked is not None:
        return asked
    stacks = rank_stacks(training, current, processes, clock.overdue_s)
    if hang_seconds is None and any(s.adopted is not None and s.adopted.own_steps for s in sessions):
        return _may_evaluate(clock, stacks)
    alone = len(training) == len(members) and _waits_for_none(stacks)
    if alone and now_s < clock.alone_s:
        return _may_be_slow(clock, stacks)
    if alone:
        asked = ask_for_stacks(training, current, clock.alone_s, late, now_s)
        if asked is not None:
            return asked
        stacks = rank_stacks(training, current, processes, clock.alone_s)
        alone = _waits_for_none(stacks)
    outside = [place for place in stacks if place[2].place not in _INSIDE]
    if alone and len(outside) > 1:
        outside = _without_keepers(outside, per_group * processes if per_group > 1 else 1)
    found_s = max(w.session.stacks_at_s or 0.0 for w in training if w.session)
    return _verdict(clock.says(found_s), stacks, outside, in_a_row, found_s, now_s)


def _clock(
    sessions: Sequence[AgentSession], current: Current, hang_seconds: float | None, settings: Settings
) -> _Clock:
    began_s = max(_moved_s(s, current.number) for s in sessions)
    bound_s = bound(sessions, hang_seconds, settings)
    excused_s = max(_excused_s(s, hang_seconds, settings) for s in sessions)
    # An operator that serves many jobs hears of a step later than it is committed.
    late_s = max(s.report_every_s for s in sessions) - REPORT_EVERY_S
    return _Clock(began_s, bound_s, max(began_s + bound_s + late_s, excused_s))


def _waits_for_none(stacks: Iterable[_RankStack]) -> bool:
    """Return whether no rank is in a collective: then no rank waits for another."""
    return not any(stack.place in _INSIDE for _, _, stack in stacks)


def _may_be_slow(clock: _Clock, stacks: Sequence[_RankStack]) -> Hang:
    """Return the look at `alone_s`. Its sentence stays the same until then, since each new one would be a write of the status."""
    where = "; ".join(_words(*place) for place in stacks[:3])
    then = f"It counts as a hang after {clock.alone_s - clock.began_s:.0f} s"
    return Hang(clock.alone_s, f"{clock.says(clock.overdue_s)}, and no rank waits for another: {where}. {then}.")


def _may_evaluate(clock: _Clock, stacks: Sequence[_RankStack]) -> Hang:
    """Return the sentence on an elastic script of Horovod. Its steps are its commits, so a long evaluation looks like a hang.

    The library knows nothing of what the script does between two commits, and the script has no `job.pause` to say so.
    """
    place = next((one for one in stacks if one[2].place not in _INSIDE), stacks[0] if stacks else None)
    where = ""
    if place is not None:
        rank, worker, stack = place
        verb = "is" if stack.place == ProcessStack.STOPPED else "is in"
        where = f": rank {rank} (worker {worker.id}, process {stack.local_rank}) {verb} {stack.where}"
    then = "A long evaluation between two commits looks the same. To have the process restarted, set spec.recovery.hangSeconds."
    return Hang(message=f"{clock.says(clock.overdue_s)}{where}. {then}", is_only_said=True)


def _verdict(
    what: str,
    stacks: Sequence[_RankStack],
    outside: Sequence[_RankStack],
    in_a_row: int,
    found_s: float,
    now_s: float,
) -> Hang:
    """Return the failure of the job after IN_A_ROW hangs, else the culprits, or new groups if there is none."""
    named = "; ".join(_words(*place) for place in outside[:3]) or "every rank is in a collective: " + "; ".join(
        f"rank {rank} in {s.where}" for rank, _, s in stacks[:3]
    )
    message = f"{what}: {named}"
    if in_a_row + 1 >= IN_A_ROW:
        failure = (
            f"{message}. This is hang {in_a_row + 1} in a row without a committed step in between. "
            f"{'Correct the script there' if outside else 'Look for ranks that run different collectives, and at the network'}"
            ", then submit the job again."
        )
        return Hang(message=message, failure=failure, found_s=found_s)
    culprits = _culprits(outside, what)
    return Hang(now_s + KILL_AGAIN_S, message, culprits=culprits, together=not outside, found_s=found_s)


def _without_keepers(outside: Sequence[_RankStack], inner: int) -> list[_RankStack]:
    """Return the processes that are killed where all hang and none waits for another. One process is left, of model groups one of
    each `inner` index: if the step only took long, the state is not lost."""
    keepers: dict[int, int] = {}
    for rank, _, _ in sorted(outside, key=lambda place: (place[2].place != ProcessStack.OUTSIDE, place[0])):
        keepers.setdefault(rank % inner, rank)
    return [place for place in outside if place[0] not in keepers.values()]


def _culprits(outside: Sequence[_RankStack], what: str) -> dict[MemberId, Culprit]:
    """Return the workers whose processes hang, each with the sentence on the first of them."""
    found: dict[MemberId, Culprit] = {}
    for rank, worker, stack in outside:
        culprit = found.get(worker.id, Culprit((), f"{what}: {_words(rank, worker, stack)}"))
        found[worker.id] = Culprit((*culprit.incarnations, stack.incarnation), culprit.message)
    return found


def bound(sessions: Iterable[AgentSession], hang_seconds: float | None, settings: Settings) -> float:
    """Return how many seconds a step may take, by what the processes have measured."""
    measured = [s.progress for s in sessions if s.progress is not None]
    step_s = max((p.step_s or 0.0 for p in measured), default=0.0)
    if hang_seconds is not None:
        return max(hang_seconds, LEAST_STEPS * step_s)
    longest_s = max((p.longest_s or 0.0 for p in measured), default=0.0)
    return max(settings.hang_s, STEPS * step_s, GAPS * longest_s)


def hangs_in_a_row(status: JobStatus, newest_step: int | None) -> int:
    """Return how many hangs there were since the last committed step, as the incidents of the status tell.

    `newest_step` is the newest that the newest generation has reported; None: nothing yet.
    """
    first = first_without_commit(status, newest_step)
    if first is None:
        return 0
    return sum(i.cause == HUNG and i.generation >= first for i in status.incidents)


def stack_lines(current: Current, workers: Iterable[Worker], processes: int) -> list[str]:
    """Return the ranks' last stacks in this generation, one shortened line each, those in no collective first."""
    stacks = rank_stacks([w for w in workers if w.is_member], current, processes, 0.0)
    stacks.sort(key=lambda entry: (entry[2].place in _INSIDE, entry[0]))
    return [
        shorten(f"rank {rank} ({worker.id}): {s.place}: {s.chain}", MAX_LINE) for rank, worker, s in stacks[:MAX_LINES]
    ]


def _moved_s(session: AgentSession, generation: int) -> float:
    """Return when this worker last did what starts the clock anew."""
    commits = session.progress is not None and session.progress_generation == generation
    # A new operator hears how long ago the last commit was, but dates the adoption with its own first look.
    moved_s = session.progress_at_s if commits and session.progress_at_s is not None else session.condition_at_s
    return max(moved_s, session.busy_ended_s)


def _excused_s(session: AgentSession, hang_seconds: float | None, settings: Settings) -> float:
    """Return until when this worker's processes may take longer than a step; 0 where they do nothing of the kind."""
    ends = (since_s + allowed_s for since_s, allowed_s in allowances(session, settings, hang_seconds or 0.0))
    return max(ends, default=0.0)


def ask_for_stacks(
    training: Sequence[Worker], current: Current, after_s: float, late: str, now_s: float
) -> Hang | None:
    """Return the agents to ask, or until when the operator waits for answers. `late` is the clause on what is overdue.

    None: there are answers of `after_s` or later, and all agents have had their time.
    """
    sessions = [(w, w.session) for w in training if w.session is not None]
    silent = [(w, s) for w, s in sessions if not _answered(s, current, after_s)]
    ask = [w for w, s in silent if s.asked_stacks_at_s is None or s.asked_stacks_at_s < after_s]
    given_s = [s.asked_stacks_at_s + ANSWER_S for w, s in silent if s.asked_stacks_at_s is not None and w not in ask]
    if not ask and len(silent) == len(sessions) and all(at_s <= now_s for at_s in given_s):
        ask = list(training)  # nobody has answered
    waits = [at_s for at_s in given_s if at_s > now_s]
    if not ask and not waits:
        return None
    what = f"{late}; asking where the ranks are."
    return Hang(min(waits, default=now_s + ANSWER_S), what, tuple(ask))


def _answered(session: AgentSession, current: Current, after_s: float) -> bool:
    at_s = session.stacks_at_s
    return (
        session.stacks is not None
        and session.stacks_generation == current.number
        and at_s is not None
        and at_s >= after_s
    )


def rank_stacks(workers: Iterable[Worker], current: Current, processes: int, after_s: float) -> list[_RankStack]:
    """Return (rank, worker, where) of every process whose agent has answered since `after_s`, by rank."""
    places = {member: index for index, member in enumerate(current.members)}
    return sorted(
        (
            (places[w.id] * processes + stack.local_rank, w, stack)
            for w in workers
            if w.session is not None and w.session.stacks is not None and _answered(w.session, current, after_s)
            for stack in w.session.stacks.processes
        ),
        key=lambda entry: entry[0],
    )


def _words(rank: int, worker: Worker, stack: ProcessStack) -> str:
    where = f"rank {rank} (worker {worker.id}, process {stack.local_rank})"
    if stack.pause:
        return f'{where} is in pause "{stack.pause}" for longer than its max_s, in {stack.where}'
    if stack.place == ProcessStack.STOPPED:
        return f"{where} is {stack.where}"
    if stack.place == ProcessStack.SILENT:
        return f"{where} does not answer: {stack.where}"
    return f"{where} hangs in {stack.where}"
