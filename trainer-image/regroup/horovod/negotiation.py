"""Decides which collective runs next, and which request is an error. Pure: no socket, no clock, no tensor.

Each rank asks for collectives by name, in any order. The coordinator on rank 0 feeds all requests into one `Table`. The table
answers with orders, and each rank gets the same orders in the same sequence. So all ranks run the same collectives in one order.
A request that does not match those of the other ranks becomes an order with an error, in Horovod's words, for all of them.

The table holds a name only until its order is given, so it never grows beyond what the ranks wait for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from regroup.horovod.errors import SHUT_DOWN

ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL = "allreduce", "allgather", "broadcast", "alltoall"
REDUCESCATTER, BARRIER, JOIN = "reducescatter", "barrier", "join"
ADD_SET, REMOVE_SET = "add_process_set", "remove_process_set"
GLOBAL_SET = 0

_SAYS = {
    ALLREDUCE: "ALLREDUCE", ALLGATHER: "ALLGATHER", BROADCAST: "BROADCAST", ALLTOALL: "ALLTOALL",
    REDUCESCATTER: "REDUCESCATTER", BARRIER: "BARRIER", JOIN: "JOIN",
}  # fmt: skip
_FREE_FIRST_DIMENSION = (ALLGATHER, ALLTOALL)
_NOT_WITH_JOIN = {
    ALLGATHER: "Allgather is not supported with Join at this time. Specify sparse_as_dense=True if using DistributedOptimizer",
    ALLTOALL: "Alltoall is not supported with Join at this time.",
    REDUCESCATTER: "Reducescatter is not supported with Join at this time.",
    BROADCAST: "Broadcast is not supported with Join at this time.",
}


@dataclass(frozen=True)
class Request:
    """A request of one rank. Everything that the ranks must agree on is in it, and no data."""

    kind: str
    name: str
    set_id: int = GLOBAL_SET
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shape of each tensor. A group of tensors is one request."""
    dtypes: tuple[str, ...] = ()
    device: str = "CPU"
    op: int = 0
    """Reduction operation, as in `hvd.Sum`."""
    factors: tuple[float, float] = (1.0, 1.0)
    """Prescale and postscale factor."""
    root: int = 0
    splits: tuple[int, ...] = ()
    """Rows of an alltoall for each member."""
    ranks: tuple[int, ...] = ()
    """Ranks of the process set to add."""

    @property
    def key(self) -> tuple[int, str]:
        return self.set_id, self.name


@dataclass(frozen=True)
class Order:
    """Tells each rank to run one collective, or to raise an error in its place."""

    request: Request
    """The request of the rank that asked first."""
    error: str = ""
    sizes: tuple[tuple[int, ...], ...] = ()
    """For each member: rows of each tensor (allgather), or rows for each member (alltoall)."""
    value: int = 0
    """Rank that joined last, or the id of the new process set."""


def to_wire(record: Request | Order) -> list[Any]:
    """Return the record as JSON can carry it."""
    return [to_wire(value) if isinstance(value, Request) else value for value in _values(record)]


def request_of(wire: Any) -> Request:
    """Return the request that `to_wire` made this of. Raises ValueError or TypeError for anything else."""
    kind, name, set_id, shapes, dtypes, device, op, factors, root, splits, ranks = wire
    return Request(
        str(kind), str(name), int(set_id), tuple(tuple(map(int, shape)) for shape in shapes), tuple(map(str, dtypes)), str(device),
        int(op), (float(factors[0]), float(factors[1])), int(root), tuple(map(int, splits)), tuple(map(int, ranks)),
    )  # fmt: skip


def order_of(wire: Any) -> Order:
    """Return the order that `to_wire` made this of. Raises ValueError or TypeError for anything else."""
    request, error, sizes, value = wire
    return Order(request_of(request), str(error), tuple(tuple(map(int, row)) for row in sizes), int(value))


def _values(record: Request | Order) -> Iterable[Any]:
    return (getattr(record, each.name) for each in dataclasses.fields(record))


