"""The session: what `with regroup.session(...) as job` gives, top to bottom.

Read `Job.steps` first: it is the life of a trainer process. Without REGROUP_SOCKET in the environment (plain `python`) the
same code runs in a world of one, without groups. One session per process; all methods are for the main thread.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from regroup.checkpoint import Checkpointer, store
from regroup.data import SamplePlan, as_source
from regroup.protocol import env, local
from regroup.protocol.document import LineageEntry
from regroup.protocol.state import StatePair

from .buffers import Buffers
from .collective import Collective
from .errors import DivergedError, GenerationChanged, GroupBroken, SampleError, UsageError
from .groups import Groups, Team
from .header import WIDTH, Header, Row
from .pace import Pace
from .reducer import ExactReducer, Reducer, parameter_hash
from .regrouper import Regrouper, Stopped
from .state import TrainingState
from .step import Step, is_collective_error
from .watcher import Watcher

COMPARED_STEPS = 100
"""Parameters are compared across ranks in this many first steps of a generation."""


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
        self._state = TrainingState(model, optimizer, state)
        self._buffers = Buffers(model)
        self._pace = Pace()
        self._generation = 0
        self._cut = False
        self._compared = 0
        self._blocks_left = 0
        self._known_by_all = 0
        self._attempted = -1
        self._redone = 0
        self._total: int | None = None
        self._checkpointer = _checkpointer()
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
            self._regrouper = Regrouper(self._watcher, self._state, parameters[0].device, self._checkpointer)

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
        return self._state.step

    def share(self) -> range:
        """This rank's virtual workers."""
        return self.plan.share(self.rank, self.world_size)

    # --- the life of a trainer process -------------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[Step]:
        """Yield steps until `total` are committed, the one in flight again after each membership change.

        Ends when the whole job is complete. When the job ends in another way (failed, released by a scale-down), the
        process exits instead: code after the loop runs only for a complete job.
        """
        self._total = total
        while self.outcome is None:
            try:
                self._ensure()
            except Stopped as stopped:
                self._end(stopped.outcome)
                return
            if self._state.step >= total:
                self._finish(total)
                continue
            step = Step(self, self._state.step)
            yield step
            if not step.committed and not step.interrupted:
                raise UsageError(f"Step {step.index} was not entered. Write `with step:` in the loop over job.steps().")

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self.outcome is None and self._total is not None:
                for _ in self.steps(self._state.step):  # the script broke out of its loop: the job ends at this step
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
        self._compared = 0
        self._redone = 0
        self.reducer.begin_generation(groups)
        self._pace.begin_generation(self._regrouper.adopted_at_s)
        if self._checkpointer is not None:
            if not self._regrouper.kept_own_state:
                self._checkpointer.cancel()
            if self._regrouper.rolled_back and groups.rank == 0:  # rule CKPT: before the first report
                self._save(all_have_it=True)

    def _start_alone(self) -> None:
        """Plain `python`: a world of one, continued from the checkpoint directory where one is named."""
        self._generation = 1
        self.reducer.begin_generation(None)
        pair = StatePair(1, 0)
        if self._checkpointer is not None:
            newest = self._checkpointer.newest(_any_lineage())
            for sentence in newest.skipped:
                print(sentence, flush=True)
            if newest.info is not None:
                self._state.load(self._checkpointer.load(newest.info, into=self._state.tree()))
                pair = newest.info.pair
                self._generation = newest.info.name.generation + 1
        self._state.named(pair, self._generation)
        self._pace.begin_generation(time.monotonic())

    def _finish(self, total: int) -> None:
        """The last step is committed: prove that all ranks have it, save it, then serve as a source until the stop."""
        groups = self.groups
        try:
            self._exchange(Row(total, 0.0, 1.0, knows_newer=False, sample_hash=0, snapshotted=total))
        except GroupBroken as error:
            self._leave(error)
            return
        self._known_by_all = total
        if self.is_main:
            self._save(all_have_it=True)
        if self._watcher is None or groups is None:
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
        return Collective(self, name)

    # --- a block of the user's own collectives; called by Collective -------------------------------------------------

    def _enter_block(self, complete: bool) -> tuple[Team | None, bool]:
        """Return who takes part in the block that begins (again) here, and whether all of them had completed it before.

        complete: this process had, and was interrupted while it waited for the others. No team: plain `python`, or
        another rank has left the block already, which it may only when all had completed it.
        """
        if self._regrouper is None:
            return None, complete
        self._regrouper.block = self._blocks_left + 1
        while True:
            try:
                self._adopt_newest()
            except Stopped as stopped:
                self._end(stopped.outcome)
                raise SystemExit(0) from None
            groups, gathering = self._regrouper.groups, self._regrouper.gathering
            assert groups is not None
            assert gathering is not None
            mine, ranks = gathering.arrivals[groups.rank], list(range(groups.world_size))
            if self._compared == 0 and mine.block:  # the generation began while this process was in the block
                others = [a for a in gathering.arrivals if a.block != mine.block and a.state is not None]
                if complete and any(mine.state is None or a.state >= mine.state for a in others if a.state is not None):
                    return None, True
                ranks = [rank for rank, arrival in enumerate(gathering.arrivals) if arrival.block == mine.block]
            try:
                team = groups.team(ranks, f"{self._state.step}/{self._regrouper.block}")
                num_complete = torch.tensor([int(complete)])
                if team.world_size > 1:
                    team.all_reduce(num_complete)
                return team, int(num_complete) == team.world_size
            except GroupBroken as error:
                self._leave(error)

    def _left_block(self) -> None:
        self._blocks_left += 1
        if self._regrouper is not None:
            self._regrouper.block = 0

    def _block_interrupted(self, error: BaseException) -> bool:
        """Return whether `error` ended a block because of a membership change."""
        if self._watcher is None or not isinstance(error, Exception) or not is_collective_error(error):
            return False
        if not isinstance(error, (GenerationChanged, GroupBroken)) and not self._newer_is_announced():
            return False
        self._leave(GroupBroken(str(error)))
        return True

    def _newer_is_announced(self) -> bool:
        """After an error of the user's own collective: wait for the generation that explains it."""
        assert self._watcher is not None
        bound_s = float(os.environ.get(env.DISCONNECT_SECONDS) or 5) + 5
        return self._watcher.wait_newer(self._generation, bound_s)

    # --- one step; called by Step ------------------------------------------------------------------------------------

    def _begin(self, step: Step) -> None:
        self.reducer.begin()
        self._buffers.keep()
        if step.index == self._attempted:
            self._redone = 1
        self._attempted = step.index

    def _check(self) -> None:
        """Raise GenerationChanged once the groups must be left."""
        if self._regrouper is None:
            return
        groups = self._regrouper.groups
        if groups is None or groups.aborted:
            self._regrouper.leave()
            raise GenerationChanged(f"generation {self._generation} has ended")

    def _interrupted(self, step: Step, error: BaseException) -> bool:
        """Return whether `error` ended the block because of a membership change; then the same step comes again."""
        if self._watcher is None or not isinstance(error, Exception):
            return False
        if not isinstance(error, GenerationChanged):
            if not is_collective_error(error):
                return False
            # A collective of the user's own. Ours ended in GenerationChanged already.
            if not self._newer_is_announced():
                return False
            self._leave(GroupBroken(str(error)))
        step.interrupted = True
        if not step.committed:
            self._buffers.restore()
        return True

    def _leave(self, error: GroupBroken) -> None:
        if self._regrouper is not None:
            self._regrouper.leave(error)

    def _commit(
        self,
        step: Step,
        before: Sequence[Callable[[], Any]],
        after: Sequence[Callable[[], Any]],
        max_norm: float | None,
    ) -> None:
        self._check()
        groups = self.groups
        row = Row(
            step=step.index,
            loss_sum=sum(step.loss_sums.values()),
            weight=sum(step.weights.values()),
            knows_newer=self._watcher is not None and self._watcher.knows_newer(self._generation),
            sample_hash=step.sample_hash,
            snapshotted=step.index,
            total=self._total or 0,
            parameter_hash=parameter_hash(self.model.parameters()) if self._compares() else 0,
            buffers_changed=self._buffers.changed(),
        )
        try:
            self.reducer.launch(groups)
            header = self._exchange(row, self.reducer.wait)
            self._verify(step, header)
            loss_sum, weight = self.reducer.totals(header, step.loss_sums, step.weights, groups)
            if header.buffers_changed:
                self._buffers.average(groups, exact=self.exact)
        except GroupBroken as error:
            self._leave(error)
            raise GenerationChanged(str(error)) from error
        self._apply(step, weight, before, after, max_norm)
        step.loss = loss_sum / weight
        self._compared += 1
        self._blocks_left = 0
        self._known_by_all = header.reportable_step
        self._cut = header.all_know_newer
        self._report(step.index + 1, step.loss, header.reportable_step)
        if self._checkpointer is not None and self.is_main and self._checkpointer.due(time.monotonic()):
            self._save(all_have_it=groups is None)
        self._prune()

    def _compares(self) -> bool:
        return self.groups is not None and self.groups.world_size > 1 and self._compared < COMPARED_STEPS

    def _exchange(self, row: Row, meanwhile: Callable[[Groups | None], None] | None = None) -> Header:
        """Gather one row of every rank. Raises GroupBroken. `meanwhile` is waited for between launch and end."""
        groups = self.groups
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

    def _verify(self, step: Step, header: Header) -> None:
        """Raise rather than commit what is not this step, everywhere (rule QUOTA). The same on all ranks."""
        problem = header.disagreement()
        if problem is not None:
            raise DivergedError(problem)
        if header.sample_hash != self.plan.expected_hash(step.index):
            raise SampleError(
                f"Step {step.index} was not committed: the ranks' samples are not the step's {self.plan.global_batch}. "
                "Call step.backward() once for every batch of step.microbatches()."
            )
        if not header.weight > 0:
            raise UsageError(f"Step {step.index} has a total weight of {header.weight:g}; it must be greater than 0.")
        if header.buffers_changed and self.exact:
            raise UsageError(
                f'reduction="exact" refuses buffers that change in forward ({self._buffers.name_of_changed()}), because '
                'their value depends on the world size. Use reduction="fast", or a layer without running statistics.'
            )

    def _apply(
        self,
        step: Step,
        weight: float,
        before: Sequence[Callable[[], Any]],
        after: Sequence[Callable[[], Any]],
        max_norm: float | None,
    ) -> None:
        """Everything that changes the state. An exception in here leaves it without a name: nobody copies it."""
        with self._state.changing():
            self.reducer.scale(weight)
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
            for hook in before:
                hook()
            self.optimizer.step()
            for hook in after:
                hook()
        self._state.named(StatePair(self._generation, step.index + 1), self._generation)
        step.committed = True

    # --- reports and checkpoints -------------------------------------------------------------------------------------

    def _report(self, committed: int, loss: float | None, reportable: int) -> None:
        if self._watcher is None:
            return
        saved = self._checkpointer.last_committed if self._checkpointer is not None else None
        first_step_ms = self._pace.committed(time.monotonic()) if loss is not None else None
        self._watcher.send(
            local.Committed(
                generation=self._generation,
                step=committed,
                reportable_step=reportable,
                loss=loss if loss is not None and abs(loss) < float("inf") else None,
                samples=self.plan.samples(reportable),
                digest=self.plan.digest(reportable),
                total_steps=self._total,
                samples_per_second=self._pace.steps_per_s(self.plan.global_batch),
                first_step_ms=first_step_ms,
                steps_redone=self._redone if first_step_ms is not None else 0,
                checkpoint=None if saved is None else local_checkpoint(saved),
            )
        )

    def _save(self, *, all_have_it: bool) -> None:
        """Write the state durably: in the background, or, where all ranks are known to have it, at once."""
        checkpointer, pair = self._checkpointer, self._state.pair
        if checkpointer is None or pair is None:
            return
        if all_have_it:
            checkpointer.wait()
        gathering = self._regrouper.gathering if self._regrouper is not None else None
        checkpointer.save(
            self._state.tree(),
            pair=pair,
            generation=self._generation,
            uid=gathering.document.uid if gathering is not None else "alone",
            parent_generation=self._regrouper.parent_generation
            if self._regrouper is not None
            else self._generation - 1,
            start_step=self._regrouper.start_step if self._regrouper is not None else 0,
            digest=self.plan.digest(pair.step),
            acknowledged=None if all_have_it else lambda: self._known_by_all >= pair.step,
        )
        if all_have_it:
            checkpointer.wait()
            if checkpointer.problem is not None:
                print(checkpointer.problem, flush=True)

    def _prune(self) -> None:
        prune = self._watcher.take_prune() if self._watcher is not None else None
        if prune is not None and self._checkpointer is not None and self.is_main:
            self._checkpointer.prune(prune.keep, self._generation)


def local_checkpoint(saved: Any) -> dict[str, Any]:
    """Return a CheckpointRef as the report's JSON object."""
    return {"generation": saved.generation, "step": saved.step, "directory": saved.directory}


def _checkpointer() -> Checkpointer | None:
    directory = os.environ.get(env.CHECKPOINT_DIR)
    if not directory:
        return None
    every_s = float(os.environ.get(env.CHECKPOINT_EVERY_SECONDS) or 300)
    keep = int(os.environ.get(env.CHECKPOINT_KEEP) or 3)
    return Checkpointer(directory, every_s, keep, os.environ.get(env.JOB_UID) or "local")


def _any_lineage() -> list[LineageEntry]:
    """Without an operator there is one trainer at a time and no fenced generation: every generation may be read."""
    committed, _ = store.names(Path(os.environ[env.CHECKPOINT_DIR]))
    return [LineageEntry(name.generation, 1 << 62) for name in committed]
