"""Sums gradients over virtual workers so that every rank gets the same bits, at any world size.

Owns the buffers and the two collectives; the tree of partial sums is in `sum_tree`. The caller passes an `Exchange` of the current
generation. If one of its collectives fails, `reduce` raises, and nothing is kept.

Memory: while a rank accumulates, it holds at most log2(V) + 1 copies of the flat tensor for a power of two of ranks.
For any other number (with the shares of `shares_of`) it holds log2(V) + 2; a test sweeps both. `reduce` needs about two
pieces of CHUNK elements for each copy on top.
Traffic: each rank sends its K nodes once, receives 1/W of the nodes of all ranks, then all-gathers the result. That is (K + 1) x
the tensor, against 2 x for a ring all-reduce, so `fast` is the default.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from .ids import check_shares
from .sum_tree import Counter, Node, finish, nodes_of

CHUNK = 1 << 22
"""Elements that are reduced at a time. It bounds the extra memory of `reduce`."""


class Exchange(Protocol):
    """Two collectives among the ranks of a generation. They move bytes and never add."""

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> None:
        """Send part d of `input` to rank d, and receive part s of `output` from rank s. Splits count elements. Blocks."""
        ...

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Fill `output` with the `input` of every rank, in rank order. All have one length. Blocks."""
        ...


class GroupExchange:
    """An Exchange over a torch process group, or a backend object that was never registered."""

    def __init__(self, run: Callable[..., None]) -> None:
        """`run(method, *arguments)` calls a method of the group and waits for it."""
        self._run = run

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> None:
        # As bytes, so that the dtypes that a backend supports do not matter.
        size = input.element_size()
        splits = [n * size for n in output_splits], [n * size for n in input_splits]
        self._run("alltoall_base", output.view(torch.uint8), input.view(torch.uint8), *splits)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        self._run("_allgather_base", output.view(torch.uint8), input.view(torch.uint8))


def _add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.add_(right)


class ExactSum:
    """The sum of one flat tensor per virtual worker, over all ranks of a generation.

    In each step the caller calls `add` for each v of its share in order, then `reduce` (all ranks together) or `reset`.
    One object serves a generation. Its buffers are reused, until tensors of another length or dtype replace them.
    """

    def __init__(self, shares: Sequence[range], rank: int) -> None:
        """Take the share of every rank (SamplePlan.shares), which must be the same on all of them. Raises DataError."""
        self._num_virtual = check_shares(shares)
        self._share = shares[rank]
        self._nodes = [nodes_of(self._num_virtual, share.start, share.stop) for share in shares]
        self._free: list[torch.Tensor] = []
        self._like: torch.Tensor | None = None
        self._incoming: torch.Tensor | None = None
        self._counter: Counter[torch.Tensor] = Counter(self._num_virtual, self._merge)
        self._next = self._share.start

    def reset(self) -> None:
        """Forget the tensors that were added, because the step will be redone."""
        self._free += [buffer for _, buffer in self._counter.held]
        self._counter = Counter(self._num_virtual, self._merge)
        self._next = self._share.start

    @property
    def num_held(self) -> int:
        """Number of copies of the flat tensor that are held."""
        return len(self._counter.held)

    def add(self, v: int, flat: torch.Tensor) -> None:
        """Add the tensor of virtual worker `v`. It has one dimension, and the same length, dtype and device each time.

        The caller may overwrite `flat` afterwards. Raises ValueError unless `v` is the next one of the share.
        """
        if v != self._next or v not in self._share:
            raise ValueError(f"virtual worker {v} was added, {self._next} of share {self._share} is next")
        if self._like is None or (flat.shape, flat.dtype, flat.device) != (
            self._like.shape, self._like.dtype, self._like.device
        ):  # fmt: skip
            if self._counter.held:
                raise ValueError(f"a tensor of {list(flat.shape)} {flat.dtype} was added to ones of {self._like}")
            self._free, self._like = [], torch.empty_like(flat, requires_grad=False)
        with torch.no_grad():
            self._incoming = flat.detach()
            self._counter.push(Node(v, v + 1), self._incoming)
            node, top = self._counter.held[-1]
            if top is self._incoming:  # it was not merged, and the caller may overwrite it: keep a copy
                buffer = self._free.pop() if self._free else torch.empty_like(self._like)
                self._counter.held[-1] = (node, buffer.copy_(top))
            self._incoming = None
        self._next += 1

    def reduce(self, exchange: Exchange, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sum over all virtual workers of all ranks, with the same bits on each. Every rank must call it. Blocks.

        The sum is written to `out`, if it is given. A rank with an empty share (rule HANDOVER) must pass it, since nothing else
        tells it the tensor's length. The object is ready for the next step afterwards, after an exception as well.
        Raises ValueError, and any exception of the exchange.
        """
        try:
            if self._next != self._share.stop:
                raise ValueError(f"{self._next - self._share.start} of {len(self._share)} virtual workers were added")
            if out is None:
                if self._like is None:
                    raise ValueError("a rank with an empty share has to pass out, a tensor for the sum")
                out = torch.empty_like(self._like)
            with torch.no_grad():
                held = [buffer for _, buffer in self._counter.held]
                for low in range(0, out.numel(), CHUNK):
                    part = out[low : low + CHUNK]
                    self._reduce_part([buffer[low : low + CHUNK] for buffer in held], part, exchange)
            return out
        finally:
            self.reset()

    def _reduce_part(self, held: list[torch.Tensor], part: torch.Tensor, exchange: Exchange) -> None:
        world_size = len(self._nodes)
        if world_size == 1:
            part.copy_(finish(self._num_virtual, zip(self._nodes[0], held), _add))
            return
        # Rank d adds up elements [d*width, (d+1)*width) of the nodes of all ranks.
        width = -(-part.numel() // world_size)
        sent = part.new_zeros(world_size, len(held), width)
        for k, buffer in enumerate(held):
            for d in range(world_size):
                piece = buffer[d * width : (d + 1) * width]
                sent[d, k, : piece.numel()] = piece
        counts = [len(nodes) for nodes in self._nodes]
        received = part.new_empty(sum(counts) * width)
        exchange.all_to_all(received, sent.view(-1), [n * width for n in counts], [len(held) * width] * world_size)
        everybody = [node for nodes in self._nodes for node in nodes]
        total = finish(self._num_virtual, zip(everybody, received.view(-1, width)), _add)
        gathered = part.new_empty(world_size * width)
        exchange.all_gather(gathered, total.contiguous())
        part.copy_(gathered[: part.numel()])

    def _merge(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        left.add_(right)
        if right is not self._incoming:  # the caller's tensor is no buffer of this object
            self._free.append(right)
        return left
