"""One step: this rank's microbatches, their gradients, and a commit that is all or nothing.

Owns what may happen between `__enter__` and `__exit__` of one `with step:` block. The same Step object is never entered
twice: after a membership change the session makes a new one with the same index.
"""

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch

from .data import EndOfStream, Feed, Key, SamplePlan, microbatch_rng
from .data.mix import mix
from .errors import BackendError, SampleError, UsageError
from .layout import CONTEXT
from .parallel.pipeline import Pipeline, Work
from .parallel.schedules import FORWARD as FORWARD_PASS
from .parallel.strategy import Share, checked_weight
from .parameter_server.versions import Applied
from .state.training import CommitRecord
from .transaction.laps import BACKWARD, DATA, FORWARD, Laps, StepTimes


class Transaction(Protocol):
    """A step runs against one: a `Committer`, a `ServedCommitter`, or a `Rehearsal`, of which nothing is kept."""

    plan: SamplePlan
    laps: Laps
    """The step's clock."""

    @property
    def applied(self) -> Sequence[Applied]:
        """Versions that are applied in the block, under a parameter server: it grows."""
        ...

    def share(self) -> Sequence[int]:
        """Return the virtual workers whose microbatches are this rank's."""
        ...

    def key(self, index: int, v: int) -> Key:
        """Return which microbatch virtual worker `v` of a step computes."""
        ...

    def begin(self) -> None:
        """Enter the block."""
        ...

    def end(self) -> None:
        """Leave the block, one way or another."""
        ...

    def check(self) -> None:
        """Raise GenerationChanged once the block must end."""
        ...

    def backward(self, v: int, loss: torch.Tensor, factor: float, *, last: bool) -> None:
        """Add the gradients of virtual worker `v`: of `loss` times `factor`. `last`: of this rank's in this step."""
        ...

    def stream(self, v: int) -> int:
        """Return the number of what forward draws for virtual worker `v`: it is another one for each part of a sequence."""
        ...

    def skip(self, v: int) -> None:
        """Virtual worker `v` adds nothing."""
        ...

    def added(self, v: int, weight: float | torch.Tensor) -> None:
        """`backward` or `skip` of virtual worker `v` is over; its microbatch has this weight."""
        ...

    def interrupted(self, error: BaseException, *, committed: bool) -> bool:
        """Return whether `error` ended the block and is not the script's own."""
        ...

    def commit(
        self,
        share: Share,
        before: Sequence[Callable[[], Any]],
        after: Sequence[Callable[[], Any]],
        max_norm: float | None,
    ) -> CommitRecord:
        """Commit on this rank. Raises GenerationChanged or BackendError: nothing was applied."""
        ...

    def noise_scale(self) -> float | None:
        """Return the noise scale after the last commit; None: there is none."""
        ...

    def announce(self) -> None:
        """Note that the step is committed."""
        ...

    def run(self, work: Work) -> None:
        """Run this rank's microbatches through the stages of a pipeline. Raises GenerationChanged or BackendError."""
        ...


