"""Where samples come from: `as_source` turns what a user has into `fetch(ids) -> Batch`.

A source is a function of the ids: no position, no shuffling, no share. So a membership change leaves it alone.
Fetching happens in the caller's thread; worker processes and prefetch are not here yet.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch

from .errors import DataError


class Batch(NamedTuple):
    """The samples of one microbatch, in the order of the ids: first dimension [microbatch]."""

    x: Any
    y: Any


@runtime_checkable
class Source(Protocol):
    """What a session reads from. A user's own class needs these two methods and no base class."""

    def __len__(self) -> int:
        """Return the number of samples, constant for the job's life and equal on every rank."""
        ...

    def fetch(self, ids: torch.Tensor) -> Any:
        """Return the batch (with `.x` and `.y`) of the samples with these ids: int64, each in [0, len)."""
        ...


@dataclass(frozen=True)
class TensorSource:
    """Samples are the rows of two tensors of one length."""

    x: torch.Tensor
    y: torch.Tensor

    def __len__(self) -> int:
        return len(self.x)

    def fetch(self, ids: torch.Tensor) -> Batch:
        """Return the rows, on the tensors' own device."""
        return Batch(self.x[ids.to(self.x.device)], self.y[ids.to(self.y.device)])


class DatasetSource:
    """Samples are the (x, y) items of a map-style dataset, put together by `collate`."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def __len__(self) -> int:
        return len(self._dataset)

    def fetch(self, ids: torch.Tensor) -> Batch:
        """Return the collated items. Raises DataError when an item is not a pair."""
        many = getattr(self._dataset, "__getitems__", None)
        indices = ids.tolist()
        items = many(indices) if callable(many) else [self._dataset[i] for i in indices]
        batch = self._collate(items)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise DataError(
                f"items of data ({type(self._dataset).__name__}) are {type(items[0]).__name__}, not pairs (x, y). "
                f"Return pairs from __getitem__, or pass an object with __len__ and fetch(ids)."
            )
        return Batch(*batch)


def as_source(data: Any) -> Source:
    """Return a Source for what a user passed as `data=`.

    Taken: an object with `fetch` and `__len__` (returned as it is); a pair of tensors (x, y); a torch TensorDataset of
    two; any map-style dataset whose items are pairs. Raises DataError, one sentence, for anything else.
    """
    if callable(getattr(data, "fetch", None)):
        if not hasattr(data, "__len__"):
            raise DataError(
                f"data ({type(data).__name__}) has fetch but no __len__. Add __len__: the number of samples."
            )
        return _not_empty(cast(Source, data))
    pair = getattr(data, "tensors", data)
    if isinstance(pair, (tuple, list)) and pair and all(isinstance(part, torch.Tensor) for part in pair):
        return _not_empty(_tensor_source(pair))
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (str, bytes, dict)):
        from torch.utils.data import default_collate

        return _not_empty(DatasetSource(data, default_collate))
    raise DataError(
        f"data is {type(data).__name__}, which has no samples to look up by number. Pass a pair of tensors (x, y), a "
        f"map-style dataset, or an object with __len__ and fetch(ids)."
    )


def _tensor_source(tensors: Sequence[torch.Tensor]) -> TensorSource:
    if len(tensors) != 2:
        raise DataError(
            f"data has {len(tensors)} tensors; two are needed, (x, y). Pack the inputs into one tensor each."
        )
    x, y = tensors
    if x.dim() == 0 or y.dim() == 0 or len(x) != len(y):
        raise DataError(
            f"data's x has shape {list(x.shape)} and y {list(y.shape)}; their first dimensions, the samples, must be equal."
        )
    return TensorSource(x, y)


def _not_empty(source: Source) -> Source:
    if len(source) < 1:
        raise DataError("data has no samples. Pass at least one.")
    return source