@dataclass
class Table:
    """Requests of all ranks that wait for other ranks."""

    size: int
    asked: dict[tuple[int, str], dict[int, Request]] = field(default_factory=dict)
    """Maps a set and a name to the requests, by rank, in the order in which they came."""
    sets: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Ranks of each process set."""
    joined: list[int] = field(default_factory=list)
    """Ranks that have joined, in the order in which they did."""
    gone: set[int] = field(default_factory=set)
    """Ranks that have shut down."""
    waits: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Maps a rank to the name that it waits for, while it has asked for that name and the order is not given."""
    next_set: int = GLOBAL_SET + 1

    def __post_init__(self) -> None:
        self.sets[GLOBAL_SET] = tuple(range(self.size))

    def take(self, rank: int, request: Request) -> list[Order]:
        """Take in a request, and return the orders that follow from it."""
        if request.set_id not in self.sets:
            return [Order(request, _no_set(request.set_id))]
        if request.kind == JOIN:
            self.joined.append(rank)
        self.asked.setdefault(request.key, {})[rank] = request
        return self._ready([request.key] if request.kind != JOIN else list(self.asked))

    def leave(self, rank: int) -> list[Order]:
        """Note that a rank has shut down. What needs it becomes an error for the others."""
        self.gone.add(rank)
        return self._ready(list(self.asked))

    def wait(self, rank: int, key: tuple[int, str]) -> None:
        """Note that a rank is blocked until this name is complete."""
        if rank in self.asked.get(key, {}):  # otherwise the order was given before the rank's message came
            self.waits[rank] = key

    def is_stuck(self) -> bool:
        """Return whether each rank waits for a name that another rank has not asked for. Then no rank can ask any more."""
        return bool(self.asked) and all(rank in self.gone or rank in self.waits for rank in range(self.size))

    def give_up(self) -> list[Order]:
        """Return an error for each name, since no rank can complete any of them."""
        orders = [Order(_first(asked), self._stuck(key, asked)) for key, asked in self.asked.items()]
        self.asked.clear()
        self.waits.clear()
        self.joined.clear()
        return orders

    def _stuck(self, key: tuple[int, str], asked: dict[int, Request]) -> str:
        kind, _, base = key[1].partition(".")
        for (set_id, other), _asked in self.asked.items():
            other_kind, _, other_base = other.partition(".")
            if set_id == key[0] and base == other_base and other_kind != kind and base:
                return (
                    f"Mismatched operations: One rank did an {_SAYS.get(kind, kind)}, but another rank did an "
                    f"{_SAYS.get(other_kind, other_kind)}."
                )
        missing = sorted(set(self.sets[key[0]]) - set(asked) - set(self.joined))
        others = sorted({name for _, name in self.asked if name != key[1]})[:5]
        return (
            "Mismatched names: One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and "
            f"are waiting for remainder of ranks. Ranks {_list(sorted(asked))} asked for {key[1]}; ranks {_list(missing)} did not"
            + (f", and wait for {', '.join(others)}." if others else ".")
        )

    def _ready(self, keys: list[tuple[int, str]]) -> list[Order]:
        orders = []
        for key in keys:
            asked, members = self.asked[key], self.sets[key[0]]
            first = _first(asked)
            # A rank that has said goodbye runs no order, even if it asked.
            if any(rank in self.gone for rank in members):
                order = Order(first, SHUT_DOWN)
            elif all(rank in asked or (rank in self.joined and first.kind != JOIN) for rank in members):
                order = self._order(asked, members)
            else:
                continue
            if first.kind == REMOVE_SET and not order.error:
                orders += self._without_set(first.root)
            orders.append(order)
            self._forget(key)
        return orders

    def _without_set(self, set_id: int) -> list[Order]:
        """Return an error for each name that waits in a set that was just removed."""
        waiting = {key: asked for key, asked in self.asked.items() if key[0] == set_id}
        for key in waiting:
            self._forget(key)
        return [Order(_first(asked), _no_set(set_id)) for asked in waiting.values()]

    def _forget(self, key: tuple[int, str]) -> None:
        """Let go of a name whose order is given. The same name may be asked for again, and nobody waits for that yet."""
        del self.asked[key]
        self.waits = {rank: waited for rank, waited in self.waits.items() if waited != key}

    def _order(self, asked: dict[int, Request], members: tuple[int, ...]) -> Order:
        first, everyone = _first(asked), list(asked.values())
        error = mismatch(everyone) or (_NOT_WITH_JOIN.get(first.kind, "") if len(asked) < len(members) else "")
        if error:
            return Order(first, error)
        if first.kind == JOIN:
            last = self.joined[-1]
            self.joined.clear()
            return Order(first, value=last)
        if first.kind == ADD_SET:
            return self._add_set(first)
        if first.kind == REMOVE_SET:
            error = "" if self.sets.pop(first.root, None) else f"The process set {first.root} does not exist."
            return Order(first, error, value=first.root)
        if first.kind == ALLGATHER:
            return Order(first, sizes=tuple(_rows(asked[rank]) for rank in members))
        if first.kind == ALLTOALL:
            return Order(first, sizes=tuple(asked[rank].splits for rank in members))
        if first.kind == BROADCAST and first.root not in members:
            return Order(first, f"broadcast received invalid root rank {first.root} for provided process set")
        return Order(first)

    def _add_set(self, first: Request) -> Order:
        ranks = first.ranks
        if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.size)):
            return Order(
                first, f"A process set needs different ranks from 0 to {self.size - 1}, and was given {_list(ranks)}."
            )
        if ranks in self.sets.values():
            return Order(first, f"A process set with the ranks {_list(ranks)} exists already.")
        self.sets[self.next_set] = ranks
        self.next_set += 1
        return Order(first, value=self.next_set - 1)


