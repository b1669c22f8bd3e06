"""The split of a model over the ranks of a model group, and the share of each rank. Pure arithmetic.

A *model group* is the m ranks that together hold one copy of the model. A generation has whole model groups, one behind the other:
rank r is in group r // m and has the *inner index* r mod m. The inner index gives a rank its coordinates in the mesh that the
script asked for. They determine which part of the model the rank holds and which part of the batch it computes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from .errors import UsageError

SHARD, TENSOR, CONTEXT, EXPERT, PIPELINE = "shard", "tensor", "context", "expert", "pipeline"
DATA_DIMS = (SHARD, EXPERT)
"""Dimensions along which each rank computes its own samples. Along the others ranks compute the same ones."""
SUMMED_DIMS = (*DATA_DIMS, CONTEXT)
"""Dimensions along which each rank has its own part of the loss. Along the others ranks have the same one."""
KNOWN_DIMS = (SHARD, TENSOR, CONTEXT, EXPERT, PIPELINE)
PRODUCTS = (
    {SHARD, TENSOR},
    {SHARD, CONTEXT},
    {TENSOR, CONTEXT},
    {SHARD, EXPERT},
    {SHARD, PIPELINE},
    {TENSOR, PIPELINE},
)
"""Sets of dimensions that may be above 1 together, because a test has trained with them."""


@dataclass(frozen=True)
class Layout:
    """Names and sizes of a mesh's dimensions, outermost first, as in torch's DeviceMesh. Without any a rank has the whole model."""

    dims: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> "Layout":
        """Return the layout with these sizes of dimensions. Raises UsageError."""
        for name, size in sizes.items():
            if name not in KNOWN_DIMS:
                raise UsageError(
                    f"regroup.mesh({name}=...) is no known dimension; choose from {', '.join(KNOWN_DIMS)}."
                )
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise UsageError(f"{name} of regroup.mesh() is {size!r}; it must be a whole number of at least 1.")
        if not sizes:
            raise UsageError("regroup.mesh() was called without a dimension. Pass one at least, such as shard=2.")
        split = {name for name, size in sizes.items() if size > 1}
        if len(split) > 1 and split not in PRODUCTS:
            known = ", ".join(" with ".join(name for name in KNOWN_DIMS if name in one) for one in PRODUCTS)
            raise UsageError(
                f"regroup.mesh({cls(tuple(sizes.items()))}) has dimensions that do not work together so far; choose one dimension, "
                f"or {known}."
            )
        return cls(tuple(sizes.items()))

    @cached_property
    def size(self) -> int:
        """Number of ranks in a model group, m."""
        return math.prod(size for _, size in self.dims)

    @cached_property
    def num_data(self) -> int:
        """Number of ranks in a model group that compute different samples."""
        return math.prod(size for name, size in self.dims if name in DATA_DIMS)

    @property
    def summed_dims(self) -> frozenset[str]:
        """The dimensions of more than one rank along which each rank has its own part of the loss."""
        return frozenset(name for name, size in self.dims if size > 1 and name in SUMMED_DIMS)

    def coordinates(self, inner: int) -> dict[str, int]:
        """Return the coordinate of an inner index in each dimension."""
        found = {}
        for name, size in reversed(self.dims):
            inner, found[name] = divmod(inner, size)
        return found

    def data_index(self, inner: int) -> int:
        """Return the number, below `num_data`, of the part of its group's share that an inner index computes."""
        index = 0
        coordinates = self.coordinates(inner)
        for name, size in self.dims:
            if name in DATA_DIMS:
                index = index * size + coordinates[name]
        return index

    def speaks(self, rank: int) -> bool:
        """Return whether a rank counts for the samples that it computes, of all ranks that compute the same ones."""
        return self._comes_first(rank, DATA_DIMS)

    def line(self, rank: int, name: str) -> tuple[int, ...]:
        """Return the ranks of a rank's model group that differ from it at most in dimension `name`, in that dimension's order."""
        inside = 1
        for dim, size in reversed(self.dims):
            if dim == name:
                first = rank - rank // inside % size * inside
                return tuple(first + at * inside for at in range(size))
            inside *= size
        return (rank,)

    def adds_loss(self, rank: int) -> bool:
        """Return whether a rank's loss and weight count, of all ranks that compute the same loss."""
        return self._comes_first(rank, SUMMED_DIMS)

    def sequence_part(self, rank: int) -> int:
        """Return the number of the part of each sequence that a rank computes."""
        return self.coordinates(rank % self.size).get(CONTEXT, 0)

    def across(self, rank: int, world_size: int, along: frozenset[str] = frozenset()) -> tuple[int, ...]:
        """Return the ranks of all groups that have the coordinates of `rank` in all dimensions but those of `along`.

        Gradients are summed among them. `along` is empty for a parameter that is split over all dimensions, for example.
        """
        mine = self._place(rank % self.size, along)
        return tuple(r for r in range(world_size) if self._place(r % self.size, along) == mine)

    @staticmethod
    def part_name(along: frozenset[str] = frozenset()) -> str:
        """Return the name of the part of a generation whose ranks `across` returns."""
        return "across " + ",".join(sorted(along))

    def parts(self, rank: int, world_size: int) -> dict[str, tuple[int, ...]]:
        """Return the ranks of each part of a generation that contains `rank`, by name and in one order on all ranks."""
        if self.size == 1:
            return {}
        return {self.part_name(along): self.across(rank, world_size, along) for along in self._alongs()}

    def _alongs(self) -> Sequence[frozenset[str]]:
        """Return the values of `along` that a step needs.

        The empty set gives the ranks that hold the same part of the model. Beyond that a parameter may be split over any of the
        data dimensions, but never over the others of `summed_dims`.
        """
        data = sorted(self.summed_dims & set(DATA_DIMS))
        always = self.summed_dims - set(DATA_DIMS)
        chosen = (some for count in range(len(data) + 1) for some in combinations(data, count))
        return list(dict.fromkeys([frozenset[str](), *(always.union(some) for some in chosen)]))

    def _comes_first(self, rank: int, own: Sequence[str]) -> bool:
        """Return whether a rank speaks for the ranks that differ from it only in dimensions other than `own`.

        It is the first of them; along a pipeline the last, which alone has a loss.
        """
        coordinates = self.coordinates(rank % self.size)
        return all(
            coordinates[name] == (size - 1 if name == PIPELINE else 0) for name, size in self.dims if name not in own
        )

    def _place(self, inner: int, along: frozenset[str]) -> tuple[int, ...]:
        return tuple(at for name, at in self.coordinates(inner).items() if name not in along)

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.dims) or "no mesh"


WHOLE = Layout()


def inner_index(layout: Layout, place: int, processes: int, workers_per_group: int) -> int:
    """Return the inner index of a process, which it keeps for life. Raises UsageError for a layout that does not fit the workers.

    `place` is the worker's position in its group of workers, times `processes`, plus the local rank.
    """
    m, places = layout.size, processes * workers_per_group
    if workers_per_group > 1 and m != places:
        raise UsageError(
            f"regroup.mesh({layout}) has {m} ranks, and a group of workers has {places} processes (spec.workersPerGroup "
            f"{workers_per_group} x {processes} processes a worker). They must be equal: change one of them."
        )
    if places % m:
        raise UsageError(
            f"regroup.mesh({layout}) has {m} ranks, and a worker has {places} processes. The ranks must divide the processes of a "
            f"worker: set processesPerWorker (`regroup run --processes-per-worker`) to {m} or a multiple, or "
            "spec.workersPerGroup where a model needs several workers."
        )
    return place % m