class Step:
    """A step in progress. `index` counts from 0."""

    def __init__(
        self, index: int, transaction: Transaction, feed: Feed, model: torch.nn.Module, *, rehearsal: bool = False
    ) -> None:
        self.index = index
        self._model = model
        self.rehearsal = rehearsal
        """The block runs only for what it compiles, before this process is ready: it ends at its commit, as if interrupted."""
        self.committed = False
        self.interrupted = False
        self.virtual_worker = -1
        """Number of the current microbatch in the step; -1: none."""
        self._transaction, self._feed = transaction, feed
        self._share = Share(index)
        self._last = False
        self._has_run = False
        """`run` was called. A rank without a share has no weights that would tell."""
        self._inside = False
        self._record: CommitRecord | None = None
        self._times: list[float] | None = None
        self._applied: Sequence[Applied] = ()

    @property
    def ids(self) -> torch.Tensor:
        """Numbers of the current microbatch's samples, [microbatch], int64. Empty where there is none."""
        if self.virtual_worker < 0:
            return torch.empty(0, dtype=torch.int64)
        return self._transaction.plan.ids(*self._transaction.key(self.index, self.virtual_worker)).clone()

    @property
    def loss(self) -> float:
        """Mean over the whole batch, by weight, once the step is committed (hooks of `after` see it); else NaN.

        On a GPU reading it waits until the device has computed the step's loss, but not for later work.
        """
        return float(self._share.loss)

    @property
    def norm(self) -> float | None:
        """The gradient's norm before it was clipped, once the step is committed with `max_norm`; else None. Waits for the
        device."""
        norm = self._record.norm if self._record is not None else None
        return None if norm is None else float(norm)

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """Learning rates of the optimizer's param groups, as this step was committed with them; empty before. Waits for the
        device."""
        return tuple(float(rate) for rate in self._record.learning_rates) if self._record is not None else ()

    @property
    def skipped(self) -> bool:
        """True once the step is committed and its gradient was no number (fp16, with a scaler): nothing was applied."""
        return self._record is not None and self._record.skipped

    @property
    def noise_scale(self) -> float | None:
        """The gradient noise scale, an average over about the last hundred steps, once the step is committed; in the unit of
        `weight`. None without `noise_scale=True`, and until it is known. Waits for the device."""
        return self._transaction.noise_scale() if self.committed else None

    @property
    def applied(self) -> tuple[Applied, ...]:
        """Under a parameter server: the versions that this process applied in the block, with what each came of. Empty on ranks
        that hold no state, and under other strategies."""
        return tuple(self._applied)

    @property
    def times(self) -> StepTimes | None:
        """The parts of the step's time on this rank, in seconds, once the step is committed; else None."""
        return StepTimes(*self._times) if self._times is not None else None

    def __enter__(self) -> "Step":
        self._transaction.begin()
        self._applied = self._transaction.applied
        self._inside = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> bool:
        self._transaction.end()
        self._inside = False
        if error is None:
            if not self.committed and not self.interrupted:
                raise UsageError(
                    f"The block of step {self.index} ended without step.commit(). Call it once, as the block's last line."
                )
            return False
        self.interrupted = self._transaction.interrupted(error, committed=self.committed)
        return self.interrupted

    def microbatches(self) -> Iterator[Any]:
        """Yield this rank's share of the step: batches as the data's collate function, or its `fetch`, returned them.

        Random numbers are those of the virtual worker, on whatever rank. In the one generation of a hand-over some ranks have
        no share, and get nothing: commit all the same, and read the loss from `step.loss`.
        """
        self._check_inside("microbatches")
        self._check_whole("microbatches")
        plan, laps = self._transaction.plan, self._transaction.laps
        share = self._transaction.share()
        with microbatch_rng() as seed_for:
            for v in share:
                self._transaction.check()
                laps.lap(FORWARD)
                key = self._transaction.key(self.index, v)
                if self._feed.draws:
                    seed_for(plan.seed, *key)
                try:
                    batch = self._feed.take(key, share)
                except EndOfStream:
                    self._end_of_data(share)
                    return
                # Forward draws the same, whoever has read the batch.
                seed_for(plan.seed, key.step, self._transaction.stream(v))
                laps.lap(DATA)
                self.virtual_worker, self._last = v, v == share[-1]
                yield batch
                if v not in self._share.weights:
                    raise UsageError(
                        f"Microbatch {v} of step {self.index} was left without step.backward(). Call it once for each."
                    )
        self.virtual_worker = -1

    def backward(
        self,
        *positional: Any,
        sum: torch.Tensor | None = None,
        mean: torch.Tensor | None = None,
        weight: float | torch.Tensor | None = None,
    ) -> None:
        """Add the gradients of one microbatch. Once for each microbatch.

        `sum` is a loss that is summed over samples, a scalar; `mean` is one that is averaged over them. `weight` is their number,
        or the number of whatever the loss is a sum or an average of (tokens that are no padding). None: the number of samples of
        the microbatch. The step's gradient and loss are those of the mean over all microbatches by weight. A weight on a GPU is
        read together with the loss, in the commit. With mean= the process waits for it at once: a mean over nothing is left out.
        """
        loss = sum if mean is None else mean
        if positional or loss is None or (sum is not None and mean is not None):
            raise UsageError(
                "step.backward() takes the loss as sum=loss (reduction='sum') or as mean=loss (reduction='mean'), and weight=n, if "
                "that is not the number of samples: the session scales sums and means differently."
            )
        self._check_inside("backward")
        self._check_whole("backward")
        share, v = self._share, self.virtual_worker
        if v < 0 or v in share.weights:
            raise UsageError("step.backward() goes inside `for batch in step.microbatches():`, once for each batch.")
        _check_loss(loss)
        number = self._weight(weight, is_late=sum is not None)
        self._transaction.check()
        factor = 1.0 if isinstance(number, torch.Tensor) or sum is not None else number
        self._transaction.laps.lap(FORWARD)
        try:
            if sum is not None or factor:
                self._transaction.backward(v, loss, factor, last=self._last)
            else:
                self._transaction.skip(v)  # a mean over nothing is no number
        except BackendError as error:
            raise error.with_traceback(None) from None  # the script's line is what matters
        self._transaction.laps.lap(BACKWARD)
        if sum is not None or factor:
            share.add(v, loss, factor, number)
        else:
            share.weights[v] = share.loss_sums[v] = 0.0
        share.sample_hash += self._transaction.plan.hash_of(*self._transaction.key(self.index, v))
        self._transaction.added(v, number)

    def run(
        self, loss: Callable[[Any, Any], tuple[torch.Tensor, float]], *, inputs: Callable[[Any], Any] | None = None
    ) -> None:
        """Run this rank's microbatches forward and backward, in place of a loop over them. All ranks call it, once a step.

        `loss(output, batch)` returns the loss summed over samples, a scalar, and its weight: their number, or whatever it is a sum
        over. In a pipeline (`regroup.pipeline`) it is called where the last stage is. `inputs(batch)` returns the model's
        arguments. None: the batch itself, or the first element of one that is a tuple or a list.
        """
        self._check_inside("run")
        if not callable(loss) or not (inputs is None or callable(inputs)):
            raise UsageError(
                "step.run() takes functions: loss(output, batch), which returns the loss summed over samples and its weight, and "
                "inputs(batch), which returns what the model is called with, or None."
            )
        if self._has_run:
            raise UsageError(
                f"step.run() was called twice in step {self.index}. Call it once: it runs all microbatches."
            )
        if self._share.weights:
            raise UsageError(
                f"step.run() was called after step.backward() in step {self.index}. Call it in place of the loop over "
                "step.microbatches(): it runs all microbatches."
            )
        self._has_run = True
        if not isinstance(self._model, Pipeline) or not self._model.is_split:
            for batch in self.microbatches():
                total, weight = _pair(loss(self._model(*_arguments(batch, inputs)), batch))
                self.backward(sum=total, weight=weight)
            return
        share = self._transaction.share()
        with microbatch_rng() as seed_for:
            try:
                self._transaction.run(_Microbatches(self, share, loss, inputs, seed_for))
            except BackendError as error:
                raise error.with_traceback(None) from None
        for v in share:
            weight = self._share.weights.setdefault(v, 0.0)  # where the last stage is not, nobody asks
            self._share.sample_hash += self._transaction.plan.hash_of(self.index, v)
            self._transaction.added(v, weight)
        self.virtual_worker = -1

    def commit(
        self,
        after: Sequence[Callable[[], Any]] | None = (),
        *,
        before: Sequence[Callable[[], Any]] | None = (),
        max_norm: float | None = None,
    ) -> None:
        """Reduce, clip to `max_norm`, run `before`, step the optimizer, run `after`: all or nothing.

        Hooks run on every rank with equal gradients and must be local (no collectives). All ranks call it, once a step.
        """
        self._check_inside("commit")
        before, after = _hooks("before", before), _hooks("after", after)
        if max_norm is not None and not (isinstance(max_norm, (int, float)) and max_norm > 0):
            raise UsageError(f"max_norm of step.commit() is {max_norm!r}; it must be a number above 0, or None.")
        if self.committed:
            raise UsageError(f"step.commit() was called twice in step {self.index}.")
        self._transaction.check()
        virtual_workers = self._transaction.share()
        if len(self._share.weights) != len(virtual_workers):
            raise SampleError(
                f"Step {self.index} was not committed: step.backward() was called for {len(self._share.weights)} of this "
                f"rank's {len(virtual_workers)} microbatches. Call it once for every batch of step.microbatches()."
            )
        try:
            record = self._transaction.commit(self._share, before, after, max_norm)
        except BackendError as error:
            raise error.with_traceback(None) from None
        self._record, self.committed = record, True
        self._times = self._transaction.laps.sums
        self._transaction.announce()

    def _weight(self, weight: Any, *, is_late: bool) -> float | torch.Tensor:
        """Return the weight of the current microbatch. `is_late`: one on a device is returned as it is, to be read in the commit.
        Raises UsageError."""
        plan = self._transaction.plan
        if weight is None:
            if CONTEXT in plan.layout.summed_dims:
                raise UsageError(
                    f"weight of step.backward() is not given, and each rank of regroup.mesh({plan.layout}) computes a part of each "
                    "sample. Pass weight=n, the number of this rank's own tokens."
                )
            return float(plan.microbatch)
        is_tensor = isinstance(weight, torch.Tensor) and weight.numel() == 1 and not weight.is_complex()
        return weight if is_late and is_tensor and weight.device.type != "cpu" else checked_weight(weight)

    def _check_whole(self, what: str) -> None:
        if isinstance(self._model, Pipeline) and self._model.is_split:
            raise UsageError(
                f"step.{what}() was called, and the model is a pipeline: its schedule says when a batch goes forward and "
                "backward. Call step.run(loss) in place of the loop over step.microbatches()."
            )

    def _end_of_data(self, share: Sequence[int]) -> None:
        """Take part in the commit, which raises on every rank: this rank's share cannot be whole."""
        self._share.ended = True
        for v in share:
            if v not in self._share.weights:
                self._transaction.skip(v)
                self._share.weights[v] = self._share.loss_sums[v] = 0.0
                self._transaction.added(v, 0.0)
        try:
            self._transaction.commit(self._share, (), (), None)
        except BackendError as error:
            raise error.with_traceback(None) from None

    def _check_inside(self, what: str) -> None:
        if not self._inside:
            raise UsageError(f"step.{what}() of step {self.index} is outside its block. Write `with step:` around it.")


