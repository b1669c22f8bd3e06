"""When a session writes and reads durable checkpoints: the policy around `regroup.checkpoint`.

Rank 0's process writes for all, since the state is replicated. Owns the environment's settings, the wait for what must be on
disk before something else happens (the end, the first report after a rollback) and its bound (adr/0015), and where plain
`python` continues. Does not decide which checkpoint may be read (`regroup.checkpoint.selection`) or whether the disk is
asked at all (`adoption`).
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regroup.checkpoint import Checkpointer, CheckpointInfo, store
from regroup.checkpoint.checkpointer import Origin as Origin  # for who has a session's durable tier
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
"""Where it takes longer, one checkpoint too many stays: the job has ended, and its volume hangs."""

MOST_S = 1800.0
"""A checkpoint is waited for so long where nothing else is said (CHECKPOINT_WAIT_SECONDS) and none was written before."""
LEAST_S = 300.0
"""... and never less than this, however fast the ones before were: a file server that is started again takes minutes."""
TIMES = 4
"""... else so many times as long as the slowest write took."""
MARGIN_S = 30.0
"""The operator calls the wait a hang so much later than this process gives up by itself."""


def patience_s(most_s: float, longest_s: float | None) -> float:
    """Return how long one checkpoint is waited for. `longest_s`: the slowest write so far; None: there was none."""
    return most_s if longest_s is None else min(most_s, max(LEAST_S, TIMES * longest_s))


class Durable:
    """The durable tier of one session; without REGROUP_CHECKPOINT_DIR all methods do nothing."""

    def __init__(self, state: TrainingState, plan: SamplePlan, model_group_index: int = 0) -> None:
        """`model_group_index`: this process's inner index."""
        self._state, self._plan = state, plan
        self.checkpointer: Checkpointer | None = None
        self.known_by_all = 0
        """Number of steps that every rank has committed for certain: only those may get a COMMIT (rule CKPT)."""
        self._said: str | None = None
        self.is_writer = False
        """This process is the one of the generation that writes, or the first of those that do."""
        self._part = (model_group_index, plan.layout.size) if plan.layout.size > 1 else None
        self._is_due = False
        self._most_s = float(os.environ.get(env.CHECKPOINT_WAIT_SECONDS) or MOST_S)
        directory = os.environ.get(env.CHECKPOINT_DIR)
        every_s = float(os.environ.get(env.CHECKPOINT_EVERY_SECONDS) or 300)
        self._interval = Interval("Checkpoints", "spec.checkpoint.everySeconds", every_s)
        if directory:
            self.checkpointer = Checkpointer(directory, every_s, os.environ.get(env.JOB_UID) or "local", state.staging)
        self.resume_from = os.environ.get(env.RESUME_FROM) if directory else None
        """Path of the checkpoint that the job begins with; the same in every process for the life of the job."""

    def continue_alone(self) -> Origin:
        """Plain `python`: load the newest checkpoint, if there is one, give the state its name, and say who goes on."""
        if self.checkpointer is not None:
            # One trainer at a time and no fenced generations: every one may be read.
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
        """Put a checkpoint into the script's objects; of what this process holds a part of, that part. Raises CheckpointError."""
        assert self.checkpointer is not None
        tree = self.checkpointer.load(info, into=self._state.tree(), like=self._state.like, choose=self._state.chosen)
        self._state.load(tree)
        if info.commit.digest:
            self._plan.digest(info.pair.step, known=(info.pair.step, info.commit.digest))

    def wants(self) -> bool:
        """Return whether it is time for a checkpoint. It stays so until one is begun: a step may not be committed."""
        if self.checkpointer is not None:
            self._is_due = self.checkpointer.due(time.monotonic()) or self._is_due
        return self._is_due

    def save_part(self, origin: Origin) -> None:
        """Start to write this process's part in the background; called by all ranks of the first model group after one commit."""
        self._say_problem()
        self._save_periodic(origin, known=False)
        self._is_due = False  # also where the writer is busy still: the others of the model group write a part now

    def hurry(self) -> None:
        """Have the next commit begin a checkpoint, whatever the interval. Called where a generation has rolled back: the volume may
        have only newer checkpoints, which the generation has left behind. The first step does not wait for the volume."""
        if self.checkpointer is not None:
            self._is_due = True

    def begin_generation(self) -> None:
        """Other ranks, from here on. In a model group a write that was under way may lack the part of a process that is gone: it
        is done again."""
        self._interval.begin_generation()
        if self._part is not None and self.checkpointer is not None and self.checkpointer.busy:
            self.checkpointer.cancel()
            self._is_due = True

    def save_if_due(self, origin: Origin, *, alone: bool) -> None:
        """Start to write in the background when it is time; called by rank 0 after a commit."""
        self._say_problem()
        if self.wants() and self._save_periodic(origin, known=alone):
            self._is_due = False

    @property
    def wait_s(self) -> float | None:
        """How long `save_now` may take: for what is being written, and for its own write. None: it does nothing."""
        return None if self.checkpointer is None else 2 * self._patience_s + MARGIN_S

    def save_now(self, origin: Origin, *, interrupted: Callable[[], bool]) -> None:
        """Write what every rank is known to hold, and wait until it is durable; no longer once `interrupted`, nor when the
        volume does not answer (adr/0015): then it is not saved, and `problem` says so."""
        pair = self._state.pair
        if self.checkpointer is None or pair is None:
            return
        # What is under way is of this state or of one before it, and there may be no next commit that would say so.
        self.known_by_all = max(self.known_by_all, pair.step)
        if self._wait(interrupted):
            self._save(origin, known=True)
            self._wait(interrupted)
        self._say_problem()

    def problem(self) -> str | None:
        """Return what is wrong with the volume, one sentence; empty: nothing is. None: this process is not the one to write."""
        if self.checkpointer is None or not self.is_writer:
            return None
        return self.checkpointer.hangs(self._patience_s) or self.checkpointer.failure or ""

    def late(self) -> str | None:
        """Why checkpoints come less often than was asked for, one sentence; empty: they do not. None: as `problem`."""
        return None if self.checkpointer is None or not self.is_writer else self._interval.sentence

    def lost(self) -> None:
        """The state was replaced by another rank's, or the script ends by an exception: what is being written may be of a step that
        was never committed by all, and no later commit of this process will say that it was."""
        self.known_by_all = 0
        if self.checkpointer is not None:
            self.checkpointer.cancel()

    def prune(self, word: PruneLocally | None, generation: int) -> None:
        """Delete what the operator's word allows, in the background: a volume that hangs keeps nobody from training."""
        if self.checkpointer is not None and word is not None:
            self.checkpointer.prune(word.keep, generation)

    def prune_last(self, word: PruneLocally | None, generation: int) -> None:
        """Delete what the operator's last word allows, which it spoke of the last checkpoint; takes 2 s at most."""
        self.prune(word, generation)
        if self.checkpointer is not None:
            self.checkpointer.wait(_LAST_S)

    def report(self) -> dict[str, Any] | None:
        """Return the newest checkpoint that this process committed, as a report has it."""
        saved = self.checkpointer.last_committed if self.checkpointer is not None else None
        if saved is None:
            return None
        return {"generation": saved.generation, "step": saved.step, "directory": saved.directory}

    def _save_periodic(self, origin: Origin, *, known: bool) -> bool:
        """As `_save`, for the checkpoint that the interval asks for."""
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
        """Begin to write; return False where there is nothing to write, or the writer is busy."""
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
        """Say once why the last write or deletion came to nothing, or does not come to an end."""
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
        """Return True when nothing is being written any more, False when `interrupted` came first, or the bound."""
        assert self.checkpointer is not None
        end_s = time.monotonic() + self._patience_s
        while not self.checkpointer.wait(_SLICE_S):
            if interrupted() or time.monotonic() > end_s:
                return False
        return True
