"""The session: what `with regroup.session(...) as job` gives, top to bottom.

Read `Job.steps` first: it is the life of a trainer process. Without REGROUP_SOCKET in the environment (plain `python`) the
same code runs in a world of one, without groups. One session per process; all methods are for the main thread.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch

from regroup.data import SamplePlan, as_source
from regroup.generation.groups import Gathering, Groups
from regroup.generation.regrouper import Regrouper, Stopped
from regroup.generation.watcher import Watcher
from regroup.parallel.buffers import Buffers
from regroup.parallel.reducer import ExactReducer, Reducer, check_optimizer
from regroup.progress.busy import BusyStack
from regroup.progress.reporter import Reporter
from regroup.protocol import env, local
from regroup.protocol.state import Busy
from regroup.state.durable import Durable, Origin
from regroup.state.training import TrainingState
from regroup.transaction.commit import Committer, exchange
from regroup.transaction.header import Header, Row

from .collective import Blocks, Collective
from .errors import BackendError, DivergedError, GroupBroken, UsageError
from .step import Step


def session(
    *,
    model: torch.nn.Module,
    optimizer: Any,
    data: Any,
    global_batch: int,
    microbatch: int,
    state: Mapping[str, Any] | None = None,
    seed: int = 0,
    reduction: str = "fast",
) -> "Job":
    """Return the job that this process trains, as a context manager. Call it once everything is built.

    model, optimizer: yours, used in place and never wrapped. data: a pair of tensors, a map-style dataset of pairs, or an
    object with `__len__` and `fetch(ids)`. global_batch: samples per step, fixed for the job's life; it is cut into
    microbatches that are dealt to the ranks. state: further objects with state_dict and load_state_dict, by name.
    reduction: "fast", or "exact" for results that are bitwise equal at any world size (slower; deterministic algorithms
    only). Raises UsageError, StateError or DataError, one sentence each.
    """
    return Job(model, optimizer, data, global_batch, microbatch, state or {}, seed, reduction)


class Job:
    """One training job as this process takes part in it."""

    _attached = False
    """This process has taken part in a job; a second session would cut the first one off from the agent."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        data: Any,
        global_batch: int,
        microbatch: int,
        state: Mapping[str, Any],
        seed: int,
        reduction: str,
    ) -> None:
        path = os.environ.get(env.SOCKET)
        if path and Job._attached:
            raise UsageError(
                "regroup.session() was called a second time in this process, which takes part in one job only. "
                "Train everything in one session, with further objects in its `state`."
            )
        self.model, self.optimizer = model, optimizer
        self.source = as_source(data)
        max_world_size = int(os.environ.get(env.MAX_WORLD_SIZE) or 1)
        self.plan = SamplePlan(seed, len(self.source), global_batch, microbatch, max_world_size)
        check_optimizer(optimizer, model)
        parameters = list(model.named_parameters())
        if reduction not in ("fast", "exact"):
            raise UsageError(f'reduction is {reduction!r}; it must be "fast" or "exact".')
        self.exact = reduction == "exact"
        if self.exact:
            torch.use_deterministic_algorithms(True)
        self.reducer = ExactReducer(parameters, self.plan) if self.exact else Reducer(parameters)
        self.outcome: str | None = None
        """How the job ended (Complete, Failed, Released, Suspended); None: not yet."""
        self.state = TrainingState(model, optimizer, state)
        self._generation = 0
        self._cut = False
        """All ranks know of a newer, planned generation: they leave this one together, before the next step."""
        self._looped = False
        self._left_loop = False
        self.total: int | None = None
        """Number of steps that the script asks for; None before its loop."""
        self._origin = Origin(0, "", 0, 0)
        self._durable = Durable(self.state, self.plan)
        self.committer = Committer(self, Buffers(model))
        self._watcher: Watcher | None = None
        self.regrouper: Regrouper | None = None
        """None in plain `python`."""
        # Until the first generation: what the environment says; a joiner is told nothing, and is nobody yet.
        self._last_rank = int(os.environ.get(env.RANK) or -1) if path else 0
        self._last_world_size = 1
        if path:
            attach = local.Attach(
                os.getpid(), int(os.environ.get(env.LOCAL_RANK) or 0), int(os.environ.get(env.INCARNATION) or 0)
            )
            self._watcher = Watcher(path, attach)
            Job._attached = True
            self.regrouper = Regrouper(
                self._watcher, self.state, self.plan, parameters[0][1].device, self._durable.checkpointer
            )
        self._reporter = Reporter(self._watcher, self.plan, self._durable)
        self._busy = BusyStack(self._watcher.send if self._watcher is not None else None, self._reporter.paused)
        self._blocks = Blocks(self, self.regrouper)

    # --- what a script reads -----------------------------------------------------------------------------------------

    @property
    def groups(self) -> Groups | None:
        """The groups of the current generation; None in plain `python` and between generations."""
        return self.regrouper.groups if self.regrouper is not None else None

    @property
    def generation(self) -> int:
        """Number of the generation that this process last adopted; 0 before the first."""
        return self._generation

    @property
    def rank(self) -> int:
        """Index of this process in the generation; -1 before the first. It changes: compute nothing lasting from it."""
        return self.groups.rank if self.groups is not None else self._last_rank

    @property
    def world_size(self) -> int:
        return self.groups.world_size if self.groups is not None else self._last_world_size

    @property
    def is_main(self) -> bool:
        """True on one process of the generation: for printing and saving."""
        return self.rank == 0

    @property
    def step(self) -> int:
        """Number of committed steps."""
        return self.state.step

    def share(self) -> range:
        """This rank's virtual workers."""
        return self.plan.share(self.rank, self.world_size)

    # --- the life of a trainer process -------------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[Step]:
        """Yield steps until `total` are committed, the one in flight again after each membership change.

        Ends when the whole job is complete. When the job ends in another way (failed, released by a scale-down), the
        process exits instead: code after the loop runs only for a complete job. Call it once; raises UsageError else.
        """
        if self._looped:
            raise UsageError(
                "job.steps() was called a second time; its loop is the whole job. Call it once, with the number of steps "
                "of all epochs together."
            )
        self._looped = True
        return self._loop(total)

    def _loop(self, total: int) -> Iterator[Step]:
        self.total = total
        while self.outcome is None:
            try:
                self._ensure()
            except Stopped as stopped:
                self._end(stopped.outcome)
                return
            if self.state.step >= total or self._ended:
                self._finish()
                continue
            step = Step(self, self.state.step)
            yield step
            if not step.committed and not step.interrupted:
                raise UsageError(f"Step {step.index} was not entered. Write `with step:` in the loop over job.steps().")

    @property
    def _ended(self) -> bool:
        """True once a script, this one or that of another rank, has left its loop: the job ends at the step it was at."""
        return self._left_loop or (self.regrouper is not None and self.regrouper.ended)

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self.outcome is None and self.total is not None:
                self._left_loop = True  # the script broke out of its loop
                if self.regrouper is not None:
                    self.regrouper.ended = True
                next(self._loop(self.total), None)
        finally:
            self.reducer.close()
            if self.regrouper is not None:
                self.regrouper.close()
            if self._watcher is not None:
                self._watcher.close()

    def _ensure(self) -> None:
        """Be in a generation: interrupt -> form -> adopt where needed. Raises Stopped."""
        if self.regrouper is None:
            if self._generation == 0:
                self._start_alone()
            return
        if self._cut:
            self._cut = False
            self.regrouper.leave_at_cut()
        self.regrouper.block = None
        self._adopt_newest()

    def _adopt_newest(self) -> None:
        """Be in the newest generation that must be followed, and take note if it is a new one. Raises Stopped."""
        assert self.regrouper is not None
        groups = self.regrouper.ensure()
        if groups.generation == self._generation:
            return
        self._generation = groups.generation
        self._last_rank, self._last_world_size = groups.rank, groups.world_size
        self._cut = False  # it was agreed on in a generation that is over
        self.committer.num_committed = 0
        self.reducer.begin_generation(groups)
        self._reporter.begin_generation(groups.generation, self.regrouper.adopted_at_s)
        self._origin = self.regrouper.origin
        self._durable.is_writer = groups.rank == 0
        if not self.regrouper.kept_own_state:
            self._durable.lost()
        if self.regrouper.rolled_back and groups.rank == 0:  # rule CKPT: before the first report
            self._save_now()

    def _start_alone(self) -> None:
        """Plain `python`: a world of one, continued from the checkpoint directory where one is named."""
        self._origin = self._durable.continue_alone()
        self._durable.is_writer = True
        self._generation = self._origin.generation
        self.reducer.begin_generation(None)
        self._reporter.begin_generation(self._generation, time.monotonic())

    def _must_leave(self) -> bool:
        return self._watcher is not None and self._watcher.must_leave(self._generation)

    def _finish(self) -> None:
        """The last step is committed: prove that all ranks have it, save it, then serve as a source until the stop."""
        step = self.state.step
        row = Row(step, 0.0, 1.0, knows_newer=False, sample_hash=0, snapshotted=step, total=self.total or 0)
        try:
            problem = exchange(self.groups, row).disagreement()
        except (GroupBroken, BackendError) as error:
            if self.regrouper is None or not self.regrouper.explains(error):
                raise
            return
        if problem is not None:
            raise DivergedError(problem)
        self._durable.known_by_all = step
        if self.is_main:
            self._save_now()
        self._reporter.finished(step)
        if self._watcher is None:
            self._end("Complete")
            return
        self._watcher.wait_forced_above(self._generation)
        if self._watcher.stop is not None:
            if self.is_main:
                self._durable.prune_last(self._watcher.take_prune(), self._generation)
            self._end(self._watcher.stop.outcome)

    def _save_now(self) -> None:
        with self._busy.during(Busy.CHECKPOINT, max_s=self._durable.wait_s):
            self._durable.save_now(self._origin, interrupted=self._must_leave)

    def _end(self, outcome: str) -> None:
        self.outcome = outcome
        if outcome != "Complete":
            raise SystemExit(0)

    def collective(self, name: str) -> Collective:
        """Return a block for collectives of your own between steps: `for attempt in job.collective("eval"):`.

        Raises UsageError, when it is entered, inside a step or after the loop.
        """
        return Collective(self, self._blocks, name)

    def pause(self, name: str, *, max_s: float) -> AbstractContextManager[None]:
        """Return a block in which this rank commits no step: `with job.pause("eval", max_s=1800):`.

        Hang detection is suspended in it, for the whole group. A pause that takes longer than `max_s` seconds is a hang,
        named after it: the process is restarted. Raises UsageError for a limit that is no number above 0.
        """
        return self._busy.pause(name, max_s)

    # --- for the other files of this package -------------------------------------------------------------------------

    def knows_newer(self) -> bool:
        """Whether a newer generation than the current one was heard of, planned or forced."""
        return self._watcher is not None and self._watcher.knows_newer(self._generation)

    def leave(self, error: GroupBroken) -> None:
        """Leave the groups, which broke, and tell the agent why if no newer generation explains it."""
        if self.regrouper is not None:
            self.regrouper.leave(error)

    def regrouped(self) -> tuple[Groups, Gathering]:
        """Be in the newest generation that must be followed, inside a block of collectives; return it."""
        assert self.regrouper is not None
        try:
            self._adopt_newest()
        except Stopped as stopped:
            self._end(stopped.outcome)
            raise SystemExit(0) from None
        groups, gathering = self.regrouper.groups, self.regrouper.gathering
        assert groups is not None
        assert gathering is not None
        return groups, gathering

    @property
    def is_fresh(self) -> bool:
        """True until the first commit of the current generation."""
        return self.committer.num_committed == 0

    def begin_step(self, step: Step) -> None:
        """The step's block is entered."""
        self.reducer.begin()
        self._reporter.begin_step(step.index)

    def committed(self, step: Step, header: Header) -> None:
        """The step is committed: report it, and write a checkpoint if it is time."""
        self._blocks.num_left = 0
        self._cut = header.all_know_newer
        self._durable.known_by_all = header.reportable_step
        waited_s = self.groups.waited_s if self.groups is not None else 0.0
        self._reporter.committed(
            step.index + 1,
            step.loss,
            header.reportable_step,
            self.total,
            waited_s=waited_s,
            empty=not step.weights,
        )
        if self.is_main:
            self._durable.save_if_due(self._origin, alone=self._watcher is None)
            self._durable.prune(self._watcher.take_prune() if self._watcher is not None else None, self._generation)
