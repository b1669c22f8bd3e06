"""The fixed binary tree over virtual workers, along which `exact` sums tensors. Pure index arithmetic.

A node is a range of virtual workers, and stands for their partial sum. The root has all V of them. The nodes at depth d
cut that range at the multiples of V / 2**d, rounded up, down to single virtual workers. The tree depends on V alone, so
floating-point sums along it do not depend on the number of ranks.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """The partial sum of virtual workers start .. stop-1."""

    start: int
    stop: int


@lru_cache(maxsize=8)
def left_siblings(num_virtual: int) -> dict[Node, Node]:
    """Return the left child of the same parent for each right child of the tree."""

    def cut(part: int, parts: int) -> int:
        return -(-part * num_virtual // parts)

    siblings: dict[Node, Node] = {}
    parts = 2
    while parts < 2 * num_virtual:
        for part in range(0, parts, 2):
            start, middle, stop = cut(part, parts), cut(part + 1, parts), cut(part + 2, parts)
            if start < middle < stop:
                siblings[Node(middle, stop)] = Node(start, middle)
        parts *= 2
    return siblings


class Counter(Generic[T]):
    """Partial sums of neighbouring nodes. They are merged as soon as both children are there, like carries in a binary counter.

    `merge(left, right)` returns the sum of two nodes.
    """

    def __init__(self, num_virtual: int, merge: Callable[[T, T], T]) -> None:
        self._left_of = left_siblings(num_virtual)
        self._merge = merge
        self.held: list[tuple[Node, T]] = []

    def push(self, node: Node, value: T) -> None:
        """Add the node to the right of those that are held, and merge it with them as far as possible."""
        while self.held and self._left_of.get(node) == self.held[-1][0]:
            left, left_value = self.held.pop()
            node, value = Node(left.start, node.stop), self._merge(left_value, value)
        self.held.append((node, value))


@lru_cache(maxsize=4096)
def nodes_of(num_virtual: int, start: int, stop: int) -> tuple[Node, ...]:
    """Return the nodes that a rank holds after it has added virtual workers start .. stop-1 from left to right."""
    counter: Counter[None] = Counter(num_virtual, lambda _left, _right: None)
    for v in range(start, stop):
        counter.push(Node(v, v + 1), None)
    return tuple(node for node, _ in counter.held)


def finish(num_virtual: int, nodes: Iterable[tuple[Node, T]], merge: Callable[[T, T], T]) -> T:
    """Return the sum at the root. The nodes must cover all virtual workers from left to right."""
    counter = Counter(num_virtual, merge)
    for node, value in nodes:
        counter.push(node, value)
    ((_, total),) = counter.held
    return total
