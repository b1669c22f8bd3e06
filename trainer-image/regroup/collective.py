"""`job.collective(name)`: the user's own collectives between steps (evaluation), repeated after a membership change.

This module decides which ranks take part in a block: mostly all of the generation. If the generation began while some ranks were
inside the block, only ranks at the same place of the script take part. The others (a joiner, a rank that missed the commit) go on
to the next step and meet them there. A rank leaves a block only when every rank in it has reached its end, so no rank has to
repeat the block alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from regroup.generation import living
from regroup.generation.adoption import BEFORE_LOOP, Arrival, Block
from regroup.generation.edges import Edges
from regroup.generation.groups import Gathering, Groups
from regroup.generation.membership import Membership, leaves_broken
from regroup.generation.team import Team, form_team

from .errors import BackendError, GenerationChanged, GroupBroken, UsageError
from .parallel import fsdp, pipeline
from .parameter_server.served_committer import ServedCommitter
from .state.training import TrainingState
from .transaction.commit import Committer


def together(arrivals: Sequence[Arrival], rank: int, here: Block) -> list[int]:
    """Return the ranks that run the block `here`, which `rank` enters before its generation's first commit. Pure.

    All ranks of a block come to the same answer from the arrivals. The answer lacks `rank` if it has completed the block and
    another rank has already left it. Raises UsageError if other ranks are in another block at the same place.
    """
    there = [a.block if a.block is not None and a.block.place == here.place else None for a in arrivals]
    if there[rank] is None:
        # Ranks that were at this place when the generation began repeat the block by themselves. They cannot know
        # whether the others, such as this rank, come through here before the next commit.
        return [other for other, block in enumerate(there) if block is None]
    for block in there:
        if block is not None and block.number == here.number and block.name != here.name:
            raise UsageError(
                f'Some ranks are in job.collective("{block.name}"), others in job.collective("{here.name}"). '
                "Enter the same blocks in the same order on all ranks."
            )
    inside = {other: block for other, block in enumerate(there) if block is not None and block.number <= here.number}
    outside = [a.state for other, a in enumerate(arrivals) if other not in inside and a.state is not None]

    def left(other: int, block: Block) -> bool:
        mine = arrivals[other].state
        complete = block.complete and block.number == here.number
        return complete and any(mine is None or state >= mine for state in outside)

    return [other for other, block in inside.items() if not left(other, block)]


def with_whole_groups(ranks: Sequence[int], rank: int, size: int) -> list[int]:
    """Return the ranks whose whole model group of `size` ranks is among `ranks`, or `rank` alone if its own group is not. Pure.

    A split model computes with all ranks of its group, so ranks of incomplete groups must not wait for each other.
    """
    whole = {one // size for one in ranks if set(range(one - one % size, one - one % size + size)) <= set(ranks)}
    return [one for one in ranks if one // size in whole] if rank // size in whole else [rank]


class Blocks:
    """The blocks of one job. They are counted since the last commit, by which ranks recognise the same block."""

    def __init__(
        self,
        membership: Membership,
        committer: Committer | ServedCommitter,
        state: TrainingState,
        follow: Callable[[], None],
    ) -> None:
        """`follow` enters the newest generation if this process must follow it."""
        self.num_left = 0
        self.loop_begun = False
        self.rehearses = False
        """A step is being rehearsed, in which this process is alone."""
        self.is_over = False
        """The job has ended."""
        self.membership = membership
        self._committer, self._state, self._follow = committer, state, follow

    def here(self, name: str) -> Block:
        """Return the block of this name at the present place of the script. Raises UsageError if no block may begin here."""
        block = f'job.collective("{name}")'
        if self.is_over:
            raise UsageError(
                f"{block} comes after the loop, when the job has ended and its ranks no longer meet. "
                "Move it into the loop, after the commit of the last step."
            )
        if self._committer.in_step:
            raise UsageError(
                f"{block} is inside `with step:` before step.commit(), where the group must not change. "
                "Move it after the block of the step."
            )
        return Block(self._state.step if self.loop_begun else BEFORE_LOOP, self.num_left + 1, name)

    def enter(self, here: Block) -> tuple[Team | None, bool]:
        """Return the team of the block that begins, or begins again, and whether all of its ranks had completed the block before.

        The team is None in plain `python`, in a rehearsal, and if another rank has already left the block. A rank may do so only
        after all had completed it.
        """
        membership = self.membership
        if membership.is_alone or self.rehearses:
            return None, here.complete
        membership.block = here
        while True:
            self._follow()
            if membership.over:  # the other ranks have passed this block before their last step
                return None, here.complete
            groups, gathering = membership.groups, membership.gathering
            assert groups is not None
            assert gathering is not None
            ranks = self._ranks(groups, gathering, here)
            if groups.rank not in ranks:
                return None, True
            try:
                # The name has the first rank: ranks that were here before and ranks that come later may form two teams.
                team = form_team(groups, ranks, f"{here.place}/{here.number}/{here.name}/{ranks[0]}")
                num_complete = torch.tensor([int(here.complete)])
                if team.world_size > 1:
                    team.all_reduce(num_complete)
                return team, int(num_complete) == team.world_size
            except (GroupBroken, BackendError) as error:
                if not membership.explains(error):
                    raise

    def _ranks(self, groups: Groups, gathering: Gathering, here: Block) -> list[int]:
        """Return the ranks that run the block. Without this one, if somebody has left the block, which all had completed then."""
        if self._committer.num_committed > 0:
            return list(range(groups.world_size))
        ranks = together(gathering.arrivals, groups.rank, here)
        if groups.rank in ranks:
            size = self._committer.plan.layout.size
            ranks = with_whole_groups(ranks, groups.rank, size)
            living.refuse(len(ranks) < size)
        return ranks

    def left(self) -> None:
        """Count a block that all ranks have completed, or that this process cannot repeat."""
        self.num_left += not self.rehearses
        self.membership.block = None
        living.refuse(False)

    def forward(self, inputs: tuple[Any, ...]) -> Any:
        """Run the model's forward pass. Raises GenerationChanged, Apart and BackendError."""
        model, groups = self._state.model, self.membership.groups
        with leaves_broken(self.membership):  # ranks of other groups may wait for this one, and must hear of the error
            if not isinstance(model, pipeline.Pipeline) or not model.is_split:
                return model(*inputs)
            living.check_together()
            assert groups is not None
            return pipeline.forward(model, inputs, Edges(groups))

    def ends(self) -> None:
        """Reset the split model at the end of an attempt, in which a forward may have been cut off.

        Its parameters are split again. Otherwise this rank waits for the gather of a group that has ended, or skips a gather that
        the others begin.
        """
        living.refuse(False)
        fsdp.begin_anew(self._state.model)


