"""The membership of an elastic Horovod script: a session whose steps are the script's commits (docs/design/adr/0084).

`Member` connects the parts that `regroup.session` has, too: watcher, regrouper, memory snapshot, checkpoints and reports. Their
training state is one entry, the copy that the last commit has made. `loop` has the order in which its methods are called.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from regroup.data import SamplePlan
from regroup.errors import BackendError, DivergedError, GroupBroken, JobEnded, StateError, UsageError
from regroup.generation.groups import Groups
from regroup.generation.membership import Stopped
from regroup.generation.regrouper import Regrouper
from regroup.generation.watcher import Watcher
from regroup.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from regroup.progress.busy import BusyStack
from regroup.progress.reporter import Progress, Reporter
from regroup.protocol import env, local
from regroup.protocol.state import Busy, StatePair
from regroup.state.durable import Durable
from regroup.state.memory import Memory
from regroup.state.training import TrainingState
from regroup.transaction.agreement import exchange
from regroup.transaction.header import Header, Row

COPY = "horovod"
"""Name of the copy in the training state."""


class Held(Protocol):
    """The state of a script, as a membership sees it: `state.State`."""

    def save(self) -> None:
        """Copy the objects."""
        ...

    def tree(self) -> dict[str, Any]:
        """Return the last copy."""
        ...

    def load(self, tree: dict[str, Any]) -> None:
        """Take another rank's copy."""
        ...


