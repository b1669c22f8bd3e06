"""Choose the commands for each connected agent: tier, newest generation, stop, `progress?`, ping. Pure.

The commands follow from what the agent was told on its open stream and has heard. So the next stream makes a lost one good. The
controller sends them after the status is written (rules PERSIST, RELEASE).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from regroup_operator.model.records import AgentSession, Pod
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
"""An agent that reports seldom is asked for progress this often while observers do not hear a member. So it is asked twice before
that member could count as lost."""


@dataclass(frozen=True)
class End:
    """The commands at the end of the steps (rule END)."""

    finish: Mapping[str, Finish]
    """Maps the pod UIDs of agents whose script leaves its loop, or does not begin it, to the command."""
    stops: frozenset[str]
    """Pod UIDs of workers whose scripts have returned 0 by the stored status. Their agents may exit."""


def end_of(facts: Facts, finished: Finished, workers: Sequence[Worker], checkpoint: CheckpointRef | None) -> End:
    """Return it. `finished`, `checkpoint`: what the status says from this plan on."""
    places = places_of(finished, workers)
    index = {member: i for i, member in enumerate(finished.members)}
    exact = checkpoint if checkpoint is not None and checkpoint.step == finished.step else None
    finish = {
        worker.uid: Finish(
            generation=finished.generation,
            step=finished.step,
            rank_offset=index[member] * facts.processes,
            world_size=len(finished.members) * facts.processes,
            checkpoint=exact,
            repeats=facts.ends_alone,
        )
        for member, worker in places.items()
    }
    stored = facts.finished
    if stored is None or (stored.open and not facts.ends_alone):
        return End(finish, frozenset())  # where all may have to run again, each of them stays until all have returned
    return End(finish, frozenset(w.uid for w in workers if w.id in stored.done))


@dataclass(frozen=True, kw_only=True)
class Briefing:
    """The facts of a job that its agents hear of."""

    workers: Sequence[Worker]
    tier: str | None
    document: Document | None
    """The newest generation's, where this operator has it."""
    released: frozenset[str]
    stop: str | None
    """The outcome of a job that has ended: everybody is stopped then, before only the released."""
    stalled: bool
    """Steps, or an adoption, are overdue."""
    now_s: float
    ask: frozenset[str] = frozenset()
    """The pod UIDs of those who must answer before a generation names them."""
    suspected: Mapping[str, float] = field(default_factory=dict)
    """Maps pod UIDs to the time since which an observer has heard nothing."""
    end: End | None = None
    """The end of the steps, once it is in the status."""
    lists_members: bool = False
    """Every member gets the document, since the framework of the job lists the members in each process."""

    @cached_property
    def _assignment(self) -> _Assignment | None:
        return _Assignment(self.document, self.workers, self.lists_members) if self.document is not None else None

    @cached_property
    def _is_withheld(self) -> bool:
        """True while a worker that joins a planned generation has not arrived at its store (rule JOIN). Members that train are not
        told of the generation yet: they would leave their group and stand still until then."""
        document = self.document
        if document is None or self.tier != "Session" or document.kind != PLANNED:
            return False
        uids = {member.pod_uid for member in document.members}
        joiners = (w for w in self.workers if w.uid in uids and not w.trains)
        return not all(_has_arrived(w, document.number) for w in joiners)

    @cached_property
    def _speak_by(self) -> dict[str, float]:
        """Maps pod UIDs to the time since which the worker must have spoken; otherwise it is asked.

        A suspected worker must have spoken lately, again and again. The others on its node must have spoken since the suspicion. So
        it is known which workers are there when the next generation is decided (adr/0017). In a small job that holds for all
        workers, which costs less than to wait for their answers then.
        """
        suspected = self.suspected
        if not suspected:
            return {}
        pods = [worker.pod for worker in self.workers if worker.pod is not None]
        nodes: dict[str, float] = {}
        for pod in pods:
            if pod.uid in suspected:
                nodes[pod.node] = min(suspected[pod.uid], nodes.get(pod.node, inf))
        everybody_s = min(suspected.values()) if len(self.workers) <= ASKED_PER_S else -inf
        lately_s = self.now_s - _every_s(self.workers)
        words = {pod.uid: nodes.get(pod.node, everybody_s) for pod in pods}
        return words | {uid: max(since_s, lately_s) for uid, since_s in suspected.items()}

    @cached_property
    def _late(self) -> frozenset[str]:
        """The pod UIDs of two members that are asked for their progress while others are `suspected`.

        Only members that report seldom, and have neither been asked nor reported lately, are in it. Their answer shows whether the
        group commits steps. That proves that a worker lives although its observers do not hear it.
        """
        if not self.suspected:
            return frozenset()
        lately_s = self.now_s - LATE_ASKED_EVERY_S
        members = (w.session for w in self.workers if w.is_member and w.session is not None and w.session.connected)
        heard = [session for session in members if session.pod_uid not in self.suspected][:2]
        return frozenset(
            session.pod_uid
            for session in heard
            if session.report_every_s > REPORT_EVERY_S
            and session.progress_told_s <= lately_s
            and (session.asked_at_s is None or session.asked_at_s <= lately_s)
        )

    @cached_property
    def _has_silent(self) -> bool:
        return any(w.is_member and w.standing == Standing.SILENT for w in self.workers)

    def commands(self, worker: Worker, pod: Pod, session: AgentSession) -> Iterator[Tell]:
        """Yield what an agent that can be reached is told now."""
        known_tier = self.tier or "Unknown"
        if session.told_tier != known_tier:
            yield Tell(pod.uid, Welcome(known_tier))
        ending = self._ending(pod, session)
        if ending is not None:
            yield from (Tell(pod.uid, body) for body in ending)
            return
        yield from self._generation(worker, pod, session)
        if self._asks(pod, session):
            yield Tell(pod.uid, ProgressRequest() if self._has_silent or pod.uid in self._late else Ping())

    def _ending(self, pod: Pod, session: AgentSession) -> tuple[Finish | Stop, ...] | None:
        """Return what a worker is told that leaves its loop or stops, unless it was told before; None: it goes on."""
        end, word, is_released = self.end, self.stop, pod.uid in self.released
        if end is not None and pod.uid in end.stops:
            word = COMPLETE
        if end is not None and word is None and pod.uid in end.finish:
            finish = end.finish[pod.uid]
            return (finish,) if session.told_finish < finish.generation else ()
        if word is None and not is_released:
            return None if end is None else ()
        if word == SUSPENDED and session.condition.phase == Phase.DONE:
            # Nothing is left to suspend: it is told once the status says so. Where all run again, its word counts no more.
            word = None if end is not None else COMPLETE
        # One that has returned 0 ignores `Suspended`, which may have been on its way then.
        told = session.told_stop and (word, session.told_outcome) != (COMPLETE, SUSPENDED)
        return () if told or (word is None and not is_released) else (Stop(word or "Released"),)

    def _generation(self, worker: Worker, pod: Pod, session: AgentSession) -> Iterator[Tell]:
        """Yield the newest generation for a worker that has not heard of it."""
        assignment, condition = self._assignment, session.condition
        if assignment is None or session.told_generation >= assignment.number:
            return
        # Who gets the document hears of a generation in two lines, between which its stream may have ended.
        waits = assignment.gets_document(pod.uid) and condition.entered < assignment.number
        if (condition.heard < assignment.number or waits) and not (self._is_withheld and worker.trains):
            yield from assignment.of(pod)

    def _asks(self, pod: Pod, session: AgentSession) -> bool:
        """Return whether an agent is asked how it is."""
        if pod.uid in self._late:
            return True
        is_unasked = session.unanswered_since_s is None
        if is_unasked and (pod.uid in self.ask or session.heard_at_s < self._speak_by.get(pod.uid, -inf)):
            return True
        if self._has_silent or self.stalled:
            return session.asked_at_s is None or self.now_s >= session.asked_at_s + _every_s(self.workers)
        return self.tier == "Script" and is_unasked and self.now_s >= script_due_s(session)


