"""The fixed tree, and sums along it, with an exchange inside this process."""

import math

import pytest
import torch

from regroup.data import DataError, ExactSum, shares_of
from regroup.data.sum_tree import Counter, Node, finish, left_siblings, nodes_of


class Alone:
    """The exchange of a world of one: nothing may be sent."""

    def all_to_all(self, *_: object) -> None:
        raise AssertionError

    all_gather = all_to_all


def formula(start: int, stop: int, num_virtual: int) -> str:
    """Return the sum over a share as text, so that its order of additions can be compared."""
    nodes = [(Node(v, v + 1), str(v)) for v in range(start, stop)]
    return finish(num_virtual, nodes, lambda a, b: f"({a}+{b})")


def test_tree_of_five() -> None:
    assert formula(0, 5, 5) == "(((0+1)+2)+(3+4))"


def test_order_of_additions_is_the_same_for_every_partition() -> None:
    for num_virtual in range(1, 24):
        want = formula(0, num_virtual, num_virtual)
        for a in range(num_virtual + 1):
            for b in range(a, num_virtual + 1):
                gathered = []
                for start, stop in [(0, a), (a, b), (b, num_virtual)]:
                    counter: Counter[str] = Counter(num_virtual, lambda left, right: f"({left}+{right})")
                    for v in range(start, stop):
                        counter.push(Node(v, v + 1), str(v))
                    assert tuple(node for node, _ in counter.held) == nodes_of(num_virtual, start, stop)
                    gathered += counter.held
                assert finish(num_virtual, gathered, lambda left, right: f"({left}+{right})") == want


def test_tree_has_one_merge_fewer_than_leaves() -> None:
    for num_virtual in range(1, 200):
        assert len(left_siblings(num_virtual)) == num_virtual - 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_held_while_accumulating_is_logarithmic(world_size: int) -> None:
    spare = 1 if world_size & (world_size - 1) == 0 else 2
    for num_virtual in range(world_size, 301):
        for share in shares_of(num_virtual, world_size):
            counter: Counter[None] = Counter(num_virtual, lambda _left, _right: None)
            for v in share:
                counter.push(Node(v, v + 1), None)
                assert len(counter.held) <= math.log2(num_virtual) + spare, (num_virtual, share)
            if spare == 1:
                assert len(counter.held) == 1  # a power of two of ranks sends one copy each


def test_sum_alone_adds_every_tensor_once_and_reuses_its_buffers() -> None:
    exact = ExactSum(shares_of(6, 1), 0)
    flat = torch.empty(3)
    for turn in range(2):
        for v in range(6):
            exact.add(v, flat.copy_(torch.tensor([1.0, 10.0**v, turn])))
        assert exact.reduce(Alone()).tolist() == [6.0, 111111.0, 6.0 * turn]
        assert flat.tolist() == [1.0, 100000.0, turn]
    assert exact.num_held == 0


def test_sum_of_a_step_that_was_given_up_leaves_nothing_behind() -> None:
    exact = ExactSum(shares_of(3, 1), 0)
    exact.add(0, torch.ones(2))
    exact.add(1, torch.ones(2))
    exact.reset()
    for v in range(3):
        exact.add(v, torch.full((2,), 5.0))
    assert exact.reduce(Alone(), out=torch.zeros(2)).tolist() == [15.0, 15.0]


def test_sum_refuses_virtual_workers_out_of_order_and_missing_ones() -> None:
    exact = ExactSum(shares_of(4, 2), 1)
    with pytest.raises(ValueError, match="virtual worker 0 was added, 2 of share"):
        exact.add(0, torch.ones(1))
    exact.add(2, torch.ones(1))
    with pytest.raises(ValueError, match="1 of 2 virtual workers were added"):
        exact.reduce(Alone())
    with pytest.raises(ValueError, match="a rank with an empty share has to pass out"):
        ExactSum(shares_of(1, 2), 1).reduce(Alone())


@pytest.mark.parametrize("shares", [(range(0, 2), range(3, 4)), (range(1, 2),), (range(0, 0),)])
def test_shares_with_a_hole_are_refused(shares: tuple[range, ...]) -> None:
    with pytest.raises(DataError, match="Pass"):
        ExactSum(shares, 0)