class _Microbatches:
    """A step's microbatches as a pipeline takes them: see `Work`."""

    def __init__(
        self,
        step: Step,
        share: Sequence[int],
        loss: Callable[[Any, Any], tuple[torch.Tensor, float]],
        inputs: Callable[[Any], Any] | None,
        seed_for: Callable[[int, int, int], None],
    ) -> None:
        self._step, self._share, self._loss, self._inputs, self._seed_for = step, share, loss, inputs, seed_for

    def __len__(self) -> int:
        return len(self._share)

    def inputs(self, microbatch: int) -> tuple[Any, ...]:
        return _arguments(self._batch(microbatch), self._inputs)

    def loss(self, microbatch: int, output: Any) -> torch.Tensor:
        step, v = self._step, self._share[microbatch]
        total, weight = _pair(self._loss(output, self._batch(microbatch)))
        _check_loss(total)
        step._share.add(v, total, 1.0, step._weight(weight, is_late=True))
        # The factor of the batch must not be rounded.
        found: torch.Tensor = total.float() if total.dtype in (torch.float16, torch.bfloat16) else total
        return found

    def seed(self, microbatch: int, stage: int) -> None:
        # Each stage draws numbers of its own: one dropout mask is not that of the next stage, too.
        seed = self._step._transaction.plan.seed
        self._seed_for(mix(seed, stage) if stage else seed, self._step.index, self._share[microbatch])

    def check(self) -> None:
        self._step._transaction.check()

    def did(self, kind: str) -> None:
        self._step._transaction.laps.lap(FORWARD if kind == FORWARD_PASS else BACKWARD)

    def _batch(self, microbatch: int) -> Any:
        step, v = self._step, self._share[microbatch]
        laps = step._transaction.laps
        laps.lap(FORWARD)
        if step._feed.draws:
            self._seed_for(step._transaction.plan.seed, step.index, v)
        batch = step._feed.take(Key(step.index, v), self._share)
        laps.lap(DATA)
        step.virtual_worker = v
        return batch


