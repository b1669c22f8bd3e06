"""The session, which `with regroup.session(...) as job` opens, top to bottom.

Read `Job.steps` first: it is the life of a trainer process. Without REGROUP_SOCKET in the environment (plain `python`) the
same code runs in a world of one, without groups. One session per process; all methods are for the main thread. `wiring` makes the
parts that follow from the settings.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch

from . import model_group, strategies
from .accelerator import make_current
from .collective import Blocks, Collective
from .data import as_source, as_stream, make_feed
from .errors import BackendError, DivergedError, GenerationChanged, GroupBroken, JobEnded, UsageError
from .generation.groups import Groups
from .generation.membership import Alone, Membership, Stopped
from .generation.regrouper import Regrouper
from .generation.watcher import Watcher
from .parallel.noise import NAME as NOISE
from .parallel.noise import NoiseScale
from .parallel.pipeline import check_model
from .parallel.strategy import Guarantees
from .parameter_server.ledger import NAME as LEDGER
from .parameter_server.ledger import CountedPlan
from .progress.busy import BusyStack
from .progress.reporter import Progress, Reporter
from .protocol import env, local
from .protocol.local import COMPLETE
from .protocol.state import Busy
from .session_settings import SessionSettings, check
from .state.durable import Durable
from .state.memory import Memory
from .state.rates import ScaledRates
from .state.training import CommitRecord, TrainingState
from .step import Step
from .transaction.agreement import exchange
from .transaction.commit import Extras
from .transaction.header import Header, Row
from .transaction.rehearsal import Rehearsal, is_compiled
from .wiring import links_of, make_committer, make_strategy, plan_of

BATCH, RATES = "regroup.batch", "regroup.rates"
"""Names of the parts of the state that are the session's own."""


