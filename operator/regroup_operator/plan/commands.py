"""Say what each connected agent has to be told: tier, newest generation, stop, `progress?`, ping. Pure.

Derived from what the agent was told on its open stream and has heard, so that a lost stream is made good by the next one.
The controller sends after the status is written (rules PERSIST, RELEASE).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf

from regroup.protocol.document import PLANNED, CheckpointRef, Document
from regroup.protocol.state import Phase
from regroup.protocol.wire import (
    REPORT_EVERY_S,
    SILENT_S,
    DocumentCommand,
    Finish,
    Generation,
    Observed,
    Ping,
    ProgressRequest,
    Stop,
    Welcome,
)
from regroup_operator.api.conditions import COMPLETE, SUSPENDED
from regroup_operator.model.plan import Tell, earliest
from regroup_operator.model.records import Pod, Session
from regroup_operator.model.worker import Standing, Worker
from regroup_operator.plan.facts.facts import Facts
from regroup_operator.plan.facts.finished import Finished
from regroup_operator.plan.facts.observers import who_observes
from regroup_operator.plan.facts.stalls import ANSWER_S, SCRIPT_ANSWER_S, SCRIPT_ASK_EVERY_S
from regroup_operator.plan.lifecycle.finished import places_of

ASK_EVERY_S = 1.0
"""While a member is silent or progress stalls, everybody who can be reached is asked this often, ..."""
ASKED_PER_S = 50.0
"""... and in a large job less often: an evaluation between two steps stalls progress, too."""
LATE_ASKED_EVERY_S = SILENT_S / 2
"""Who reports seldom is asked for progress this often while observers do not hear a member: twice before it could count as lost."""


@dataclass(frozen=True)
class End:
    """What the end of the steps means for the agents, by pod UID (rule END)."""

    finish: Mapping[str, Finish]
    """Who is told to leave its loop, or not to begin it."""
    stops: frozenset[str]
    """Whose scripts have returned 0 by the stored status: they may exit."""


def end_of(facts: Facts, finished: Finished, workers: Sequence[Worker], checkpoint: CheckpointRef | None) -> End:
    """Return it. `finished`, `checkpoint`: what the status says from this plan on."""
    places = places_of(finished, workers)
    index = {member: i for i, member in enumerate(finished.members)}
    exact = checkpoint if checkpoint is not None and checkpoint.step == finished.step else None
    finish = {
        worker.pod.uid: Finish(
            generation=finished.generation,
            step=finished.step,
            rank_offset=index[member] * facts.processes,
            world_size=len(finished.members) * facts.processes,
            checkpoint=exact,
            repeats=facts.ends_alone,
        )
        for member, worker in places.items()
        if worker.pod is not None
    }
    stored = facts.finished
    if stored is None or not facts.ends_alone:
        return End(finish, frozenset())  # where all may have to run again, each of them stays until all have returned
    return End(finish, frozenset(w.pod.uid for w in workers if w.pod is not None and w.id in stored.done))


def plan_commands(
    *,
    workers: Iterable[Worker],
    tier: str | None,
    document: Document | None,
    released: frozenset[str],
    stop: str | None,
    stalled: bool,
    now_s: float,
    ask: frozenset[str] = frozenset(),
    suspected: Mapping[str, float] | None = None,
    end: End | None = None,
) -> Iterator[Tell]:
    """Yield the commands. `document` is the newest generation's, where this operator has it; `stop` the outcome of a job
    that has ended: everybody is stopped then, before only the released. `stalled`: steps, or an adoption, are overdue. `ask`:
    the pod UIDs of those who must answer before a generation names them. `suspected`: since when an observer has heard nothing,
    by pod UID. `end`: of the steps, once it is in the status."""
    workers = tuple(workers)
    assignment = _Assignment(document, workers) if document is not None else None
    every_s = _every_s(workers)
    words = _due_words(workers, suspected or {}, now_s - every_s)
    late = _late_reporters(workers, suspected, now_s - LATE_ASKED_EVERY_S) if suspected else frozenset()
    silent = any(w.is_member and w.standing == Standing.SILENT for w in workers)
    withheld = document is not None and tier == "Session" and _waits_for_joiners(document, workers)
    for worker in workers:
        session, pod = worker.session, worker.pod
        if session is None or pod is None or not session.connected:
            continue
        known_tier = tier or "Unknown"
        if session.told_tier != known_tier:
            yield Tell(pod.uid, Welcome(known_tier))
        word = COMPLETE if end is not None and pod.uid in end.stops else stop
        if end is not None and word is None and pod.uid in end.finish:
            if session.told_finish < end.finish[pod.uid].generation:
                yield Tell(pod.uid, end.finish[pod.uid])
            continue
        if word is not None or pod.uid in released:
            if word == SUSPENDED and session.condition.phase == Phase.DONE:
                # Nothing is left to suspend: it is told once the status says so. Where all run again, its word counts no more.
                word = None if end is not None else COMPLETE
            # One that has returned 0 ignores `Suspended`, which may have been on its way then.
            told = session.told_stop and (word, session.told_outcome) != (COMPLETE, SUSPENDED)
            if not told and (word is not None or pod.uid in released):
                yield Tell(pod.uid, Stop(word or "Released"))
            continue
        if end is not None:
            continue
        if assignment is not None and session.told_generation < assignment.number:
            condition = session.condition
            # The host of the store hears of a generation in two lines, between which its stream may have ended.
            waits = pod.uid == assignment.host and condition.entered < assignment.number
            if (condition.heard < assignment.number or waits) and not (withheld and worker.trains):
                yield from assignment.of(pod)
        if silent or stalled:
            asks = session.asked_at_s is None or now_s >= session.asked_at_s + every_s
        else:
            asks = tier == "Script" and session.unanswered_since_s is None and now_s >= script_due_s(session)
        must_answer = pod.uid in ask or session.heard_at_s < words.get(pod.uid, -inf)
        if asks or pod.uid in late or (must_answer and session.unanswered_since_s is None):
            yield Tell(pod.uid, ProgressRequest() if silent or pod.uid in late else Ping())


def _every_s(workers: Sequence[Worker]) -> float:
    return max(ASK_EVERY_S, len(workers) / ASKED_PER_S)


def _late_reporters(workers: Sequence[Worker], suspected: Mapping[str, float], lately_s: float) -> frozenset[str]:
    """Return the pod UIDs of two members that are asked how far they are while others are `suspected`, and have neither been asked
    nor said so lately. Where members report seldom, only that shows whether the group commits steps, which proves that a worker
    lives although its observers do not hear it."""
    members = (w.session for w in workers if w.is_member and w.session is not None and w.session.connected)
    heard = [session for session in members if session.pod_uid not in suspected][:2]
    return frozenset(
        session.pod_uid
        for session in heard
        if session.report_every_s > REPORT_EVERY_S
        and session.progress_told_s <= lately_s
        and (session.asked_at_s is None or session.asked_at_s <= lately_s)
    )


def _due_words(workers: Sequence[Worker], suspected: Mapping[str, float], lately_s: float) -> dict[str, float]:
    """Return since when a worker must have spoken, by pod UID, or be asked. Who is suspected: lately, again and again, and the
    others on its node: since then. So it is known who is there when the next generation is decided (adr/0017); in a small job of
    all workers, which costs less than to wait for their answers then."""
    if not suspected:
        return {}
    nodes: dict[str, float] = {}
    for worker in workers:
        if worker.pod is not None and worker.pod.uid in suspected:
            node, since_s = worker.pod.node, suspected[worker.pod.uid]
            nodes[node] = min(since_s, nodes.get(node, since_s))
    everybody_s = min(suspected.values()) if len(workers) <= ASKED_PER_S else -inf
    pods = [worker.pod for worker in workers if worker.pod is not None]
    words = {pod.uid: nodes.get(pod.node, everybody_s) for pod in pods}
    return words | {uid: max(since_s, lately_s) for uid, since_s in suspected.items()}


def stop_leaving(leaving: Iterable[tuple[Pod, Session]]) -> Iterator[Tell]:
    """Yield the commands for pods that are asked to leave and whose job is deleted: nobody will take their place, so they do not
    train on until their grace period is over."""
    for pod, session in leaving:
        if session.connected and not session.told_stop:
            yield Tell(pod.uid, Stop("Released"))


def script_due_s(session: Session) -> float:
    """Return when the agent of a script that runs is asked next if nothing calls for it before, or, where it has not answered
    yet, when it counts as silent."""
    if session.unanswered_since_s is not None:
        return session.unanswered_since_s + SCRIPT_ANSWER_S
    return session.heard_at_s + SCRIPT_ASK_EVERY_S


def commands_due_s(facts: Facts, members: Sequence[Worker]) -> float | None:
    """Return when agents are asked again, or have had their time to answer."""
    now_s, dues_s = facts.inputs.clock.now_s, list[float | None]()
    sessions = [w.session for w in members if w.session is not None]
    if facts.asks or any(w.standing == Standing.SILENT for w in members):
        asked = [s.unanswered_since_s for s in sessions]
        dues_s = [now_s + ASK_EVERY_S, *(at_s + ANSWER_S for at_s in asked if at_s is not None)]
    if facts.silences.suspected:
        dues_s.append(now_s + _every_s(facts.workers))
        if any(s.report_every_s > REPORT_EVERY_S for s in sessions):
            dues_s.append(now_s + LATE_ASKED_EVERY_S)
    if facts.tier == "Script":
        dues_s += [script_due_s(s) for s in sessions if s.connected]
    return earliest(dues_s, after_s=now_s)


def _waits_for_joiners(document: Document, workers: Iterable[Worker]) -> bool:
    """Return whether those that train are not told of a planned generation yet, because one that joins has not arrived at its
    store (rule JOIN): they would leave their group and stand still until it does."""
    if document.kind != PLANNED:
        return False
    uids = {member.pod_uid for member in document.members}
    return any(
        w.pod is not None and w.pod.uid in uids and not w.trains and not _has_arrived(w, document.number)
        for w in workers
    )


def _has_arrived(worker: Worker, number: int) -> bool:
    condition = worker.session.condition if worker.session is not None else None
    return condition is not None and (condition.generation, condition.phase) in (
        (number, Phase.ARRIVED),
        (number, Phase.ADOPTING),
    )


class _Assignment:
    """One generation, told to many: what they share is computed once."""

    def __init__(self, document: Document, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self.number, self.host = document.number, document.store.pod_uid
        self._document, self._digest, self._world_size = document, document.digest(), document.world_size
        offsets = accumulate((m.processes for m in document.members), initial=0)
        self._places = {m.pod_uid: place for m, place in zip(document.members, enumerate(offsets))}

    @cached_property
    def _observes(self) -> dict[str, tuple[Observed, ...]]:
        return who_observes(w for w in self._workers if w.pod is not None and w.pod.uid in self._places)

    def of(self, pod: Pod) -> Iterator[Tell]:
        """Yield what this pod is told; the store's host gets the document, too."""
        document = self._document
        index, offset = self._places.get(pod.uid, (0, 0))
        hosts = pod.uid == document.store.pod_uid
        body = Generation(
            number=document.number,
            uid=document.uid,
            kind=document.kind,
            member=pod.uid in self._places,
            rank_offset=offset,
            world_size=self._world_size,
            slot=pod.slot,
            group_rank=index,
            store_host=document.store.host,
            store_port=document.store.port,
            store_prefix=document.store_prefix(),
            hosts_store=hosts,
            document_digest=self._digest,
            reason=document.reason,
            observes=self._observes.get(pod.uid, ()),
        )
        yield Tell(pod.uid, body)
        if hosts:
            yield Tell(pod.uid, DocumentCommand(document))
