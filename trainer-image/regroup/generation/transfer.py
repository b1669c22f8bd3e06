"""A training state from the source to the ranks that need it: JSON and raw bytes, never pickle.

Receivers stage in host memory and load after the last byte, so a source that dies in mid-copy leaves the receiver's own
state whole (rule TORN). The whole group takes part in each broadcast; who needs nothing drops what comes.
"""

import json
from collections.abc import Iterator

import torch

from regroup.checkpoint import tree as trees
from regroup.state.training import CommitRecord

from .groups import Groups

CHUNK_BYTES = 32 << 20
_ALIGN = 16


def send(
    groups: Groups, packed: tuple[str, dict[str, torch.Tensor]], digest: str, record: CommitRecord | None = None
) -> None:
    """Broadcast a packed state (`regroup.checkpoint.tree.pack`) from this rank, with the digest of its samples
    (`SamplePlan.digest`), which a receiver would compute from all of them, and the record of the commit that made it.
    Raises what `Groups.failed` says."""
    structure, tensors = packed
    meta = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()]
    said = None if record is None else record.to_json()
    text = json.dumps({"structure": structure, "tensors": meta, "digest": digest, "record": said}).encode()
    _broadcast(groups, torch.tensor([len(text)], dtype=torch.int64), groups.rank)
    _broadcast(groups, torch.frombuffer(bytearray(text), dtype=torch.uint8), groups.rank)
    pieces = [_bytes(tensor) for tensor in tensors.values()]
    offsets, total = _layout([piece.numel() for piece in pieces])
    for low, high in _chunks(total):
        chunk = torch.zeros(high - low, dtype=torch.uint8)
        for offset, piece in zip(offsets, pieces):
            first, last = max(offset, low), min(offset + piece.numel(), high)
            if first < last:
                chunk[first - low : last - low] = piece[first - offset : last - offset]
        _broadcast(groups, chunk, groups.rank)


def receive(groups: Groups, source: int, *, keep: bool) -> tuple[trees.Tree, str, CommitRecord | None] | None:
    """Take part in the broadcast from `source`; return the tree, in host memory, the digest and the record; None: not to be
    kept."""
    length = torch.zeros(1, dtype=torch.int64)
    _broadcast(groups, length, source)
    text = torch.zeros(int(length.item()), dtype=torch.uint8)
    _broadcast(groups, text, source)
    meta = json.loads(bytes(text.numpy()))
    dtypes = [(name, getattr(torch, dtype), shape) for name, dtype, shape in meta["tensors"]]
    sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in dtypes]
    offsets, total = _layout(sizes)
    staged = torch.zeros(total if keep else min(total, CHUNK_BYTES), dtype=torch.uint8)
    for low, high in _chunks(total):
        _broadcast(groups, staged[low:high] if keep else staged[: high - low], source)
    if not keep:
        return None
    tensors = {
        name: staged[offset : offset + size].view(dtype).reshape(shape).clone()
        for (name, dtype, shape), offset, size in zip(dtypes, offsets, sizes)
    }
    record = None if meta["record"] is None else CommitRecord.from_json(meta["record"])
    return trees.unpack(meta["structure"], tensors), meta["digest"], record


def share_text(groups: Groups, source: int, text: str) -> str:
    """Return rank `source`'s text on every rank."""
    data = bytearray(text.encode())
    length = torch.tensor([len(data)], dtype=torch.int64)
    _broadcast(groups, length, source)
    if groups.rank != source:
        data = bytearray(int(length.item()))
    if not data:
        return ""
    body = torch.frombuffer(data, dtype=torch.uint8)
    _broadcast(groups, body, source)
    return data.decode()


def _broadcast(groups: Groups, tensor: torch.Tensor, source: int) -> None:
    if groups.world_size == 1:
        return
    options = torch._C._distributed_c10d.BroadcastOptions()
    options.rootRank = source
    options.rootTensor = 0
    groups.wait([groups.launch("broadcast", [tensor], options, control=True)])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    host = tensor.detach().cpu().contiguous()
    return host.reshape(-1).view(torch.uint8)


def _layout(sizes: list[int]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGN) * _ALIGN
    return offsets, end


def _chunks(total: int) -> Iterator[tuple[int, int]]:
    for low in range(0, total, CHUNK_BYTES):
        yield low, min(low + CHUNK_BYTES, total)