class Copy:
    """The copy that the last commit has made, as a part of the training state. Nobody changes the tensors of a copy."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        """`Held.tree`; empty before the first commit."""
        self.returned = False
        """The function of all ranks has returned: nobody calls it again."""
        self._is_foreign = False
        """The tree is another rank's, or from a snapshot or checkpoint, and the script's objects do not have it yet."""

    def give(self, state: Held) -> None:
        """Give the script's objects a copy that another process has made, once."""
        if self._is_foreign and self.tree:
            state.load(self.tree)
        self._is_foreign = False

    def state_dict(self) -> dict[str, Any]:
        return {"tree": self.tree, "returned": self.returned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tree, self.returned = state["tree"], state["returned"]
        self._is_foreign = True


class _NoOptimizer:
    """The script's optimizer is a part of the copy, so the training state has none of its own."""

    def step(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: there is no state."""


class _NoSamples(SamplePlan):
    """The script deals its samples itself, so none are counted."""

    own_steps = True

    @property
    def step_samples(self) -> int:
        return 0

    def samples(self, step: int) -> int:  # noqa: ARG002
        return 0

    def digest(self, step: int, known: tuple[int, str] | None = None) -> str:  # noqa: ARG002
        return ""


def order(held: Sequence[bool]) -> list[int]:
    """Return the ranks of a generation in the order of Horovod's ranks: those that held the adopted state come first. Pure."""
    return [rank for rank, holds in enumerate(held) if holds] + [rank for rank, holds in enumerate(held) if not holds]


class Member:
    """One process of an elastic Horovod job. All methods are for the main thread."""

    def __init__(self, path: str, connect: Callable[[Groups, list[int]], None]) -> None:
        """Attach to the agent at the socket `path`.

        `connect(groups, order)` is called in each new generation. It gives the script's collectives the ranks of `groups`, in
        Horovod's order.
        """
        local_rank = int(os.environ.get(env.LOCAL_RANK) or 0)
        incarnation = int(os.environ.get(env.INCARNATION) or 0)
        attach = local.Attach(os.getpid(), local_rank, incarnation, path=os.path.dirname(os.path.dirname(__file__)))
        self._connect = connect
        self._watcher = Watcher(path, attach)
        plan = _NoSamples(0, 1, 1, 1)
        self._copy = Copy()
        self._training = TrainingState(torch.nn.Module(), _NoOptimizer(), {COPY: self._copy})
        self._durable = Durable(self._training, plan)
        self._memory = Memory(self._training, plan, self._watcher.send, local_rank)
        self._membership = Regrouper(
            self._watcher, self._training, plan, torch.device("cpu"), self._durable, self._memory
        )
        self._reporter = Reporter(self._watcher, plan, self._durable, self._memory)
        self._busy = BusyStack(self._watcher.send, self._reporter.paused)
        self.is_over = False
        """The job has ended for this process: no generation follows."""

    @property
    def groups(self) -> Groups | None:
        """The groups of the current generation; None between generations."""
        return self._membership.groups

    @property
    def step(self) -> int:
        """Number of commits."""
        return self._training.step

    @property
    def has_returned(self) -> bool:
        """The function of all ranks has returned, in this process or in the one before it."""
        return self._copy.returned or self._membership.over

    # --- between generations -----------------------------------------------------------------------------------------

    def join(self) -> None:
        """Be in a first generation. Blocks until there is one that forms. Raises as `follow` does, but not for a lost rank."""
        while True:
            try:
                self.follow()
                return
            except HorovodInternalError as error:
                self.explain(error)

    def follow(self) -> None:
        """Be in the newest generation that must be followed. Blocks as long as there is none.

        Raises JobEnded if the job has ended for this process, and HorovodInternalError if the group is lost meanwhile.
        """
        if self.is_over:
            return
        membership = self._membership
        try:
            is_new = membership.ensure()
        except Stopped as stopped:
            self._end(stopped.outcome)
        except StateError as error:
            if self._watcher.finish is None:
                raise
            raise StateError(
                f"{error} A script that fails after its function of hvd.elastic.run has returned is run again there."
            ) from error
        if membership.over or not is_new:
            return
        self._memory.committed()
        self._memory.interval.begin_generation()
        groups = membership.groups
        assert groups is not None
        self._reporter.begin_generation(membership.generation, membership.adopted_at_s, groups.waited_s)
        self._reporter.begin_step(self.step)
        self._durable.begin_generation()
        self._durable.is_writer = membership.rank == 0
        if not membership.kept_own_state:
            self._durable.lost()
        if membership.rolled_back and self._durable.is_writer:
            self._durable.hurry()
        with self._lost():
            try:
                self._connect(groups, order(self._held()))
            except (RuntimeError, OSError) as error:  # of torch, or of the connection to the coordinator
                raise groups.failed(error) from error

    def _held(self) -> list[bool]:
        """Return which ranks held the state that the generation continues from. The same on all ranks."""
        gathering = self._membership.gathering
        assert gathering is not None
        return [one.state == self._training.pair and not one.from_snapshot for one in gathering.arrivals]

    def load(self, state: Held) -> None:
        """Give the script's objects the copy that the generation continues from, if they lack it."""
        self._copy.give(state)

    def explain(self, error: HorovodInternalError) -> None:
        """Leave the group if `error` comes of a lost rank or a newer generation. Otherwise it is the script's own: raise it."""
        groups = self._membership.groups
        if groups is None:
            return  # it was left already
        cause = error.__cause__
        if not isinstance(cause, (GroupBroken, BackendError)):
            cause = groups.failed(error)
        if not self._membership.explains(cause):
            raise error

    def leave_together(self) -> None:
        """Leave a healthy group, after a commit after which all ranks do so."""
        self._membership.leave_at_cut()

    # --- in a generation ---------------------------------------------------------------------------------------------

    def committed(self, state: Held) -> None:
        """Name the copy that `state` has just made, and meet the other ranks.

        Raises HostsUpdatedInterrupt if all know a newer generation, and HorovodInternalError if one is lost.
        """
        self._name(state)
        header = self._gather()
        self._report(header)
        if header.all_know_newer:
            raise HostsUpdatedInterrupt

    def check(self, state: Held) -> None:
        """Meet the other ranks, and commit if all know a newer generation. Raises as `committed` does."""
        if self._gather().all_know_newer:
            state.save()
            self.committed(state)

    def finish(self, state: Held) -> bool:
        """Meet the other ranks, whose functions have returned, too, and wait for the end of the job.

        Returns False if a newer generation needs this process first. Raises JobEnded, and HorovodInternalError if a rank is lost.
        """
        if not self.has_returned:
            self._gather(returned=True)
            state.save()
            self._copy.returned = True
            self._name(state)
        if self._membership.over:
            self._close(local.COMPLETE)
            return True
        self._gather(returned=True)
        self._durable.known_by_all = self.step
        self._save_now(self._membership.must_leave)
        self._memory.take_last()
        self._reporter.finished(self.step, None)
        outcome = self._membership.wait_end()
        if outcome is None:
            return False
        if self._durable.is_writer:
            self._durable.prune_last(self._membership.take_prune(), self._membership.generation)
        self._close(outcome)
        return True

    def keep_state(self) -> None:
        """Leave the last commit in the memory snapshot for the next process: this one ends by an exception."""
        if not self.is_over:
            self._memory.take_last()
            self._durable.lost()

    def close(self) -> None:
        """End the membership, as the process ends."""
        self.is_over = True
        self._memory.settle()
        self._training.staging.settle()
        self._membership.close()
        self._watcher.close()

    # --- small parts -------------------------------------------------------------------------------------------------

    def _name(self, state: Held) -> None:
        pair = StatePair(self._membership.generation, self.step + 1)
        self._training.begin_change()
        self._copy.tree = state.tree()
        self._training.named(pair, self._membership.generation)

    def _gather(self, *, returned: bool = False) -> Header:
        """Gather a row of each rank. Raises HorovodInternalError if one is lost, and DivergedError or UsageError on all ranks."""
        membership = self._membership
        with self._lost():
            if membership.groups is None or membership.groups.aborted:
                raise GroupBroken("The group was left.")
            row = Row(
                self.step,
                0.0,
                1.0,
                membership.knows_newer(),
                sample_hash=0,
                snapshotted=self._memory.step,
                wants_snapshot=self._memory.due(time.monotonic()),
                ended=returned,
            )
            header = exchange(membership.groups, row)
        _check(header)
        return header

    def _report(self, header: Header) -> None:
        membership = self._membership
        self._durable.known_by_all = header.reportable_step
        self._memory.committed()
        if header.takes_snapshot:
            self._memory.take()
        groups = membership.groups
        waited_s = groups.waited_s if groups is not None else 0.0
        self._reporter.committed(
            Progress(
                self.step, None, header.reportable_step, None, waited_s=waited_s, snapshot_step=header.snapshot_step
            )
        )
        self._reporter.begin_step(self.step)
        if self._durable.is_writer:
            self._durable.save_if_due(membership.origin, alone=False)
            self._durable.prune(membership.take_prune(), membership.generation)
            self._reporter.say_late()

    @contextmanager
    def _lost(self) -> Iterator[None]:
        """Return a block in which a lost group is Horovod's error."""
        try:
            yield
        except (GroupBroken, BackendError) as error:
            raise HorovodInternalError(str(error)) from error

    def _end(self, outcome: str) -> None:
        """End this process, since the job needs it no more. Raises JobEnded."""
        if outcome in (local.DRAINED, local.SUSPENDED):
            self._save_now(lambda: False)
            self._reporter.saved()
        self._close(outcome)

    def _save_now(self, interrupted: Callable[[], bool]) -> None:
        """Write a checkpoint and wait for it, if this process writes them. The agent knows of the wait, so it counts as no hang."""
        if self._durable.is_writer:
            with self._busy.during(Busy.CHECKPOINT, max_s=self._durable.wait_s):
                self._durable.save_now(self._membership.origin, interrupted=interrupted)

    def _close(self, outcome: str) -> None:
        self.is_over = True
        if outcome != local.COMPLETE:
            raise JobEnded(outcome)


def _check(header: Header) -> None:
    """Raise an error, the same on all ranks, if they are not at the same place of the script."""
    gone = [rank for rank, row in enumerate(header.rows) if row.ended]
    if gone and len(gone) < len(header.rows):
        raise UsageError(
            f"The function of hvd.elastic.run has returned on rank {', '.join(map(str, gone))} of the generation, and others are "
            "still in it. Give all ranks equally many batches, as ElasticSampler does, or call hvd.join() at the end."
        )
    problem = header.disagreement()
    if problem is not None:
        raise DivergedError(f"{problem} Call state.commit() and state.check_host_updates() equally often on all ranks.")