def session(  # noqa: PLR0913 (users pass keywords)
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

    - `model`, `optimizer`: yours, used in place and never wrapped; several optimizers as a list.
    - `data`: tensors (x, y), a map-style dataset, or an object with `__len__` and `fetch(ids)`. A DataLoader of a dataset adds its
      collate function, workers and pinning. Data that can only be read in order is a `regroup.stream` or an IterableDataset.
    - `global_batch`: samples per step, fixed for the job's life. It is cut into microbatches that are dealt to the ranks.
    - `state`: further objects with state_dict and load_state_dict, by name.
    - `shuffle`: False for the order of the samples' numbers in each epoch; None: a DataLoader's own shuffle, else True.
    - `reduction`: "fast", or "exact" for results that are bitwise equal at any world size (slower; deterministic algorithms only).
    - `scaler`: a torch.amp.GradScaler, for fp16. The session scales, unscales before it clips, and updates it.
    - `rehearse`: run the block of a step once before this process joins a job, and keep nothing of it. So no other process waits
      for what it compiles. None: if the model is compiled.
    - `strategy`: the split of the work over ranks, one of `regroup.strategies`; None: DataParallel().
    - `batch_per_rank`: samples per step and rank, instead of `global_batch`. A step's batch then follows the number of ranks.
    - `rate_scaling`: the way in which learning rates follow the batch; None: not at all.
    - `noise_scale`: measure the gradient noise scale.

    Raises UsageError, StateError or DataError, one sentence each.
    """
    return Job(
        SessionSettings(
            model,
            optimizer,
            data,
            global_batch,
            microbatch,
            {} if state is None else state,
            seed,
            shuffle,
            reduction,
            scaler,
            rehearse,
            strategies.DataParallel() if strategy is None else strategy,
            batch_per_rank,
            rate_scaling,
            noise_scale,
        )
    )


def _check_process(path: str | None) -> None:
    """Raise UsageError in a process that cannot have a session, or not another one. `path`: its agent's socket."""
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


class Job:
    """One training job as this process takes part in it."""

    _attached = False
    """This process has taken part in a job; a second session would cut the first one off from the agent."""

    def __init__(self, settings: SessionSettings) -> None:
        path, layout = os.environ.get(env.SOCKET), model_group.layout()
        _check_process(path)
        check(settings, layout.size)
        model, described = settings.model, settings.strategy
        self.model, self.optimizer = model, settings.optimizer
        stream = as_stream(settings.data)
        self.source: Any = as_source(settings.data, settings.microbatch) if stream is None else stream
        if layout.size > 1:
            check_model(model, layout)
            model_group.check_device(model)
        self._batch_per_rank, self._max_world_size = (
            settings.batch_per_rank,
            int(os.environ.get(env.MAX_WORLD_SIZE) or 1),
        )
        self._is_served = isinstance(described, strategies.ParameterServer)
        self.plan = plan_of(settings, self.source, self._max_world_size, layout)
        self.state = TrainingState(model, settings.optimizer, settings.state, settings.scaler)
        self._rates = (
            ScaledRates(settings.rate_scaling, self.state.optimizer) if settings.rate_scaling is not None else None
        )
        self._noise = NoiseScale() if settings.noise_scale else None
        for name, own in (
            (BATCH, self.plan if settings.batch_per_rank is not None else None),
            (RATES, self._rates),
            (LEDGER, self.plan.ledger if isinstance(self.plan, CountedPlan) else None),
            (NOISE, self._noise),
        ):
            if own is not None:
                self.state.add(name, own)
        self._feed = make_feed(self.source, self.plan, reads_ahead=not self._is_served)
        self.outcome: str | None = None
        """The job's end (Complete, Failed, Released, Suspended, Drained); None: it has not ended."""
        self.total: int | None = None
        """Number of steps that the script asks for; None before its loop."""
        self._looped = False
        self._cut = False
        """All ranks know of a newer, planned generation: they leave this one together, before the next step."""
        self._left_loop = False
        self._durable = Durable(self.state, self.plan, model_group.inner())
        self._device = next(model.parameters(), torch.empty(0)).device
        make_current(self._device)
        self._strategy = make_strategy(
            described, settings.reduction, model, self.state, self.plan, measures=settings.noise_scale
        )
        outer = self._strategy.outer
        if outer is not None and self.state.extra.setdefault("outer", outer) is not outer:
            raise UsageError('state["outer"] is the name of the strategy\'s own optimizer. Choose another name.')
        # In a model group a forward communicates, and before the first generation there is nobody to do so with.
        rehearses = is_compiled(model) if settings.rehearse is None else settings.rehearse
        self._rehearses = bool(path) and layout.size == 1 and rehearses
        """The loop begins with a rehearsal: this process is not ready before that."""
        self._join(path, described)

    def _join(self, path: str | None, described: strategies.Description) -> None:
        """Make the connection to the agent at the socket `path`, the membership and the committer. None: plain `python`."""
        local_rank = int(os.environ.get(env.LOCAL_RANK) or 0)
        self._watcher: Watcher | None = None
        """None in plain `python`."""
        if path:
            incarnation = int(os.environ.get(env.INCARNATION) or 0)
            attach = local.Attach(
                os.getpid(), local_rank, incarnation, rehearses=self._rehearses, path=os.path.dirname(__file__)
            )
            self._watcher = Watcher(path, attach)
            Job._attached = True
        send = self._watcher.send if self._watcher is not None else None
        self._memory = Memory(self.state, self.plan, send, local_rank, model_group.inner())
        self._membership: Membership = Alone(self._durable)
        if self._watcher is not None:
            self._membership = Regrouper(
                self._watcher,
                self.state,
                self.plan,
                self._device,
                self._durable,
                self._memory,
                links_of(described),
            )
        self._reporter = Reporter(self._watcher, self.plan, self._durable, self._memory)
        self._busy = BusyStack(send, self._reporter.paused)
        self._committer = make_committer(
            described,
            self._membership,
            self._strategy,
            self.state,
            self.plan,
            self._memory,
            self._committed,
            Extras(
                self._durable.wants,
                self._rates,
                isinstance(described, strategies.DataParallel) and described.uneven,
                self._noise,
            ),
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
        """The model's device. Batches are moved there."""
        return self._device

    @property
    def guarantees(self) -> Guarantees:
        """The session's promises that hold under its strategy."""
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

        The loop ends when every rank has committed the last step. If the job ends in another way (failed, released by a
        scale-down), the loop raises JobEnded, which ends the script with exit code 0. The job is complete once the script has
        returned 0 in every member. A script that fails after its loop is started again, with the state of the last step, its rank
        and its world size. Its loop then has no steps. So code after the loop may run more than once, and finds no variable that
        only the loop sets. Call it once; raises UsageError else.
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
        """Let the batch follow the number of ranks, before the first step of a generation. Local.

        The batch is a function of the adopted state and of the generation's size, so it is the same on all ranks.
        """
        if self._batch_per_rank is None:
            return
        # The one generation of a hand-over has a rank more than the job: then one gets an empty share, as ever.
        size = min(self._membership.world_size, self._max_world_size)
        self.plan.change_batch(self.state.step, size * self._batch_per_rank)
        if self._rates is not None:
            self._rates.follow(self.state.step, self.plan.batch)

    def _finish(self) -> None:
        """Prove that all ranks have the last step, save it, then serve as a source until the loop is over."""
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
        self._reporter.finished(step, float(self.state.record.loss) if self.state.record is not None else None)
        outcome = self._membership.wait_end()
        if outcome is not None:
            if self.is_main:
                self._durable.prune_last(self._membership.take_prune(), self.generation)
            self._end(outcome)

    def _keep_state(self) -> None:
        """Leave the state in the memory snapshot for the next process: this one ends by an exception."""
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
        """Return whether a newer generation than the current one was heard of: the group is about to change."""
        return self._membership.knows_newer()

    def _committed(self, record: CommitRecord, header: Header, empty: bool) -> None:
        """Report a committed step, and write a checkpoint if it is time."""
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
            Progress(
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
        )
        if self._saves and self.plan.layout.size > 1 and header.takes_checkpoint:
            self._durable.save_part(membership.origin)
        if self.is_main:
            if self.plan.layout.size == 1:
                self._durable.save_if_due(membership.origin, alone=membership.is_alone)
            self._durable.prune(membership.take_prune(), self.generation)
            self._reporter.say_late()
