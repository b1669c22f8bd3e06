"""One step: this rank's microbatches, their gradients, and a commit that is all or nothing.

Owns what may happen between `__enter__` and `__exit__` of one `with step:` block. The same Step object is never entered
twice: after a membership change the session makes a new one with the same index.
"""

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch

from .data import microbatch_rng
from .data.sources import Source
from .errors import BackendError, GenerationChanged, GroupBroken, SampleError, UsageError
from .parallel.strategy import Share
from .transaction.commit import Committer


class Microbatch(NamedTuple):
    """What `step.microbatches()` yields. `x` and `y` are those of the data's batch."""

    x: Any
    y: Any
    ids: torch.Tensor
    """Sample ids: [microbatch], int64."""
    virtual_worker: int


class Step:
    """A step in progress. `index` counts from 0; `loss` is the mean over the whole batch once it is committed, else NaN."""

    def __init__(self, index: int, committer: Committer, source: Source) -> None:
        self.index = index
        self.loss = float("nan")
        self.committed = False
        self.interrupted = False
        self._committer, self._source = committer, source
        self._share = Share(index)
        self._current: Microbatch | None = None
        self._last = False
        self._pending: list[tuple[int, torch.Tensor]] = []
        self._norm: torch.Tensor | float | None = None

    @property
    def norm(self) -> float | None:
        """The gradient's norm before it was clipped, once the step is committed with `max_norm`; else None. Waits for the
        device."""
        return None if self._norm is None else float(self._norm)

    def __enter__(self) -> "Step":
        self._committer.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> bool:
        self._committer.end()
        if error is None:
            if not self.committed and not self.interrupted:
                raise UsageError(
                    f"The block of step {self.index} ended without step.commit(). Call it once, as the block's last line."
                )
            return False
        self.interrupted = self._committer.interrupted(error, committed=self.committed)
        return self.interrupted

    def microbatches(self) -> Iterator[Microbatch]:
        """Yield this rank's share of the step. Random numbers are those of the virtual worker, on whatever rank.

        In the one generation of a hand-over some ranks have no share, and get nothing: commit all the same, and read the
        loss from `step.loss`.
        """
        plan = self._committer.plan
        share = self._virtual_workers()
        with microbatch_rng() as seed_for:
            for v in share:
                self._committer.check()
                ids = plan.ids(self.index, v)
                seed_for(plan.seed, self.index, v)  # before the fetch: a dataset may draw in __getitem__
                batch = self._source.fetch(ids)
                self._current, self._last = Microbatch(batch.x, batch.y, ids, v), v == share[-1]
                yield self._current
                if v not in self._share.weights:
                    raise UsageError(
                        f"Microbatch {v} of step {self.index} was left without step.backward(). Call it once for each."
                    )
        self._current = None

    def backward(self, loss_sum: torch.Tensor, weight: float) -> None:
        """Add the gradients of one microbatch: `loss_sum` is a sum over samples, `weight` their number (or total weight).

        Once for each microbatch. The committed gradient is the sum of all over the sum of all weights.
        """
        current, share = self._current, self._share
        if current is None or current.virtual_worker in share.weights:
            raise UsageError("step.backward() goes inside `for batch in step.microbatches():`, once for each batch.")
        self._committer.check()
        v = current.virtual_worker
        try:
            self._committer.strategy.backward(v, loss_sum, last=self._last)
        except GroupBroken as error:
            self._committer.membership.leave(error)
            raise GenerationChanged(str(error)) from error
        except BackendError as error:
            raise error.with_traceback(None) from None  # the script's line is what matters
        share.weights[v] = float(weight)
        self._pending.append((v, loss_sum.detach()))
        share.sample_hash += self._committer.plan.hash_ids(current.ids)

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
        self._committer.check()
        virtual_workers = self._virtual_workers()
        if len(self._share.weights) != len(virtual_workers):
            raise SampleError(
                f"Step {self.index} was not committed: step.backward() was called for {len(self._share.weights)} of this "
                f"rank's {len(virtual_workers)} microbatches. Call it once for every batch of step.microbatches()."
            )
        for v, loss in self._pending:
            self._share.loss_sums[v] = float(loss)  # the one place where the host waits for the losses
        try:
            record = self._committer.commit(self._share, before, after, max_norm)
        except BackendError as error:
            raise error.with_traceback(None) from None
        self.loss, self._norm, self.committed = record.loss, record.norm, True
        self._committer.announce()

    def _virtual_workers(self) -> range:
        membership = self._committer.membership
        return self._committer.plan.share(membership.rank, membership.world_size)
