"""A rank's part in a generation, as its agent tells it: for tests that form real groups."""

from __future__ import annotations

from collections.abc import Sequence

from regroup.protocol.document import FORCED, Document, Member, Store
from regroup.protocol.local import Assignment

HERE = "127.0.0.1"


def make_document(
    store_port: int, world_size: int = 2, *, hosts: Sequence[str] = (), processes: Sequence[int] = ()
) -> Document:
    """Return generation 1 of one worker for each rank on this machine, or of one for each of `hosts`. Worker 0 hosts the store."""
    hosts = hosts or [HERE] * world_size
    members = tuple(
        Member(slot, f"w-{slot}", f"pod-{slot}", 1, host, count)
        for slot, (host, count) in enumerate(zip(hosts, processes or [1] * len(hosts)))
    )
    return Document(1, "uid1", "job", FORCED, members, Store(hosts[0], store_port, "pod-0"))


def make_assignment(document: Document, rank: int) -> Assignment:
    """Return the part of a rank that is its worker's first process; rank 0 is told the document."""
    member = document.member_of_rank(rank)
    return Assignment(
        number=document.number,
        uid=document.uid,
        kind=document.kind,
        member=True,
        rank=rank,
        world_size=document.world_size,
        local_rank=0,
        local_world_size=member.processes,
        group_rank=document.members.index(member),
        pod_uid=member.pod_uid,
        store_host=document.store.host,
        store_port=document.store.port,
        store_prefix=document.store_prefix(),
        hosts_store=rank == 0,
        document_digest=document.digest(),
        document=document if rank == 0 else None,
    )
