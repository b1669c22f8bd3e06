"""The stage of the generation: who is late, what to do about membership, and the document of the next one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from regroup.protocol.document import PLANNED, Document
from regroup.protocol.wire import DumpStacks, Kill, Restart
from regroup_operator.api.conditions import SIZE_REFUSED
from regroup_operator.api.status import JobStatus
from regroup_operator.model.plan import Issued, Setback, Spell, Tell, earliest
from regroup_operator.model.ports import EventNote
from regroup_operator.model.waits import UntilEvent
from regroup_operator.model.worker import (
    RESUMED,
    Announce,
    Bounds,
    Decision,
    Keep,
    Refusal,
    Situation,
    Standing,
    Wait,
    Worker,
)
from regroup_operator.plan.facts.current import membership_status, named_checkpoint
from regroup_operator.plan.facts.facts import Facts, members_of
from regroup_operator.plan.facts.losses import dated
from regroup_operator.plan.facts.saved import waits_for_save
from regroup_operator.plan.facts.size import tried_sizes
from regroup_operator.plan.failures.failures import Failures
from regroup_operator.plan.failures.hangs import ALONE, HUNG, KILL_AGAIN_S, Hang
from regroup_operator.plan.failures.hangs import bound as hang_bound_s
from regroup_operator.plan.failures.no_commit import count_after
from regroup_operator.plan.failures.refused_size import refused_words
from regroup_operator.plan.generation.decision import next_generation
from regroup_operator.plan.generation.document import Header, build_document
from regroup_operator.plan.generation.lateness import (
    Attendance,
    longest_start,
    see_lateness,
    with_setbacks,
)
from regroup_operator.plan.generation.links import Links, with_links
from regroup_operator.plan.generation.retry import names_of
from regroup_operator.plan.lifecycle.lifecycle import Active, Lifecycle

STORE_RETRY_S = 0.2


@dataclass(frozen=True)
class Kept:
    """The part of the memory that this stage makes: the issued generation, and the workers that hold one up."""

    issued: Issued
    spells: Mapping[str, Spell]
    """Late workers, by pod UID."""
    setbacks: Mapping[str, Setback]
    """Workers that kept generations from forming, by pod UID."""
    readers: frozenset[str]
    """Pod UIDs of workers that could not read the checkpoint that must be, since the last adoption."""
    links: Links
    """Pairs that could not reach each other."""


@dataclass(frozen=True)
class NextGeneration:
    """`decision` is None where the job is not active. `status`: the status with the generation that is issued."""

    kept: Kept
    workers: tuple[Worker, ...]
    """As before, but those who are not waited for any more are marked."""
    status: JobStatus
    abandoned: frozenset[str] = frozenset()
    """Their pod UIDs."""
    decision: Decision | None = None
    document: Document | None = None
    """The document of the generation that is issued."""
    notes: tuple[EventNote, ...] = ()
    tell: tuple[Tell, ...] = ()
    due_s: float | None = None

    @property
    def members(self) -> tuple[Worker, ...]:
        """The newest generation's, before the one that is issued."""
        return members_of(self.workers)

    @property
    def stands(self) -> bool:
        """True if none of the newest generation's members has been lost."""
        bad = (Standing.LOST, Standing.DIED, Standing.HUNG, Standing.BROKEN)
        return not any(w.standing in bad for w in self.members)


def plan_generation(facts: Facts, failures: Failures, lifecycle: Lifecycle) -> NextGeneration:
    """Return what becomes of the newest generation."""
    if not isinstance(lifecycle, Active):
        return NextGeneration(_kept(facts), failures.workers, facts.updated, due_s=failures.hang.due_s)
    late = _see_late(facts, failures)
    refusal, readers, have_all_tried = _refusal(facts, late)
    situation = Situation(
        workers=late.workers,
        bounds=bounds_of(facts),
        now_s=facts.inputs.clock.now_s,
        settings=facts.inputs.settings,
        step_s=facts.step_s,
        refusal=refusal,
        hang=failures.hang.message if failures.hang.together else "",
        links=late.kept.links,
        without_commit=failures.num_without_commit,
        holds_growth=waits_for_save(
            facts.inputs.job.spec.elastic_policy,
            facts.tier,
            late.members,
            facts.inputs.clock.now_s,
            since_s=0.0 if facts.current is None else facts.current.announced_at_s,
        ),
    )
    decision = failures.size.wait or next_generation(facts.current, situation)
    stops, told = _stop_hang(failures.hang, late.workers, facts.inputs.clock.now_s)
    kept = replace(late.kept, readers=readers)
    notes = (*late.notes, *stops, *_refused_size(failures))
    late = replace(late, kept=kept, decision=decision, notes=notes, tell=(*late.tell, *told))
    if isinstance(decision, Announce):
        decision = dated(decision, facts.losses)
        late = replace(late, decision=decision)
        late = _announce(facts, failures, late, decision, have_all_tried=have_all_tried)
    until = late.decision.until if isinstance(late.decision, Wait | Keep) else None
    until_s = None if isinstance(until, UntilEvent) else until
    return replace(late, due_s=earliest((until_s, late.due_s, failures.hang.due_s), after_s=facts.inputs.clock.now_s))


