"""Deals the samples of an epoch to the ranks, and deals those that are left anew when the number of ranks changes."""

import random
from collections.abc import Iterator, Sequence, Sized
from typing import Any

from torch.utils.data import Sampler

from . import link


def remaining(num_samples: int, *, shuffle_seed: int | None, processed: int) -> list[int]:
    """Return the samples of an epoch that are left after the first `processed` ones, in the epoch's order. Pure.

    `shuffle_seed` is the epoch's own seed, None for the order of the samples' numbers.
    """
    indices = list(range(num_samples))
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(indices)
    return indices[processed:]


def share(indices: Sequence[int], rank: int, size: int) -> list[int]:
    """Return this rank's samples. All ranks get equally many, so the first samples come twice if the number does not fit. Pure."""
    each = -(-len(indices) // size)
    padded = list(indices)
    while indices and len(padded) < each * size:
        padded += indices[: each * size - len(padded)]
    return padded[rank : each * size : size]


class ElasticSampler(Sampler[int]):
    """Sampler for a DataLoader in an elastic Horovod script.

    Put it into the `TorchState`, call `record_batch` after each batch, and `set_epoch` at the end of each epoch. After a reset the
    samples that no rank has used yet are dealt to the ranks that there are then.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """`seed` must be equal on all ranks."""
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_num = 0
        """Samples of the epoch that all ranks together have used."""
        self.rank, self.num_replicas = 0, 1
        self.remaining_indices: list[int] = []
        self.num_samples = self.total_size = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch. Call it at the end of an epoch: at the begin it would forget what was used before a reset."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002 (Horovod's signature)
        """Note that each rank has used a batch of `batch_size` samples."""
        self.record_indices(range(batch_size))

    def record_indices(self, indices: Sequence[int]) -> None:
        """Note that each rank has used as many samples as are given here. Only their number counts."""
        self.processed_num += len(indices) * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal the samples that are left to the ranks that there are now."""
        self.rank, self.num_replicas = link.place()
        seed = self.seed + self.epoch if self.shuffle else None
        self.remaining_indices = remaining(len(self.dataset), shuffle_seed=seed, processed=self.processed_num)
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(share(self.remaining_indices, self.rank, self.num_replicas))

    def __len__(self) -> int:
        return self.num_samples
