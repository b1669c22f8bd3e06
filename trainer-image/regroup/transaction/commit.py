"""The commit of a step: everything is reduced, checked and applied on every rank, or nothing is on this one.

Owns the one header collective of a step and what follows from it (rules CUTALL, QUOTA, ACK). Ranks may end up one commit
apart when one dies in between; adoption brings them together.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from regroup.errors import DivergedError, GenerationChanged, GroupBroken, SampleError, UsageError
from regroup.generation.groups import Groups
from regroup.parallel.buffers import Buffers
from regroup.parallel.reducer import parameter_hash
from regroup.protocol.state import StatePair

from .header import WIDTH, Header, Row

if TYPE_CHECKING:
    from regroup.job import Job
    from regroup.step import Step

COMPARED_STEPS = 100
"""Parameters are compared across ranks in this many first steps of a generation."""


class Committer:
    """Begins and commits the steps of one job. `num_committed` counts those of the current generation."""

    def __init__(self, job: "Job", buffers: Buffers) -> None:
        self.num_committed = 0
        self._job = job
        self._buffers = buffers
        self._step: Step | None = None

    @property
    def in_step(self) -> bool:
        """True inside the block of a step that is not committed yet."""
        return self._step is not None and not self._step.committed

    def begin(self, step: "Step") -> None:
        """The step's block is entered."""
        self._step = step
        self._job.begin_step(step)
        self._buffers.keep()

    def end(self) -> None:
        """The step's block is left, one way or another."""
        self._step = None

    def check(self) -> None:
        """Raise GenerationChanged once the groups must be left."""
        if self._job.regrouper is not None:
            self._job.regrouper.check()

    def interrupted(self, step: "Step", error: BaseException) -> bool:
        """Return whether `error` ended the block because of a membership change; then the same step comes again."""
        if self._job.regrouper is None or not self._job.regrouper.explains(error):
            return False
        step.interrupted = True
        if not step.committed:
            self._buffers.restore()
        return True

    def commit(
        self,
        step: "Step",
        before: Sequence[Callable[[], Any]],
        after: Sequence[Callable[[], Any]],
        max_norm: float | None,
    ) -> None:
        """Commit on this rank. Raises GenerationChanged or BackendError: nothing was applied."""
        self.check()
        job, groups = self._job, self._job.groups
        row = Row(
            step=step.index,
            loss_sum=sum(step.loss_sums.values()),
            weight=sum(step.weights.values()),
            knows_newer=job.knows_newer(),
            sample_hash=step.sample_hash,
            snapshotted=step.index,
            total=job.total or 0,
            parameter_hash=parameter_hash(job.model.parameters()) if self._compares(groups) else 0,
            buffers_changed=self._buffers.changed(),
        )
        try:
            job.reducer.launch(groups)
            header = exchange(groups, row, job.reducer.wait)
            self._verify(step, header)
            loss_sum, weight = job.reducer.totals(header, step.loss_sums, step.weights, groups)
            if header.buffers_changed:
                ran = [rank for rank, share in enumerate(job.plan.shares(job.world_size)) if share]
                self._buffers.average(groups, ran, exact=job.exact)
        except GroupBroken as error:
            job.leave(error)
            raise GenerationChanged(str(error)) from error
        self._apply(step, weight, before, after, max_norm)
        step.loss = loss_sum / weight
        self.num_committed += 1
        job.committed(step, header)

    def _compares(self, groups: Groups | None) -> bool:
        return groups is not None and groups.world_size > 1 and self.num_committed < COMPARED_STEPS

    def _verify(self, step: "Step", header: Header) -> None:
        """Raise rather than commit what is not this step, everywhere (rule QUOTA). The same on all ranks."""
        problem = header.disagreement()
        if problem is not None:
            raise DivergedError(problem)
        if header.sample_hash != self._job.plan.expected_hash(step.index):
            raise SampleError(
                f"Step {step.index} was not committed: the ranks' samples are not the step's {self._job.plan.global_batch}. "
                "Call step.backward() once for every batch of step.microbatches()."
            )
        if not header.weight > 0:
            raise UsageError(f"Step {step.index} has a total weight of {header.weight:g}; it must be greater than 0.")
        if header.buffers_changed and self._job.exact:
            name = self._buffers.name_of_changed() or "on another rank"
            raise UsageError(
                f'reduction="exact" refuses buffers that change in forward ({name}), because '
                'their value depends on the world size. Use reduction="fast", or a layer without running statistics.'
            )

    def _apply(
        self,
        step: "Step",
        weight: float,
        before: Sequence[Callable[[], Any]],
        after: Sequence[Callable[[], Any]],
        max_norm: float | None,
    ) -> None:
        """Everything that changes the state. An exception in here leaves it without a name: nobody copies it."""
        job = self._job
        with job.state.changing():
            job.reducer.scale(weight)
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(job.model.parameters(), max_norm)
            for hook in before:
                hook()
            job.optimizer.step()
            for hook in after:
                hook()
        job.state.named(StatePair(job.generation, step.index + 1), job.generation)
        step.committed = True


def exchange(groups: Groups | None, row: Row, meanwhile: Callable[[Groups | None], None] | None = None) -> Header:
    """Gather one row of every rank; all ranks call it. Raises what `Groups.failed` says.

    `meanwhile` is waited for before the rows are."""
    if groups is None or groups.world_size == 1:
        if meanwhile is not None:
            meanwhile(groups)
        if groups is not None:
            groups.check()
        return Header((row,))
    mine = torch.tensor(row.pack(), dtype=torch.int64)
    rows = torch.zeros(groups.world_size * WIDTH, dtype=torch.int64)
    work = groups.launch("_allgather_base", rows, mine, control=True)
    if meanwhile is not None:
        meanwhile(groups)
    groups.wait([work])
    return Header(tuple(Row.unpack(values) for values in rows.view(-1, WIDTH).tolist()))
