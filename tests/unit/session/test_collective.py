"""Who repeats a block of the user's collectives in a generation that began while some ranks were in one."""

from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from regroup.collective import Blocks, Collective, together, with_whole_groups
from regroup.errors import UsageError
from regroup.generation.adoption import BEFORE_LOOP, Arrival, Block
from regroup.protocol.state import StatePair
from tests.unit.parallel.fake_device import DEVICE, FakeDevice


def at(step: int, block: Block | None = None, generation: int = 1) -> Arrival:
    return Arrival(StatePair(generation, step), generation, generation, block)


def fresh(block: Block | None = None) -> Arrival:
    """A process that holds nothing yet."""
    return Arrival(None, 0, 0, block)


EVAL = Block(10, 1, "eval")
TEST = Block(10, 2, "test")
DONE = Block(10, 1, "eval", complete=True)
SETUP = Block(BEFORE_LOOP, 1, "setup")
SET_UP = Block(BEFORE_LOOP, 1, "setup", complete=True)


@pytest.mark.parametrize(
    ("arrivals", "here", "want"),
    [
        pytest.param([at(10, EVAL), at(10, EVAL), fresh()], EVAL, {0: [0, 1], 1: [0, 1]}, id="a joiner is left out"),
        pytest.param(
            [at(10, EVAL), fresh(SETUP), at(10, EVAL)],
            EVAL,
            {0: [0, 2], 2: [0, 2]},
            id="a block before the loop is another one than a block in it",
        ),
        pytest.param([at(10, EVAL), fresh(SETUP), at(10, EVAL)], SETUP, {1: [1]}, id="the joiner's block is its own"),
        pytest.param(
            [at(0, SETUP), fresh(SETUP), at(0, SET_UP)],
            SETUP,
            {0: [0, 1, 2], 1: [0, 1, 2], 2: [0, 1, 2]},
            id="a block before the loop is repeated by all, also by one that had ended it, and with one that starts anew",
        ),
        pytest.param(
            [at(10, EVAL), at(10), at(10)],
            EVAL,
            {0: [0], 1: [1, 2], 2: [1, 2]},
            id="those that come to this place later meet one another, not those that were there",
        ),
        pytest.param([at(10, DONE), at(10)], EVAL, {0: []}, id="who had ended it does not repeat it once one has left"),
        pytest.param(
            [at(10, DONE), at(9)], EVAL, {0: [0]}, id="one that missed the commit has not left it, and does not come"
        ),
        pytest.param(
            [at(10, DONE), at(10, TEST)], EVAL, {0: []}, id="who is in the next block has left this one"
        ),
        pytest.param(
            [at(10, DONE), at(10, TEST)], TEST, {0: [0, 1], 1: [0, 1]}, id="the others follow into the next block"
        ),
        pytest.param(
            [at(0, SET_UP), fresh(SETUP), at(0)],
            SETUP,
            {0: [], 1: [1]},
            id="nobody waits for one that does not repeat it",
        ),
    ],
)  # fmt: skip
def test_who_takes_part(arrivals: list[Arrival], here: Block, want: dict[int, list[int]]) -> None:
    for rank, ranks in want.items():
        got = together(arrivals, rank, here)
        assert (got if rank in got else []) == ranks


def test_all_that_repeat_a_block_agree_on_who_they_are() -> None:
    kinds = [at(10), at(9), fresh(), fresh(SETUP), at(10, EVAL), at(10, DONE), at(10, TEST)]
    for arrivals in product(kinds, repeat=3):
        for here in (EVAL, TEST, SETUP):
            teams = [together(arrivals, rank, here) for rank in range(3)]
            for rank, team in enumerate(teams):
                assert all(teams[other] == team for other in team if rank in team), (arrivals, here, teams)


def test_ranks_in_different_blocks_at_one_place_are_told_so() -> None:
    arrivals = [at(10, EVAL), at(10, Block(10, 1, "test"))]
    with pytest.raises(UsageError, match=r'job\.collective\("test"\), others in job\.collective\("eval"\)'):
        together(arrivals, 0, EVAL)


@pytest.mark.parametrize(
    ("ranks", "size", "want"),
    [
        pytest.param([0, 2, 3], 1, {0: [0, 2, 3], 2: [0, 2, 3]}, id="without a mesh each rank is a group"),
        pytest.param([0, 2, 3], 2, {0: [0], 2: [2, 3], 3: [2, 3]}, id="a rank whose partner is elsewhere is alone"),
        pytest.param([0, 1, 2, 3], 2, {0: [0, 1, 2, 3], 3: [0, 1, 2, 3]}, id="all groups are whole"),
        pytest.param([1, 2], 2, {1: [1], 2: [2]}, id="no group is whole"),
        pytest.param([0, 1, 2, 4, 5], 3, {1: [0, 1, 2], 4: [4], 5: [5]}, id="a group of three lacks one"),
    ],
)  # fmt: skip
def test_model_groups_take_part_as_a_whole(ranks: list[int], size: int, want: dict[int, list[int]]) -> None:
    for rank, team in want.items():
        assert with_whole_groups(ranks, rank, size) == team


def test_arrival_survives_its_form_on_the_way() -> None:
    for arrival in (fresh(), at(3, DONE), Arrival(StatePair(2, 7), 3, 4, EVAL, ended=True, seed=2**64 - 1)):
        as_sent = [list(value) if isinstance(value, tuple) else value for value in arrival.to_json()]
        assert Arrival.from_json(as_sent) == arrival


@pytest.mark.parametrize(("nccl", "device"), [(None, "cpu"), ("NCCL", DEVICE.type)], ids=["some ranks", "all ranks"])
def test_sum_among_some_ranks_goes_through_host_memory(nccl: Any, device: str) -> None:
    """A group of some ranks has gloo only."""
    seen: list[str] = []

    def all_reduce(tensor: torch.Tensor) -> None:
        seen.append(tensor.device.type)
        tensor.mul_(2)

    block = Collective(cast(Blocks, None), "eval")
    block._team = cast(Any, SimpleNamespace(world_size=2, nccl=nccl, all_reduce=all_reduce))
    with FakeDevice():
        right = torch.ones(2).to(DEVICE)
        assert block.all_reduce(right) is right
        assert right.to("cpu").tolist() == [2, 2]
    assert seen == [device]
