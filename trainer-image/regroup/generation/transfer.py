"""A training state from the source to the ranks that need it: JSON and raw bytes, never pickle.

Tensors on the model's GPU go from GPU to GPU by the generation's own backend, all others through host memory by gloo. A receiver
that holds a state stages in host memory and loads after the last byte. So a source that dies in mid-copy leaves that state whole
(rule TORN). A receiver without a state receives on the GPU where the tensors will stay (`into`): a second copy may have no room.
The whole group takes part in each broadcast. A rank that needs nothing drops what comes.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from regroup.checkpoint import tree as trees
from regroup.state.training import CommitRecord

from . import nccl
from .broadcast import from_rank
from .groups import Groups, Part

CHUNK_BYTES = 32 << 20
Received = tuple[trees.Tree, str, "CommitRecord | None"]


def send(
    groups: Groups | Part, packed: tuple[str, dict[str, torch.Tensor]], digest: str, record: CommitRecord | None = None
) -> None:
    """Broadcast a packed state (`regroup.checkpoint.tree.pack`) from this rank, with the record of the commit that made it.

    The digest of its samples (`SamplePlan.digest`) saves a receiver the work to compute it. Raises what `Groups.failed` says.
    """
    structure, tensors = packed
    meta = [
        [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), _is_on_device(groups, tensor)]
        for name, tensor in tensors.items()
    ]
    said = None if record is None else record.to_json()
    text = json.dumps({"structure": structure, "tensors": meta, "digest": digest, "record": said}).encode()
    _broadcast(groups, torch.tensor([len(text)], dtype=torch.int64), groups.rank)
    _broadcast(groups, torch.frombuffer(bytearray(text), dtype=torch.uint8), groups.rank)
    for on_device in (False, True):
        pieces = [
            _bytes(tensor if on_device else tensor.detach().cpu())
            for tensor in tensors.values()
            if _is_on_device(groups, tensor) == on_device
        ]
        offsets, total = trees.layout([piece.numel() for piece in pieces])
        for low, high in _chunks(total):
            chunk = torch.zeros(high - low, dtype=torch.uint8, device=groups.device if on_device else "cpu")
            for piece, part, place in _within(pieces, offsets, low, high):
                chunk[place] = piece[part]
            _broadcast(groups, chunk, groups.rank)


def receive(
    groups: Groups | Part, source: int, *, keep: bool, into: Mapping[str, torch.Tensor] | None = None
) -> Received | None:
    """Take part in the broadcast from `source`; return the tree, the digest and the record; None: not to be kept.

    The tree is in host memory. `into` has this process's own tensors by name. With it tensors that come by the GPU are put into
    those that fit, and else into new ones on the GPU.
    """
    length = torch.zeros(1, dtype=torch.int64)
    _broadcast(groups, length, source)
    text = torch.zeros(int(length.item()), dtype=torch.uint8)
    _broadcast(groups, text, source)
    meta = json.loads(bytes(text.numpy()))
    tensors: dict[str, torch.Tensor] = {}
    for on_device in (False, True):
        described = {
            name: (getattr(torch, dtype), torch.Size(shape))
            for name, dtype, shape, there in meta["tensors"]
            if there == on_device
        }
        device = groups.device if on_device else torch.device("cpu")
        if not keep:
            _receive_bytes(groups, source, device, described, lambda _low, _chunk: None)
        elif on_device and into is not None:
            tensors |= _receive_in_place(groups, source, described, into)
        else:
            tensors |= _receive_staged(groups, source, device, described)
    if not keep:
        return None
    record = None if meta["record"] is None else CommitRecord.from_json(meta["record"])
    ordered = {name: tensors[name] for name, *_ in meta["tensors"]}
    return trees.unpack(meta["structure"], ordered), meta["digest"], record


Described = Mapping[str, tuple[torch.dtype, torch.Size]]
"""Type and shape of tensors, by name, in the order in which their bytes come."""


def _receive_staged(
    groups: Groups | Part, source: int, device: torch.device, described: Described
) -> dict[str, torch.Tensor]:
    """Return the tensors in host memory."""
    offsets, total = trees.layout(_sizes(described))
    staged = torch.zeros(total, dtype=torch.uint8)

    def keep(low: int, chunk: torch.Tensor) -> None:
        staged[low : low + chunk.numel()].copy_(chunk)

    _receive_bytes(groups, source, device, described, keep)
    return {
        name: staged[offset : offset + size].view(dtype).reshape(shape).clone()
        for (name, (dtype, shape)), offset, size in zip(described.items(), offsets, _sizes(described))
    }


def _receive_in_place(
    groups: Groups | Part, source: int, described: Described, own: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors on the GPU, in own ones where these fit."""
    tensors = {}
    for name, (dtype, shape) in described.items():
        mine = own.get(name)
        fits = mine is not None and (mine.dtype, mine.shape, mine.device) == (dtype, shape, groups.device)
        tensors[name] = (
            mine
            if fits and mine is not None and mine.is_contiguous()
            else torch.empty(shape, dtype=dtype, device=groups.device)
        )
    pieces = [_bytes(tensor) for tensor in tensors.values()]
    offsets, _ = trees.layout([piece.numel() for piece in pieces])

    def keep(low: int, chunk: torch.Tensor) -> None:
        for piece, part, place in _within(pieces, offsets, low, low + chunk.numel()):
            piece[part] = chunk[place]

    _receive_bytes(groups, source, groups.device, described, keep)
    return tensors


def _receive_bytes(
    groups: Groups | Part,
    source: int,
    device: torch.device,
    described: Described,
    keep: Callable[[int, torch.Tensor], None],
) -> None:
    """Take part in the broadcast of these tensors. `keep` gets each chunk and its offset; the chunk is overwritten afterwards."""
    _, total = trees.layout(_sizes(described))
    chunk = torch.empty(min(total, CHUNK_BYTES), dtype=torch.uint8, device=device)
    for low, high in _chunks(total):
        _broadcast(groups, chunk[: high - low], source)
        keep(low, chunk[: high - low])


def share_text(groups: Groups | Part, source: int, text: str) -> str:
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


def _broadcast(groups: Groups | Part, tensor: torch.Tensor, source: int) -> None:
    if groups.world_size == 1:
        return
    groups.wait([groups.launch("broadcast", [tensor], from_rank(source), control=tensor.device.type == "cpu")])


def _is_on_device(groups: Groups | Part, tensor: torch.Tensor) -> bool:
    return tensor.device == groups.device and nccl.serves(groups.device)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes: its own, where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _sizes(described: Described) -> list[int]:
    return [shape.numel() * dtype.itemsize for dtype, shape in described.values()]


def _within(
    pieces: Sequence[torch.Tensor], offsets: Sequence[int], low: int, high: int
) -> Iterator[tuple[torch.Tensor, slice, slice]]:
    """Yield each piece that has bytes in a chunk, with their place in the piece and in the chunk."""
    for offset, piece in zip(offsets, pieces):
        first, last = max(offset, low), min(offset + piece.numel(), high)
        if first < last:
            yield piece, slice(first - offset, last - offset), slice(first - low, last - low)


def _chunks(total: int) -> Iterator[tuple[int, int]]:
    for low in range(0, total, CHUNK_BYTES):
        yield low, min(low + CHUNK_BYTES, total)
