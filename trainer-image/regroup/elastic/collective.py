"""`job.collective(name)`: the user's own collectives between steps (evaluation), repeated after a membership change.

Owns who takes part. All ranks of a generation do, except where the generation began while some were inside the block: then
those that were, since the others (a joiner, a rank that missed the commit) go on to the next step and meet them there. A
block is left only when every rank in it has reached its end, so nobody repeats it without the others.
"""

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from .errors import GenerationChanged, GroupBroken
from .groups import Team
from .regrouper import Regrouper

if TYPE_CHECKING:
    from .session import Job


class Blocks:
    """The blocks of one job, counted since the last commit: who takes part in the one that begins here."""

    def __init__(self, job: "Job", regrouper: Regrouper | None) -> None:
        self.num_left = 0
        self._job = job
        self._regrouper = regrouper

    def enter(self, complete: bool) -> tuple[Team | None, bool]:
        """Return who takes part in the block that begins (again) here, and whether all of them had completed it before.

        complete: this process had, and was interrupted while it waited for the others. No team: plain `python`, or
        another rank has left the block already, which it may only when all had completed it.
        """
        if self._regrouper is None:
            return None, complete
        self._regrouper.block = self.num_left + 1
        while True:
            groups, gathering = self._job.regrouped()
            mine, ranks = gathering.arrivals[groups.rank], list(range(groups.world_size))
            if self._job.is_fresh and mine.block:  # the generation began while this process was in the block
                others = [a for a in gathering.arrivals if a.block != mine.block and a.state is not None]
                if complete and any(mine.state is None or a.state >= mine.state for a in others if a.state is not None):
                    return None, True
                ranks = [rank for rank, arrival in enumerate(gathering.arrivals) if arrival.block == mine.block]
            try:
                team = groups.team(ranks, f"{self._job.step}/{self._regrouper.block}")
                num_complete = torch.tensor([int(complete)])
                if team.world_size > 1:
                    team.all_reduce(num_complete)
                return team, int(num_complete) == team.world_size
            except GroupBroken as error:
                self._job.leave(error)

    def left(self) -> None:
        """The block was completed by all."""
        self.num_left += 1
        if self._regrouper is not None:
            self._regrouper.block = 0


class Collective:
    """One block of collectives, as a loop of attempts:

        for attempt in job.collective("eval"):
            with attempt as team:
                team.all_reduce(correct)

    Plain `with job.collective("eval") as team:` is one attempt: a membership change in it raises GenerationChanged.
    """

    def __init__(self, job: "Job", blocks: Blocks, name: str) -> None:
        self.name = name
        self._job = job
        self._blocks = blocks
        self._done = False
        self._repeats = False
        self._entered = False
        """The next attempt's team stands already."""
        self._team: Team | None = None

    def __iter__(self) -> Iterator["Collective"]:
        self._repeats = True
        while not self._done:
            yield self

    def __enter__(self) -> "Collective":
        if not self._entered:
            self._team, _ = self._blocks.enter(complete=False)
        self._entered = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> bool:
        if error is None:
            try:
                self._all_reduce(torch.zeros(1))  # everyone has reached the end
                self._done = True
            except GroupBroken as broken:
                self._job.leave(broken)
                error = broken
                # Whoever is in it again says whether it, too, had reached the end.
                self._team, self._done = self._blocks.enter(complete=True)
                self._entered = not self._done
        elif not self._job.is_membership(error):
            return False
        if self._done:
            self._blocks.left()
            return False
        if self._repeats:
            return True
        raise GenerationChanged(
            f'The group changed inside job.collective("{self.name}"). '
            f'To have it repeated, write: for attempt in job.collective("{self.name}"): with attempt as team: ...'
        ) from error

    @property
    def rank(self) -> int:
        """Index of this process among those in the block."""
        return self._team.rank if self._team is not None else 0

    @property
    def world_size(self) -> int:
        """Number of processes in the block."""
        return self._team.world_size if self._team is not None else 1

    @property
    def group(self) -> Any:
        """The processes in the block, for `torch.distributed` calls with `group=`; None in plain `python`."""
        return self._team.group if self._team is not None else None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the processes in the block, in place, and return it. In a world of one: unchanged."""
        try:
            return self._all_reduce(tensor)
        except GroupBroken as error:
            raise GenerationChanged(str(error)) from error

    def _all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._team is not None and self._team.world_size > 1:
            self._team.all_reduce(tensor)
        return tensor
