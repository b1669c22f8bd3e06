"""Build the document of the next generation from the decision (rule 2). Pure; the caller gives the random uid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from regroup.protocol.document import (
    PLANNED,
    CheckpointRef,
    Document,
    Member,
    MemberSeal,
    OlderGeneration,
    Store,
)
from regroup_operator.api.members import gone_name
from regroup_operator.model.worker import Announce, Current, Worker
from regroup_operator.plan.facts.groups import positions_of


@dataclass(frozen=True, kw_only=True)
class Header:
    """The part of a document that does not depend on its members."""

    job_uid: str
    uid: str
    """Random identity of the generation."""
    processes: int
    """Processes of each worker."""
    checkpoint: CheckpointRef | None
    """The newest durable checkpoint."""
    imported: str | None = None
    """Digest of the checkpoint of an earlier job with which this one has begun."""
    session_tier: bool
    per_group: int = 1
    """Workers of a group."""
    has_ports: bool = False
    """The document names a port for each process, since the job's framework lists its members."""
    before: Document | None = None
    """The newest document, if this operator has it."""


def build_document(announce: Announce, current: Current | None, workers: Iterable[Worker], header: Header) -> Document:
    """Return the document of the generation that is announced.

    Raises ValueError if no member offers a socket for the store, an agent of a member has not called, or one offers too few
    ports."""
    per_group = header.per_group
    workers = tuple(workers)
    if any(w.pod is None or w.session is None for w in announce.members):
        raise ValueError("a member has no pod, or its agent has not called")
    if header.has_ports and any(len(w.session.ports) != header.processes for w in announce.members if w.session):
        raise ValueError("an agent offers no port for each of its processes")
    members = tuple(
        Member(
            w.id.slot,
            w.pod.name,
            w.pod.uid,
            w.session.condition.incarnation,
            w.pod.ip,
            header.processes,
            w.session.ports if header.has_ports else None,
        )
        for w in announce.members
        if w.pod is not None and w.session is not None
    )
    older: tuple[OlderGeneration, ...] = ()
    if current is not None:
        uids = {w.id: w.uid for w in workers}
        this = OlderGeneration(
            current.number,
            current.uid,
            tuple(uids.get(m, gone_name(m)) for m in current.members),
            positions_of(current.members, per_group),
        )
        older = (this,) if current.adopted else (this, *current.older)
        older = tuple(generation for generation in older if not _never_stepped(generation, workers))
    names = {uid for generation in older for uid in generation.pod_uids}
    alive = {w.uid for w in workers if w.pod is not None and w.pod.alive}
    lost = tuple(sorted(names - alive))
    seals = tuple(
        MemberSeal(w.uid, s.left_up_to, s.state, s.adopted, s.state_adopted, s.is_backup, _position(w, per_group))
        for w in workers
        if w.pod is not None and w.session is not None and (s := w.session.seal) is not None
        if w.uid in names or w.connected
    )
    inside = {member.pod_uid for member in members}
    silent = [w for w in workers if w.pod is not None and w.silent_until_s and w.uid not in inside]
    number = _next_number(current, workers)
    return Document(
        number=number,
        uid=header.uid,
        job_uid=header.job_uid,
        kind=announce.kind,
        members=members,
        store=_store(announce, number, header),
        older=older,
        seals=seals,
        lost=lost,
        silent=tuple(w.uid for w in silent),
        silent_positions=positions_of((w.id for w in silent), per_group),
        lineage=current.lineage if current else (),
        checkpoint=header.checkpoint,
        reason=announce.reason,
        imported=header.imported,
    )


def _position(worker: Worker, per_group: int) -> int | None:
    return None if per_group == 1 else worker.id.slot % per_group


def _next_number(current: Current | None, workers: Iterable[Worker]) -> int:
    """Return a number that no agent has heard: a restored status may name an older generation than there has been."""
    heard = (w.session.condition.heard for w in workers if w.session is not None)
    return max([current.number if current else 0, *heard]) + 1


def _never_stepped(generation: OlderGeneration, workers: Iterable[Worker]) -> bool:
    """Return whether a generation is certain never to have trained, so that no state can come from it.

    Some of its members then promise to have left it without having adopted it, and the others are gone (rules MAD and SEAL). So a
    group that fails to form again and again does not make the list of older generations longer and longer.
    """
    by_uid = {w.uid: w for w in workers if w.pod is not None and w.pod.alive}
    living = [by_uid[uid] for uid in generation.pod_uids if uid in by_uid]
    seals = [w.session.seal for w in living if w.session is not None and w.session.seal is not None]
    left = [s for s in seals if s.left_up_to >= generation.number and s.adopted < generation.number]
    return bool(left) and len(left) == len(living)


def _store(announce: Announce, number: int, header: Header) -> Store:
    """Choose the store's host: for scripts rank 0's worker (MASTER_ADDR is its address), else a member by the generation's number.

    A form that failed therefore moves the store. So the worker that is lost as rank 0 and as the store's host is not always the
    same one. Workers that join a group arrive before its members leave it (rule JOIN), so that one of them is the host.

    The host of the previous generation's store is chosen last, because it may have given its socket away. An agent that has
    reported another port has not. If there is no other member, its process serves both (regroup/generation/groups.py).
    """
    session_tier, before = header.session_tier, header.before
    able = [w for w in announce.members if w.connected and w.pod and w.pod.ip and w.session and w.session.store_port]
    if not able or (announce.members[0] not in able and not session_tier):
        raise ValueError("no member has a socket for the store")
    if announce.kind == PLANNED and session_tier:
        able = [w for w in able if not w.trains] or able
    if session_tier and before is not None:
        used = (before.store.pod_uid, before.store.port)
        able = [w for w in able if w.session and (w.uid, w.session.store_port) != used] or able
    chosen = able[number % len(able)] if session_tier else able[0]
    assert chosen.pod is not None
    assert chosen.session is not None
    return Store(chosen.pod.ip, chosen.session.store_port, chosen.pod.uid)
