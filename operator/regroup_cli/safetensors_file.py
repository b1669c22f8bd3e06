"""Writes tensors to a file in the format of safetensors, a few at a time.

The library's own writer takes all tensors at once, so it needs memory for the whole state. A file consists of the header's length
(8 bytes, little-endian), the header as JSON, and the tensors' bytes without a gap. The tests read the files with the library.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

BATCH_BYTES = 256 << 20
"""Size of the tensors that are in memory at once. A larger tensor is read by itself."""
TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
"""Name in the header of each type that the format has."""
Read = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]


def unknown_type(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of a tensor whose type the format has not, or None."""
    return next((name for name, one in tensors.items() if one.dtype not in TYPES), None)


def header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """Return the begin of a file, and the tensors' names in the order in which their bytes follow.

    `tensors` need no values (device "meta"). Wide types come first, so that every tensor lies at a multiple of its type's size.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        entries[name] = {"dtype": TYPES[tensors[name].dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def batches(order: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Yield the names in their order, as many at once as BATCH_BYTES allows and at least one."""
    batch: list[str] = []
    size = 0
    for name in order:
        if batch and size + tensors[name].nbytes > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += tensors[name].nbytes
    if batch:
        yield batch


@contextlib.contextmanager
def written(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], read: Read) -> Iterator[None]:
    """Write a file beside `path` durably, and rename it to `path` when the block ends without an exception.

    `read` returns the tensors of these names, as described in `tensors`. Raises OSError and the exceptions of `read`, and leaves
    nothing behind then.
    """
    aside = path.with_name(f".{path.name}.writing")
    try:
        with open(aside, "wb") as stream:
            begin, order = header(tensors, metadata)
            stream.write(begin)
            for names in batches(order, tensors):
                held = read(names)
                for name in names:
                    stream.write(held[name].contiguous().view(-1).view(torch.uint8).numpy().data)
            stream.flush()
            os.fsync(stream.fileno())
        yield
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
