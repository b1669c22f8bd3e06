"""The batches of one session, in the order in which its microbatches ask for them; worker processes read ahead.

Owns the worker processes. What they read ahead is a function of (step, virtual worker), as everything is; after a membership
change, when other microbatches come next, it is dropped and they begin anew. What a dataset draws is seeded where it is read.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from .ids import SamplePlan
from .rng import microbatch_rng
from .sources import LoaderSource, Source, TensorSource, items_of
from .streams import Stream, StreamFeed


class Key(NamedTuple):
    """Which microbatch: virtual worker `v` of a step."""

    step: int
    v: int


class Feed(Protocol):
    """Where a step gets its batches."""

    draws: bool
    """A batch may depend on this process's random numbers while it is read."""

    def take(self, key: Key, share: Sequence[int]) -> Any:
        """Return a microbatch's batch. `share`: this rank's virtual workers, which come in turn, in this and further steps."""
        ...

    def close(self) -> None:
        """The session has ended."""
        ...


class Direct:
    """Reads in the caller's thread."""

    def __init__(self, source: Source, plan: SamplePlan) -> None:
        self._source, self._plan = source, plan
        self.draws = not isinstance(source, TensorSource)

    def take(self, key: Key, share: Sequence[int]) -> Any:  # noqa: ARG002
        ids = self._plan.ids(key.step, key.v)
        return self._source.fetch(ids.clone() if self.draws else ids)  # what a script's `fetch` writes to it is its own

    def close(self) -> None:
        """A Direct feed holds nothing to close."""


class Ahead:
    """Reads by a DataLoader like the script's, in its worker processes and with its pinning."""

    draws = False
    """Each batch is seeded where it is read."""

    def __init__(self, source: LoaderSource, plan: SamplePlan) -> None:
        theirs = source.loader
        self._positions = _Positions(plan)
        self._loader: DataLoader[Any] = DataLoader(
            _Seeded(theirs.dataset, theirs.collate_fn, plan.seed),
            batch_sampler=self._positions,
            num_workers=theirs.num_workers,
            collate_fn=_as_it_is,
            pin_memory=theirs.pin_memory and torch.accelerator.is_available(),  # torch warns where there is none
            timeout=theirs.timeout,
            worker_init_fn=theirs.worker_init_fn,
            multiprocessing_context=theirs.multiprocessing_context,
            prefetch_factor=theirs.prefetch_factor,
            persistent_workers=theirs.num_workers > 0,
        )
        self._batches: Iterator[Any] | None = None
        self._next: Key | None = None
        self._share: Sequence[int] = range(0)
        self._piece = plan.piece
        """What is read ahead is of these steps."""

    def take(self, key: Key, share: Sequence[int]) -> Any:
        """Return the batch from the DataLoader. An error in a worker process is raised here with its traceback."""
        piece = self._positions.plan.piece
        if self._batches is None or (key, share, piece) != (self._next, self._share, self._piece):
            self._piece = piece
            self._positions.first, self._positions.share, self._share = key, share, share
            self._batches = iter(self._loader)
        self._next = _after(key, share)
        try:
            return next(self._batches)
        except BaseException:
            self._batches = None  # it is no longer where we think
            raise

    def close(self) -> None:
        """End the worker processes of the DataLoader."""
        self._batches = None
        self._loader._iterator = None


def make_feed(source: Source | Stream, plan: SamplePlan, *, reads_ahead: bool = True) -> Feed:
    """Return what reads from `source`. reads_ahead: it is known which microbatches come next."""
    if isinstance(source, Stream):
        return StreamFeed(source, plan)
    return Ahead(source, plan) if isinstance(source, LoaderSource) and reads_ahead else Direct(source, plan)


def _after(key: Key, share: Sequence[int]) -> Key:
    """Return the microbatch that follows on this rank."""
    at = share.index(key.v) + 1
    return Key(key.step, share[at]) if at < len(share) else Key(key.step + 1, share[0])


class _Positions(Sampler[list[int]]):
    """For the loader: the microbatches from `first` on, each as [step, v, id, id, ..]."""

    def __init__(self, plan: SamplePlan) -> None:
        self.plan = plan
        self.first = Key(0, 0)
        self.share: Sequence[int] = range(1)

    def __iter__(self) -> Iterator[list[int]]:
        key, share = self.first, self.share
        while True:
            yield [*key, *self.plan.ids(key.step, key.v).tolist()]
            key = _after(key, share)


class _Seeded(Dataset[Any]):
    """In the process that reads: the script's dataset and collate function, with random numbers of the microbatch's own.

    A `worker_init_fn` meets it as `get_worker_info().dataset`; what it reads or sets there is the script's dataset's.
    """

    _OURS = frozenset({"_dataset", "_collate", "_seed"})

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed

    def __getitems__(self, numbers: list[int]) -> Any:
        step, v, *indices = numbers
        with microbatch_rng() as seed_for:
            seed_for(self._seed, step, v)
            return self._collate(items_of(self._dataset, indices))

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getattr__(self, name: str) -> Any:
        if name in self._OURS or name.startswith("__"):
            raise AttributeError(name)  # of an object that is being unpickled
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OURS:
            super().__setattr__(name, value)
        else:
            setattr(self._dataset, name, value)


def _as_it_is(batch: Any) -> Any:
    return batch
