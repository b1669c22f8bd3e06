"""The session: what `with regroup.session(...) as job` gives, top to bottom.

Read `Job.steps` first: it is the life of a trainer process. Without REGROUP_SOCKET in the environment (plain `python`) the
same code runs in a world of one, without groups. One session per process; all methods are for the main thread.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, cast

import torch

from . import model_group, served, strategies
from .accelerator import make_current
from .checkpoint.shards import local_of
from .checkpoint.tree import unsaved_kind
from .collective import Blocks, Collective
from .data import UNKNOWN, LoaderSource, SamplePlan, Stream, as_source, as_stream, make_feed
from .errors import BackendError, DivergedError, GenerationChanged, GroupBroken, JobEnded, UsageError
from .generation.groups import Groups
from .generation.membership import Alone, Membership, Stopped
from .generation.regrouper import Regrouper
from .generation.watcher import Watcher
from .parallel.ddp import DataParallel
from .parallel.exact import Exact
from .parallel.ledger import NAME as LEDGER
from .parallel.ledger import CountedPlan
from .parallel.local_steps import LocalSteps
from .parallel.noise import NAME as NOISE
from .parallel.noise import NoiseScale
from .parallel.pipeline import check_model
from .parallel.served import Served
from .parallel.strategy import Guarantees, Strategy
from .progress.busy import BusyStack
from .progress.reporter import Reporter
from .protocol import env, local
from .protocol.local import COMPLETE
from .protocol.state import Busy
from .state.durable import Durable
from .state.memory import Memory
from .state.rates import ScaledRates
from .state.training import CommitRecord, TrainingState
from .step import Step
from .transaction.commit import Committer, exchange
from .transaction.header import Header, Row
from .transaction.rehearsal import Rehearsal, is_compiled
from .transaction.served import ServedCommitter

BATCH, RATES = "regroup.batch", "regroup.rates"
"""Names of the parts of the state that are the session's own."""
REDUCTIONS = ("fast", "exact")
"""What a script may pass as `reduction`."""


def make_strategy(
    described: strategies.Description,
    reduction: str,
    model: torch.nn.Module,
    state: TrainingState,
    plan: SamplePlan,
    *,
    measures: bool = False,
) -> Strategy:
    """Return what does the work of a description. `measures`: norms of gradients, too. Raises UsageError for one that fits neither
    `reduction` nor the model."""
    if not isinstance(described, strategies.Description):
        raise UsageError(
            f"strategy is a {type(described).__name__}; it must be one of regroup.strategies, such as "
            "regroup.strategies.DataParallel()."
        )
    if reduction == "exact":
        if described != strategies.DataParallel():
            raise UsageError(
                f'reduction is "exact" and strategy is {described}: only DataParallel() without options gives the same bits at any '
                'number of processes. Leave out strategy, or pass reduction="fast".'
            )
        return Exact(model, state.optimizer, plan)
    if isinstance(described, (strategies.LocalSGD, strategies.DiLoCo)):
        return _local_steps(described, state, plan)
    if isinstance(described, strategies.ParameterServer):
        return served.make_strategy(described, state, plan)
    if state.scaler is not None and isinstance(described.hook, strategies.PowerSGD):
        raise UsageError(
            "strategy has a PowerSGD hook, and scaler is set: what one step leaves for the next would be of another scale. "
            "Train in bfloat16, which needs no scaler, or use another hook."
        )
    return DataParallel(model, state.optimizer, plan, described, model_group.inner(), measures=measures)


