"""The commit of a step under a parameter server: in place of `Committer`, whose ranks commit together.

Here a step is a version of the server's parameters, and each rank goes at its own pace: it pulls, computes what it was dealt, and
pushes. Owns what this rank is in its generation (server, standby or worker) and when it drops its name of the state: a worker's
parameters are soon another version's, so it brings none to the next generation. The decisions are in `regroup.parallel.dealing`,
the server's and the standby's work in `service`. Why so: docs/design/adr/0031-parameter-server.md.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from regroup import strategies
from regroup.data import Key, SamplePlan
from regroup.errors import BackendError, DivergedError, GenerationChanged, SampleError
from regroup.generation.links import Link, Pauses, name_of
from regroup.generation.membership import Membership, leaves_broken
from regroup.parallel.dealing import Answer, Desk, Roles, Terms, roles_of
from regroup.parallel.host import to_host
from regroup.parallel.ledger import CountedPlan, key_of
from regroup.parallel.served import Served
from regroup.parallel.strategy import Share
from regroup.protocol.state import StatePair
from regroup.state.training import CommitRecord, TrainingState

from . import messages
from .agreement import exchange
from .header import Header, Row
from .hooks import Hooks
from .laps import DEVICE, EXCHANGE, FORWARD, Laps
from .messages import Reply, Request
from .service import Copying, Service
from .versions import Applied, Calls, Versions

T = TypeVar("T")


def terms_of(described: strategies.ParameterServer, plan: CountedPlan, roles: Roles) -> Terms:
    """Return the rules of a generation."""
    return Terms(described.staleness, plan.shares_per_version, roles, is_whole(described, plan))


def is_whole(described: strategies.ParameterServer, plan: CountedPlan) -> bool:
    """Return whether a version is the gradient of a whole block, of no age."""
    return described.staleness == 0 and plan.shares_per_version == plan.num_virtual


class ServedCommitter:
    """See regroup.step.Transaction, and `Committer`: what the session uses of both is the same."""

    def __init__(
        self,
        membership: Membership,
        strategy: Served,
        described: strategies.ParameterServer,
        state: TrainingState,
        plan: CountedPlan,
        on_commit: Callable[[CommitRecord, Header, bool], None],
    ) -> None:
        """`on_commit(record, header, empty)` is called on the server for each version, elsewhere for each push that is answered."""
        self.num_committed = 0
        self.total = 0
        """Number of versions that the script asks for."""
        self.data_ended = False
        self.membership, self.strategy = membership, strategy
        self.plan: SamplePlan = plan
        self._counted = plan
        self._described, self._state = described, state
        self._on_commit = on_commit
        self._hooks = Hooks(state)
        self.laps = Laps()
        self._versions = Versions(membership, strategy, state, plan)
        self._roles = Roles(None, (0,))
        self._link: Link | None = None
        self._service: Service | None = None
        self._copying: Copying | None = None
        self._is_settled = False
        self._is_open = False
        self._has = -1
        """The version whose parameters this rank has."""
        self._shares: tuple[int, ...] = ()
        """What it was dealt."""
        self._announced: tuple[CommitRecord, bool] | None = None

    @property
    def in_step(self) -> bool:
        """True inside the block of a step that is not committed yet."""
        return self._is_open

    @property
    def step(self) -> int:
        """The newest version that this rank knows of."""
        return self._counted.ledger.version

    @property
    def deals(self) -> tuple[int, ...]:
        """Microbatches that each rank is dealt at a time; empty before the first generation."""
        if not self.membership.generation:
            return ()
        quotas = terms_of(self._described, self._counted, self._roles).quotas()
        return tuple(quotas.get(rank, 0) for rank in range(self.membership.world_size))

    @property
    def applied(self) -> list[Applied]:
        """Versions that this process has applied in the block in progress, or the last one; none where it holds no state."""
        return self._versions.applied

    # --- one generation ----------------------------------------------------------------------------------------------

    def begin_generation(self) -> None:
        """Other ranks, from here on."""
        self.num_committed = 0
        self.laps.begin_generation()
        self.strategy.begin_generation(None)
        self._versions.begin_generation()
        groups = self.membership.groups
        per_worker = groups.assignment.local_world_size if groups is not None else 1
        self._roles = roles_of(self.membership.world_size, per_worker, computes=self._described.computes)
        self._is_settled = False
        self._link = self._service = self._copying = None
        self._has = self._counted.ledger.version

    def _settle(self) -> None:
        """All ranks have adopted the state; from here on only server and standby hold it.

        Two meetings of all ranks. After the first each knows that both have it, so the others may drop its name. The server makes
        no version before the second: whoever still brings the state of this generation to a later one then knows that nothing was
        committed on it (rule WITNESS)."""
        membership, groups = self.membership, self.membership.groups
        row = Row(self.step, 0.0, 1.0, knows_newer=False, sample_hash=0, total=self.total)
        problem = exchange(groups, row).disagreement()
        if problem is not None:
            raise DivergedError(problem)
        if not self._roles.holds(membership.rank):
            self._state.begin_receiving()
        exchange(groups, row)
        if membership.rank == 0:
            terms = terms_of(self._described, self._counted, self._roles)
            desk = Desk(self._counted.ledger, terms, membership.world_size, time.monotonic(), self.total)
            self._service = Service(
                groups, desk, self.strategy, self._versions, self._counted, self._made, self._state.record
            )
        else:
            assert groups is not None
            self._link = Link(groups, name_of(membership.rank))
            if membership.rank == self._roles.standby:
                self._copying = Copying(groups, self.strategy, self._versions)
        self._is_settled = True

    def next_index(self, *, ended: bool) -> int | None:
        """Return the version that was pulled; None: the job has come to its end. `ended`: the script has left its loop.

        Blocks until the server answers. Raises GenerationChanged, also at the cut of a planned change."""
        kind = self._among(lambda: self._pull(ended=ended))
        if kind is messages.LEAVE:
            self.membership.leave_at_cut()
            raise GenerationChanged("all ranks leave for a newer generation")
        return None if kind is messages.FINISHED else self._has

    def _pull(self, *, ended: bool) -> int:
        if not self._is_settled:
            self._settle()
        knows_newer = self.membership.knows_newer()
        if self._service is not None:
            answer = self._service.pull(knows_newer=knows_newer, ended=ended)
            if isinstance(answer, Answer):
                self._service.serve(lambda: self._desk.is_over)
                return messages.FINISHED if answer is Answer.FINISHED else messages.LEAVE
            self._shares, self._has = answer.shares, answer.base
            return messages.DEAL
        has = self._counted.ledger.version if self._copying is not None else self._has
        reply = self._ask(Request(messages.PULL, has, knows_newer, ended))
        if reply.kind == messages.LEAVE:
            return reply.kind
        if reply.version != has:
            assert self._link is not None
            flats = self.strategy.empty()
            self._link.expect(flats)
            self._link.wait()
            self.strategy.put_parameters(flats)
        self._shares, self._has = reply.shares, reply.version
        if reply.kind == messages.FINISHED and self._copying is not None:
            self._copying.end()
        self._heard(reply)
        return reply.kind

    # --- one block ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step's block is entered."""
        self._is_open = True
        self._versions.applied = []
        self.laps.begin()
        self.strategy.begin_step()

    def end(self) -> None:
        """The step's block is left, one way or another."""
        self._is_open = False

    def share(self) -> Sequence[int]:
        """Return the shares that this rank was dealt."""
        return self._shares

    def key(self, index: int, v: int) -> Key:  # noqa: ARG002
        """See regroup.step.Transaction: `v` is a share."""
        return key_of(v, self.plan)

    def check(self) -> None:
        """Raise GenerationChanged once the groups must be left."""
        self.membership.check()

    def stream(self, v: int) -> int:
        """See regroup.step.Transaction."""
        return key_of(v, self.plan).v

    def skip(self, v: int) -> None:
        """Share `v` adds nothing."""

    def added(self, v: int, weight: float | torch.Tensor) -> None:
        """`backward` or `skip` of share `v` is over."""

    def backward(self, v: int, loss: torch.Tensor, factor: float, *, last: bool) -> None:  # noqa: ARG002
        """Add the gradients of share `v`: of `loss` times `factor`."""
        if loss.dtype in (torch.float16, torch.bfloat16):
            loss = loss.float()  # the factor must not be rounded
        gradient = torch.full_like(loss, factor * self._versions.prescale)
        self.strategy.backward(loss, gradient, last=last)

    def run(self, work: Any) -> None:
        """See regroup.step.Transaction: there are no model groups."""
        raise AssertionError(f"a pipeline under a parameter server: {work}")

    def interrupted(self, error: BaseException, *, committed: bool) -> bool:
        """Return whether `error` ended the block because of a membership change."""
        is_explained = self.membership.explains(error)
        if not committed:
            with contextlib.nullcontext() if is_explained else contextlib.suppress(RuntimeError):
                self.strategy.undo()
        return is_explained

    def commit(
        self,
        share: Share,
        before: Sequence[Callable[[], Any]],
        after: Sequence[Callable[[], Any]],
        max_norm: float | None,
    ) -> CommitRecord:
        """Push what was computed and wait until a version has counted it, or it is refused. Server and standby make versions
        meanwhile. Raises GenerationChanged."""
        self.laps.lap(FORWARD)
        self.check()
        self._hooks.check((*before, *after))
        self.strategy.collect(share)
        share.tell(to_host(share.ask()))
        self.laps.lap(DEVICE)
        self._check_samples(share)
        record = self._among(lambda: self._push(share, Calls(before, after, max_norm, share)))
        share.loss = record.loss
        self.laps.lap(EXCHANGE)
        self.laps.committed()
        self.num_committed += 1
        self._is_open = False
        self._announced = record, not share.weights
        return record

    def announce(self) -> None:
        """The step knows that its push is answered: tell the rest of the session. The server has, for each version."""
        assert self._announced is not None
        if self._service is None:
            self._report(*self._announced)

    def noise_scale(self) -> None:
        """See regroup.step.Transaction: it is not measured."""

    def kept(self) -> tuple[tuple[int, StatePair], ...]:
        """See regroup.generation.membership.Keeper: there are no model groups."""
        return ()

    def roll_forward(self, wanted: StatePair, record: CommitRecord) -> bool:  # noqa: ARG002
        """See regroup.generation.membership.Keeper."""
        return False

    # --- small parts -------------------------------------------------------------------------------------------------

    def _push(self, share: Share, calls: Calls) -> CommitRecord:
        flats, used = self.strategy.flats(), messages.used_of(self.strategy.gradients.used)
        weight, loss_sum = float(sum(share.weights.values())), float(sum(share.loss_sums.values()))
        if self._service is not None:
            service = self._service
            self._desk.heard(0, knows_newer=self.membership.knows_newer())
            service.push(flats, used, weight, loss_sum)
            service.serve(lambda: service.own_outcome is not None, calls)
            return self._state.record or CommitRecord(self._pair, share.loss, weight)
        kind = messages.PUSH if self._shares else messages.WAIT
        request = Request(kind, self._has, self.membership.knows_newer(), False, weight, loss_sum)
        assert self._link is not None
        self._link.send([request.pack(), *((used, *flats) if self._shares else ())])
        reply = self._await_reply() if self._copying is None else self._copy_until_answered(calls)
        self._heard(reply)
        return CommitRecord(StatePair(self.membership.generation, reply.version), reply.loss, reply.weight)

    def _copy_until_answered(self, calls: Calls) -> Reply:
        """Of the standby: apply what the server applies, until this rank's own push is answered."""
        assert self._link is not None
        assert self._copying is not None
        header = self._empty_reply()
        self._link.expect([header])
        pauses = Pauses(self.membership.groups)
        try:
            while not self._link.take():
                pauses.pause(idle=not self._copying.step(calls))
        finally:
            pauses.end()
        return Reply.unpack(header)

    def _ask(self, request: Request) -> Reply:
        assert self._link is not None
        self._link.send([request.pack()])
        return self._await_reply()

    def _await_reply(self) -> Reply:
        assert self._link is not None
        header = self._empty_reply()
        self._link.expect([header])
        self._link.wait()
        return Reply.unpack(header)

    def _empty_reply(self) -> torch.Tensor:
        return torch.empty(messages.ANSWER + max(self.deals), dtype=torch.int64)

    def _heard(self, reply: Reply) -> None:
        """Who holds no state knows from the server how far it is."""
        if self._copying is None:
            self._counted.ledger.heard(reply.version, reply.samples, reply.digest)

    def _made(self, record: CommitRecord) -> None:
        self._report(record, False)

    def _report(self, record: CommitRecord, empty: bool) -> None:
        row = Row(
            record.state.step, float(record.loss), record.weight, knows_newer=False, sample_hash=0, total=self.total
        )
        self._on_commit(record, Header((row,)), empty)

    def _check_samples(self, share: Share) -> None:
        """Rule QUOTA, of what this rank was dealt."""
        wanted = sum(self.plan.hash_of(*key_of(one, self.plan)) for one in self._shares) % 2**64
        if share.sample_hash % 2**64 != wanted:
            raise SampleError(
                f"Step {share.index} was not committed: this rank did not use the samples of the {len(self._shares)} microbatches "
                "that it was dealt. Call step.backward() once for every batch of step.microbatches()."
            )

    def _among(self, what: Callable[[], T]) -> T:
        """Do what communicates. Raises GenerationChanged where the group is left, and BackendError."""
        try:
            with leaves_broken(self.membership):
                return what()
        except BackendError as error:
            if not self.membership.explains(error):
                raise
            raise GenerationChanged(str(error)) from error

    @property
    def _desk(self) -> Desk:
        assert self._service is not None
        return self._service.desk

    @property
    def _pair(self) -> StatePair:
        return self._state.pair or StatePair(self.membership.generation, self.step)