def _arguments(batch: Any, inputs: Callable[[Any], Any] | None) -> tuple[Any, ...]:
    """Return what the model is called with."""
    value = inputs(batch) if inputs is not None else batch[0] if isinstance(batch, (tuple, list)) else batch
    return value if isinstance(value, tuple) else (value,)


def _pair(found: Any) -> tuple[Any, Any]:
    """Return what the script's loss function returned. Raises UsageError for anything but a pair."""
    if not isinstance(found, tuple) or len(found) != 2:
        raise UsageError(
            f"The loss function of step.run() returned a {type(found).__name__}; it must return the loss summed over samples "
            "and its weight: return cross_entropy(output, targets, reduction='sum'), len(targets), for example."
        )
    return found


def _check_loss(loss: Any) -> None:
    """Raise UsageError for what is no loss that a model is trained by."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise UsageError(
            f"The loss of step.backward() is {what}; it must be a scalar tensor, a sum or a mean over samples."
        )
    if not loss.requires_grad:
        raise UsageError(
            "The loss of step.backward() depends on no parameter that is trained: it was computed under torch.no_grad(), or "
            "detached."
        )


def _hooks(name: str, hooks: Any) -> Sequence[Callable[[], Any]]:
    """Return the hooks as a list. Raises UsageError for what is none."""
    if hooks is None:
        return ()
    if not isinstance(hooks, (list, tuple)) or not all(map(callable, hooks)):
        raise UsageError(
            f"{name} of step.commit() is a list of functions without arguments: {name}=[schedule.step], for example."
        )
    return hooks