def _check_batch(
    global_batch: int | None,
    batch_per_rank: int | None,
    microbatch: int,
    reduction: str,
    rate_scaling: strategies.RateScaling | None,
) -> None:
    """Raise UsageError for arguments that fit no way of choosing the batch."""
    if (global_batch is None) == (batch_per_rank is None):
        raise UsageError(
            f"global_batch is {global_batch!r} and batch_per_rank is {batch_per_rank!r}; exactly one of them must be given. Pass "
            "global_batch for a step that is the same at any number of processes."
        )
    if batch_per_rank is None:
        if rate_scaling is not None:
            raise UsageError(
                "rate_scaling is set, and global_batch never changes. Pass batch_per_rank, or leave it out."
            )
        return
    if not isinstance(batch_per_rank, int) or isinstance(batch_per_rank, bool) or batch_per_rank < 1:
        raise UsageError(f"batch_per_rank is {batch_per_rank!r}; it must be a whole number of at least 1.")
    if isinstance(microbatch, int) and microbatch > 0 and batch_per_rank % microbatch:
        raise UsageError(
            f"batch_per_rank ({batch_per_rank}) is not a multiple of microbatch ({microbatch}). Change one."
        )
    if reduction == "exact":
        raise UsageError(
            'reduction is "exact" and batch_per_rank is set: steps that differ by the number of processes have no equal bits. Pass '
            'global_batch, or reduction="fast".'
        )


def session(
    *,
    model: torch.nn.Module,
    optimizer: Any,
    data: Any,
    global_batch: int | None = None,
    microbatch: int,
    state: Mapping[str, Any] | None = None,
    seed: int = 0,
    shuffle: bool | None = None,
    reduction: str = "fast",
    scaler: Any = None,
    rehearse: bool | None = None,
    strategy: strategies.Description | None = None,
    batch_per_rank: int | None = None,
    rate_scaling: strategies.RateScaling | None = None,
    noise_scale: bool = False,
) -> "Job":
    """Return the job that this process trains, as a context manager. Call it once everything is built.

    model, optimizer: yours, used in place and never wrapped; several optimizers as a list. data: tensors (x, y), a map-style
    dataset, a DataLoader of one (for its collate function, workers and pinning), an object with `__len__` and `fetch(ids)`, or, for
    what can only be read in order, a `regroup.stream` or an IterableDataset.
    global_batch: samples per step, fixed for the job's life; it is cut into microbatches that are dealt to the ranks. state:
    further objects with state_dict and load_state_dict, by name. shuffle: False for the order of the samples' numbers in each
    epoch; None: a DataLoader's own shuffle, else True. reduction: "fast", or "exact" for results that are bitwise
    equal at any world size (slower; deterministic algorithms only). scaler: a torch.amp.GradScaler, for fp16: the session
    scales, unscales before it clips, and updates it. rehearse: run the block of a step once before this process joins a job, and
    keep nothing of it, so that nobody waits for what it compiles; None: where the model is compiled. strategy: how the work is
    split over ranks, one of `regroup.strategies`; None: DataParallel(). batch_per_rank: instead of
    global_batch: samples per step and rank, so that a step's batch follows the number of ranks, from one generation to the next.
    rate_scaling: how learning rates follow it; None: not at all. noise_scale: measure the gradient noise scale.
    Raises UsageError, StateError or DataError, one sentence each.
    """
    return Job(
        model,
        optimizer,
        data,
        global_batch,
        microbatch,
        state or {},
        seed,
        shuffle,
        reduction,
        scaler,
        rehearse,
        strategy,
        batch_per_rank,
        rate_scaling,
        noise_scale,
    )


def _local_steps(
    described: strategies.LocalSGD | strategies.DiLoCo, state: TrainingState, plan: SamplePlan
) -> Strategy:
    """Return what makes rounds of inner steps. Raises UsageError."""
    name = type(described).__name__
    if state.scaler is not None:
        raise UsageError(
            f"scaler is given, and strategy is {name}: each rank would find overflows, and a scale, of its own. Use bfloat16, "
            "which needs no scaler."
        )
    if plan.layout.size > 1:
        raise UsageError(f"strategy {name} does not work with regroup.mesh() so far. Leave one of them out.")
    rate, momentum = 1.0, 0.0
    if isinstance(described, strategies.DiLoCo):
        rate, momentum = described.outer_learning_rate, described.outer_momentum
    return LocalSteps(
        state.model,
        state.optimizer,
        plan,
        inner_steps=described.inner_steps,
        max_norm=described.max_norm,
        outer=lambda trained: torch.optim.SGD(trained, lr=rate, momentum=momentum, nesterov=momentum > 0),
        before_change=lambda: state.before_change(),
    )


