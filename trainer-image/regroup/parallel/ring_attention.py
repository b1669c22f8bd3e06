"""Ring attention (Liu et al., 2023): each rank keeps the queries of its tokens, and keys and values go round.

In each turn a rank computes attention between its queries and the keys and values of one rank. Those of the next rank are on
their way meanwhile. The results are merged by their logsumexp. Heads are not exchanged, so there may be any number of them.

The kernels are torch's own, those below `scaled_dot_product_attention`: they return the logsumexp, and their backward takes that
of all keys. Why torch's own ring is not used: docs/design/adr/0039-context-and-experts.md.

Shapes: b sequences, h heads of queries, g heads of keys and values, t tokens of one rank, d numbers for each head and token. A
block is keys and values of one rank: [2, b, g, t, d].
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from regroup.errors import UsageError

from .all_to_all import exchange

_aten = torch.ops.aten
_ALIGNED_SIZE = 8
"""The kernels on a GPU take sizes of heads that are a multiple of this."""
_ALIGNED_LSE = 32
"""The logsumexp of the memory-efficient kernel has a multiple of so many tokens."""


class Attended(NamedTuple):
    """The result of attention, with what its backward needs."""

    output: torch.Tensor
    logsumexp: torch.Tensor
    """[b, h, t]"""
    rest: Any
    """Further results that the kernel's backward takes back. Those of any block do."""


class Kernel(NamedTuple):
    """Attention between queries and one block. Heads of queries, keys and values are equally many, and so are their sizes."""

    forward: Callable[..., Attended]
    """Takes query, key, value, causal and scale."""
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """Takes the output's gradient, query, key, value, what attention to all blocks gave, causal and scale. Returns the gradients
    of query, key and value."""


def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mesh: Any, causal: bool
) -> torch.Tensor:
    """Return what `regroup.attention` does, for a mesh of several ranks. Raises UsageError."""
    device_type = query.device.type
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        # As for torch's own function: the kernels do not know of autocast.
        query, key, value = (one.to(torch.get_autocast_dtype(device_type)) for one in (query, key, value))
    _check(query, key, value, causal)
    size, size_of_values = query.shape[-1], value.shape[-1]
    # Zeros change no product of a query and a key, and add columns of zeros to the output.
    aligned = -(-max(size, size_of_values) // _ALIGNED_SIZE) * _ALIGNED_SIZE
    query, key, value = (pad(one, (0, aligned - one.shape[-1])) for one in (query, key, value))
    kernel = _kernel(query, causal)
    mixed: torch.Tensor = _RingAttention.apply(query, key, value, mesh, causal, size**-0.5, kernel)  # type: ignore[no-untyped-call]
    return mixed[..., :size_of_values]


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> None:
    shapes = ", ".join(str(list(one.shape)) for one in (query, key, value))
    if query.shape[1] % key.shape[1] or key.shape[:3] != value.shape[:3] or query.shape[-1] != key.shape[-1]:
        raise UsageError(
            f"query, key and value of regroup.attention() have shapes {shapes}; the heads of query must be a multiple of those "
            "of key and value, and query and key of one size. Change the shapes."
        )
    if causal and query.shape[2] != key.shape[2]:
        raise UsageError(
            f"query, key and value of regroup.attention() have shapes {shapes}; with causal=True they must have the same tokens. "
            'Pass causal=False, or algorithm="ulysses".'
        )
    if len({(one.dtype, one.device) for one in (query, key, value)}) > 1:
        found = ", ".join(f"{one.dtype} on {one.device}" for one in (query, key, value))
        raise UsageError(
            f"query, key and value of regroup.attention() are {found}; they must have one dtype and one device."
        )


def _kernel(query: torch.Tensor, causal: bool) -> Kernel:
    """Return the kernel for tensors like this one. Raises UsageError."""
    if query.device.type == "cpu":
        return ON_CPU
    if query.device.type != "cuda" or query.dtype == torch.float64:
        raise UsageError(
            f'algorithm="ring" of regroup.attention() has no kernel for {query.dtype} on {query.device.type}. Use float32, '
            'bfloat16 or float16 on a GPU or a CPU, or pass algorithm="ulysses".'
        )
    like_it = torch.backends.cuda.SDPAParams(query, query, query, None, 0.0, causal, False)
    return FLASH if torch.backends.cuda.can_use_flash_attention(like_it) else EFFICIENT


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mesh: Any,
        causal: bool,
        scale: float,
        kernel: Kernel,
    ) -> torch.Tensor:
        at, own, query = mesh.get_local_rank(), torch.stack([key, value]), query.contiguous()
        merged, rest = None, None
        for source, block in _round(own, mesh, causal):
            if block is not None:
                key, value = _to_each_head(block, query)
                some, some_logsumexp, rest = kernel.forward(query, key, value, causal and source == at, scale)
                found = some.to(torch.promote_types(some.dtype, torch.float32)), some_logsumexp
                merged = found if merged is None else _merged(merged, found)
        assert merged is not None, "a rank sees its own tokens"
        mixed, logsumexp = merged[0].to(query.dtype), merged[1]
        ctx.save_for_backward(query, own, mixed, logsumexp)
        ctx.mesh, ctx.causal, ctx.scale, ctx.kernel, ctx.rest = mesh, causal, scale, kernel, rest
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Keys and values go round again. Their gradients go from each rank to that which has the tokens, where they are summed."""
        query, own, mixed, logsumexp = ctx.saved_tensors
        found = Attended(mixed, logsumexp, ctx.rest)
        num, at, causal = ctx.mesh.size(), ctx.mesh.get_local_rank(), ctx.causal
        gradient, wide = gradients[0].contiguous(), torch.promote_types(query.dtype, torch.float32)
        of_query, of_own = torch.zeros_like(query, dtype=wide), torch.zeros_like(own, dtype=wide)
        coming = None
        for turn, (source, block) in enumerate(_round(own, ctx.mesh, causal)):
            of_block = own
            if block is not None:
                key, value = _to_each_head(block, query)
                of_some, of_key, of_value = ctx.kernel.backward(
                    gradient, query, key, value, found, causal and source == at, ctx.scale
                )
                of_query += of_some
                of_block = torch.stack([_summed_by_head(one, block[0], wide) for one in (of_key, of_value)])
            if coming is not None and (came := coming.wait()) is not None:
                of_own += came
            if source == at:
                of_own += of_block
            else:
                other = (at + turn) % num  # it has this rank's keys and values in this turn
                to, of = source if block is not None else None, other if _sees(other, at, causal) else None
                coming = exchange(of_block.to(query.dtype), ctx.mesh, to, of)
        if coming is not None and (came := coming.wait()) is not None:
            of_own += came
        of_key, of_value = of_own.to(query.dtype)
        return of_query.to(query.dtype), of_key, of_value, None, None, None, None


def _round(own: torch.Tensor, mesh: Any, causal: bool) -> Iterator[tuple[int, torch.Tensor | None]]:
    """Yield every rank with its block, this one first; None for one that this rank must not see. The next is under way meanwhile.

    A block goes from rank to rank, and no further than it is needed.
    """
    num, at = mesh.size(), mesh.get_local_rank()
    following = (at + 1) % num
    block: torch.Tensor | None = own
    for turn in range(num):
        source, coming = (at - turn) % num, None
        if turn < num - 1:
            to = following if _sees(following, source, causal) else None
            of = (at - 1) % num if _sees(at, (source - 1) % num, causal) else None
            coming = exchange(own if block is None else block, mesh, to, of)
        yield source, block
        if coming is not None:
            block = coming.wait()


def _merged(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and logsumexp over the keys of both. Not in place: checkpointing may keep what a kernel has returned."""
    share = torch.sigmoid(other[1] - one[1]).unsqueeze(-1)
    return torch.lerp(one[0], other[0], share), torch.logaddexp(one[1], other[1])


