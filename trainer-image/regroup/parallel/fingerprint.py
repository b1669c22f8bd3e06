"""Hashes of tensors and optimizer settings, which are compared in each step: equal bits have equal hashes, on any device.

Each step reads a part of the parameters and buffers, so that the cost does not grow with the model. Every part comes round
within ROUNDS steps. The optimizer's settings are compared whole: a scheduler that ran on some ranks only shows at once.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from regroup.bits import float_of

from .host import Scalar, bits_of, to_host

PART_BYTES = 4 << 20
"""Read in each step, or more where all would take more than ROUNDS steps."""
ROUNDS = 50
_WORD_BYTES = 8
_MASK = (1 << 63) - 1
_PLAIN = (bool, int, float, complex, str, type(None))


class Piece(NamedTuple):
    """Bytes `low` to `high` of a tensor, by its number."""

    tensor: int
    low: int
    high: int


def parts_of(sizes: Sequence[int], part_bytes: int = PART_BYTES, rounds: int = ROUNDS) -> list[list[Piece]]:
    """Cut tensors of `sizes` bytes into parts of about equal size, at most `rounds`. Pure."""
    limit = max(part_bytes, -(-sum(sizes) // rounds))
    limit += -limit % _WORD_BYTES
    parts: list[list[Piece]] = [[]]
    room = limit
    for tensor, size in enumerate(sizes):
        low = 0
        while low < size:
            if room == 0:
                parts.append([])
                room = limit
            high = min(size, low + room)
            parts[-1].append(Piece(tensor, low, high))
            # A piece begins where a word of its tensor does, so a part that ends within a word is full.
            room = 0 if high < size else room - min(room, high - low + -(high - low) % _WORD_BYTES)
            low = high
    return parts


class Fingerprint:
    """The parts of one model's tensors, read one after the other."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._parts = parts_of([tensor.numel() * tensor.element_size() for tensor in tensors])

    def ask(self, tensors: Sequence[torch.Tensor], step: int) -> list[Scalar]:
        """Return what `hash` needs of the part that is this step's turn."""
        return [_sum(tensors[piece.tensor], piece.low, piece.high) for piece in self._part(step)]

    def hash(self, step: int, values: Sequence[int]) -> int:
        """Return the hash of that part, from the values of `ask`. Never 0."""
        total = 0
        for piece, value in zip(self._part(step), values):
            total += (2 * (piece.tensor + 31 * piece.low) + 3) * value
        return (total << 1 | 1) & _MASK

    def _part(self, step: int) -> list[Piece]:
        return self._parts[step % len(self._parts)]


def sums_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a number for each tensor, which another value of it would have changed. Waits for the device once."""
    return to_host([_sum(one, 0, one.numel() * one.element_size()) for one in tensors])


def ask_settings(groups: Iterable[dict[str, Any]]) -> list[Scalar]:
    """Return what `settings_hash` needs of tensors among the settings: learning rates, for example."""
    return [bits_of(one) for _, value in _settings(groups) for one in _elements(value)]


def settings_hash(groups: Iterable[dict[str, Any]], values: Sequence[int]) -> int:
    """Return the hash of an optimizer's `param_groups` without the parameters, with the values of `ask_settings`. Never 0."""
    numbers = map(float_of, values)
    text = repr([(key, _plain(value, numbers)) for key, value in _settings(groups)])
    return zlib.crc32(text.encode()) | 1 << 32


def _settings(groups: Iterable[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(key, value) for group in groups for key, value in sorted(group.items()) if key != "params"]


def _elements(value: Any) -> list[torch.Tensor]:
    """Return each number that is a tensor's, in the order in which `_plain` takes them."""
    if isinstance(value, torch.Tensor):
        return list(value.detach().reshape(-1).unbind())
    if isinstance(value, (tuple, list)):
        return [element for one in value for element in _elements(one)]
    return []


def _plain(value: Any, numbers: Iterator[float]) -> Any:
    """Return what of a setting can be compared between processes: an object's default text has its address in it.

    `numbers`: those that are tensors' elements.
    """
    if isinstance(value, torch.Tensor):
        return [next(numbers) for _ in range(value.numel())]
    if isinstance(value, (tuple, list)):
        return [_plain(one, numbers) for one in value]
    return value if isinstance(value, _PLAIN) else None


def _sum(tensor: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Return the sum of bytes `low` to `high` as words; what is left of a word is added byte by byte."""
    data = tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)[low:high]
    if data.storage_offset() % _WORD_BYTES:
        data = data.clone()
    whole = data.numel() // _WORD_BYTES * _WORD_BYTES
    total = data[:whole].view(torch.int64).sum()
    return total + data[whole:].sum() if whole < data.numel() else total
