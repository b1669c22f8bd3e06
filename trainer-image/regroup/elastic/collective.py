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

if TYPE_CHECKING:
    from .session import Job


class Collective:
    """One block of collectives, as a loop of attempts:

        for attempt in job.collective("eval"):
            with attempt as team:
                team.all_reduce(correct)

    Plain `with job.collective("eval") as team:` is one attempt: a membership change in it raises GenerationChanged.
    """

    def __init__(self, job: "Job", name: str) -> None:
        self.name = name
        self._job = job
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
            self._team, _ = self._job._enter_block(complete=False)
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
                self._job._leave(broken)
                error = broken
                # Whoever is in it again says whether it, too, had reached the end.
                self._team, self._done = self._job._enter_block(complete=True)
                self._entered = not self._done
        elif not self._job._block_interrupted(error):
            return False
        if self._done:
            self._job._left_block()
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
