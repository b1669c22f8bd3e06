"""Decides when a session writes durable checkpoints, and when it waits for one: the policy around `regroup.checkpoint`.

The process of rank 0 writes for all, since the state is replicated. This module owns the settings from the environment, the
bounded wait for a checkpoint before the job ends (adr/0015), and the start of plain `python`. `regroup.checkpoint.selection`
decides which checkpoint may be read, and `adoption` whether one is read at all.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regroup.checkpoint import Checkpointer, CheckpointInfo, store
from regroup.checkpoint.checkpointer import Origin
from regroup.checkpoint.shards import apart
from regroup.data import SamplePlan
from regroup.protocol import env
from regroup.protocol.document import LineageEntry
from regroup.protocol.local import PruneLocally
from regroup.protocol.state import StatePair

from .intervals import Interval
from .training import TrainingState

_SLICE_S = 0.2
_LAST_S = 2.0
"""Longest wait for the last deletion. If the volume hangs then, a checkpoint too many stays."""

MOST_S = 1800.0
"""Longest wait for one checkpoint, unless CHECKPOINT_WAIT_SECONDS is set. It holds for the first one."""
LEAST_S = 300.0
"""Shortest bound of a later wait, however fast earlier writes were: a file server that restarts takes minutes."""
TIMES = 4
"""Bound of a later wait, as a multiple of the slowest write."""
MARGIN_S = 30.0
"""Time between the end of this process's own bound and the moment at which the operator calls the wait a hang."""


def patience_s(most_s: float, longest_s: float | None) -> float:
    """Return the longest wait for one checkpoint. `longest_s` is the time of the slowest write so far; None: there was none."""
    return most_s if longest_s is None else min(most_s, max(LEAST_S, TIMES * longest_s))


