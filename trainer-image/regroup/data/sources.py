"""Sources of samples: `as_source` turns a user's data into an object with `fetch(ids) -> batch`.

A source is a function of the ids, without position, shuffling or share. So a membership change does not concern it. A batch is
the value that its `fetch`, or the dataset's collate function, returns. `feed` reads ahead of the training loop.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from .errors import DataError


class Batch(NamedTuple):
    """A microbatch of two tensors in the order of the ids, whose first dimension is [microbatch]. `x, y = batch` unpacks it."""

    x: Any
    y: Any


@runtime_checkable
class Source(Protocol):
    """The data of a session. A user's own class needs these two methods and no base class."""

    def __len__(self) -> int:
        """Return the number of samples. It is constant for the job's life and equal on every rank."""
        ...

    def fetch(self, ids: torch.Tensor) -> Any:
        """Return the batch of the samples with these ids: int64, each in [0, len). The script gets it unchanged."""
        ...


@dataclass(frozen=True)
class TensorSource:
    """A source whose samples are the rows of tensors of one length."""

    tensors: tuple[torch.Tensor, ...]

    def __len__(self) -> int:
        return len(self.tensors[0])

    def fetch(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the rows of each tensor on its own device, as a Batch if there are two tensors, else as a tuple."""
        rows = tuple([tensor.index_select(0, _on(ids, tensor.device)) for tensor in self.tensors])
        return Batch(*rows) if len(rows) == 2 else rows


def _on(ids: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ids on a device, without waiting for work that was enqueued there before."""
    if device.type == "cpu":
        return ids
    if device.type == "cuda":
        ids = ids.pin_memory()
    return ids.to(device, non_blocking=True)


class DatasetSource:
    """A source whose samples are the items of a map-style dataset, put together by `collate`."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def __len__(self) -> int:
        return len(self._dataset)

    def fetch(self, ids: torch.Tensor) -> Any:
        """Return the collated items."""
        return self._collate(items_of(self._dataset, ids.tolist()))


class LoaderSource(DatasetSource):
    """A source with the dataset and settings of a DataLoader. The session, not the loader, decides the order of the samples."""

    def __init__(self, loader: "DataLoader[Any]", microbatch: int) -> None:
        """Raise DataError for a loader that decides in its own way which samples come when."""
        self.loader = loader
        own = loader.batch_sampler if loader.batch_size is None else loader.sampler
        if isinstance(loader.dataset, IterableDataset):
            raise DataError(
                "data is a DataLoader of an IterableDataset, which has no samples to look up by number. Pass the dataset itself, "
                "or regroup.stream(open_at, collate=...): both are read in this process."
            )
        if own is None:
            raise DataError(
                "data is a DataLoader with batch_size=None, whose dataset makes batches by itself. The session deals samples: "
                f"pass one with batch_size={microbatch}."
            )
        deals = type(own) not in (RandomSampler, SequentialSampler) or getattr(own, "replacement", False)
        deals = deals or getattr(own, "_num_samples", None) is not None
        if loader.batch_size is None or deals:
            raise DataError(
                f"data is a DataLoader with a {type(own).__name__}, which would be ignored: the session deals the samples, each "
                f"once an epoch, in an order of its own. Pass DataLoader(dataset, batch_size={microbatch}, ...) without it."
            )
        if loader.batch_size not in (1, microbatch):
            raise DataError(
                f"data is a DataLoader with batch_size={loader.batch_size}, and microbatch is {microbatch}: make them equal."
            )
        if type(loader).__iter__ is not DataLoader.__iter__:
            raise DataError(
                f"data is a {type(loader).__name__}, a DataLoader with an __iter__ of its own, which would be ignored. Pass a "
                "plain DataLoader of the dataset."
            )
        super().__init__(loader.dataset, cast(Any, loader.collate_fn))
        self.in_order = type(own) is SequentialSampler
        """Each epoch has the order of the dataset, as with the loader's own shuffle=False."""


def items_of(dataset: Any, indices: list[int]) -> list[Any]:
    """Return items of a dataset in the way of a DataLoader: by `__getitems__`, if there is one."""
    many = getattr(dataset, "__getitems__", None)
    items: list[Any] = many(indices) if callable(many) else [dataset[i] for i in indices]
    return items


def as_source(data: Any, microbatch: int = 1) -> Source:
    """Return the Source of the data that a user passed as `data=`. Raises DataError for data that has none.

    - an object with `fetch` and `__len__` is returned as it is
    - a tuple of tensors, or a TensorDataset, becomes a TensorSource
    - a DataLoader gives its dataset, collate function, workers and pinning
    - any other map-style dataset becomes a DatasetSource

    Data that can only be read in order is a matter of `streams`.
    """
    if callable(getattr(data, "fetch", None)):
        if not hasattr(data, "__len__"):
            raise DataError(
                f"data ({type(data).__name__}) has fetch but no __len__. Add __len__: the number of samples."
            )
        return _not_empty(cast(Source, data))
    if isinstance(data, DataLoader):
        return _not_empty(LoaderSource(data, microbatch))
    if callable(getattr(data, "__next__", None)) or inspect.isroutine(data):
        why = "" if inspect.isroutine(data) else ", which no other process can continue after a membership change"
        raise DataError(
            f"data is a {type(data).__name__}{why}. Pass regroup.stream(open_at), where open_at(position) returns an iterator over "
            "the samples from that position on."
        )
    # A subclass may do anything to a sample; a list of tensors is a list of samples, but for two of them.
    tensors = data.tensors if type(data) is TensorDataset else data
    if isinstance(tensors, tuple) or (isinstance(tensors, list) and len(tensors) == 2):
        if tensors and all(isinstance(part, torch.Tensor) for part in tensors):
            return _not_empty(_tensor_source(tensors))
        if isinstance(tensors, tuple):
            kinds = ", ".join(type(part).__name__ for part in tensors)
            raise DataError(
                f"data is a tuple of {kinds or 'nothing'}. Pass tensors of one length, (x, y): torch.from_numpy makes one of an "
                "array."
            )
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (str, bytes, dict)):
        return _not_empty(DatasetSource(data, default_collate))
    if isinstance(data, dict) and data:
        key = next(iter(data))
        raise DataError(
            f"data is a {type(data).__name__} of {', '.join(map(str, list(data)[:5]))}. Pass one dataset of it, such as "
            f"data[{key!r}], or tensors of one length as a tuple: (x, y)."
        )
    raise DataError(
        f"data is {type(data).__name__}, which has no samples to look up by number. Pass tensors (x, y), a "
        f"map-style dataset, a DataLoader of one, or an object with __len__ and fetch(ids)."
    )


def _tensor_source(tensors: Sequence[torch.Tensor]) -> TensorSource:
    shapes = [list(tensor.shape) for tensor in tensors]
    if not all(shapes) or len({shape[0] for shape in shapes}) > 1:
        raise DataError(
            f"data's tensors have shapes {', '.join(map(str, shapes))}; their first dimensions, the samples, must be equal."
        )
    return TensorSource(tuple(tensors))


def _not_empty(source: Source) -> Source:
    if len(source) < 1:
        raise DataError("data has no samples. Pass at least one.")
    return source
