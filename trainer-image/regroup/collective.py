"""`job.collective(name)`: the user's own collectives between steps (evaluation), repeated after a membership change.

Owns who takes part. All ranks of a generation do, except where the generation began while some were inside the block: then
those that were at the same place of the script, since the others (a joiner, a rank that missed the commit) go on to the next step
and meet them there. A block is left only when every rank in it has reached its end, so nobody repeats it without the others.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from regroup.generation import living
from regroup.generation.adoption import BEFORE_LOOP, Arrival, Block
from regroup.generation.edges import Edges
from regroup.generation.membership import Membership, leaves_broken
from regroup.generation.team import Team, form_team

from .errors import BackendError, GenerationChanged, GroupBroken, UsageError
from .parallel import fsdp, pipeline
from .state.training import TrainingState
from .transaction.commit import Committer
from .transaction.served import ServedCommitter


def together(arrivals: Sequence[Arrival], rank: int, here: Block) -> list[int]:
    """Return the ranks that run the block `here`, which `rank` enters before its generation's first commit.

    Without `rank` itself: it has completed the block, and somebody has left it already. Pure. Raises UsageError when
    other ranks are in another block at the same place. The ranks of one block agree on this, as do those of the rest.
    """
    there = [a.block if a.block is not None and a.block.place == here.place else None for a in arrivals]
    if there[rank] is None:
        # Those that were at this place when the generation began repeat the block without the others: they cannot know
        # whether these come through here before the next commit.
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
    """Return those of `ranks` whose model group of `size` ranks is there as a whole, where that of `rank` is; else `rank` alone.

    Pure. A split model computes with all ranks of its group: the others of such a group must not wait for it, nor it for them.
    """
    whole = {one // size for one in ranks if set(range(one - one % size, one - one % size + size)) <= set(ranks)}
    return [one for one in ranks if one // size in whole] if rank // size in whole else [rank]


class Blocks:
    """The blocks of one job, counted since the last commit: who takes part in the one that begins here."""

    def __init__(
        self,
        membership: Membership,
        committer: Committer | ServedCommitter,
        state: TrainingState,
        follow: Callable[[], None],
    ) -> None:
        """`follow` is called to be in the newest generation that must be followed."""
        self.num_left = 0
        self.loop_begun = False
        self.rehearses = False
        """A step is rehearsed: this process is alone for the time being."""
        self.is_over = False
        """The job has ended."""
        self.membership = membership
        self._committer, self._state, self._follow = committer, state, follow

    def here(self, name: str) -> Block:
        """Return where in the script this process is. Raises UsageError where no block may be entered."""
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
        """Return who takes part in the block that begins (again) here, and whether all of them had completed it before.

        No team: plain `python`, a rehearsal, or another rank has left the block already, which it may only when all had
        completed it.
        """
        membership = self.membership
        if membership.is_alone or self.rehearses:
            return None, here.complete
        membership.block = here
        while True:
            self._follow()
            if membership.over:  # the others were here before their last step
                return None, here.complete
            groups, gathering = membership.groups, membership.gathering
            assert groups is not None
            assert gathering is not None
            ranks = list(range(groups.world_size))
            if self._committer.num_committed == 0:
                ranks = together(gathering.arrivals, groups.rank, here)
                if groups.rank not in ranks:
                    return None, True
                size = self._committer.plan.layout.size
                ranks = with_whole_groups(ranks, groups.rank, size)
                living.refuse(len(ranks) < size)
            try:
                # By the first rank, too: ranks that were here before and ranks that come later may be two teams of one block.
                team = form_team(groups, ranks, f"{here.place}/{here.number}/{here.name}/{ranks[0]}")
                num_complete = torch.tensor([int(here.complete)])
                if team.world_size > 1:
                    team.all_reduce(num_complete)
                return team, int(num_complete) == team.world_size
            except (GroupBroken, BackendError) as error:
                if not membership.explains(error):
                    raise

    def left(self) -> None:
        """The block was completed by all, or this process cannot repeat it."""
        self.num_left += not self.rehearses
        self.membership.block = None
        living.refuse(False)

    def forward(self, inputs: tuple[Any, ...]) -> Any:
        """Run the model's forward pass. Raises GenerationChanged, Apart and BackendError."""
        model, groups = self._state.model, self.membership.groups
        with leaves_broken(self.membership):  # other groups may not have noticed, and wait for this rank
            if not isinstance(model, pipeline.Pipeline) or not model.is_split:
                return model(*inputs)
            living.check_together()
            assert groups is not None
            return pipeline.forward(model, inputs, Edges(groups))

    def ends(self) -> None:
        """The block ends, one way or another. A forward of a split model may have been cut off in it. Its parameters are split
        again: else this rank would wait for the gather of a group that has ended, or skip one that the others begin."""
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
        """The next attempt's team stands already."""
        self._team: Team | None = None
        self._here: Block | None = None
        """Where it is in the script, from the first attempt on."""

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
            try:
                self._all_reduce(torch.zeros(1))  # everyone has reached the end
                self._done = True
            except (GroupBroken, BackendError) as broken:
                if not self._blocks.membership.explains(broken):
                    raise
                error = broken
                # Whoever is in it again says whether it, too, had reached the end.
                assert self._here is not None
                self._team, self._done = self._blocks.enter(replace(self._here, complete=True))
                self._entered = not self._done
        elif not self._blocks.membership.explains(error):
            return False
        else:
            self._done = isinstance(error, living.Apart) and self._repeats
        if self._done:
            self._here = None
            self._blocks.left()
            return error is not None and self._repeats
        if self._repeats:
            return True
        self._here = None
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
        """The processes in the block, for `torch.distributed` calls with `group=`; None in plain `python`.

        On CPU such a call may stay blocked for good when a peer dies in it (`Team.group`); `all_reduce` never does.
        """
        return self._team.group if self._team is not None else None

    def forward(self, *inputs: Any) -> Any:
        """Return what the model makes of a batch: of any model, and of a pipeline where its last stage is; None where it is not.

        All processes of a model group call it as often, those of a pipeline with the same inputs. Raises BackendError.
        """
        try:
            return self._blocks.forward(inputs)
        except BackendError as error:
            raise error.with_traceback(None) from None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the processes in the block, in place, and return it. In a world of one: unchanged.

        Raises BackendError with the backend's text, on every rank that has it: for example for a type that it does not know.
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
        if team.nccl is None and tensor.device.type != "cpu":  # some ranks of a generation: they have gloo only
            host = tensor.detach().cpu()
            team.all_reduce(host)
            tensor.detach().copy_(host)
        else:
            team.all_reduce(tensor)
        return tensor