def _sees(rank: int, source: int, causal: bool) -> bool:
    """Return whether tokens of one rank attend to those of another."""
    return not causal or source <= rank


def _to_each_head(block: torch.Tensor, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of a block for each head of the queries: [b, h, t, d]."""
    key, value = block.repeat_interleave(query.shape[1] // block.shape[2], dim=2)
    return key, value


def _summed_by_head(gradient: torch.Tensor, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the gradient of what `_to_each_head` was given: [b, h, t, d] -> [b, g, t, d]."""
    b, h, t, d = gradient.shape
    g = like.shape[1]
    return gradient.reshape(b, g, h // g, t, d).sum(2, dtype=dtype)


# --- the kernels -----------------------------------------------------------------------------------------------------


def _forward_on_cpu(query: Any, key: Any, value: Any, causal: bool, scale: float) -> Attended:
    mixed, logsumexp = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    return Attended(mixed, logsumexp, None)


def _backward_on_cpu(
    gradient: Any, query: Any, key: Any, value: Any, found: Attended, causal: bool, scale: float
) -> Any:
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, found.output, found.logsumexp, 0.0, causal, scale=scale
    )


def _forward_flash(query: Any, key: Any, value: Any, causal: bool, scale: float) -> Attended:
    mixed, logsumexp, *rest, _ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    return Attended(mixed, logsumexp, rest)


def _backward_flash(
    gradient: Any, query: Any, key: Any, value: Any, found: Attended, causal: bool, scale: float
) -> Any:
    mixed, lse, (*lengths, seed, offset) = found
    return _aten._scaled_dot_product_flash_attention_backward(
        gradient, query, key, value, mixed, lse.contiguous(), *lengths, 0.0, causal, seed, offset, scale=scale
    )


def _forward_efficient(query: Any, key: Any, value: Any, causal: bool, scale: float) -> Attended:
    mixed, logsumexp, *rest = _aten._scaled_dot_product_efficient_attention(
        query, key, value, None, True, 0.0, causal, scale=scale
    )
    return Attended(mixed, logsumexp[..., : query.shape[2]], rest)


def _backward_efficient(
    gradient: Any, query: Any, key: Any, value: Any, found: Attended, causal: bool, scale: float
) -> Any:
    mixed, lse, rest = found
    lse = pad(lse, (0, -lse.shape[-1] % _ALIGNED_LSE), value=float("inf")).contiguous()  # as its forward does
    return _aten._scaled_dot_product_efficient_attention_backward(
        gradient, query, key, value, None, mixed, lse, *rest, 0.0, [True, True, True, False], causal, scale=scale
    )[:3]


ON_CPU = Kernel(_forward_on_cpu, _backward_on_cpu)
FLASH = Kernel(_forward_flash, _backward_flash)
"""For GPUs, bfloat16 and float16, sizes of heads up to 256."""
EFFICIENT = Kernel(_forward_efficient, _backward_efficient)
"""For GPUs, everything else."""