def mismatch(requests: list[Request]) -> str:
    """Return what the requests of all ranks for one name differ in, in Horovod's words; "": they match."""
    one = requests[0]
    for other in requests[1:]:
        if other.kind != one.kind:
            return (
                f"Mismatched operations: One rank did an {_SAYS.get(one.kind, one.kind)}, but another rank did an "
                f"{_SAYS.get(other.kind, other.kind)}."
            )
        if len(other.dtypes) != len(one.dtypes):
            return f"Mismatched groups: One rank sent {len(one.dtypes)} tensors, but another rank sent {len(other.dtypes)}."
        if other.dtypes != one.dtypes:
            mine, its = _first_difference(one.dtypes, other.dtypes)
            return f"Mismatched data types: One rank had type {mine}, but another rank had type {its}."
        if (other.op, other.factors) != (one.op, one.factors):
            if other.op != one.op:
                return (
                    f"Mismatched reduction operation: One rank sent reduction op {one.op}, but another rank sent reduction op "
                    f"{other.op}."
                )
            return (
                f"Mismatched prescale and/or postscale factors: One rank sent factors {one.factors}, but another rank sent factors "
                f"{other.factors}."
            )
        if other.root != one.root:
            return (
                f"Mismatched {one.kind} root ranks: One rank specified root rank {one.root}, but another rank specified root rank "
                f"{other.root}."
            )
        if other.ranks != one.ranks:
            return f"Mismatched process sets: One rank gave ranks {_list(one.ranks)}, but another rank gave {_list(other.ranks)}."
        if other.device != one.device:
            return (
                f"Mismatched {_SAYS.get(one.kind, one.kind)} CPU/GPU device selection: One rank specified device {one.device}, but "
                f"another rank specified device {other.device}."
            )
        error = _shapes_differ(one, other)
        if error:
            return error
    return ""


def _shapes_differ(one: Request, other: Request) -> str:
    says = _SAYS.get(one.kind, one.kind)
    for mine, its in zip(one.shapes, other.shapes):
        if one.kind not in _FREE_FIRST_DIMENSION:
            if mine != its:
                return (
                    f"Mismatched {says} tensor shapes: One rank sent a tensor of shape {_list(mine)}, but another rank sent a "
                    f"tensor of shape {_list(its)}."
                )
        elif len(mine) != len(its):
            return (
                f"Mismatched {says} tensor shapes: One rank sent a tensor of rank {len(mine)}, but another rank sent a tensor of "
                f"rank {len(its)}."
            )
        elif mine[1:] != its[1:]:
            at = next(i for i in range(1, len(mine)) if mine[i] != its[i])
            return (
                f"Mismatched {says} tensor shapes: One rank sent a tensor with dimension {at} equal to {mine[at]}, but another "
                f"rank sent a tensor with dimension {at} equal to {its[at]}."
            )
    return ""


def _rows(request: Request) -> tuple[int, ...]:
    return tuple(shape[0] if shape else 1 for shape in request.shapes)


def _no_set(set_id: int) -> str:
    return f"The process set {set_id} does not exist, or was removed."


def _first(asked: dict[int, Request]) -> Request:
    return next(iter(asked.values()))


def _first_difference(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, str]:
    return next((a, b) for a, b in zip(one, other) if a != b)


def _list(numbers: Iterable[int]) -> str:
    return "[" + ", ".join(map(str, numbers)) + "]"
