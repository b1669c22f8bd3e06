"""The server's side of a generation: it receives, lets `Desk` decide, makes versions, copies them to the standby, and answers.

Owns the order of the four moves of a version (docs/design/adr/0031-parameter-server.md): apply with the ledger's entry, copy,
have it acknowledged, commit. Until the last one nobody sees it: what workers pull is a copy of the parameters from before (rule
COPY). It runs in the main thread, whenever the server's own worker is in a call of the session, and decides nothing.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from regroup.bits import float_of
from regroup.errors import DivergedError, PeerLost
from regroup.generation.groups import Groups
from regroup.generation.links import COPIES, Link, Pauses, name_of, numbers
from regroup.parallel.dealing import Answer, Deal, Desk, Version
from regroup.parallel.ledger import CountedPlan, Entry
from regroup.parallel.served import Served
from regroup.state.training import CommitRecord

from . import messages
from .messages import Reply, Request
from .versions import Calls, Versions


@dataclass
class _Gradients:
    """What one rank pushed. The memory is there for the generation: one copy of the gradients for each rank."""

    flats: list[torch.Tensor]
    used: torch.Tensor


@dataclass
class _Peer:
    """Another rank, and what of it is awaited: a header, or the gradients behind one, or nothing before it is answered."""

    link: Link
    gradients: _Gradients
    header: torch.Tensor = field(default_factory=lambda: torch.empty(messages.REQUEST, dtype=torch.int64))
    awaits: str = ""
    request: Request | None = None
    """It asks for work."""


class Service:
    """Of rank 0 in one generation. Alone, or in plain `python`, it has no peers."""

    def __init__(
        self,
        groups: Groups | None,
        desk: Desk,
        strategy: Served,
        versions: Versions,
        plan: CountedPlan,
        on_commit: Callable[[CommitRecord], None],
        record: CommitRecord | None,
    ) -> None:
        """`on_commit` is called once for each version that is committed. record: of the adopted one; None: it is not known."""
        self.desk = desk
        self._strategy, self._versions, self._plan = strategy, versions, plan
        self._on_commit = on_commit
        self._groups, self._pauses = groups, Pauses(groups)
        self._most = max(desk.terms.quotas().values())
        self._own: _Gradients | None = None
        self.own_outcome: bool | None = None
        """Whether what this rank pushed last was counted; None: that is not decided."""
        self._peers: dict[int, _Peer] = {}
        self._copies: Link | None = None
        self._acknowledgement = torch.empty(messages.ACKNOWLEDGEMENT, dtype=torch.int64)
        self._staged: tuple[Version, CommitRecord, int] | None = None
        """Applied here and on its way to the standby, with the hash of its parameters."""
        self._published: list[torch.Tensor] | None = None
        """Parameters of the newest committed version; None: those of the model are."""
        loss, weight = (record.loss, record.weight) if record is not None else (math.nan, 0.0)
        self._said = (desk.version, plan.ledger.samples, plan.ledger.digest, loss, weight)
        """Version, samples, digest, loss and weight of the newest committed version."""
        self._left_s = time.monotonic()
        """When it served last."""
        if groups is None:
            return
        for rank in range(1, groups.world_size):
            peer = _Peer(Link(groups, name_of(rank)), self._empty())
            self._peers[rank] = peer
            self._await_request(peer)
        if desk.terms.roles.standby is not None:
            self._copies = Link(groups, COPIES)

    def pull(self, *, knows_newer: bool, ended: bool) -> Deal | Answer:
        """This rank's own worker asks for work."""
        self.desk.heard(0, knows_newer=knows_newer, ended=ended)
        return self.desk.pull(0, time.monotonic())

    def push(self, flats: list[torch.Tensor], used: torch.Tensor, weight: float, loss_sum: float) -> None:
        """This rank's own worker has computed what it was dealt."""
        self._own, self.own_outcome = _Gradients(flats, used), None
        self.desk.push(0, weight, loss_sum, time.monotonic())

    def serve(self, until: Callable[[], bool], calls: Calls | None = None) -> None:
        """Serve until that is so, and no version is on its way. Without `calls` no version is made.

        Raises what `Groups.failed` says, and PeerLost where somebody does not come to the cut of a planned change."""
        self.desk.was_away(time.monotonic() - self._left_s)
        try:
            while True:
                moved = self._receive()
                moved = self._take_acknowledgement() or moved
                moved = self._make(calls) or moved
                moved = self._answer() or moved
                if self._staged is None and until():
                    return
                if self.desk.must_break(time.monotonic()):
                    raise PeerLost(
                        "A worker has not come to the end of its share, and the others leave for a newer generation."
                    )
                self._pauses.pause(idle=not moved)
        finally:
            self._left_s = time.monotonic()
            self._pauses.end()

    # --- what comes --------------------------------------------------------------------------------------------------

    def _await_request(self, peer: _Peer) -> None:
        peer.link.expect([peer.header])
        peer.awaits = "header"

    def _receive(self) -> bool:
        moved = False
        for rank, peer in self._peers.items():
            if not peer.awaits or not peer.link.take():
                continue
            moved = True
            if peer.awaits == "gradients":
                assert peer.request is not None
                peer.awaits = ""
                self._pushed(rank, peer)
                continue
            peer.awaits, peer.request = "", Request.unpack(peer.header)
            self.desk.heard(rank, knows_newer=peer.request.knows_newer, ended=peer.request.ended)
            if peer.request.kind == messages.PUSH:
                peer.link.expect([peer.gradients.used, *peer.gradients.flats])
                peer.awaits = "gradients"
            elif peer.request.kind == messages.WAIT:
                self._pushed(rank, peer)
        return moved

    def _pushed(self, rank: int, peer: _Peer) -> None:
        request, peer.request = peer.request, None
        assert request is not None
        self.desk.push(rank, request.weight, request.loss_sum, time.monotonic())

    # --- versions ----------------------------------------------------------------------------------------------------

    def _make(self, calls: Calls | None) -> bool:
        """Moves 1 and 2: apply the next version, and send the standby what was applied."""
        version = self.desk.next_version(time.monotonic())
        if version is None:
            return False
        assert calls is not None, "a version is made outside a commit"
        pushed = [self._gradients_of(push.deal.rank) for push in version.pushes]
        sums = [one.clone() for one in pushed[0].flats]
        for further in pushed[1:]:
            for total, flat in zip(sums, further.flats):
                total.add_(flat)
        used = messages.any_used([one.used for one in pushed])
        self._publish()
        entry = version.entry
        record = self._versions.apply(entry, sums, used, calls)
        self._staged = version, record, self._versions.hash()
        if self._copies is None:
            self._commit()
            return True
        said = numbers(*entry.to_numbers())
        head = numbers(len(said), entry.weight, entry.loss_sum)
        self._copies.send([head, said, messages.used_of(used), *sums])
        self._copies.expect([self._acknowledgement])
        return True

    def _take_acknowledgement(self) -> bool:
        """Move 3: the standby holds the version."""
        if self._copies is None or self._staged is None or not self._copies.take():
            return False
        version, _, mine = self._staged
        number, theirs = self._acknowledgement.tolist()
        if (number, theirs) != (version.number, mine):
            raise DivergedError(
                f"Parameters after version {version.number} differ between the server and its standby (rank "
                f"{self.desk.terms.roles.standby}): code outside step.commit() changed them, a hook is not the same on all ranks, "
                "or their kernels differ. Change parameters in a hook of step.commit() only."
            )
        self._commit()
        return True

    def _commit(self) -> None:
        assert self._staged is not None
        (_, record, _), self._staged = self._staged, None
        self._published = None
        ledger = self._plan.ledger
        self._said = (ledger.version, ledger.samples, ledger.digest, record.loss, record.weight)
        self.desk.made(time.monotonic())
        self._on_commit(record)

    # --- answers -----------------------------------------------------------------------------------------------------

    def _answer(self) -> bool:
        moved = bool(self.desk.decided)
        for push, counted in self.desk.decided:
            rank = push.deal.rank
            if rank == 0:
                self.own_outcome = counted
                continue
            self._reply(self._peers[rank], messages.COUNTED if counted else messages.REFUSED)
        self.desk.decided.clear()
        for rank, peer in self._peers.items():
            if peer.request is None or peer.awaits:
                continue
            is_standby = rank == self.desk.terms.roles.standby
            if is_standby and peer.request.version != self.desk.version:
                continue  # it has applied a version, and its acknowledgement is on the way
            if self._staged is not None and self.desk.is_finished:
                continue  # a script has left its loop, and the job ends with the version that is on its way
            moved = True
            request, peer.request = peer.request, None
            answer = self.desk.pull(rank, time.monotonic())
            kinds = {Answer.FINISHED: messages.FINISHED, Answer.LEAVE: messages.LEAVE}
            kind = messages.DEAL if isinstance(answer, Deal) else kinds[answer]
            follow: Sequence[torch.Tensor] = ()
            if kind != messages.LEAVE and request.version != self.desk.version:
                self._publish()
                assert self._published is not None
                follow = self._published
            self._reply(peer, kind, answer.shares if isinstance(answer, Deal) else (), follow)
        return moved

    def _reply(self, peer: _Peer, kind: int, shares: tuple[int, ...] = (), follow: Sequence[torch.Tensor] = ()) -> None:
        version, samples, digest, loss, weight = self._said
        reply = Reply(kind, version, samples, digest, float(loss), weight, shares)
        peer.link.send([reply.pack(self._most), *follow])
        if kind == messages.FINISHED and peer is self._peers.get(self.desk.terms.roles.standby or 0):
            assert self._copies is not None
            self._copies.send([numbers(0, 0.0, 0.0)])  # no copy follows
        if kind not in (messages.LEAVE, messages.FINISHED):
            self._await_request(peer)  # behind what is sent: both ends of a link do everything in one order

    # --- small parts -------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Keep the parameters of the newest committed version: those of the model are about to be another's, or somebody wants
        them."""
        if self._published is None and self._peers:
            self._published = self._strategy.parameters()

    def _gradients_of(self, rank: int) -> _Gradients:
        if rank:
            return self._peers[rank].gradients
        assert self._own is not None
        return self._own

    def _empty(self) -> _Gradients:
        used = torch.empty(len(self._strategy.gradients.parameters), dtype=torch.uint8)
        return _Gradients(self._strategy.empty(), used)


class Copying:
    """The standby's side: it receives a version's sum, applies the same, and acknowledges (rules COPY and LEAVE)."""

    def __init__(self, groups: Groups, strategy: Served, versions: Versions) -> None:
        self._link = Link(groups, COPIES)
        self._strategy, self._versions = strategy, versions
        self._head = torch.empty(messages.COPY, dtype=torch.int64)
        self._said = torch.empty(0, dtype=torch.int64)
        self._used = torch.empty(len(strategy.gradients.parameters), dtype=torch.uint8)
        self._flats: Sequence[torch.Tensor] = strategy.empty()
        self._has_head = False
        self._link.expect([self._head])

    def end(self) -> None:
        """The job has come to its end: hear that no copy follows. A process that ends while gloo waits for a message aborts."""
        self._link.wait()

    def step(self, calls: Calls) -> bool:
        """Do what can be done without waiting; return whether anything was. Raises what `Groups.failed` says."""
        if not self._link.take():
            return False
        length, weight, loss_sum = self._head.tolist()
        if not self._has_head:
            self._has_head = True
            self._said = torch.empty(length, dtype=torch.int64)
            self._link.expect([self._said, self._used, *self._flats])
            return True
        entry = Entry.from_numbers(self._said.tolist(), float_of(weight), float_of(loss_sum))
        self._versions.apply(entry, self._flats, bytes(self._used.tolist()), calls)
        self._link.send([numbers(entry.version, self._versions.hash())])
        self._has_head = False
        self._link.expect([self._head])
        return True
