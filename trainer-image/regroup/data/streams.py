"""Data that can only be read in order: `stream` makes a source of a function that opens it at a position.

A sample's number is its position, and step s uses those from s * global_batch on. So the step says where to read, as it says
everything else: there is no position to save. Each process reads on from where it is, leaves out what others compute, and opens the
stream again where it has to go back: after a membership change, or to start. Nobody knows the length. A process that finds the end
says so with its row, and the job ends before that step (`regroup.transaction`).
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
    def __init__(self, open_at: OpenAt, collate: Collate) -> None:
        self.open_at, self.collate = open_at, collate


def stream(open_at: OpenAt, collate: Collate = default_collate) -> Stream:
    """Return what to pass as `data` for samples that are read in order.

    open_at: from a position to an iterator over the samples from that one on, the first of all being 0. It must give the same
    samples each time and in each process. An iterator with a method `skip(n)` is asked to leave out n samples; of others they are
    read and dropped. collate: makes a batch of a list of samples; torch's by default. Raises DataError.
    """
    for name, value in (("open_at", open_at), ("collate", collate)):
        if not callable(value):
            raise DataError(
                f"{name} of regroup.stream() is a {type(value).__name__}; it must be a function. open_at(position) returns an "
                "iterator over the samples from that position on."
            )
    return Stream(open_at, collate)


def as_stream(data: Any) -> Stream | None:
    """Return the stream that a user passed as `data=`: a Stream, or an IterableDataset, which has to begin anew, with the same
    samples, each time it is iterated over. None: it is none."""
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
    """Each batch is seeded here: after what was left out, which would draw, too."""

    def __init__(self, source: Stream, plan: SamplePlan) -> None:
        self._source, self._plan = source, plan
        self._iterator: Iterator[Any] | None = None
        self._position = 0
        """Of the sample that the iterator gives next."""

    def take(self, key: Any, share: Sequence[int]) -> Any:  # noqa: ARG002
        """Return the batch at the key's position in the stream. Raises EndOfStream if the stream has too few samples."""
        size = self._plan.microbatch
        first = int(self._plan.ids(key.step, key.v)[0])
        iterator, self._iterator = self._iterator, None  # it is nowhere if something is raised
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
    """Leave out samples; return whether there were so many, as far as can be seen."""
    skip = getattr(iterator, "skip", None)
    if count and callable(skip):
        skip(count)
        return True
    return sum(1 for _ in islice(iterator, count)) == count


def _close(iterator: Any) -> None:
    """End a generator, so that it closes its files."""
    close = getattr(iterator, "close", None)
    if callable(close):
        close()
