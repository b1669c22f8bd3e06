"""Build the document of the next generation from the decision (rule 2). Pure; the caller gives the random uid."""

from __future__ import annotations

from collections.abc import Iterable

from regroup.protocol.document import (
    CheckpointRef,
    Document,
    LineageEntry,
    Member,
    MemberSeal,
    OlderGeneration,
    Store,
)
from regroup_operator.model.members import MemberId
from regroup_operator.model.worker import Announce, Current, Worker


def gone_name(member: MemberId) -> str:
    """Return what stands for the UID of a pod that the API no longer has; it is always among the document's `lost`."""
    return f"gone/{member.slot}.{member.attempt}"


def build_document(
    *,
    announce: Announce,
    current: Current | None,
    workers: Iterable[Worker],
    job_uid: str,
    uid: str,
    processes: int,
    checkpoint: CheckpointRef | None,
    session_tier: bool,
) -> Document:
    """Return the document. Raises ValueError if no member offers a socket for the store."""
    workers = tuple(workers)
    members = tuple(
        Member(w.id.slot, w.pod.name, w.pod.uid, w.session.condition.incarnation, w.pod.ip, processes)
        for w in announce.members
        if w.pod is not None and w.session is not None
    )
    older: tuple[OlderGeneration, ...] = ()
    if current is not None:
        uids = {w.id: w.pod.uid for w in workers if w.pod is not None}
        this = OlderGeneration(current.number, current.uid, tuple(uids.get(m, gone_name(m)) for m in current.members))
        older = (this,) if current.adopted else (this, *current.older)
    names = {uid for generation in older for uid in generation.pod_uids}
    dead = {w.pod.uid for w in workers if w.pod is not None and not w.pod.alive}
    lost = tuple(sorted(name for name in names if name.startswith("gone/") or name in dead))
    seals = tuple(
        MemberSeal(w.pod.uid, s.left_up_to, s.state, s.adopted, s.state_adopted)
        for w in workers
        if w.pod is not None and w.session is not None and w.session.connected and (s := w.session.seal) is not None
        if w.pod.uid in names
    )
    return Document(
        number=current.number + 1 if current else 1,
        uid=uid,
        job_uid=job_uid,
        kind=announce.kind,
        members=members,
        store=_store(announce, current, session_tier),
        older=older,
        seals=seals,
        lost=lost,
        lineage=current.lineage if current else (),
        checkpoint=checkpoint,
        reason=announce.reason,
    )


def _store(announce: Announce, current: Current | None, session_tier: bool) -> Store:
    """Choose the store's host: rank 0's worker for scripts (MASTER_ADDR is its address); a failed form moves it."""
    able = [w for w in announce.members if w.connected and w.pod and w.session and w.session.store_port]
    if not able:
        raise ValueError("no member has a socket for the store")
    chosen = announce.members[0]
    if session_tier:
        chosen = able[(current.attempts if current else 0) % len(able)]
    assert chosen.pod is not None
    assert chosen.session is not None
    return Store(chosen.pod.ip, chosen.session.store_port, chosen.pod.uid)


def lineage_entries(pairs: Iterable[tuple[int, int]]) -> tuple[LineageEntry, ...]:
    """Return lineage records from (generation, start step) pairs."""
    return tuple(LineageEntry(g, s) for g, s in pairs)
