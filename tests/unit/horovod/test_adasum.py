"""Adasum against the formula in float64, for the numbers of ranks that it takes, and what it says of others."""

from __future__ import annotations

import pytest
import torch

from regroup.horovod import adasum


def reference(vectors: list[torch.Tensor]) -> torch.Tensor:
    """The formula of the paper, written out: a tree over all vectors in float64."""
    if len(vectors) == 1:
        return vectors[0].double()
    half = len(vectors) // 2
    a, b = reference(vectors[:half]), reference(vectors[half:])
    dot, aa, bb = float(a.flatten() @ b.flatten()), float(a.flatten() @ a.flatten()), float(b.flatten() @ b.flatten())
    return (1 - dot / (2 * aa)) * a + (1 - dot / (2 * bb)) * b


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_result_is_the_formulas_in_the_type_of_the_parts(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    parts = [torch.randn(3, 5).to(dtype) for _ in range(size)]
    result = adasum.combine(parts)
    assert result.dtype == dtype
    torch.testing.assert_close(result, reference(parts).to(dtype))


def test_both_orders_of_a_pair_give_the_same_bits() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(100), torch.randn(100)
    assert torch.equal(adasum.combined(a, b), adasum.combined(b, a))


def test_equal_vectors_count_once_and_orthogonal_ones_are_summed() -> None:
    a, b = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert torch.equal(adasum.combined(a, a), a.double())
    assert torch.equal(adasum.combined(a, b), (a + b).double())


def test_zero_vector_adds_nothing_and_makes_no_nan() -> None:
    a = torch.tensor([1.0, 2.0])
    assert torch.equal(adasum.combined(a, torch.zeros(2)), a.double())
    assert torch.equal(adasum.combined(torch.zeros(2), torch.zeros(2)), torch.zeros(2).double())


@pytest.mark.parametrize("size", [3, 5, 6, 7, 12])
def test_other_numbers_of_ranks_are_refused_with_the_number(size: int) -> None:
    said = adasum.refusal(size)
    assert said is not None
    assert f"with {size} ranks" in said
    assert "power of two" in said


@pytest.mark.parametrize("size", [1, 2, 4, 1024])
def test_powers_of_two_are_not_refused(size: int) -> None:
    assert adasum.refusal(size) is None