def _kept(facts: Facts) -> Kept:
    """Return what the plan before has left. Once all members have adopted, nobody has failed to read the checkpoint."""
    memory = facts.memory
    readers = (
        frozenset[str]() if facts.adoption.completed else memory.of_workers(lambda w: w.cannot_read or None).keys()
    )
    spells, setbacks = memory.of_workers(lambda w: w.spell), memory.of_workers(lambda w: w.setback)
    return Kept(memory.issued, spells, setbacks, frozenset(readers), memory.links)


def _see_late(facts: Facts, failures: Failures) -> NextGeneration:
    """Find the late workers; have their processes restarted in place, or mark their pods for replacement."""
    inputs, kept, workers = facts.inputs, _kept(facts), failures.workers
    sessions, now_s = inputs.obs.sessions.values(), inputs.clock.now_s
    setbacks = with_setbacks(kept.setbacks, workers, frozenset(), now_s)
    said_s = inputs.job.spec.recovery.hang_seconds
    longest_start_s = longest_start(facts.status.longest_start_seconds, sessions, inputs.settings)
    attendance = Attendance(
        workers=workers,
        current=facts.current,
        spells=kept.spells,
        setbacks=setbacks,
        released=facts.released,
        step_s=facts.step_s,
        now_s=now_s,
        settings=inputs.settings,
        alone_s=None if said_s is None else ALONE * hang_bound_s(sessions, said_s, inputs.settings),
        longest_start_s=longest_start_s or 0.0,
        per_group=facts.per_group,
        at_fault=inputs.obs.num_out_of_reach > 0,
    )
    lateness = see_lateness(attendance)
    restart = [(worker, worker.pod, why) for worker, why in lateness.restart if worker.pod is not None]
    return NextGeneration(
        kept=replace(kept, spells=lateness.spells or {}, setbacks=setbacks),
        workers=tuple(replace(w, abandoned=True) if w.uid in lateness.replace else w for w in workers),
        abandoned=lateness.replace,
        status=facts.updated.with_fields(longest_start_seconds=longest_start_s),
        notes=tuple(
            EventNote("Warning", "WorkerRestarted", f"Worker {worker.id} is restarted in place: {why}")
            for worker, _, why in restart
        ),
        tell=tuple(Tell(pod.uid, Restart(why)) for _, pod, why in restart),
        due_s=lateness.due_s,
    )


def _refusal(facts: Facts, late: NextGeneration) -> tuple[Refusal | None, frozenset[str], bool]:
    """Return why members refused to train, the pod UIDs of those that could not read the checkpoint, and whether all have tried
    that."""
    current, kept = facts.current, late.kept
    causes = {_refused(w, current.number) for w in late.members} - {""} if current is not None else set()
    if not causes:
        return None, kept.readers, False
    readers, unreadable, have_all_tried = kept.readers, "checkpoint" in causes, False
    if unreadable:
        readers = _readers(facts, kept)
        have_all_tried = not any(
            w.available and w.uid not in readers for w in late.workers if facts.inputs.clock.now_s >= w.barred_until_s
        )
    return Refusal(kept.issued.tried or frozenset(), unreadable, readers, have_all_tried), readers, have_all_tried


def _refused(worker: Worker, generation: int) -> str:
    """Return why a member refused to train, "" if it did not: `witness` (rules WITNESS, BEST) or `checkpoint` (RETRY)."""
    session = worker.session
    fault = session.fault if session else None
    refused = session and fault and fault.cause in ("witness", "checkpoint") and session.fault_generation == generation
    return fault.cause if refused and fault else ""