def _shuffles(asked: bool | None, source: Any) -> bool:
    """Return whether each epoch has an order of its own. `asked`: the argument `shuffle`. Raises UsageError."""
    if asked not in (None, True, False):
        raise UsageError(f"shuffle is {asked!r}; it must be True or False.")
    if isinstance(source, LoaderSource):
        if asked is not None:
            raise UsageError(
                f"shuffle is {asked} and data is a DataLoader, whose own shuffle ({not source.in_order}) counts. Leave out "
                "shuffle, and pass it to the DataLoader."
            )
        return not source.in_order
    if isinstance(source, Stream) and asked is not None:
        raise UsageError(f"shuffle is {asked} and data is a stream, which has an order of its own. Leave out shuffle.")
    return asked is None or bool(asked)


def _refuse_meta(model: torch.nn.Module) -> None:
    """Raise UsageError for a tensor of the model that has no values. One of a subclass may hold them on another device."""
    for what, named in (("Parameter", model.named_parameters()), ("Buffer", model.named_buffers())):
        for name, tensor in named:
            local = getattr(tensor, "_local_tensor", tensor)
            if local.is_meta and type(local) in (torch.Tensor, torch.nn.Parameter):
                raise UsageError(
                    f"{what} {name} of the model is on the meta device, so it has no values: call "
                    "model.to_empty(device=...) and initialise the model before regroup.session(), or build it on its device."
                )


def _refuse_layouts(model: torch.nn.Module) -> None:
    """Raise UsageError for a tensor of the state that cannot be compared, copied and saved byte by byte, such as a sparse one. It
    may be hidden from `state_dict`, which a module may change."""
    left_alone = {
        id(module._buffers[name]) for module in model.modules() for name in module._non_persistent_buffers_set
    }
    for what, named in (("Parameter", model.named_parameters()), ("Buffer", model.named_buffers())):
        for name, tensor in named:
            local = local_of(tensor)
            if id(tensor) in left_alone:
                continue
            if (kind := unsaved_kind(local)) is not None:
                raise UsageError(
                    f"{what} {name} of the model is a {kind} tensor, and a session compares, copies and saves dense ones only. "
                    "Register it as a buffer with persistent=False if the script can build it again: the session leaves such "
                    "buffers alone. Otherwise store its parts in dense buffers."
                )
            if any(stride == 0 and size > 1 for size, stride in zip(local.shape, local.stride())):
                raise UsageError(
                    f"{what} {name} of the model has strides {list(local.stride())} for shape {list(local.shape)}: several "
                    "elements share one place in memory, so no state can be loaded into it. Make it contiguous."
                )


