"""The session: what `with regroup.session(...) as job` gives, top to bottom.

Read `Job.steps` first: it is the life of a trainer process. Without REGROUP_SOCKET in the environment (plain `python`) the
same code runs in a world of one, without groups. One session per process; all methods are for the main thread.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from regroup.data import SamplePlan, as_source
from regroup.protocol import env, local

from .buffers import Buffers
from .collective import Blocks, Collective
from .commit import Committer, exchange
from .durable import Durable, Origin
from .errors import GenerationChanged, GroupBroken, UsageError
from .groups import Gathering, Groups
from .header import Row
from .pace import Pace
from .reducer import ExactReducer, Reducer
from .regrouper import Regrouper, Stopped
from .state import TrainingState
from .step import Step, is_collective_error
from .watcher import Watcher


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
        self.model, self.optimizer = model, optimizer
        self.source = as_source(data)
        max_world_size = int(os.environ.get(env.MAX_WORLD_SIZE) or 1)
        self.plan = SamplePlan(seed, len(self.source), global_batch, microbatch, max_world_size)
        parameters = list(model.parameters())
        if reduction not in ("fast", "exact"):
            raise UsageError(f'reduction is {reduction!r}; it must be "fast" or "exact".')
        self.exact = reduction == "exact"
        if self.exact:
            torch.use_deterministic_algorithms(True)
        self.reducer = ExactReducer(parameters, self.plan) if self.exact else Reducer(parameters)
        self.outcome: str | None = None
        """How the job ended (Complete, Failed, Released, Suspended); None: not yet."""
        self.state = TrainingState(model, optimizer, state)
        self._buffers = Buffers(model)
        self._pace = Pace()
        self._generation = 0
        self._cut = False
        self._attempted = -1
        self._redone = 0
        self.total: int | None = None
        """Number of steps that the script asks for; None before its loop."""
        self._origin = Origin(0, "", 0, 0)
        self._durable = Durable(self.state, self.plan)
        self._committer = Committer(self, self._buffers)
        self._watcher: Watcher | None = None
        self._regrouper: Regrouper | None = None
        path = os.environ.get(env.SOCKET)
        # Until the first generation: what the environment says; a joiner is told nothing, and is nobody yet.
        self._last_rank = int(os.environ.get(env.RANK) or -1) if path else 0
        self._last_world_size = 1
        if path:
            attach = local.Attach(
                os.getpid(), int(os.environ.get(env.LOCAL_RANK) or 0), int(os.environ.get(env.INCARNATION) or 0)
            )
            self._watcher = Watcher(path, attach)
            self._regrouper = Regrouper(self._watcher, self.state, parameters[0].device, self._durable.checkpointer)
        self._blocks = Blocks(self, self._regrouper)

    # --- what a script reads -----------------------------------------------------------------------------------------

    @property
    def groups(self) -> Groups | None:
        """The groups of the current generation; None in plain `python` and between generations."""
        return self._regrouper.groups if self._regrouper is not None else None

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
        process exits instead: code after the loop runs only for a complete job.
        """
        self.total = total
        while self.outcome is None:
            try:
                self._ensure()
            except Stopped as stopped:
                self._end(stopped.outcome)
                return
            if self.state.step >= total:
                self._finish(total)
                continue
            step = Step(self, self.state.step)
            yield step
            if not step.committed and not step.interrupted:
                raise UsageError(f"Step {step.index} was not entered. Write `with step:` in the loop over job.steps().")

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self.outcome is None and self.total is not None:
                for _ in self.steps(self.state.step):  # the script broke out of its loop: the job ends at this step
                    raise UsageError("Ranks left their loops at different steps.")
        finally:
            self.reducer.close()
            if self._regrouper is not None:
                self._regrouper.close()
            if self._watcher is not None:
                self._watcher.close()

    def _ensure(self) -> None:
        """Be in a generation: interrupt -> form -> adopt where needed. Raises Stopped."""
        if self._regrouper is None:
            if self._generation == 0:
                self._start_alone()
            return
        if self._cut:
            self._cut = False
            self._regrouper.leave_at_cut()
        self._regrouper.block = 0
        self._adopt_newest()

    def _adopt_newest(self) -> None:
        """Be in the newest generation that must be followed, and take note if it is a new one. Raises Stopped."""
        assert self._regrouper is not None
        groups = self._regrouper.ensure()
        if groups.generation == self._generation:
            return
        self._generation = groups.generation
        self._last_rank, self._last_world_size = groups.rank, groups.world_size
        self._committer.num_committed = 0
        self._redone = 0
        self.reducer.begin_generation(groups)
        self._pace.begin_generation(self._regrouper.adopted_at_s)
        self._origin = self._regrouper.origin
        if not self._regrouper.kept_own_state:
            self._durable.lost()
        if self._regrouper.rolled_back and groups.rank == 0:  # rule CKPT: before the first report
            self._durable.save_now(self._origin, interrupted=self._must_leave)

    def _start_alone(self) -> None:
        """Plain `python`: a world of one, continued from the checkpoint directory where one is named."""
        self._origin = self._durable.continue_alone()
        self._generation = self._origin.generation
        self.reducer.begin_generation(None)
        self._pace.begin_generation(time.monotonic())

    def _must_leave(self) -> bool:
        return self._watcher is not None and self._watcher.must_leave(self._generation)

    def _finish(self, total: int) -> None:
        """The last step is committed: prove that all ranks have it, save it, then serve as a source until the stop."""
        try:
            exchange(self.groups, Row(total, 0.0, 1.0, knows_newer=False, sample_hash=0, snapshotted=total))
        except GroupBroken as error:
            self.leave(error)
            return
        self._durable.known_by_all = total
        if self.is_main:
            self._durable.save_now(self._origin, interrupted=self._must_leave)
        if self._watcher is None:
            self._end("Complete")
            return
        self._report(total, None, total)
        self._watcher.send(local.FinishedLocally(self._generation, total))
        self._watcher.wait_forced_above(self._generation)
        if self._watcher.stop is not None:
            self._end(self._watcher.stop.outcome)

    def _end(self, outcome: str) -> None:
        self.outcome = outcome
        if outcome != "Complete":
            raise SystemExit(0)

    def collective(self, name: str) -> Collective:
        """Return a block for collectives of your own between steps: `for attempt in job.collective("eval"):`."""
        return Collective(self, self._blocks, name)

    # --- for the other files of this package -------------------------------------------------------------------------

    def knows_newer(self) -> bool:
        """Whether a newer generation than the current one was heard of, planned or forced."""
        return self._watcher is not None and self._watcher.knows_newer(self._generation)

    def leave(self, error: GroupBroken) -> None:
        """Leave the groups, which broke, and tell the agent why if no newer generation explains it."""
        if self._regrouper is not None:
            self._regrouper.leave(error)

    def is_membership(self, error: BaseException) -> bool:
        """Return whether `error` comes of a membership change; then the groups are left. Else it is the user's own.

        Ours say so themselves. A collective of the user's own counts only if a newer generation is heard within
        `disconnectSeconds` + 5 s; this waits for it.
        """
        if self._watcher is None or not isinstance(error, Exception):
            return False
        if isinstance(error, GenerationChanged):
            return True
        if not isinstance(error, GroupBroken):
            if not is_collective_error(error):
                return False
            bound_s = float(os.environ.get(env.DISCONNECT_SECONDS) or 5) + 5
            if not self._watcher.wait_newer(self._generation, bound_s):
                return False
        self.leave(GroupBroken(str(error)))
        return True

    def regrouped(self) -> tuple[Groups, Gathering]:
        """Be in the newest generation that must be followed, inside a block of collectives; return it."""
        assert self._regrouper is not None
        try:
            self._adopt_newest()
        except Stopped as stopped:
            self._end(stopped.outcome)
            raise SystemExit(0) from None
        groups, gathering = self._regrouper.groups, self._regrouper.gathering
        assert groups is not None
        assert gathering is not None
        return groups, gathering

    @property
    def is_fresh(self) -> bool:
        """True until the first commit of the current generation."""
        return self._committer.num_committed == 0

    # --- one step; called by Step ------------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """The step's block is entered."""
        self.reducer.begin()
        self._buffers.keep()
        if step.index == self._attempted:
            self._redone = 1
        self._attempted = step.index

    def check(self) -> None:
        """Raise GenerationChanged once the groups must be left."""
        if self._regrouper is None:
            return
        groups = self._regrouper.groups
        if groups is None or groups.aborted:
            self._regrouper.leave()
            raise GenerationChanged(f"generation {self._generation} has ended")

    def interrupted(self, step: Step, error: BaseException) -> bool:
        """Return whether `error` ended the block because of a membership change; then the same step comes again."""
        if not self.is_membership(error):
            return False
        step.interrupted = True
        if not step.committed:
            self._buffers.restore()
        return True

    def commit(
        self,
        step: Step,
        before: Sequence[Callable[[], Any]],
        after: Sequence[Callable[[], Any]],
        max_norm: float | None,
    ) -> None:
        """Commit, report, and write a checkpoint if it is time."""
        self.check()
        header = self._committer.commit(step, before, after, max_norm)
        self._blocks.num_left = 0
        self._cut = header.all_know_newer
        self._durable.known_by_all = header.reportable_step
        self._report(step.index + 1, step.loss, header.reportable_step)
        if self.is_main:
            self._durable.save_if_due(self._origin, alone=self._watcher is None)
            self._durable.prune(self._watcher.take_prune() if self._watcher is not None else None, self._generation)

    def _report(self, committed: int, loss: float | None, reportable: int) -> None:
        if self._watcher is None:
            return
        first_step_ms = self._pace.committed(time.monotonic()) if loss is not None else None
        self._watcher.send(
            local.Committed(
                generation=self._generation,
                step=committed,
                reportable_step=reportable,
                loss=loss if loss is not None and abs(loss) < float("inf") else None,
                samples=self.plan.samples(reportable),
                digest=self.plan.digest(reportable),
                total_steps=self.total,
                samples_per_second=self._pace.steps_per_s(self.plan.global_batch),
                first_step_ms=first_step_ms,
                steps_redone=self._redone if first_step_ms is not None else 0,
                checkpoint=self._durable.report(),
            )
        )
