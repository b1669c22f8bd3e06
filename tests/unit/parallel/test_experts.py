"""Experts of one rank: each token goes through those that were chosen for it. Ranks that exchange: tests/trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regroup
from regroup.errors import UsageError
from regroup.parallel import experts
from tests.unit.parallel.fake_device import DEVICE, FakeDevice


class Row:
    """What of a DeviceMesh of one dimension is asked for before anything is exchanged."""

    mesh_dim_names = ("expert",)

    def size(self) -> int:
        return 2


@pytest.mark.parametrize("k", [1, 2, 3])
def test_each_token_goes_through_its_experts(k: int) -> None:
    tokens, chosen = torch.randn(20, 4, requires_grad=True), torch.randint(3, (20, k))
    weights = torch.randn(3, 4, 5)

    def compute(rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        assert counts == chosen.flatten().bincount(minlength=3).tolist()
        return torch.cat([some @ weight for some, weight in zip(torch.split(rows, counts), weights, strict=True)])

    said = regroup.through_experts(tokens, chosen, 3, compute, None)
    want = torch.einsum("tw,tkwh->tkh", tokens, weights[chosen])
    torch.testing.assert_close(said, want)
    gradient = torch.randn_like(said)
    torch.testing.assert_close(
        torch.autograd.grad(said, tokens, gradient)[0], torch.autograd.grad(want, tokens, gradient)[0]
    )


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_layer_weighs_its_experts_by_the_router(top_k: int) -> None:
    torch.manual_seed(0)
    layer = regroup.MixtureOfExperts(4, 6, 5, top_k=top_k)
    x = torch.randn(2, 7, 4)
    said = layer(x)
    likely = (x @ layer.router.weight.T).softmax(-1)
    for place in ((0, 0), (1, 3), (1, 6)):
        share, chosen = likely[place].topk(top_k)
        share = share if top_k == 1 else share / share.sum()
        want = sum(
            s * (torch.nn.functional.gelu(x[place] @ layer.up[e]) @ layer.down[e])
            for s, e in zip(share, chosen, strict=True)
        )
        torch.testing.assert_close(said[place], want)


def test_an_expert_without_a_token_gets_a_gradient_of_zero() -> None:
    layer = regroup.MixtureOfExperts(4, 6, 5)
    layer(torch.randn(1, 4)).sum().backward()
    assert layer.up.grad is not None
    assert [bool(one.any()) for one in layer.up.grad].count(True) == 1


def test_what_is_no_mixture_of_experts_is_refused() -> None:
    with pytest.raises(UsageError, match=r"top_k of regroup\.MixtureOfExperts\(\) is 3; .* the number of experts, 2"):
        regroup.MixtureOfExperts(4, 6, 2, top_k=3)
    with pytest.raises(UsageError, match=r"5 experts cannot be split evenly over expert=2\. .* a multiple of 2\."):
        regroup.MixtureOfExperts(4, 6, 5, Row())
    with pytest.raises(UsageError, match="names expert 4; there are 4, numbered from 0"):
        regroup.through_experts(torch.zeros(1, 2), torch.tensor([[4]]), 4, lambda rows, _: rows, None)


def test_numbers_of_rows_travel_in_host_memory_and_the_host_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective on the GPU that is aborted leaves anything in its tensors: as a number of rows that would end the process."""
    moved: list[tuple[torch.device, torch.dtype]] = []

    def all_to_all(rows: torch.Tensor, _mesh: Any, _sent: Any = None, _received: Any = None) -> torch.Tensor:
        """Of a rank that has the same tokens as the other one."""
        moved.append((rows.device, rows.dtype))
        return rows.clone()

    monkeypatch.setattr(experts, "all_to_all", all_to_all)
    tokens, chosen = torch.randn(20, 4), torch.randint(4, (20, 2))
    with FakeDevice() as device:
        there, wanted = tokens.to(DEVICE), chosen.to(DEVICE)
        device.take()
        said = regroup.through_experts(there, wanted, 4, lambda rows, _: rows, Row())
        assert device.take() == ["experts.through_experts: copy to the host"]
        assert moved == [(torch.device("cpu"), torch.int64), (DEVICE, torch.float32), (DEVICE, torch.float32)]
        assert torch.equal(said.to("cpu"), tokens.unsqueeze(1).expand(-1, 2, -1))
