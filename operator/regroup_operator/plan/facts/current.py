"""Between the status and the policies: read the newest generation from it, write the next one into it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from regroup.protocol.document import PLANNED, CheckpointRef, Document, LineageEntry, OlderGeneration
from regroup.protocol.state import Group, Phase
from regroup_operator.api import status as written
from regroup_operator.api.members import MemberId, format_members, gone_name, parse_members
from regroup_operator.api.status import JobStatus, Membership
from regroup_operator.model.plan import Issued
from regroup_operator.model.records import AgentSession, Pod
from regroup_operator.model.worker import Announce, Current
from regroup_operator.plan.facts.groups import positions_of

SCRIPT_AFTER_S = 30.0
"""Processes that run this long without attaching belong to an unmodified script (tier Script). Longer than a session's
imports take on a busy node: until then nobody says Running of a job in which nobody trains."""


def read_current(
    status: JobStatus, pods: Iterable[Pod], issued: Issued, term_started_s: float, per_group: int = 1
) -> Current | None:
    """Return the newest generation, None before the first. `issued` knows more of it if this operator issued it; `per_group`
    workers are a group, which does not change once there is a generation."""
    membership = status.membership
    if membership is None:
        return None
    uids = {pod.id: pod.uid for pod in pods}
    document, announced_at_s = issued.document, issued.announced_at_s
    has_document = document is not None and document.uid == membership.uid
    older = tuple(
        OlderGeneration(
            o.generation,
            o.uid,
            tuple(uids.get(m, gone_name(m)) for m in members),
            positions_of(members, per_group),
        )
        for o, members in ((o, parse_members(o.members)) for o in membership.older)
    )
    return Current(
        number=membership.generation,
        uid=membership.uid,
        kind=membership.kind,
        members=parse_members(membership.members),
        adopted=membership.adopted,
        announced_at_s=announced_at_s if has_document and announced_at_s is not None else term_started_s,
        older=older,
        lineage=tuple(LineageEntry(e.generation, e.start_step) for e in status.lineage),
        has_document=has_document,
        attempts=0 if membership.adopted else max(1, issued.attempts),
        launches=has_document and issued.launches,
        incarnations={m.pod_uid: m.incarnation for m in document.members} if has_document and document else {},
        suspended=bool(membership.suspended),
    )


def membership_status(document: Document, decision: Announce, previous: Membership | None) -> Membership:
    """Return status.membership for a generation that is about to be written."""
    older: list[written.OlderGeneration] = []
    resumed_in = None
    if previous is not None:
        this = written.OlderGeneration(generation=previous.generation, uid=previous.uid, members=previous.members)
        carried = {generation.uid for generation in document.older}
        older = [o for o in (this, *previous.older) if o.uid in carried]
        resumed_in = document.number if previous.suspended else previous.resumed_in
    host = next(m.slot for m in document.members if m.pod_uid == document.store.pod_uid)
    return Membership(
        generation=document.number,
        uid=document.uid,
        kind="planned" if document.kind == PLANNED else "forced",
        digest=document.digest(),
        world_size=document.world_size,
        members=format_members((w.id for w in decision.members), in_order=True),
        store=written.Store(host=document.store.host, port=document.store.port, slot=host),
        resumed_in=resumed_in,
        older=older,
        lost=list(document.lost),
    )


def named_members(status: JobStatus) -> list[MemberId]:
    """Return all members that the status names: their attempt numbers are not used again."""
    membership = status.membership
    if membership is None:
        return []
    texts = [membership.members, *(o.members for o in membership.older)]
    return [member for text in texts for member in parse_members(text)]


def named_checkpoint(status: JobStatus) -> CheckpointRef | None:
    """Return the durable checkpoint that the status names."""
    named = status.checkpoint
    return CheckpointRef(named.generation, named.step, named.directory) if named is not None else None


def outdated(pods: Iterable[Pod], spec_digest: str) -> list[str]:
    """Return the UIDs of pods that were made from another spec than the one with this digest (`api.worker_digest`).

    Asked only while there is no generation: nobody needs these pods, and none of them may get into the first one. Later
    the spec that pods are made from is immutable.
    """
    return [pod.uid for pod in pods if pod.alive and pod.spec_digest not in ("", spec_digest)]


def corrected_slots(pods: Iterable[Pod], digest: str) -> frozenset[int]:
    """Return the slots whose newest pod was made from another template than the job has now, whose digest is `digest`."""
    newest: dict[int, Pod] = {}
    for pod in pods:
        if pod.slot not in newest or newest[pod.slot].attempt < pod.attempt:
            newest[pod.slot] = pod
    return frozenset(slot for slot, pod in newest.items() if pod.spec_digest not in ("", digest))


def decide_tier(status: JobStatus, sessions: Sequence[AgentSession], now_s: float, *, on_torch: bool) -> str | None:
    """Return the tier of the script, or None while it is open.

    The tier is Session once a process has said that it uses the library. It is Script when all members run without it: they have
    passed init_process_group, have ended, or have run for SCRIPT_AFTER_S. A member whose program has said two numbers of its
    progress needs no such time. A framework that is not on torch runs scripts only, since the library needs torch.
    """
    tier: str | None = status.tier
    if tier == "Session" or any(s.condition.session for s in sessions):
        return "Session"
    membership = status.membership
    if tier is not None or membership is None:
        return tier
    if not on_torch:
        return "Script"
    due = [
        script_at_s(s, 0.0 if _gets_further(s) else SCRIPT_AFTER_S)
        for s in sessions
        if s.connected and s.condition.generation == membership.generation
    ]
    due_s = [at_s for at_s in due if at_s is not None]
    everybody = bool(due_s) and len(due_s) >= len(parse_members(membership.members))
    return "Script" if everybody and now_s >= max(due_s) else None


def _gets_further(session: AgentSession) -> bool:
    """Return whether a program has said in this generation that it has got further, though it has not attached."""
    script, generation = session.script, session.condition.generation
    return script is not None and script.every_s is not None and session.script_generation == generation


def script_at_s(session: AgentSession, patience_s: float) -> float | None:
    """Return since when a worker's processes are an unmodified script's: they have passed init_process_group, have ended, or have
    run for `patience_s` without attaching. None: they are not."""
    condition = session.condition
    if condition.phase == Phase.DONE or (condition.phase == Phase.STARTING and condition.group == Group.FORMED):
        return session.condition_at_s
    return session.condition_at_s + patience_s if condition.phase == Phase.STARTING else None
