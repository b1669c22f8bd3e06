"""Name the peers that agents could not reach by pod UID. Pure.

Agents name a rank, since only the store's host has the list of members, and this operator only the newest one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from regroup.protocol.document import Document
from regroup_operator.model.records import AgentSession

Peers = Mapping[str, tuple[int, str]]
"""Maps a pod UID to the generation in which the pod lost a peer, and to the peer's pod UID."""


def with_peers(
    sessions: Mapping[str, AgentSession], document: Document | None, before: Peers
) -> tuple[dict[str, AgentSession], Peers]:
    """Return the sessions with the peers of faults of the newest generation by pod UID, and what is to be remembered of them.
    `document`: the newest generation's, None: this operator has not announced it."""
    out, peers = dict(sessions), {uid: before[uid] for uid in sessions if uid in before}
    for uid, session in sessions.items():
        fault, number = session.fault, session.fault_generation
        if fault is None or fault.peer is not None or fault.peer_rank is None:
            continue
        if document is not None and number < document.number:
            continue  # nobody asks for it any more, and each plan would copy thousands of sessions
        if document is not None and number == document.number and 0 <= fault.peer_rank < document.world_size:
            peers[uid] = (number, document.member_of_rank(fault.peer_rank).pod_uid)
        if uid in peers and peers[uid][0] == number:
            out[uid] = replace(session, fault=replace(fault, peer=peers[uid][1]))
    return out, peers
