"""Data that can only be read in order: `stream` makes session data from a function that opens it at a position.

A sample's number is its position, and step s uses the samples from s * global_batch on. So no position has to be saved. Each
process reads forward and leaves out the samples of other ranks. It opens the stream again at the start, and if it has to
go back after a membership change. Nobody knows the length. A process that finds the end says so with its row, and the job ends
before that step (`regroup.transaction`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from .errors import DataError
from .ids import SamplePlan
from .rng import microbatch_rng

OpenAt = Callable[[int], Iterable[Any]]
Collate = Callable[[list[Any]], Any]


class EndOfStream(Exception):
    """The stream ended before a microbatch was whole."""


class Stream:
    """Data that is read in order, as `stream` describes it."""

    def __init__(self, open_at: OpenAt, collate: Collate) -> None:
        self.open_at, self.collate = open_at, collate


def stream(open_at: OpenAt, collate: Collate = default_collate) -> Stream:
    """Return session data for samples that are read in order, to be passed as `data=`. Raises DataError.

    - `open_at(position)` returns an iterator over the samples from that position on; the first sample has position 0. It must give
      the same samples each time and in each process. If the iterator has a method `skip(n)`, it is called to leave out n samples;
      otherwise they are read and dropped.
    - `collate` makes a batch from a list of samples. The default is torch's.
    """
    for name, value in (("open_at", open_at), ("collate", collate)):
        if not callable(value):
            raise DataError(
                f"{name} of regroup.stream() is a {type(value).__name__}; it must be a function. open_at(position) returns an "
                "iterator over the samples from that position on."
            )
    return Stream(open_at, collate)


def as_stream(data: Any) -> Stream | None:
    """Return the stream that a user passed as `data=`, or None for other data.

    It is a Stream or an IterableDataset, which must give the same samples each time it is iterated over.
    """
    if isinstance(data, Stream):
        return data
    if not isinstance(data, IterableDataset):
        return None
    skip = getattr(data, "skip", None)
    if callable(skip):  # Hugging Face's
        return Stream(skip, default_collate)
    return Stream(lambda position: islice(iter(data), position, None), default_collate)


class StreamFeed:
    """A Feed that reads a stream in the caller's thread."""

    draws = False
    """`take` seeds each batch itself, after it has left out samples, which may draw random numbers as well."""

    def __init__(self, source: Stream, plan: SamplePlan) -> None:
        self._source, self._plan = source, plan
        self._iterator: Iterator[Any] | None = None
        self._position = 0
        """Position of the sample that the iterator gives next."""

    def take(self, key: Any, share: Sequence[int]) -> Any:  # noqa: ARG002
        """Return the batch of a microbatch. Raises EndOfStream if the stream has too few samples."""
        size = self._plan.microbatch
        first = int(self._plan.ids(key.step, key.v)[0])
        iterator, self._iterator = self._iterator, None  # its position is unknown after an exception
        if iterator is None or first < self._position:
            _close(iterator)
            iterator, self._position = self._opened(first), first
        if not _leave_out(iterator, first - self._position):
            raise EndOfStream
        with microbatch_rng() as seed_for:
            seed_for(self._plan.seed, key.step, key.v)
            samples = list(islice(iterator, size))
        if len(samples) < size:
            raise EndOfStream
        self._iterator, self._position = iterator, first + size
        return self._source.collate(samples)

    def close(self) -> None:
        _close(self._iterator)
        self._iterator = None

    def _opened(self, position: int) -> Iterator[Any]:
        opened = self._source.open_at(position)
        try:
            return iter(opened)
        except TypeError:
            raise DataError(
                f"open_at({position}) of regroup.stream() returned a {type(opened).__name__}; it must return an iterator over the "
                "samples from that position on."
            ) from None


def _leave_out(iterator: Iterator[Any], count: int) -> bool:
    """Leave out samples. Returns False if the stream has ended meanwhile, which `skip` of an iterator does not tell."""
    skip = getattr(iterator, "skip", None)
    if count and callable(skip):
        skip(count)
        return True
    return sum(1 for _ in islice(iterator, count)) == count


def _close(iterator: Any) -> None:
    """Close an iterator that can be closed. A generator then closes its files."""
    close = getattr(iterator, "close", None)
    if callable(close):
        close()