def _readers(facts: Facts, kept: Kept) -> frozenset[str]:
    """Return who could not read the checkpoint, with those of the newest generation."""
    document, current = kept.issued.document, facts.current
    if document is None or current is None or document.number != current.number:
        return kept.readers
    return kept.readers | {m.pod_uid for m in document.readers(facts.per_group)}


def _refused_size(failures: Failures) -> list[EventNote]:
    """Return the event of a size that the script has just refused."""
    refused = failures.size.refused
    if refused is None:
        return []
    return [EventNote("Warning", SIZE_REFUSED, refused_words(refused))]


def bounds_of(facts: Facts) -> Bounds:
    """Return the number of workers that the job wants and needs."""
    job, refused = facts.inputs.job, facts.size.refused
    policy, minimum = job.spec.elastic_policy, job.min_replicas
    permitted = None if policy is None else policy.permitted
    if refused is not None and refused.permitted is not None:
        permitted, minimum = refused.permitted, refused.permitted[0]
    elif facts.updated.refused_sizes:
        permitted = tried_sizes(permitted, facts.updated.refused_sizes, minimum, facts.size.replicas, facts.per_group)
        minimum = next((number for number in permitted or () if number >= minimum), minimum)
    return Bounds(
        facts.size.replicas,
        minimum,
        job.elastic,
        job.spec.recovery.rejoin_seconds,
        session=facts.tier == "Session",
        per_group=facts.per_group,
        spares=job.spec.recovery.spares,
        permitted=permitted,
    )


def _stop_hang(hang: Hang, workers: tuple[Worker, ...], now_s: float) -> tuple[list[EventNote], list[Tell]]:
    """Ask for stacks, and have the processes that hang killed; say so once."""
    notes, tell = [], [Tell(w.pod.uid, DumpStacks()) for w in hang.ask if w.pod is not None]
    for worker in workers:
        culprit, session = hang.culprits.get(worker.id), worker.session
        if culprit is None or session is None or worker.pod is None:
            continue
        if session.killed != culprit.incarnations:
            notes.append(EventNote("Warning", HUNG, f"{culprit.message}. Its process is killed and restarted."))
        elif now_s < session.killed_at_s + KILL_AGAIN_S:
            continue
        tell.append(Tell(worker.pod.uid, Kill(culprit.incarnations, culprit.message)))
    return notes, tell


def _announce(
    facts: Facts, failures: Failures, late: NextGeneration, decision: Announce, *, have_all_tried: bool
) -> NextGeneration:
    """Issue the generation, or wait a moment where no member offers a socket for the store."""
    inputs, current, kept, workers = facts.inputs, facts.current, late.kept, late.workers
    now_s, resumed = inputs.clock.now_s, facts.updated.resumed_from
    try:
        header = Header(
            job_uid=inputs.job.uid,
            uid=inputs.fresh_uid,
            processes=facts.processes,
            checkpoint=named_checkpoint(facts.status),
            imported=None if resumed is None else resumed.digest,
            session_tier=facts.tier == "Session",
            per_group=facts.per_group,
            has_ports=facts.lists_members,
            before=kept.issued.document,
        )
        document = build_document(decision, current, workers, header)
    except ValueError:
        wait = Wait("NoStore", "No member offers a socket for the store yet.", now_s + STORE_RETRY_S)
        return replace(late, decision=wait)
    status = late.status.with_fields(
        membership=membership_status(document, decision, facts.membership),
        start_time=facts.status.start_time or inputs.clock.timestamp(),
    )
    is_usual = decision.kind == PLANNED or document.number == 1 or decision.cause == RESUMED
    kind = "Normal" if is_usual else "Warning"
    note = EventNote(kind, decision.reason, f"Generation {document.number}: {decision.message}")
    issued = Issued(
        document=document,
        announced_at_s=now_s,
        launches=facts.tier != "Session" or any(worker.has_left_loop for worker in workers),
        attempts=1 if current is None or current.adopted else current.attempts + 1,
        without_commit=count_after(kept.issued.without_commit, decision, broke=failures.num_without_commit > 0),
        tried=names_of(current, workers, decision.members),
    )
    kept = replace(
        kept,
        issued=issued,
        setbacks=with_setbacks(kept.setbacks, workers, decision.set_back, now_s),
        readers=frozenset() if have_all_tried else kept.readers,
        links=with_links(kept.links, current, workers),
    )
    return replace(late, kept=kept, document=document, status=status, notes=(*late.notes, note))
