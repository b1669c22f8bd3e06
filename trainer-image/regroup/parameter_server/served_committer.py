"""The commit of a step under a parameter server, in place of `Committer`, whose ranks commit together.

A step is a version of the server's parameters here. Each rank goes at its own pace: it pulls parameters, computes the gradients of
its deal, and pushes them. `ServedCommitter` owns the role of this rank in its generation: server, standby or worker. It also drops
a worker's name of the state: the worker's parameters are soon another version's, so it brings no state to the next generation.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from regroup import strategies
from regroup.data import Key, SamplePlan
from regroup.errors import BackendError, DivergedError, GenerationChanged, SampleError
from regroup.generation.membership import Membership, leaves_broken
from regroup.parallel.host import to_host
from regroup.parallel.strategy import Share
from regroup.protocol.state import StatePair
from regroup.state.training import CommitRecord, TrainingState
from regroup.transaction.agreement import exchange
from regroup.transaction.header import Header, Row
from regroup.transaction.hooks import Hooks
from regroup.transaction.laps import DEVICE, EXCHANGE, FORWARD, Laps

from . import messages
from .dealing import Answer, Desk, Roles, roles_of
from .ledger import CountedPlan, key_of
from .links import Link, Pauses, name_of
from .messages import Reply, Request
from .served_gradients import ServedGradients
from .service import Service
from .settings import terms_of
from .standby import Standby
from .versions import Applied, Calls, Versions

T = TypeVar("T")


class ServedCommitter:
    """The `regroup.step.Transaction` and the `Keeper` of a job with a parameter server. The session uses it as a `Committer`."""

    def __init__(
        self,
        membership: Membership,
        strategy: ServedGradients,
        described: strategies.ParameterServer,
        state: TrainingState,
        plan: CountedPlan,
        on_commit: Callable[[CommitRecord, Header, bool], None],
    ) -> None:
        """`on_commit(record, header, empty)` is called on the server for each version, elsewhere for each answered push."""
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
        self._standby: Standby | None = None
        self._is_settled = False
        self._is_open = False
        self._has = -1
        """The version whose parameters this rank has."""
        self._shares: tuple[int, ...] = ()
        """The shares that this rank was dealt."""
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
        """Versions that this process has applied in the block in progress, or in the last one. A worker applies none."""
        return self._versions.applied

    # --- one generation ----------------------------------------------------------------------------------------------

    def begin_generation(self) -> None:
        """Take the role of this rank in a new generation."""
        self.num_committed = 0
        self.laps.begin_generation()
        self.strategy.begin_generation(None)
        self._versions.begin_generation()
        groups = self.membership.groups
        per_worker = groups.assignment.local_world_size if groups is not None else 1
        self._roles = roles_of(self.membership.world_size, per_worker, computes=self._described.computes)
        self._is_settled = False
        self._link = self._service = self._standby = None
        self._has = self._counted.ledger.version

    def _settle(self) -> None:
        """Leave the adopted state with server and standby alone, and begin this rank's role.

        All ranks exchange a row twice. After the first exchange each rank knows that server and standby have the state. The other
        ranks then drop its name. The server makes no version before the second exchange has ended. So no version builds on a
        state that a worker could still bring to a later generation (rules MEET and WITNESS).

        Raises DivergedError if the ranks' rows differ, and what `Groups.failed` says.
        """
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
                groups, desk, self.strategy, self._versions, self._counted, self._report, self._state.record
            )
        else:
            assert groups is not None
            self._link = Link(groups, name_of(membership.rank))
            if membership.rank == self._roles.standby:
                self._standby = Standby(groups, self.strategy, self._versions)
        self._is_settled = True

    def next_index(self, *, ended: bool) -> int | None:
        """Return the version that was pulled; None: the job has come to its end. `ended`: the script has left its loop.

        Blocks until the server answers. Raises GenerationChanged, also at the cut of a planned change.
        """
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
        has = self._counted.ledger.version if self._standby is not None else self._has
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
        if reply.kind == messages.FINISHED and self._standby is not None:
            self._standby.end()
        self._heard(reply)
        return reply.kind

    # --- one block ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Enter a step's block."""
        self._is_open = True
        self._versions.applied = []
        self.laps.begin()
        self.strategy.begin_step()

    def end(self) -> None:
        """Leave the step's block."""
        self._is_open = False

    def share(self) -> Sequence[int]:
        """Return the shares that this rank was dealt."""
        return self._shares

    def key(self, index: int, v: int) -> Key:  # noqa: ARG002
        """Return the block of share `v` and its microbatch there."""
        return key_of(v, self.plan)

    def check(self) -> None:
        """Raise GenerationChanged once the groups must be left."""
        self.membership.check()

    def stream(self, v: int) -> int:
        return key_of(v, self.plan).v

    def skip(self, v: int) -> None:
        """Do nothing: share `v` adds no gradient."""

    def added(self, v: int, weight: float | torch.Tensor) -> None:
        """Do nothing: the share's weight is sent with the push."""

    def backward(self, v: int, loss: torch.Tensor, factor: float, *, last: bool) -> None:  # noqa: ARG002
        """Add the gradients of `loss` times `factor` for share `v`."""
        if loss.dtype in (torch.float16, torch.bfloat16):
            loss = loss.float()  # the factor must not be rounded
        gradient = torch.full_like(loss, factor * self._versions.prescale)
        self.strategy.backward(loss, gradient, last=last)

    def run(self, work: Any) -> None:
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
        """Push the gradients and wait until a version has counted them, or they are refused. Raises GenerationChanged.

        Server and standby make versions meanwhile.
        """
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
        """Tell the rest of the session that the push is answered. The server has done so for each version."""
        assert self._announced is not None
        if self._service is None:
            self._report(*self._announced)

    def noise_scale(self) -> None:
        """Return None: the noise scale is not measured."""

    def kept(self) -> tuple[tuple[int, StatePair], ...]:
        """Return nothing: there are no model groups."""
        return ()

    def roll_forward(self, wanted: StatePair, record: CommitRecord) -> bool:  # noqa: ARG002
        """Return False: no gradients are kept."""
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
        reply = self._await_reply() if self._standby is None else self._copy_until_answered(self._standby, calls)
        self._heard(reply)
        return CommitRecord(StatePair(self.membership.generation, reply.version), reply.loss, reply.weight)

    def _copy_until_answered(self, standby: Standby, calls: Calls) -> Reply:
        """Apply the versions that the server applies, until the standby's own push is answered."""
        assert self._link is not None
        header = self._empty_reply()
        self._link.expect([header])
        pauses = Pauses(self.membership.groups)
        try:
            while not self._link.take():
                pauses.pause(idle=not standby.step(calls))
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
        """Note how far the server is. The standby knows that from its own ledger."""
        if self._standby is None:
            self._counted.ledger.heard(reply.version, reply.samples, reply.digest)

    def _report(self, record: CommitRecord, empty: bool = False) -> None:
        row = Row(
            record.state.step, float(record.loss), record.weight, knows_newer=False, sample_hash=0, total=self.total
        )
        self._on_commit(record, Header((row,)), empty)

    def _check_samples(self, share: Share) -> None:
        """Raise SampleError unless this rank has used the samples of its deal (rule QUOTA)."""
        wanted = sum(self.plan.hash_of(*key_of(one, self.plan)) for one in self._shares) % 2**64
        if share.sample_hash % 2**64 != wanted:
            raise SampleError(
                f"Step {share.index} was not committed: this rank did not use the samples of the {len(self._shares)} microbatches "
                "that it was dealt. Call step.backward() once for every batch of step.microbatches()."
            )

    def _among(self, what: Callable[[], T]) -> T:
        """Return `what()`, which communicates. Raises GenerationChanged if the group is left, and BackendError."""
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
