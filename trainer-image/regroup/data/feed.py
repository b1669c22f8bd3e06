"""Gives the batches of a session in the order in which its microbatches come, if asked with worker processes that read ahead.

Owns the worker processes. They know the next microbatches, which follow from (step, virtual worker). If other microbatches come
next, after a membership change, the batches that were read are dropped. Random numbers of a dataset are seeded for each microbatch.
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
    """A microbatch: virtual worker `v` of a step."""

    step: int
    v: int


class Feed(Protocol):
    """The source of a step's batches."""

    draws: bool
    """A batch may depend on the random numbers of this process while it is read, so the caller must seed them."""

    def take(self, key: Key, share: Sequence[int]) -> Any:
        """Return the batch of a microbatch. `share` are the rank's virtual workers, in the order of this and further steps."""
        ...

    def close(self) -> None:
        """End the feed with its session."""
        ...


class Direct:
    """A Feed that reads a source in the caller's thread."""

    def __init__(self, source: Source, plan: SamplePlan) -> None:
        self._source, self._plan = source, plan
        self.draws = not isinstance(source, TensorSource)

    def take(self, key: Key, share: Sequence[int]) -> Any:  # noqa: ARG002
        ids = self._plan.ids(key.step, key.v)
        return self._source.fetch(ids.clone() if self.draws else ids)  # a script's own `fetch` may write to the ids

    def close(self) -> None:
        """Do nothing: a Direct feed holds nothing to close."""


class Ahead:
    """A Feed that reads with a DataLoader like the script's: with its worker processes and its pinning."""

    draws = False
    """`_Seeded` seeds each batch in the worker process."""

    def __init__(self, source: LoaderSource, plan: SamplePlan) -> None:
        theirs = source.loader
        self._positions = _Positions(plan)
        self._loader: DataLoader[Any] = DataLoader(
            _Seeded(theirs.dataset, theirs.collate_fn, plan.seed),
            batch_sampler=self._positions,
            num_workers=theirs.num_workers,
            collate_fn=_as_it_is,
            pin_memory=theirs.pin_memory and torch.accelerator.is_available(),  # without an accelerator torch warns
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
        """Batch size of the steps that are read ahead."""

    def take(self, key: Key, share: Sequence[int]) -> Any:
        """Return the batch from the DataLoader. Raises an error of a worker process, with its traceback."""
        piece = self._positions.plan.piece
        if self._batches is None or (key, share, piece) != (self._next, self._share, self._piece):
            self._piece = piece
            self._positions.first, self._positions.share, self._share = key, share, share
            self._batches = iter(self._loader)
        self._next = _after(key, share)
        try:
            return next(self._batches)
        except BaseException:
            self._batches = None  # its position is unknown after an error
            raise

    def close(self) -> None:
        """End the worker processes of the DataLoader."""
        self._batches = None
        self._loader._iterator = None


def make_feed(source: Source | Stream, plan: SamplePlan, *, reads_ahead: bool = True) -> Feed:
    """Return the Feed of a source. `reads_ahead` must be False if the order of the microbatches is not known in advance."""
    if isinstance(source, Stream):
        return StreamFeed(source, plan)
    return Ahead(source, plan) if isinstance(source, LoaderSource) and reads_ahead else Direct(source, plan)


def _after(key: Key, share: Sequence[int]) -> Key:
    """Return the next microbatch of this rank."""
    at = share.index(key.v) + 1
    return Key(key.step, share[at]) if at < len(share) else Key(key.step + 1, share[0])


class _Positions(Sampler[list[int]]):
    """Sampler of the DataLoader. It yields the microbatches from `first` on, each as [step, v, id, id, ..]."""

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
    """The script's dataset and collate function in a worker process, with random numbers seeded for each microbatch.

    A script's `worker_init_fn` gets it as `get_worker_info().dataset`. So all other attributes are those of the script's dataset.
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
            raise AttributeError(name)  # asked before __init__, while the object is unpickled
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OURS:
            super().__setattr__(name, value)
        else:
            setattr(self._dataset, name, value)


def _as_it_is(batch: Any) -> Any:
    return batch