def _refuse_synchronised(model: torch.nn.Module) -> None:
    """Raise UsageError for a layer that communicates over torch's default process group, which a session does not have: it would
    silently use the statistics of its own rank."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise UsageError(
                f"{name or 'The model'} is a SyncBatchNorm, which would see the samples of its own rank only: a session has no "
                "default process group. Use BatchNorm, whose running statistics the session averages, or a norm that does not "
                "depend on the batch, such as GroupNorm."
            )


class Job:
    """One training job as this process takes part in it."""

    _attached = False
    """This process has taken part in a job; a second session would cut the first one off from the agent."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        data: Any,
        global_batch: int | None,
        microbatch: int,
        state: Mapping[str, Any],
        seed: int,
        shuffle: bool | None,
        reduction: str,
        scaler: Any = None,
        rehearse: bool | None = None,
        strategy: strategies.Description | None = None,
        batch_per_rank: int | None = None,
        rate_scaling: strategies.RateScaling | None = None,
        noise_scale: bool = False,
    ) -> None:
        path = os.environ.get(env.SOCKET)
        if path and Job._attached:
            raise UsageError(
                "regroup.session() was called a second time in this process, which takes part in one job only. "
                "Train everything in one session, with further objects in its `state`."
            )
        world_size = os.environ.get("WORLD_SIZE", "")
        if not path and world_size.isdecimal() and int(world_size) > 1:
            raise UsageError(
                f"WORLD_SIZE is {world_size}, but no agent of Regroup is present: each process would train its own model. "
                "Start the script with `regroup run --workers N` or in a job, not with torchrun."
            )
        if not isinstance(model, torch.nn.Module):
            raise UsageError(f"model is a {type(model).__name__}; it must be a torch.nn.Module.")
        _refuse_meta(model)
        _refuse_layouts(model)
        _refuse_synchronised(model)
        if not isinstance(state, Mapping):
            raise UsageError(f'state is a {type(state).__name__}; it must be a dict: state={{"schedule": schedule}}.')
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise UsageError(f"seed is {seed!r}; it must be a whole number.")
        if reduction not in REDUCTIONS:
            raise UsageError(f'reduction is {reduction!r}; it must be "fast" or "exact".')
        if rehearse not in (None, True, False):
            raise UsageError(f"rehearse is {rehearse!r}; it must be True, False, or None: where the model is compiled.")
        if noise_scale not in (True, False):
            raise UsageError(f"noise_scale is {noise_scale!r}; it must be True or False.")
        self.model, self.optimizer = model, optimizer
        stream = as_stream(data)
        mapped = as_source(data, microbatch) if stream is None else None
        self.source = cast(Any, stream or mapped)
        max_world_size = int(os.environ.get(env.MAX_WORLD_SIZE) or 1)
        _check_batch(global_batch, batch_per_rank, microbatch, reduction, rate_scaling)
        layout = model_group.layout()
        if layout.size > 1:
            _refuse_in_group(reduction, scaler, batch_per_rank)
            check_model(model, layout)
            model_group.check_device(model)
        if batch_per_rank is not None and isinstance(strategy, (strategies.LocalSGD, strategies.DiLoCo)):
            raise UsageError(
                f"batch_per_rank does not work with strategy {type(strategy).__name__} so far. Pass global_batch."
            )
        if batch_per_rank is not None and isinstance(strategy, strategies.DataParallel) and strategy.uneven:
            raise UsageError(
                "batch_per_rank is set, which gives each process the same work, and strategy is DataParallel(uneven=True). Pass "
                "global_batch, or leave out uneven."
            )
        self._batch_per_rank, self._max_world_size = batch_per_rank, max_world_size
        largest = max_world_size * batch_per_rank if batch_per_rank is not None else global_batch
        assert largest is not None
        if stream is not None and layout.size > 1:
            raise UsageError(
                "data is a stream, which does not work with regroup.mesh() so far. Pass a map-style dataset."
            )
        num_samples = UNKNOWN if mapped is None else len(mapped)
        shuffles = _shuffles(shuffle, self.source)
        described = strategies.DataParallel() if strategy is None else strategy
        self._is_served = isinstance(described, strategies.ParameterServer)
        if isinstance(described, strategies.ParameterServer):
            served.refuse(
                described,
                reduction=reduction,
                scaler=scaler,
                batch_per_rank=batch_per_rank,
                noise_scale=noise_scale,
                is_stream=stream is not None,
                group_size=layout.size,
            )
            self.plan: SamplePlan = served.plan_of(
                described, seed, num_samples, largest, microbatch, max_world_size, shuffles=shuffles
            )
        else:
            self.plan = SamplePlan(
                seed,
                num_samples,
                largest,
                microbatch,
                max_world_size,
                layout,
                in_order=stream is not None,
                shuffles=shuffles,
            )
        self.state = TrainingState(model, optimizer, state, scaler)
        self._rates = ScaledRates(rate_scaling, self.state.optimizer) if rate_scaling is not None else None
        if batch_per_rank is not None:
            self.state.add(BATCH, self.plan)
        if self._rates is not None:
            self.state.add(RATES, self._rates)
        if isinstance(self.plan, CountedPlan):
            self.state.add(LEDGER, self.plan.ledger)
        self._feed = make_feed(self.source, self.plan, reads_ahead=not self._is_served)
        self.outcome: str | None = None
        """How the job ended (Complete, Failed, Released, Suspended, Drained); None: not yet."""
        self.total: int | None = None
        """Number of steps that the script asks for; None before its loop."""
        self._looped = False
        self._cut = False
        """All ranks know of a newer, planned generation: they leave this one together, before the next step."""
        self._left_loop = False
        self._durable = Durable(self.state, self.plan, model_group.inner())
        self._device = next(model.parameters(), torch.empty(0)).device
        make_current(self._device)
        self._noise: NoiseScale | None = None
        if noise_scale:
            _refuse_to_measure(described, reduction, scaler, layout.size)
            self._noise = NoiseScale()
            self.state.add(NOISE, self._noise)
        self._strategy = make_strategy(described, reduction, model, self.state, self.plan, measures=noise_scale)
        if self._strategy.outer is not None and self.state.extra.setdefault("outer", self._strategy.outer) is not (
            self._strategy.outer
        ):
            raise UsageError('state["outer"] is the name of the strategy\'s own optimizer. Choose another name.')
        self._watcher: Watcher | None = None
        """None in plain `python`."""
        # In a model group a forward communicates, and before the first generation there is nobody to do so with.
        self._rehearses = bool(path) and layout.size == 1 and (is_compiled(model) if rehearse is None else rehearse)
        """The loop begins with a rehearsal: this process is not ready before that."""
        self._membership: Membership = Alone(self._durable)
        local_rank = int(os.environ.get(env.LOCAL_RANK) or 0)
        if path:
            incarnation = int(os.environ.get(env.INCARNATION) or 0)
            attach = local.Attach(os.getpid(), local_rank, incarnation, rehearses=self._rehearses)
            self._watcher = Watcher(path, attach)
            Job._attached = True
        send = self._watcher.send if self._watcher is not None else None
        self._memory = Memory(self.state, self.plan, send, local_rank, model_group.inner())
        if self._watcher is not None:
            self._membership = Regrouper(
                self._watcher,
                self.state,
                self.plan,
                self._device,
                self._durable,
                self._memory,
                served.links_of(described),
            )
        self._reporter = Reporter(self._watcher, self.plan, self._durable, self._memory)
        self._busy = BusyStack(send, self._reporter.paused)
        self._committer: Committer | ServedCommitter
        if isinstance(self._strategy, Served):
            assert isinstance(described, strategies.ParameterServer)
            assert isinstance(self.plan, CountedPlan)
            self._committer = ServedCommitter(
                self._membership, self._strategy, described, self.state, self.plan, self._committed
            )
        else:
            self._committer = Committer(
                self._membership,
                self._strategy,
                self.state,
                self.plan,
                self._memory,
                self._committed,
                self._durable.wants,
                self._rates,
                uneven=isinstance(described, strategies.DataParallel) and described.uneven,
                noise=self._noise,
            )
        self._membership.keeper = self._committer
        self._blocks = Blocks(self._membership, self._committer, self.state, self._follow)

    # --- what a script reads -----------------------------------------------------------------------------------------

    @property
    def groups(self) -> Groups | None:
        """The groups of the current generation; None in plain `python` and between generations."""
        return self._membership.groups

    @property
    def generation(self) -> int:
        """Number of the generation that this process last adopted; 0 before the first."""
        return self._membership.generation

    @property
    def rank(self) -> int:
        """Index of this process in the generation; -1 before the first. It changes: compute nothing lasting from it."""
        return self._membership.rank

    @property
    def world_size(self) -> int:
        """Number of processes in the generation. It changes, too."""
        return self._membership.world_size

    @property
    def is_main(self) -> bool:
        """True on one process of the generation: for printing and saving."""
        return self.rank == 0

    @property
    def _saves(self) -> bool:
        """This process writes checkpoints, or its part of them: those of the first model group do."""
        return 0 <= self.rank < self.plan.layout.size

    @property
    def device(self) -> torch.device:
        """The model's: batches are moved there."""
        return self._device

    @property
    def guarantees(self) -> Guarantees:
        """Which of the session's promises hold under its strategy."""
        return self._strategy.guarantees

    @property
    def global_batch(self) -> int:
        """Samples in a step, over all ranks. With `batch_per_rank` it changes with the generation."""
        return self.plan.batch

    @property
    def shares(self) -> tuple[int, ...]:
        """Microbatches of each process in the next step, in the order of ranks; empty before the first generation. With
        `uneven` they change between steps."""
        return self._committer.deals

    @property
    def step(self) -> int:
        """Number of committed steps; under a parameter server the newest version that this process knows of."""
        return self._committer.step

    # --- the life of a trainer process -------------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[Step]:
        """Yield steps until `total` are committed, the one in flight again after each membership change.

        Ends when every rank has committed the last step. When the job ends in another way (failed, released by a scale-down), the
        loop raises JobEnded, which ends the script with exit code 0. The job is complete once the script has returned 0 in every
        member: one that fails after its loop is started again, with the state of the last step, its rank and its world size, and
        this loop then has no steps. So code after the loop may run more than once, and finds no variable that only the loop sets.
        Call it once; raises UsageError else.
        """
        if self._looped:
            raise UsageError(
                "job.steps() was called a second time; its loop is the whole job. Call it once, with the number of steps "
                "of all epochs together."
            )
        if not isinstance(total, int) or isinstance(total, bool) or total < 0:
            raise UsageError(
                f"job.steps() was called with {total!r}; it takes the number of steps of all epochs together."
            )
        self._looped = True
        return self._loop(total)

    def _loop(self, total: int) -> Iterator[Step]:
        self.total = self._committer.total = total
        self._blocks.loop_begun = True
        # A collective before the loop has joined already; and who comes after the last step has nothing to rehearse.
        if self._rehearses and total and self.generation == 0 and self._watcher and self._watcher.may_rehearse():
            yield from self._rehearse()
        while self.outcome is None:
            try:
                self._ensure()
            except Stopped as stopped:
                self._end(stopped.outcome)
                return
            if self._membership.over:
                self._end(COMPLETE)
                return
            try:
                index = self._committer.next_index(ended=self._ended)
            except GenerationChanged:
                continue
            if index is None:
                self._finish()
                continue
            step = Step(index, self._committer, self._feed, self.model)
            self._reporter.begin_step(step.index)
            yield step
            if self._committer.data_ended:
                self._membership.ended = True
            if not step.committed and not step.interrupted:
                raise UsageError(f"Step {step.index} was not entered. Write `with step:` in the loop over job.steps().")

    def _rehearse(self) -> Iterator[Step]:
        """Yield a step of which nothing is kept, before the agent is told that this process is ready."""
        self._rehearses, self._blocks.rehearses = False, True
        rehearsal = Rehearsal(self._strategy, self.state, self.plan)
        try:
            with rehearsal.keep_nothing():
                yield Step(0, rehearsal, self._feed, self.model, rehearsal=True)
        finally:
            self._blocks.rehearses = False

    @property
    def _ended(self) -> bool:
        """True once a script, this one or that of another rank, has left its loop: the job ends at the step it was at."""
        return self._left_loop or self._membership.ended

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self.outcome is None and self.total is not None:
                self._left_loop = self._membership.ended = True  # the script broke out of its loop
                next(self._loop(self.total), None)
            elif error is not None and self.outcome is None and not isinstance(error, DivergedError):
                # What is diverged is no state to go back to. Anything else costs no step: the next process continues here.
                self._keep_state()
            if error is not None and self.outcome is None and not self._membership.is_alone:
                self._durable.lost()
        finally:
            self._memory.settle()
            self.state.staging.settle()  # no thread reads from a device that is being torn down
            self._feed.close()
            self._strategy.close()
            self._membership.close()
            if self._watcher is not None:
                self._watcher.close()

    def _ensure(self) -> None:
        """Be in a generation, between two steps: interrupt -> form -> adopt where needed. Raises Stopped."""
        if self._cut:
            self._cut = False
            self._membership.leave_at_cut()
        self._membership.block = None
        self._adopt_newest()

    def _follow(self) -> None:
        """Be in the newest generation that must be followed, inside a block of collectives."""
        try:
            self._adopt_newest()
        except Stopped as stopped:
            self._end(stopped.outcome)
            raise JobEnded(stopped.outcome) from None

    def _adopt_newest(self) -> None:
        """Be in the newest generation that must be followed, and take note if it is a new one. Raises Stopped."""
        membership = self._membership
        if self._watcher is not None:
            self._watcher.ready()
        if not membership.ensure() or membership.over:
            return
        self._cut = False  # it was agreed on in a generation that is over
        self._follow_size()
        self._committer.begin_generation()
        self._memory.committed()
        self._memory.interval.begin_generation()
        waited_s = membership.groups.waited_s if membership.groups is not None else 0.0
        self._reporter.begin_generation(membership.generation, membership.adopted_at_s, waited_s)
        self._durable.begin_generation()
        self._durable.is_writer = membership.rank == 0
        if not membership.kept_own_state:
            self._durable.lost()
        if membership.rolled_back and self._saves:
            self._durable.hurry()  # rule CKPT

    def _follow_size(self) -> None:
        """Where the batch follows the number of ranks: it does so before the first step of a generation. A function of the adopted
        state and of the generation's size, so it is the same on all ranks. Local."""
        if self._batch_per_rank is None:
            return
        # The one generation of a hand-over has a rank more than the job: then one gets an empty share, as ever.
        size = min(self._membership.world_size, self._max_world_size)
        self.plan.change_batch(self.state.step, size * self._batch_per_rank)
        if self._rates is not None:
            self._rates.follow(self.state.step, self.plan.batch)

    def _finish(self) -> None:
        """The last step is committed: prove that all ranks have it, save it, then serve as a source until the loop is over."""
        step = self._committer.step
        row = Row(
            step, 0.0, 1.0, knows_newer=False, sample_hash=0, snapshotted=self._memory.step, total=self.total or 0
        )
        try:
            problem = exchange(self.groups, row).disagreement()
        except (GroupBroken, BackendError) as error:
            if not self._membership.explains(error):
                raise
            return
        if problem is not None:
            raise DivergedError(problem)
        self._durable.known_by_all = step
        if self._saves:
            self._save_now()
        if self.plan.layout.size == 1:
            self._memory.take_last()  # for a script that fails after its loop, and is started again there
        self._reporter.finished(step, self.state.record.loss if self.state.record is not None else None)
        outcome = self._membership.wait_end()
        if outcome is not None:
            if self.is_main:
                self._durable.prune_last(self._membership.take_prune(), self.generation)
            self._end(outcome)

    def _keep_state(self) -> None:
        """This process ends by an exception: leave its state in the memory snapshot, for the next one."""
        try:
            self._memory.take_last()
        except Exception as error:  # where the device is what has failed, the script's own exception must be seen
            print(f"The state could not be copied to the memory snapshot: {error}", flush=True)

    def _save_now(self) -> None:
        self._save_unless(self._membership.must_leave)

    def _save_unless(self, interrupted: Callable[[], bool]) -> None:
        with self._busy.during(Busy.CHECKPOINT, max_s=self._durable.wait_s):
            self._durable.save_now(self._membership.origin, interrupted=interrupted)

    def _end(self, outcome: str) -> None:
        self.outcome = outcome
        self._blocks.is_over = True
        if outcome in (local.DRAINED, local.SUSPENDED) and self._saves:
            # The pod's grace is over, or all pods go: perhaps nobody else has what this process holds.
            self._save_unless(lambda: False)
            self._reporter.saved()
        if outcome != COMPLETE:
            raise JobEnded(outcome)

    def collective(self, name: str) -> Collective:
        """Return a block for collectives of your own between steps: `for attempt in job.collective("eval"):`.

        Raises UsageError, when it is entered, inside a step or after the loop, and under a parameter server.
        """
        if self._is_served:
            raise UsageError(
                f'job.collective("{name}") does not work with strategy ParameterServer: ranks do not come to the same step. Do it '
                "on one rank, where job.is_main is true."
            )
        return Collective(self._blocks, name)

    def pause(self, name: str, *, max_s: float) -> AbstractContextManager[None]:
        """Return a block in which this rank commits no step: `with job.pause("eval", max_s=1800):`.

        Hang detection is suspended in it, for the whole group. A pause that takes longer than `max_s` seconds is a hang,
        named after it: the process is restarted. Raises UsageError for a limit that is no number above 0.
        """
        return self._busy.pause(name, max_s)

    def knows_newer(self) -> bool:
        """Whether a newer generation than the current one was heard of: the group is about to change."""
        return self._membership.knows_newer()

    def _committed(self, record: CommitRecord, header: Header, empty: bool) -> None:
        """A step is committed: report it, and write a checkpoint if it is time."""
        membership = self._membership
        self._blocks.num_left = 0
        self._cut = header.all_know_newer
        self._durable.known_by_all = header.reportable_step
        self._memory.committed()
        if self._memory.step is not None:
            self._memory.whole_step = header.whole_snapshot_step
        if header.takes_snapshot:
            self._memory.take()
        self._reporter.committed(
            record.state.step,
            record.loss,
            header.reportable_step,
            self.total,
            waited_s=membership.groups.waited_s if membership.groups is not None else 0.0,
            empty=empty,
            snapshot_step=header.snapshot_step,
            times=self._committer.laps.sums,
            noise_scale=self._noise.known if self._noise is not None else None,
        )
        if self._saves and self.plan.layout.size > 1 and header.takes_checkpoint:
            self._durable.save_part(membership.origin)
        if self.is_main:
            if self.plan.layout.size == 1:
                self._durable.save_if_due(membership.origin, alone=membership.is_alone)
            self._durable.prune(membership.take_prune(), self.generation)
            self._reporter.say_late()


def _refuse_in_group(reduction: str, scaler: Any, batch_per_rank: int | None) -> None:
    """Raise UsageError for what a session does not do where a model is split over several ranks."""
    for what, is_asked in (
        ('reduction="exact"', reduction == "exact"),
        ("scaler", scaler is not None),
        ("batch_per_rank", batch_per_rank is not None),
    ):
        if is_asked:
            raise UsageError(f"{what} does not work with regroup.mesh() so far. Leave one of them out.")


def _refuse_to_measure(described: Any, reduction: str, scaler: Any, group_size: int) -> None:
    """Raise UsageError where no rank has the gradient of its own share, or its norm is not to be compared with the sum's."""
    for what, is_asked in (
        ('reduction="exact"', reduction == "exact"),
        (f"strategy {type(described).__name__}", isinstance(described, (strategies.LocalSGD, strategies.DiLoCo))),
        ("a PowerSGD hook", isinstance(getattr(described, "hook", None), strategies.PowerSGD)),
        ("scaler", scaler is not None),
        ("regroup.mesh()", group_size > 1),
    ):
        if is_asked:
            raise UsageError(f"noise_scale=True does not work with {what}. Leave one of them out.")
