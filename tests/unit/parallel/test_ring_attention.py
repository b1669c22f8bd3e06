"""Ring attention of several ranks, each a thread of this process: equal to torch's attention over whole sequences."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent import futures
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

import regroup
from regroup.errors import UsageError
from regroup.parallel import ring_attention
from regroup.parallel.ring_attention import EFFICIENT, FLASH, Kernel

Q, K, V, GRADIENT = range(4)
plain: Any = torch.nn.functional.scaled_dot_product_attention
attend: Any = partial(regroup.attention, algorithm="ring")


class Sent(NamedTuple):
    turn: int
    rows: torch.Tensor


class Ranks:
    """What threads send to each other, by sender and receiver. `numbers`: how many numbers each rank has sent."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.ways = {(of, to): queue.SimpleQueue[Sent]() for of in range(num) for to in range(num)}
        self.numbers = [0] * num

    def run(self, what: Callable[[Rank], Any]) -> list[Any]:
        with futures.ThreadPoolExecutor(self.num) as pool:
            return list(pool.map(what, [Rank(self, at) for at in range(self.num)]))


class Rank:
    """What of a DeviceMesh's dimension is asked for, and one exchange after the other."""

    mesh_dim_names = ("context",)

    def __init__(self, ranks: Ranks, at: int) -> None:
        self.ranks, self.at, self.turn = ranks, at, 0

    def size(self) -> int:
        return self.ranks.num

    def get_local_rank(self) -> int:
        return self.at

    def exchange(self, rows: torch.Tensor, to: int | None, of: int | None) -> Any:
        self.turn += 1
        turn, shape = self.turn, rows.shape
        if to is not None:
            self.ranks.ways[self.at, to].put(Sent(turn, rows.detach().clone()))
            self.ranks.numbers[self.at] += rows.numel()

        class Coming:
            def wait(coming) -> torch.Tensor | None:
                if of is None:
                    return None
                came = self.ranks.ways[of, self.at].get(timeout=10)
                assert came.turn == turn, "ranks call exchanges in one order"
                assert came.rows.shape == shape
                return came.rows

        return Coming()


@pytest.fixture(autouse=True)
def by_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_attention, "exchange", lambda rows, rank, to, of: rank.exchange(rows, to, of))