class Collective:
    """One block of collectives, as a loop of attempts:

        for attempt in job.collective("eval"):
            with attempt as team:
                team.all_reduce(correct)

    Plain `with job.collective("eval") as team:` is one attempt: a membership change in it raises GenerationChanged.
    """

    def __init__(self, blocks: Blocks, name: str) -> None:
        self.name = name
        self._blocks = blocks
        self._done = False
        self._repeats = False
        self._entered = False
        """The team of the next attempt has been formed."""
        self._team: Team | None = None
        self._here: Block | None = None
        """Number and place of the block in the script; None before the first attempt."""

    def __iter__(self) -> Iterator["Collective"]:
        self._repeats = True
        while not self._done:
            yield self

    def __enter__(self) -> "Collective":
        if self._here is None:
            self._here = self._blocks.here(self.name)
        if not self._entered:
            self._team, _ = self._blocks.enter(self._here)
        self._entered = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> bool:
        self._blocks.ends()
        if error is None:
            error = self._meet()
        elif not self._blocks.membership.explains(error):
            return False
        else:
            self._done = isinstance(error, living.Apart) and self._repeats
        if self._repeats and not self._done:
            return True
        self._here = None
        if self._done:
            self._blocks.left()
            return error is not None and self._repeats
        raise GenerationChanged(
            f'The group changed inside job.collective("{self.name}"). '
            f'To have it repeated, write: for attempt in job.collective("{self.name}"): with attempt as team: ...'
        ) from error

    def _meet(self) -> BaseException | None:
        """Meet the other processes at the end of the block. Returns None, or the error by which a membership change cut it off.

        After a change the block is entered again, to learn whether all others had reached its end, too.
        """
        try:
            self._all_reduce(torch.zeros(1))
            self._done = True
            return None
        except (GroupBroken, BackendError) as broken:
            if not self._blocks.membership.explains(broken):
                raise
            assert self._here is not None
            self._team, self._done = self._blocks.enter(replace(self._here, complete=True))
            self._entered = not self._done
            return broken

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
        """The process group of the block, for `torch.distributed` calls with `group=`; None in plain `python`.

        On CPU such a call may block for ever if a peer dies in it. `all_reduce` of this class never does.
        """
        return self._team.group if self._team is not None else None

    def forward(self, *inputs: Any) -> Any:
        """Return the model's output for a batch. In a pipeline only the last stage has it; the others return None.

        All processes of a model group must call it equally often, those of a pipeline with the same inputs. Raises BackendError.
        """
        try:
            return self._blocks.forward(inputs)
        except BackendError as error:
            raise error.with_traceback(None) from None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the processes in the block, in place, and return it. With one process it stays unchanged.

        Raises BackendError with the backend's text, for example for a dtype that the backend does not know, and GenerationChanged
        if the group changes meanwhile.
        """
        try:
            return self._all_reduce(tensor)
        except GroupBroken as error:
            raise GenerationChanged(str(error)) from error
        except BackendError as error:
            raise error.with_traceback(None) from None  # the script's line is what matters

    def _all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        team = self._team
        if team is None or team.world_size == 1:
            return tensor
        if team.nccl is None and tensor.device.type != "cpu":  # a team of some ranks has gloo only
            host = tensor.detach().cpu()
            team.all_reduce(host)
            tensor.detach().copy_(host)
        else:
            team.all_reduce(tensor)
        return tensor
