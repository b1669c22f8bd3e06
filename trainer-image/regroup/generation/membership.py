"""The membership of a session, as the rest of it sees it: the current generation, and the way into the next one.

`Regrouper` is the membership under an agent, `Alone` that of plain `python`.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from regroup.checkpoint.checkpointer import Origin
from regroup.errors import GenerationChanged, GroupBroken
from regroup.protocol.local import COMPLETE, PruneLocally
from regroup.protocol.state import StatePair
from regroup.state.durable import Durable
from regroup.state.training import CommitRecord

from .adoption import Block
from .groups import Gathering, Groups


class Stopped(Exception):
    """The agent said stop: `steps()` ends."""

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class Keeper(Protocol):
    """The owner of gradients that were reduced and not applied (rule KEEP). The commit implements it."""

    def kept(self) -> tuple[tuple[int, StatePair], ...]:
        """Return (generation, base) of each that can be applied to the state that is held."""
        ...

    def roll_forward(self, wanted: StatePair, record: CommitRecord) -> bool:
        """Make the wanted state of the one that is held; False: nothing that was kept makes it. `record`: of its commit on a rank
        that has it. Local."""
        ...


class Membership(Protocol):
    """This process's place in the newest generation. All methods are for the main thread."""

    @property
    def groups(self) -> Groups | None:
        """The groups of the current generation; None in plain `python` and between generations."""
        ...

    @property
    def gathering(self) -> Gathering | None:
        """The arrivals of all ranks in the current generation; None in plain `python` and before the first."""
        ...

    @property
    def generation(self) -> int:
        """Number of the generation that was adopted last; 0 before the first."""
        ...

    @property
    def rank(self) -> int:
        """Index in that generation; -1 before the first, for a process that joins a running job."""
        ...

    @property
    def world_size(self) -> int: ...

    @property
    def origin(self) -> Origin:
        """That generation, for a checkpoint."""
        ...

    @property
    def adopted_at_s(self) -> float:
        """Monotonic time at which it was adopted."""
        ...

    @property
    def rolled_back(self) -> bool:
        """It continues from an older state than was reached before: a checkpoint is due (rule CKPT)."""
        ...

    @property
    def kept_own_state(self) -> bool:
        """It continues from what this process held."""
        ...

    @property
    def is_alone(self) -> bool:
        """Plain `python`."""
        ...

    block: Block | None
    """The block of the user's own collectives that this process is in (`Arrival.block`)."""
    keeper: Keeper | None
    """The owner of kept gradients, which is asked for them at adoption."""
    over: bool
    """True if all steps were committed before this process could take part in them. It forms no generation, and holds the state of
    the last step."""
    ended: bool
    """This process, or one that it met, has left its loop: the job ends at the step that was adopted (`Arrival.ended`)."""

    def ensure(self) -> bool:
        """Be in the newest generation that must be followed; return whether it is another one than at the last call.

        Blocks as long as there is none, and none is formed once `over`. Raises Stopped.
        """
        ...

    def check(self) -> None:
        """Raise GenerationChanged once the groups must be left."""
        ...

    def explains(self, error: BaseException) -> bool:
        """Return whether `error` comes of a membership change; then the groups are left. Else it is the user's own."""
        ...

    def leave(self, error: GroupBroken) -> None:
        """Leave the groups, which broke, and tell the agent why if no newer generation explains it."""
        ...

    def leave_at_cut(self) -> None:
        """Leave healthy groups together with all other ranks (rule CUTALL)."""
        ...

    def knows_newer(self) -> bool:
        """Return whether a newer generation than the current one was heard of, planned or forced."""
        ...

    def must_leave(self) -> bool:
        """Return whether the current generation has to be left at once."""
        ...

    def take_prune(self) -> PruneLocally | None:
        """Return the newest word on which checkpoints to keep, once."""
        ...

    def wait_end(self) -> str | None:
        """Block until the job's end, after the last step, and return its outcome; None: a newer generation needs this process
        first."""
        ...

    def close(self) -> None:
        """End the membership: the session has ended."""
        ...


@contextmanager
def leaves_broken(membership: Membership) -> Iterator[None]:
    """Return a block that leaves the groups once they break in it, and then raises GenerationChanged.

    Everything that communicates in a step runs in one. Exceptions other than GroupBroken pass.
    """
    try:
        yield
    except GroupBroken as error:
        membership.leave(error)
        raise GenerationChanged(str(error)) from error


class Alone:
    """Plain `python`: a world of one without groups, which never changes."""

    groups = None
    gathering = None
    rank = 0
    world_size = 1
    adopted_at_s = 0.0
    rolled_back = False
    kept_own_state = True
    is_alone = True

    def __init__(self, durable: Durable) -> None:
        self.origin = Origin(0, "", 0, 0)
        self.block: Block | None = None
        self.ended = self.over = False
        self.keeper: Keeper | None = None
        self._durable = durable

    @property
    def generation(self) -> int:
        """Number of the generation: one more than that of the checkpoint that this process continues from."""
        return self.origin.generation

    def ensure(self) -> bool:
        """Load the newest checkpoint at the first call, if the job has a checkpoint directory. Only the first call returns
        True."""
        if self.generation > 0:
            return False
        self.origin = self._durable.continue_alone()
        self.adopted_at_s = time.monotonic()
        return True

    def check(self) -> None:
        """Do nothing: a world of one never leaves its generation."""

    def explains(self, error: BaseException) -> bool:  # noqa: ARG002
        """Return False: without groups no error comes from a change of membership."""
        return False

    def leave(self, error: GroupBroken) -> None:
        """There are no groups to leave."""

    def leave_at_cut(self) -> None:
        """There are no groups to leave."""

    def knows_newer(self) -> bool:
        return False

    def must_leave(self) -> bool:
        return False

    def take_prune(self) -> PruneLocally | None:
        """Return None: only this process deletes checkpoints."""
        return None

    def wait_end(self) -> str | None:
        return COMPLETE

    def close(self) -> None:
        """There is nothing to close."""