def plan_commands(briefing: Briefing) -> Iterator[Tell]:
    """Yield the commands for all agents that can be reached."""
    for worker in briefing.workers:
        session, pod = worker.session, worker.pod
        if session is not None and pod is not None and session.connected:
            yield from briefing.commands(worker, pod, session)


def _every_s(workers: Sequence[Worker]) -> float:
    return max(ASK_EVERY_S, len(workers) / ASKED_PER_S)


def stop_leaving(leaving: Iterable[tuple[Pod, AgentSession]]) -> Iterator[Tell]:
    """Yield the commands for pods that are asked to leave and whose job is deleted. No worker will take their place, so they do not
    train on until their grace period is over."""
    for pod, session in leaving:
        if session.connected and not session.told_stop:
            yield Tell(pod.uid, Stop("Released"))


def script_due_s(session: AgentSession) -> float:
    """Return when the agent of a running script is asked next if nothing calls for it before. If it has not answered yet, return
    when it counts as silent."""
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


def _has_arrived(worker: Worker, number: int) -> bool:
    condition = worker.session.condition if worker.session is not None else None
    return condition is not None and (condition.generation, condition.phase) in (
        (number, Phase.ARRIVED),
        (number, Phase.ADOPTING),
    )


class _Assignment:
    """One generation, told to many: what they share is computed once."""

    def __init__(self, document: Document, workers: Sequence[Worker], lists_members: bool) -> None:
        self._workers, self._lists_members = workers, lists_members
        self.number = document.number
        self._document, self._digest, self._world_size = document, document.digest(), document.world_size
        offsets = accumulate((m.processes for m in document.members), initial=0)
        self._places = {m.pod_uid: place for m, place in zip(document.members, enumerate(offsets))}

    @cached_property
    def _observes(self) -> dict[str, tuple[Observed, ...]]:
        return who_observes(w for w in self._workers if w.uid in self._places)

    def gets_document(self, pod_uid: str) -> bool:
        """Return whether a worker is sent the document: the store's host is, and every member where the framework lists them."""
        return pod_uid == self._document.store.pod_uid or (self._lists_members and pod_uid in self._places)

    def of(self, pod: Pod) -> Iterator[Tell]:
        """Yield what this pod is told."""
        document = self._document
        index, offset = self._places.get(pod.uid, (0, 0))
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
            hosts_store=pod.uid == document.store.pod_uid,
            document_digest=self._digest,
            reason=document.reason,
            observes=self._observes.get(pod.uid, ()),
        )
        yield Tell(pod.uid, body)
        if self.gets_document(pod.uid):
            yield Tell(pod.uid, DocumentCommand(document))
