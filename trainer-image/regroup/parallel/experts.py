"""Expert parallelism: a layer has many experts, each rank holds some of them, and each token is computed where its experts are.

Ranks compute different samples. Two all-to-alls carry tokens to their experts and the results back. They carry any number for each
rank: no token is dropped, and none is padded. `MixtureOfExperts` is a layer to use and to read; `through_experts` is what a
layer of your own needs. The gradient of an expert comes from the tokens of all ranks of the group, because backward takes the same
way. So it is complete inside the group; a session sums it over groups only, and sees by its DTensor that it is split.

Deterministic: tokens of one expert are computed in the order of the ranks that they came from, and of their places there.
"""

from collections.abc import Callable
from typing import Any

import torch

from regroup.errors import UsageError
from regroup.layout import EXPERT

from .all_to_all import all_to_all, ranks_of

Compute = Callable[[torch.Tensor, list[int]], torch.Tensor]


class MixtureOfExperts(torch.nn.Module):
    """Feed-forward layers of which a router chooses `top_k` for each token: [..., width] in, [..., width] out.

    The parameters `up` and `down` hold all experts, the first dimension is the expert. With a mesh they are DTensors, of which each
    rank holds its experts. Tokens weigh their experts by the router's softmax over all of them (top_k=1: Switch Transformer,
    Fedus et al., 2021), or else over the chosen ones.
    """

    def __init__(self, width: int, hidden: int, num_experts: int, mesh: Any = None, *, top_k: int = 1) -> None:
        """mesh: mesh["expert"]; None: all experts are here. Raises UsageError for numbers that do not fit."""
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise UsageError(
                f"top_k of regroup.MixtureOfExperts() is {top_k!r}; it must be at least 1 and at most the number of experts, "
                f"{num_experts}."
            )
        self.top_k, self.num_experts = top_k, num_experts
        self.mesh: Any = None
        self.router = torch.nn.Linear(width, num_experts, bias=False)
        self.up = torch.nn.Parameter(_drawn(num_experts, width, hidden))
        self.down = torch.nn.Parameter(_drawn(num_experts, hidden, width))
        self.split(mesh)

    def split(self, mesh: Any) -> None:
        """Keep the experts of this rank only: for a layer that was made without a mesh, and whose parameters were drawn anew since.

        mesh: mesh["expert"]; None: all experts stay here. Call it before the optimizer is built. Raises UsageError for a number of
        experts that the ranks do not divide.
        """
        _check(self.num_experts, ranks_of(mesh, EXPERT, "regroup.MixtureOfExperts"))
        self.mesh = mesh
        if mesh is None:
            return
        from torch.distributed.tensor import Shard, distribute_tensor

        # Everybody has drawn the same numbers, and keeps its part.
        self.up = torch.nn.Parameter(distribute_tensor(self.up.detach(), mesh, [Shard(0)]))
        self.down = torch.nn.Parameter(distribute_tensor(self.down.detach(), mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        likely = self.router(tokens).softmax(-1)
        share, chosen = likely.topk(self.top_k)
        if self.top_k > 1:
            share = share / share.sum(-1, keepdim=True)
        said = through_experts(tokens, chosen, self.num_experts, self._compute, self.mesh)
        mixed: torch.Tensor = (said * share.unsqueeze(-1)).sum(1)
        return mixed.view_as(x)

    def _compute(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        ups, downs = held(self.up), held(self.down)
        # Experts without a token take part, too: each parameter gets a gradient in each step.
        of_each = torch.split(rows, counts)
        return torch.cat([torch.nn.functional.gelu(some @ up) @ down for some, up, down in zip(of_each, ups, downs)])


def held(parameter: torch.Tensor) -> torch.Tensor:
    """Return the experts of a parameter that this rank holds: [experts here, ...], with its gradient."""
    local: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local


def through_experts(
    tokens: torch.Tensor, chosen: torch.Tensor, num_experts: int, compute: Compute, mesh: Any
) -> torch.Tensor:
    """Return what the chosen experts make of each token: [tokens, k, width], in the order of `chosen`.

    `tokens` are this rank's: [tokens, width]. `chosen` has numbers of experts: [tokens, k], int64. The first rank of the mesh holds
    the first experts, and so on. `compute(rows, counts)` is called once. `rows` are the tokens for this rank's experts in their
    order, [rows, width], and `counts` the number of rows for each of them. It returns as many rows, of any width. `mesh` is
    mesh["expert"], all of whose ranks call this as often; None: all experts are here. Raises UsageError for a number of experts
    that the ranks do not divide, and for an expert that does not exist.
    """
    ranks, k = ranks_of(mesh, EXPERT, "regroup.through_experts"), chosen.shape[1]
    _check(num_experts, ranks)
    wanted = chosen.flatten()
    by_expert = wanted.argsort(stable=True)
    # Each token is copied before it is sorted, so that backward adds up its gradients in one order.
    rows = tokens.unsqueeze(1).expand(-1, k, -1).reshape(-1, tokens.shape[-1]).index_select(0, by_expert)
    # The host needs these numbers: it reads from the device once, and they travel in host memory. On a GPU a collective that was
    # aborted leaves anything in its tensors and does not raise, and a number of rows must not be anything.
    counts = wanted.cpu().bincount(minlength=num_experts)
    if len(counts) != num_experts:
        raise UsageError(
            f"chosen of regroup.through_experts() names expert {len(counts) - 1}; there are {num_experts}, numbered from 0."
        )
    if ranks == 1:
        said = compute(rows, counts.tolist())
    else:
        theirs = all_to_all(counts, mesh).view(ranks, -1)  # [ranks, experts here]: rows that come
        sent, received = counts.view(ranks, -1).sum(1).tolist(), theirs.sum(1).tolist()
        came = all_to_all(rows, mesh, sent, received)
        of_piece = torch.arange(num_experts // ranks, device=tokens.device).repeat(ranks)
        repeats = theirs.flatten().to(tokens.device, non_blocking=True)
        here = of_piece.repeat_interleave(repeats, output_size=len(came))
        order = here.argsort(stable=True)  # by expert, and those of one expert by rank
        computed = compute(came.index_select(0, order), theirs.sum(0).tolist())
        said = all_to_all(computed.index_select(0, _inverse(order)), mesh, received, sent)
    return said.index_select(0, _inverse(by_expert)).view(*chosen.shape, said.shape[-1])


def _inverse(order: torch.Tensor) -> torch.Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


def _drawn(*shape: int) -> torch.Tensor:
    bound: float = shape[-2] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound)


def _check(num_experts: int, ranks: int) -> None:
    if num_experts % ranks:
        raise UsageError(
            f"{num_experts} experts cannot be split evenly over expert={ranks}. Take a number of experts that is a multiple of "
            f"{ranks}."
        )
