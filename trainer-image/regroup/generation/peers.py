"""The ranks at the other ends of connections. They tell which rank was lost. Owns the ports on which ranks listen for gloo.

`reach` asks the network.
"""

from collections.abc import Mapping, Sequence

from regroup.protocol.document import Document
from regroup.protocol.local import Assignment

from .reach import knock, lost_rank
from .sockets import Connection


class Peers:
    """The ranks of one generation, as far as this one knows them: `document` comes with the store."""

    def __init__(self, assignment: Assignment) -> None:
        self._store = (assignment.store_host, assignment.store_port)
        self.document: Document | None = assignment.document
        self.ranks_by_port: dict[int, list[int]] = {}
        """Several hosts may use one port."""

    def store_rank(self) -> int | None:
        """Return the lowest rank of the member that hosts the store; None: it is not known."""
        document = self.document
        return document.rank_offset(document.store.pod_uid) if document is not None else None

    def one_of(self, lost: Sequence[Connection]) -> int | None:
        """Return a rank of the member that was lost. None where it is not known, or where there are several: who is slow also
        sees those that have left because of it."""
        ranks = {self._rank_at(kept.host, kept.port) for kept in lost}
        document = self.document
        if document is None or None in ranks:
            return None
        known = [rank for rank in ranks if rank is not None]
        return min(known) if len({document.member_of_rank(rank).pod_uid for rank in known}) == 1 else None

    def who_refuses(self, rank: int, ports: Mapping[int, int] | None = None) -> int | None:
        """Return the rank that kept a group from forming, asked over the network by `rank`; None: it is not known.

        `ports`: where they listen, by rank; absent: for the generation's own gloo. Blocks for up to `reach.KNOCK_S`.
        """
        document = self.document
        if document is None:
            return None
        if ports is None:
            ports = {one: port for port, ranks in self.ranks_by_port.items() for one in ranks}
        others = {one: (document.member_of_rank(one).host, port) for one, port in ports.items() if one != rank}
        return lost_rank(knock(others), lambda one: document.member_of_rank(one).pod_uid)

    def _rank_at(self, host: str, port: int) -> int | None:
        """Return the rank at the other end of a connection, None where that is not known. Where the other side connected to
        us, the port is any: then it is the host's, if only one member is there."""
        document = self.document
        if document is None:
            return None
        if (host, port) == self._store:
            return self.store_rank()
        listening = [rank for rank in self.ranks_by_port.get(port, ()) if document.member_of_rank(rank).host == host]
        if listening:
            return listening[0]
        there = [member.pod_uid for member in document.members if member.host == host]
        return document.rank_offset(there[0]) if len(there) == 1 else None
