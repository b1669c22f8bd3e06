"""One step: this rank's microbatches, their gradients, and a commit that is all or nothing.

Owns what may happen between `__enter__` and `__exit__` of one `with step:` block. The same Step object is never entered
twice: after a membership change the session makes a new one with the same index. Rules CUTALL, QUOTA and ACK ride in the
one collective of `commit` (`header`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from regroup.data import microbatch_rng

from .errors import BackendError, GenerationChanged, GroupBroken, SampleError, UsageError

if TYPE_CHECKING:
    from .job import Job


class Microbatch(NamedTuple):
    """What `step.microbatches()` yields. `x` and `y` are those of the data's batch."""

    x: Any
    y: Any
    ids: torch.Tensor
    """Sample ids: [microbatch], int64."""
    virtual_worker: int


class Step:
    """A step in progress. `index` counts from 0; `loss` is the mean over the whole batch once it is committed, else NaN."""

    def __init__(self, job: "Job", index: int) -> None:
        self.index = index
        self.loss = float("nan")
        self.committed = False
        self.interrupted = False
        self.loss_sums: dict[int, float] = {}
        self.weights: dict[int, float] = {}
        self.sample_hash = 0
        self._job = job
        self._current: Microbatch | None = None
        self._last = False
        self._pending: list[tuple[int, torch.Tensor]] = []

    def __enter__(self) -> "Step":
        self._job.committer.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> bool:
        self._job.committer.end()
        if error is None:
            if not self.committed and not self.interrupted:
                raise UsageError(
                    f"The block of step {self.index} ended without step.commit(). Call it once, as the block's last line."
                )
            return False
        return self._job.committer.interrupted(self, error)

    def microbatches(self) -> Iterator[Microbatch]:
        """Yield this rank's share of the step. Random numbers are those of the virtual worker, on whatever rank.

        In the one generation of a hand-over some ranks have no share, and get nothing: commit all the same, and read the
        loss from `step.loss`.
        """
        job = self._job
        share = job.share()
        for v in share:
            job.committer.check()
            ids = job.plan.ids(self.index, v)
            batch = job.source.fetch(ids)
            with ExitStack() as stack:
                stack.enter_context(microbatch_rng(job.plan.seed, self.index, v))
                self._current, self._last = Microbatch(batch.x, batch.y, ids, v), v == share[-1]
                yield self._current
            if v not in self.weights:
                raise UsageError(
                    f"Microbatch {v} of step {self.index} was left without step.backward(). Call it once for each."
                )
        self._current = None

    def backward(self, loss_sum: torch.Tensor, weight: float) -> None:
        """Add the gradients of one microbatch: `loss_sum` is a sum over samples, `weight` their number (or total weight).

        Once for each microbatch. The committed gradient is the sum of all over the sum of all weights.
        """
        job, current = self._job, self._current
        if current is None or current.virtual_worker in self.weights:
            raise UsageError("step.backward() goes inside `for batch in step.microbatches():`, once for each batch.")
        job.committer.check()
        if self._last:
            job.reducer.arm(job.groups)
        try:
            loss_sum.backward()  # type: ignore[no-untyped-call]
        except GroupBroken as error:
            job.leave(error)
            raise GenerationChanged(str(error)) from error
        except BackendError as error:
            raise error.with_traceback(None) from None  # the script's line is what matters
        v = current.virtual_worker
        job.reducer.after_backward(v)
        self.weights[v] = float(weight)
        self._pending.append((v, loss_sum.detach()))
        self.sample_hash += job.plan.hash_ids(current.ids)

    def commit(
        self,
        after: Sequence[Callable[[], Any]] = (),
        *,
        before: Sequence[Callable[[], Any]] = (),
        max_norm: float | None = None,
    ) -> None:
        """Reduce, clip to `max_norm`, run `before`, step the optimizer, run `after`: all or nothing.

        Hooks run on every rank with equal gradients and must be local (no collectives). All ranks call it, once a step.
        """
        if self.committed:
            raise UsageError(f"step.commit() was called twice in step {self.index}.")
        self._job.committer.check()
        share = self._job.share()
        if len(self.weights) != len(share):
            raise SampleError(
                f"Step {self.index} was not committed: step.backward() was called for {len(self.weights)} of this rank's "
                f"{len(share)} microbatches. Call it once for every batch of step.microbatches()."
            )
        for v, loss in self._pending:
            self.loss_sums[v] = float(loss)  # the one place where the host waits for the losses
        try:
            self._job.committer.commit(self, before, after, max_norm)
        except BackendError as error:
            raise error.with_traceback(None) from None