class Durable:
    """The durable tier of one session. Without REGROUP_CHECKPOINT_DIR all methods do nothing."""

    def __init__(self, state: TrainingState, plan: SamplePlan, model_group_index: int = 0) -> None:
        """`model_group_index` is the inner index of this process."""
        self._state, self._plan = state, plan
        self.checkpointer: Checkpointer | None = None
        self.known_by_all = 0
        """Number of steps that every rank has committed for certain. Only their checkpoints may get a COMMIT (rule CKPT)."""
        self._said: str | None = None
        self.is_writer = False
        """This process is the only writer of the generation, or the first one in a model group."""
        self._part = (model_group_index, plan.layout.size) if plan.layout.size > 1 else None
        self._is_due = False
        self._most_s = float(os.environ.get(env.CHECKPOINT_WAIT_SECONDS) or MOST_S)
        directory = os.environ.get(env.CHECKPOINT_DIR)
        every_s = float(os.environ.get(env.CHECKPOINT_EVERY_SECONDS) or 300)
        self._interval = Interval("Checkpoints", "spec.checkpoint.everySeconds", every_s)
        if directory:
            self.checkpointer = Checkpointer(directory, every_s, os.environ.get(env.JOB_UID) or "local", state.staging)
        self.resume_from = os.environ.get(env.RESUME_FROM) if directory else None
        """Path of the checkpoint with which the job begins. It is the same in every process for the life of the job."""

    def continue_alone(self) -> Origin:
        """Load the newest checkpoint, if there is one, and name the state, in plain `python`. Returns the origin of checkpoints."""
        if self.checkpointer is not None:
            # Only one trainer runs at a time and no generation is fenced, so every checkpoint may be read.
            committed, _ = store.names(Path(os.environ[env.CHECKPOINT_DIR]))
            newest = self.checkpointer.newest([LineageEntry(name.generation, 1 << 62) for name in committed])
            for sentence in newest.skipped:
                print(sentence, flush=True)
            if newest.info is not None:
                self.load(newest.info)
                generation = newest.info.name.generation + 1
                self._state.named(newest.info.pair, generation)
                return Origin(generation, "alone", newest.info.name.generation, newest.info.pair.step)
            if self.resume_from:
                info = self.checkpointer.imported(self.resume_from)
                self.load(info)
                self._state.named(info.pair, 1)
                return Origin(1, "alone", 0, info.pair.step)
        self._state.named(StatePair(1, 0), 1)
        return Origin(1, "alone", 0, 0)

    def load(self, info: CheckpointInfo) -> None:
        """Load a checkpoint into the script's objects. Of split tensors this process reads its part. Raises CheckpointError."""
        assert self.checkpointer is not None
        tree = self.checkpointer.load(info, into=self._state.tree(), like=self._state.like, choose=self._state.chosen)
        self._state.load(tree)
        if info.commit.digest:
            self._plan.digest(info.pair.step, known=(info.pair.step, info.commit.digest))

    def wants(self) -> bool:
        """Return whether it is time for a checkpoint. The answer stays True until one begins, since the step may not commit."""
        if self.checkpointer is not None:
            self._is_due = self.checkpointer.due(time.monotonic()) or self._is_due
        return self._is_due

    def save_part(self, origin: Origin) -> None:
        """Start to write this process's part in the background. Each rank of the first model group does so after one commit."""
        self._say_problem()
        self._save_periodic(origin, known=False)
        self._is_due = False  # even if the writer is busy, since the others of the model group write their parts now

    def hurry(self) -> None:
        """Have the next commit begin a checkpoint, whatever the interval.

        Called by a generation that has rolled back: the volume may have only newer checkpoints, which it has left behind.
        """
        if self.checkpointer is not None:
            self._is_due = True

    def begin_generation(self) -> None:
        """Begin a generation with other ranks.

        In a model group an unfinished write may lack the part of a lost process, so it is cancelled and done again.
        """
        self._interval.begin_generation()
        if self._part is not None and self.checkpointer is not None and self.checkpointer.busy:
            self.checkpointer.cancel()
            self._is_due = True

    def save_if_due(self, origin: Origin, *, alone: bool) -> None:
        """Start to write in the background if it is time. Rank 0 calls this after a commit. `alone`: there is no other rank."""
        self._say_problem()
        if self.wants() and self._save_periodic(origin, known=alone):
            self._is_due = False

    @property
    def wait_s(self) -> float | None:
        """Longest duration of `save_now`: it waits for the write under way and then for its own. None if it does nothing."""
        return None if self.checkpointer is None else 2 * self._patience_s + MARGIN_S

    def save_now(self, origin: Origin, *, interrupted: Callable[[], bool]) -> None:
        """Write the state, which every rank is known to hold, and wait until it is durable.

        The wait ends early if `interrupted()` returns True, or at its bound if the volume does not answer (adr/0015). The state is
        not saved then, and `problem` tells why.
        """
        pair = self._state.pair
        if self.checkpointer is None or pair is None:
            return
        # The write under way is of this state or an older one, and no later commit may come to acknowledge it.
        self.known_by_all = max(self.known_by_all, pair.step)
        if self._wait(interrupted):
            self._save(origin, known=True)
            self._wait(interrupted)
        self._say_problem()

    def problem(self) -> str | None:
        """Return a sentence on a problem with the volume, empty if there is none. None if this process is not the writer."""
        if self.checkpointer is None or not self.is_writer:
            return None
        return self.checkpointer.hangs(self._patience_s) or self.checkpointer.failure or ""

    def late(self) -> str | None:
        """Return a sentence if checkpoints come later than the spec asks for, else "". None if this process is not the writer."""
        return None if self.checkpointer is None or not self.is_writer else self._interval.sentence

    def lost(self) -> None:
        """Cancel all writes, because the state was replaced by another rank's or the script ends by an exception.

        They may be of a step that some rank never committed, and no later commit of this process will acknowledge it.
        """
        self.known_by_all = 0
        if self.checkpointer is not None:
            self.checkpointer.cancel()

    def prune(self, word: PruneLocally | None, generation: int) -> None:
        """Delete the checkpoints that the operator's word allows, in the background. A volume that hangs does not stop training."""
        if self.checkpointer is not None and word is not None:
            self.checkpointer.prune(word.keep, generation)

    def prune_last(self, word: PruneLocally | None, generation: int) -> None:
        """Delete the checkpoints that the operator's word about the last checkpoint allows. Takes at most 2 s."""
        self.prune(word, generation)
        if self.checkpointer is not None:
            self.checkpointer.wait(_LAST_S)

    def report(self) -> dict[str, Any] | None:
        """Return the newest checkpoint that this process has committed, in the form of a report."""
        saved = self.checkpointer.last_committed if self.checkpointer is not None else None
        if saved is None:
            return None
        return {"generation": saved.generation, "step": saved.step, "directory": saved.directory}

    def _save_periodic(self, origin: Origin, *, known: bool) -> bool:
        """Begin to write the checkpoint that the interval asks for, as `_save` does."""
        longest_s = self.checkpointer.longest_s if self.checkpointer is not None else None
        if not self._save(origin, known=known):
            return False
        is_slow = longest_s is not None and longest_s > self._interval.asked_s
        why = (
            f"writing one has taken {longest_s:.3g} s"
            if is_slow
            else "a checkpoint begins after a step, once the data of the one before is on the volume"
        )
        self._interval.began(time.monotonic(), why)
        return True

    def _save(self, origin: Origin, *, known: bool) -> bool:
        """Begin to write. Returns False if there is nothing to write, or the writer is busy."""
        pair = self._state.pair
        if self.checkpointer is None or pair is None:
            return False
        return self.checkpointer.save(
            apart(self._state.saved_tree()),
            pair=pair,
            origin=origin,
            digest=self._plan.digest(pair.step),
            acknowledged=None if known else lambda: self.known_by_all >= pair.step,
            part=self._part,
            parts_within_s=self._patience_s,
        )

    def _say_problem(self) -> None:
        """Print once why the last write or deletion has failed or does not end."""
        if self.checkpointer is None:
            return
        problem = self.checkpointer.hangs(self._patience_s) or self.checkpointer.problem
        if problem is not None and problem != self._said:
            print(problem, flush=True)
        self._said = problem

    @property
    def _patience_s(self) -> float:
        return patience_s(self._most_s, self.checkpointer.longest_s if self.checkpointer is not None else None)

    def _wait(self, interrupted: Callable[[], bool]) -> bool:
        """Wait until nothing is being written. Returns False if `interrupted()` or the bound ends the wait."""
        assert self.checkpointer is not None
        end_s = time.monotonic() + self._patience_s
        while not self.checkpointer.wait(_SLICE_S):
            if interrupted() or time.monotonic() > end_s:
                return False
        return True
