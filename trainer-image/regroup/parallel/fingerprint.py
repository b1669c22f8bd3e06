"""What has to be equal on all ranks, as hashes that are compared in each step: equal bits, equal hash, on any device.

Parameters and buffers are read a part in each step, so that the cost does not grow with the model; every part comes round
within ROUNDS steps. The optimizer's settings are compared whole: a scheduler that ran on some ranks only shows at once.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

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

    def of(self, tensors: Sequence[torch.Tensor], step: int) -> int:
        """Return the hash of the part that is this step's turn. Never 0. Waits for the device once."""
        part = self._parts[step % len(self._parts)]
        if not part:
            return 1
        sums = [_sum(tensors[piece.tensor], piece.low, piece.high) for piece in part]
        total = 0
        for piece, value in zip(part, _numbers(sums)):
            total += (2 * (piece.tensor + 31 * piece.low) + 3) * value
        return (total << 1 | 1) & _MASK


def settings_hash(groups: Iterable[dict[str, Any]]) -> int:
    """Return the hash of an optimizer's `param_groups` without the parameters. Never 0."""
    text = repr([[(key, _plain(value)) for key, value in sorted(group.items()) if key != "params"] for group in groups])
    return zlib.crc32(text.encode()) | 1 << 32


def _plain(value: Any) -> Any:
    """Return what of a setting can be compared between processes: an object's default text has its address in it."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    return value if isinstance(value, _PLAIN) else None


def _sum(tensor: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Return the sum of bytes `low` to `high` as words; what is left of a word is added byte by byte."""
    data = tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)[low:high]
    if data.storage_offset() % _WORD_BYTES:
        data = data.clone()
    whole = data.numel() // _WORD_BYTES * _WORD_BYTES
    total = data[:whole].view(torch.int64).sum()
    return total + data[whole:].sum() if whole < data.numel() else total


def _numbers(sums: Sequence[torch.Tensor]) -> list[int]:
    if len({one.device for one in sums}) == 1:
        return [int(value) for value in torch.stack(list(sums)).tolist()]
    return [int(one) for one in sums]