def tensors(num: int, heads: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return query, key and value of whole sequences, and a gradient of the output."""
    draw = torch.Generator().manual_seed(1)
    shapes = [(heads[0], sizes[0]), (heads[1], sizes[0]), (heads[1], sizes[1]), (heads[0], sizes[1])]
    return [torch.randn(2, h, 5 * num, d, generator=draw).to(dtype) for h, d in shapes]


def by_torch(whole: list[torch.Tensor], causal: bool) -> list[torch.Tensor]:
    """Return output and gradients of query, key and value, in float64."""
    leaves = [one.double().requires_grad_() for one in whole[:3]]
    mixed = plain(*leaves, is_causal=causal, enable_gqa=True)
    return [mixed, *torch.autograd.grad(mixed, leaves, whole[GRADIENT].double())]


def by_ring(ranks: Ranks, whole: list[torch.Tensor], causal: bool) -> list[torch.Tensor]:
    def run(rank: Rank) -> list[torch.Tensor]:
        mine = [one.chunk(ranks.num, dim=2)[rank.at] for one in whole]
        leaves = [one.clone().requires_grad_() for one in mine[:3]]
        mixed = attend(*leaves, rank, causal=causal)
        return [mixed, *torch.autograd.grad(mixed, leaves, mine[GRADIENT])]

    return [torch.cat(parts, dim=2) for parts in zip(*ranks.run(run), strict=True)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("num", [2, 4])
@pytest.mark.parametrize(
    ("heads", "sizes"),
    [
        pytest.param((4, 4), (8, 8), id="as many heads of keys"),
        pytest.param((6, 2), (16, 16), id="fewer heads of keys"),
        pytest.param((3, 1), (5, 5), id="one head of keys, a size that is padded"),
        pytest.param((1, 1), (4, 12), id="one head, values of another size"),
        pytest.param((5, 5), (12, 3), id="odd heads, smaller values"),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 3e-6), (torch.bfloat16, 0.04), (torch.float16, 0.005)],
    ids=str,
)
def test_output_and_gradients_are_those_of_whole_sequences(
    num: int, causal: bool, heads: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype, tolerance: float
) -> None:
    whole = tensors(num, heads, sizes, dtype)
    for got, want in zip(by_ring(Ranks(num), whole, causal), by_torch(whole, causal), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [True, False])
def test_a_block_goes_no_further_than_it_is_needed(causal: bool) -> None:
    num, whole = 4, tensors(4, (4, 2), (8, 8), torch.float32)
    ranks = Ranks(num)
    by_ring(ranks, whole, causal)
    block = 2 * whole[K].numel() // num
    if causal:  # keys and values go on to the last rank, their gradients back from those that have seen them
        sent = [0 if at == num - 1 else at + 1 for at in range(num)]
        assert ranks.numbers == [block * (2 * turns + at) for at, turns in enumerate(sent)]
    else:
        assert ranks.numbers == [block * 3 * (num - 1)] * num
    assert all(way.empty() for way in ranks.ways.values())


def test_whoever_needs_no_gradient_gets_none() -> None:
    whole = tensors(2, (2, 2), (8, 8), torch.float32)

    def run(rank: Rank) -> Any:
        query, key, value, _ = (one.chunk(2, dim=2)[rank.at] for one in whole)
        key = key.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(attend(query, key, value, rank, causal=True).sum(), key)
        with torch.no_grad():
            assert not attend(query, key, value, rank, causal=True).requires_grad
        return gradient

    leaves = [whole[Q], whole[K].clone().requires_grad_(), whole[V]]
    (want,) = torch.autograd.grad(plain(*leaves, is_causal=True).sum(), leaves[K])
    torch.testing.assert_close(torch.cat(Ranks(2).run(run), dim=2), want)


def test_tensors_may_lie_in_memory_in_any_order() -> None:
    """A projection gives views of one tensor, and the gradient of a sum is one number for all."""
    packed = torch.randn(2, 10, 4, 3, 8)

    def run(rank: Rank) -> list[torch.Tensor]:
        leaf = packed.chunk(2, dim=1)[rank.at].clone().requires_grad_()
        query, key, value = leaf.permute(3, 0, 2, 1, 4)
        mixed = attend(query, key, value, rank, causal=True)
        return list(torch.autograd.grad(mixed.sum(), leaf))

    leaf = packed.clone().requires_grad_()
    query, key, value = leaf.permute(3, 0, 2, 1, 4)
    want = torch.autograd.grad(plain(query, key, value, is_causal=True).sum(), leaf)
    got = torch.cat([part for (part,) in Ranks(2).run(run)], dim=1)
    torch.testing.assert_close(got, want[0])


def test_autocast_chooses_the_dtype_as_for_torchs_attention() -> None:
    whole = tensors(2, (2, 2), (8, 8), torch.float32)
    query, key, value = whole[Q].bfloat16(), whole[K], whole[V]

    def run(rank: Rank) -> Any:
        parts = [one.chunk(2, dim=2)[rank.at] for one in (query, key, value)]
        with torch.autocast("cpu", torch.bfloat16):
            return attend(*parts, rank, causal=True)

    with torch.autocast("cpu", torch.bfloat16):
        want = plain(query, key, value, is_causal=True)
    got = torch.cat(Ranks(2).run(run), dim=2)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


X = torch.zeros


@pytest.mark.parametrize(
    ("query", "key", "value", "causal", "said"),
    [
        (X(1, 3, 4), X(1, 3, 4, 8), X(1, 3, 4, 8), True, r"query .* has shape \[1, 3, 4\]; it must be \[batch, heads"),
        (X(1, 3, 4, 8), X(1, 2, 4, 8), X(1, 2, 4, 8), True, "the heads of query must be a multiple of those of key"),
        (X(1, 4, 4, 8), X(1, 2, 4, 8), X(1, 4, 4, 8), True, "the heads of query must be a multiple of those of key"),
        (X(1, 4, 4, 8), X(1, 4, 4, 6), X(1, 4, 4, 6), True, "query and key of one size"),
        (X(1, 4, 4, 8), X(1, 4, 6, 8), X(1, 4, 6, 8), True, "with causal=True they must have the same tokens"),
        (X(1, 4, 4, 8), X(1, 4, 4, 8).half(), X(1, 4, 4, 8), True, "must have one dtype and one device"),
        (*[X(1, 4, 4, 8, device="meta")] * 3, True, "no kernel for torch.float32 on meta. Use float32, bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused(query: Any, key: Any, value: Any, causal: bool, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        attend(query, key, value, Rank(Ranks(2), 0), causal=causal)


def test_other_tokens_than_those_of_the_queries_can_be_attended_to() -> None:
    query, key, value = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)

    def run(rank: Rank) -> Any:
        parts = [one.chunk(2, dim=2)[rank.at] for one in (query, key, value)]
        return attend(*parts, rank, causal=False)

    want = plain(query, key, value)
    torch.testing.assert_close(torch.cat(Ranks(2).run(run), dim=2), want)


@pytest.mark.parametrize("tokens", [32, 40])
@pytest.mark.parametrize(
    ("kernel", "dtype"), [(FLASH, torch.bfloat16), (EFFICIENT, torch.bfloat16), (EFFICIENT, torch.float32)]
)
def test_kernels_on_gpus_are_called_as_torch_declares_them(kernel: Kernel, dtype: torch.dtype, tokens: int) -> None:
    """On no device, where torch only says what shapes it would return: that is all that can be known without a GPU."""
    query, key, value = (torch.empty(2, 3, tokens, 16, dtype=dtype, device="meta") for _ in range(3))
    found = kernel.forward(query, key, value, True, 0.3)
    mixed, logsumexp = found.output, found.logsumexp
    assert (mixed.shape, logsumexp.shape, logsumexp.dtype) == (query.shape, query.shape[:3], torch.float32)
    merged = torch.logaddexp(logsumexp, logsumexp)
    for gradient in kernel.backward(mixed, query, key, value, found._replace(logsumexp=merged), False, 0.3):
        assert (gradient.shape, gradient.dtype) == (query.shape, dtype)


class OnGpu:
    """Torch's kernels on a GPU by that on CPUs, with what they ask of their arguments and return beside the output."""

    def __init__(self) -> None:
        self._cpu = torch.ops.aten

    def _scaled_dot_product_flash_attention(self, query: Any, key: Any, value: Any, *options: Any, scale: float) -> Any:
        assert query.shape[-1] % 8 == 0
        assert query.shape[:2] == key.shape[:2]
        assert query.shape[-1] == value.shape[-1]
        mixed, lse = self._cpu._scaled_dot_product_flash_attention_for_cpu(query, key, value, *options, scale=scale)
        return mixed, lse, None, None, query.shape[2], key.shape[2], SEED, OFFSET, torch.empty(0)

    def _scaled_dot_product_flash_attention_backward(self, *arguments: Any, scale: float) -> Any:
        *tensors, lse, no, none, _, _, dropout, causal, seed, offset = arguments
        assert (no, none, dropout, seed is SEED, offset is OFFSET) == (None, None, 0.0, True, True)
        return self._backward(*tensors, lse, dropout, causal, scale=scale)

    def _scaled_dot_product_efficient_attention(
        self, query: Any, key: Any, value: Any, _bias: None, returns_lse: bool, *options: Any, scale: float
    ) -> Any:
        assert query.shape[-1] % 8 == 0
        assert query.shape[:2] == key.shape[:2]
        assert returns_lse
        mixed, lse = self._cpu._scaled_dot_product_flash_attention_for_cpu(query, key, value, *options, scale=scale)
        return mixed, torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf")), SEED, OFFSET

    def _scaled_dot_product_efficient_attention_backward(self, *arguments: Any, scale: float) -> Any:
        *tensors, lse, seed, offset, dropout, wanted, causal = arguments
        gradient, query, key, value, bias, mixed = tensors
        assert (bias, dropout, seed is SEED, offset is OFFSET) == (None, 0.0, True, True)
        assert wanted == [True, True, True, False]
        tokens = query.shape[2]
        assert lse.shape[-1] % 32 == 0
        assert bool(lse[..., tokens:].isinf().all())
        found = self._backward(gradient, query, key, value, mixed, lse[..., :tokens], dropout, causal, scale=scale)
        return (*found, None)

    def _backward(self, *arguments: Any, scale: float) -> Any:
        assert arguments[5].stride(-1) == 1, "torch's ring reads wrong numbers otherwise"
        return self._cpu._scaled_dot_product_flash_attention_for_cpu_backward(*arguments, scale=scale)


SEED, OFFSET = torch.zeros(2), torch.zeros(())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", [FLASH, EFFICIENT], ids=["flash", "efficient"])
def test_a_ring_of_kernels_on_gpus_is_the_same(monkeypatch: pytest.MonkeyPatch, kernel: Kernel, causal: bool) -> None:
    monkeypatch.setattr(ring_attention, "_aten", OnGpu())
    monkeypatch.setattr(ring_attention, "_kernel", lambda *_: kernel)
    whole = tensors(3, (6, 2), (5, 7), torch.float32)
    for got, want in zip(by_ring(Ranks(3), whole, causal), by_torch(whole, causal), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=3e-6, atol=3e-6)


def test_a_rank_alone_needs_no_ring() -> None:
    query, key, value = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    want = plain(query, key, value, is_causal=True)
    assert torch.equal(attend(query, key, value, None, causal=True), want)
