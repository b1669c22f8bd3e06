"""Context parallelism: each rank has a part of every sequence. Attention needs all of it, so it exchanges parts of the sequence for
heads (DeepSpeed-Ulysses, Jacobs et al., 2023). Each rank computes some heads over the whole sequence, and exchanges them back. The
other algorithm is in `ring_attention`.

Everything else in a transformer is computed token by token, and needs nothing of another rank. A session sums the gradients.

Shapes: b sequences, h heads, n ranks, t tokens of one rank, d numbers for each head and token.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from regroup.errors import UsageError
from regroup.layout import CONTEXT

from .all_to_all import all_to_all, ranks_of
from .ring_attention import ring_attention

ALGORITHMS = ("ulysses", "ring")


class SequencePart(NamedTuple):
    """One rank's part of a batch of sequences."""

    batch: Any
    """As it was, with a part of each tensor."""
    positions: torch.Tensor
    """Places of its tokens in the whole sequence: [t], int64."""


def split_sequence(batch: Any, mesh: Any, dim: int = 1) -> SequencePart:
    """Return this rank's part of a batch of sequences: of n ranks, the first has the first n-th of each, and so on.

    `batch` is a tensor whose dimension `dim` is the sequence, or a tuple, list or dict of such tensors, of one length. `mesh` is
    mesh["context"]; None: this rank has all of it. Local. Raises UsageError for a length that n does not divide, and for tensors
    without the dimension.
    """
    num, at = ranks_of(mesh, CONTEXT, "regroup.split_sequence"), 0 if mesh is None else mesh.get_local_rank()
    tensors = list(_tensors(batch))
    lengths = {one.shape[dim] if -one.ndim <= dim < one.ndim else None for one in tensors}
    if len(lengths) != 1 or None in lengths:
        shapes = ", ".join(str(list(one.shape)) for one in tensors) or "none"
        raise UsageError(
            f"regroup.split_sequence() was called with tensors of shape {shapes}; dimension {dim} of each must be the sequence, of "
            "one length. Pass only those tensors of a batch that have it, or dim=."
        )
    length: Any = lengths.pop()
    if length % num:
        raise UsageError(
            f"A sequence of {length} tokens cannot be split evenly over context={num}. Pad it to {length + -length % num} tokens, "
            "and give the padding no weight in the loss."
        )
    low, size = at * (length // num), length // num
    positions = torch.arange(low, low + size, device=tensors[0].device)
    return SequencePart(_mapped(batch, dim, low, size), positions)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mesh: Any, *, causal: bool, algorithm: str = "ulysses"
) -> torch.Tensor:
    """Return torch's scaled dot product attention over whole sequences, of which each rank passes its part: [b, h, t, d].

    `query`, `key` and `value` are [b, h, t, d], of the tokens that `split_sequence` gave this rank. `key` and `value` may have
    fewer heads than `query`, each for several of it. `mesh` is mesh["context"], all of whose ranks call this; None: plain
    attention. With `causal` a token sees itself and the tokens before it. `algorithm` is "ulysses", or "ring" for any number of
    heads. With "ring" all three are of one dtype, and the result has no second derivative. Raises UsageError for numbers of heads
    that the ranks do not divide, for shapes that do not fit together, and for another dimension.
    """
    if algorithm not in ALGORITHMS:
        raise UsageError(f"algorithm of regroup.attention() is {algorithm!r}; choose from {', '.join(ALGORITHMS)}.")
    num = ranks_of(mesh, CONTEXT, "regroup.attention")
    for name, one in (("query", query), ("key", key), ("value", value)):
        if one.ndim != 4:
            raise UsageError(
                f"{name} of regroup.attention() has shape {list(one.shape)}; it must be [batch, heads, tokens, size]."
            )
        if algorithm == "ulysses" and one.shape[1] % num:
            raise UsageError(
                f"{name} of regroup.attention() has shape {list(one.shape)}; it must be [batch, heads, tokens, size], with a "
                f'number of heads that is a multiple of context={num}. Change the heads, or the mesh, or pass algorithm="ring".'
            )
    if num > 1 and algorithm == "ring":
        return ring_attention(query, key, value, mesh, causal)
    if num > 1:
        query, key, value = _to_whole_sequences([query, key, value], mesh, num)
    fewer = key.shape[1] != query.shape[1]
    mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=fewer)
    return mixed if num == 1 else _to_all_heads(mixed, mesh, num)


def _to_whole_sequences(tensors: list[torch.Tensor], mesh: Any, num: int) -> list[torch.Tensor]:
    """Exchange [b, h, t, d] for [b, h/n, n*t, d], of each tensor, in one collective."""
    pieces, came = [], []
    for one in tensors:
        b, h, t, d = one.shape
        pieces.append(one.view(b, num, h // num, t, d).movedim(1, 0))  # by the rank that computes these heads
    flat = all_to_all(torch.cat([piece.reshape(num, -1) for piece in pieces], dim=1), mesh)
    for part, piece in zip(torch.split(flat, [piece[0].numel() for piece in pieces], dim=1), pieces):
        whole = part.reshape(piece.shape).movedim(0, 2)  # by the rank that has these tokens: [b, h/n, n, t, d]
        came.append(whole.flatten(2, 3))
    return came


def _to_all_heads(mixed: torch.Tensor, mesh: Any, num: int) -> torch.Tensor:
    """Exchange [b, h/n, n*t, d] for [b, h, t, d]."""
    b, h, t, d = mixed.shape
    pieces = mixed.view(b, h, num, t // num, d).movedim(2, 0)  # by the rank that has these tokens
    came = all_to_all(pieces.reshape(num, -1), mesh).view(pieces.shape)
    return came.movedim(0, 1).flatten(1, 2)


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for one in batch.values():
            yield from _tensors(one)
    elif isinstance(batch, (tuple, list)):
        for one in batch:
            yield from _tensors(one)
    else:
        raise UsageError(
            f"regroup.split_sequence() was called with a {type(batch).__name__}; it takes a tensor, or a tuple, list or dict of "
            "tensors."
        )


def _mapped(batch: Any, dim: int, low: int, size: int) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.narrow(dim, low, size)
    if isinstance(batch, Mapping):
        return {key: _mapped(one, dim, low, size) for key, one in batch.items()}
    parts = [_mapped(one, dim, low, size) for one in batch]
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
