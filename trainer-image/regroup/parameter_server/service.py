"""The server's side of a generation: it receives, lets `Desk` decide, makes versions, copies them to the standby, and answers.

The service owns the order of the four moves of a version (docs/design/adr/0031-parameter-server.md): apply with the ledger's entry,
copy, have it acknowledged, commit. Before the last move nobody sees the version: workers pull a copy of the parameters from before
(rule COPY). The service runs in the main thread, while the server's own worker is in a call of the session. It decides nothing.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from regroup.errors import DivergedError, PeerLost
from regroup.generation.groups import Groups
from regroup.state.training import CommitRecord

from . import messages
from .dealing import Answer, Deal, Desk, Version
from .ledger import CountedPlan
from .links import COPIES, Link, Pauses, name_of, numbers
from .messages import Reply, Request
from .served_gradients import ServedGradients
from .versions import Calls, Versions

_KINDS = {Answer.FINISHED: messages.FINISHED, Answer.LEAVE: messages.LEAVE}


@dataclass
class _Gradients:
    """The gradients that one rank pushed. The memory is there for the generation: one copy of the gradients for each rank."""

    flats: list[torch.Tensor]
    used: torch.Tensor


@dataclass
class _Peer:
    """Another rank. `awaits` is what comes next from it: a header, the gradients behind one, or nothing before a reply."""

    link: Link
    gradients: _Gradients
    header: torch.Tensor = field(default_factory=lambda: torch.empty(messages.REQUEST, dtype=torch.int64))
    awaits: str = ""
    request: Request | None = None
    """A request for work that has no answer yet, or the push whose gradients come."""


class Service:
    """The service of rank 0 in one generation. A process that is alone has no peers."""

    def __init__(
        self,
        groups: Groups | None,
        desk: Desk,
        strategy: ServedGradients,
        versions: Versions,
        plan: CountedPlan,
        on_commit: Callable[[CommitRecord], None],
        record: CommitRecord | None,
    ) -> None:
        """`on_commit` is called once for each version that is committed. `record` is the one of the adopted version, if known."""
        self.desk = desk
        self._strategy, self._versions, self._plan = strategy, versions, plan
        self._on_commit = on_commit
        self._pauses = Pauses(groups)
        self._most = max(desk.terms.quotas().values())
        self._own: _Gradients | None = None
        self.own_outcome: bool | None = None
        """True if a version has counted this rank's last push; None: that is not decided."""
        self._peers: dict[int, _Peer] = {}
        self._copies: Link | None = None
        self._acknowledgement = torch.empty(messages.ACKNOWLEDGEMENT, dtype=torch.int64)
        self._staged: tuple[Version, CommitRecord, int] | None = None
        """The version that is applied here and on its way to the standby, with the hash of its parameters."""
        self._published: list[torch.Tensor] | None = None
        """Parameters of the newest committed version; None: the model has them."""
        self._newest = self._reply_of(record)
        """A reply about the newest committed version."""
        self._left_s = time.monotonic()
        """Monotonic time at which the service ran last."""
        if groups is None:
            return
        for rank in range(1, groups.world_size):
            peer = _Peer(Link(groups, name_of(rank)), self._empty())
            self._peers[rank] = peer
            self._await_request(peer)
        if desk.terms.roles.standby is not None:
            self._copies = Link(groups, COPIES)

    def pull(self, *, knows_newer: bool, ended: bool) -> Deal | Answer:
        """Return the work of this rank's own worker, which asks for some."""
        self.desk.heard(0, knows_newer=knows_newer, ended=ended)
        return self.desk.pull(0, time.monotonic())

    def push(self, flats: list[torch.Tensor], used: torch.Tensor, weight: float, loss_sum: float) -> None:
        """Take the gradients of this rank's own worker."""
        self._own, self.own_outcome = _Gradients(flats, used), None
        self.desk.push(0, weight, loss_sum, time.monotonic())

    def serve(self, until: Callable[[], bool], calls: Calls | None = None) -> None:
        """Serve until `until()` is true and no version is on its way. Without `calls` no version is made.

        Raises what `Groups.failed` says, and PeerLost if a rank does not come to the cut of a planned change."""
        self.desk.was_away(time.monotonic() - self._left_s)
        try:
            while True:
                moved = self._receive()
                moved = self._take_acknowledgement() or moved
                moved = self._make(calls) or moved
                moved = self._tell_outcomes() or moved
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
            if peer.awaits and peer.link.take():
                moved = True
                self._take(rank, peer)
        return moved

    def _take(self, rank: int, peer: _Peer) -> None:
        """Take what has come from a peer: a request, or the gradients of its push."""
        has_gradients, peer.awaits = peer.awaits == "gradients", ""
        if not has_gradients:
            peer.request = Request.unpack(peer.header)
            self.desk.heard(rank, knows_newer=peer.request.knows_newer, ended=peer.request.ended)
        request = peer.request
        assert request is not None
        if request.kind == messages.PUSH and not has_gradients:
            peer.link.expect([peer.gradients.used, *peer.gradients.flats])
            peer.awaits = "gradients"
        elif request.kind != messages.PULL:
            peer.request = None
            self.desk.push(rank, request.weight, request.loss_sum, time.monotonic())

    # --- versions ----------------------------------------------------------------------------------------------------

    def _make(self, calls: Calls | None) -> bool:
        """Apply the next version, and send the standby what was applied (moves 1 and 2)."""
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
        """Commit the version that the standby has acknowledged (move 3)."""
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
        """Commit the version: from now on workers pull it (move 4)."""
        assert self._staged is not None
        (_, record, _), self._staged = self._staged, None
        self._published = None
        self._newest = self._reply_of(record)
        self.desk.made(time.monotonic())
        self._on_commit(record)

    # --- answers -----------------------------------------------------------------------------------------------------

    def _tell_outcomes(self) -> bool:
        """Tell each worker whose push is decided whether a version has counted it."""
        moved = bool(self.desk.decided)
        for push, counted in self.desk.decided:
            if push.deal.rank == 0:
                self.own_outcome = counted
            else:
                self._reply(self._peers[push.deal.rank], messages.COUNTED if counted else messages.REFUSED)
        self.desk.decided.clear()
        return moved

    def _answer(self) -> bool:
        """Answer the requests for work that need not wait."""
        moved = False
        for rank, peer in self._peers.items():
            if peer.request is not None and not peer.awaits and not self._must_wait(rank, peer.request):
                moved = True
                self._deal(rank, peer, peer.request.version)
        return moved

    def _must_wait(self, rank: int, request: Request) -> bool:
        if rank == self.desk.terms.roles.standby and request.version != self.desk.version:
            return True  # it has applied a version, and its acknowledgement is on the way
        # A script has left its loop, and the job ends with the version that is on its way.
        return self._staged is not None and self.desk.is_finished

    def _deal(self, rank: int, peer: _Peer, has: int) -> None:
        """Give a rank work, and the newest parameters unless it has them. `has` is the version of its parameters."""
        peer.request = None
        answer = self.desk.pull(rank, time.monotonic())
        kind, shares = (messages.DEAL, answer.shares) if isinstance(answer, Deal) else (_KINDS[answer], ())
        follow: Sequence[torch.Tensor] = ()
        if kind != messages.LEAVE and has != self.desk.version:
            self._publish()
            assert self._published is not None
            follow = self._published
        self._reply(peer, kind, shares, follow)

    def _reply(self, peer: _Peer, kind: int, shares: tuple[int, ...] = (), follow: Sequence[torch.Tensor] = ()) -> None:
        peer.link.send([replace(self._newest, kind=kind, shares=shares).pack(self._most), *follow])
        if kind == messages.FINISHED and peer is self._peers.get(self.desk.terms.roles.standby or 0):
            assert self._copies is not None
            self._copies.send([numbers(0, 0.0, 0.0)])  # no copy follows
        if kind not in (messages.LEAVE, messages.FINISHED):
            self._await_request(peer)  # behind what is sent: both ends of a link do everything in one order

    # --- small parts -------------------------------------------------------------------------------------------------

    def _reply_of(self, record: CommitRecord | None) -> Reply:
        loss, weight = (math.nan, 0.0) if record is None else (float(record.loss), record.weight)
        ledger = self._plan.ledger
        return Reply(messages.COUNTED, ledger.version, ledger.samples, ledger.digest, loss, weight)

    def _publish(self) -> None:
        """Keep the parameters of the newest committed version, before a version changes the model's or for a worker that needs
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
