"""Adasum: a sum of gradients in which what two ranks have in common counts once. Pure functions.

Two vectors a and b become

    (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b

This is a + b if they are orthogonal, and a if they are equal. More vectors are combined in pairs, the results in pairs again, and
so on, as in recursive doubling. So their number must be a power of two.

Source: S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020 (arXiv:2006.02924), sections 3 and 4. The
order of the pairs is that of Horovod 0.28 (common/ops/adasum/adasum.h, FusedPairwiseReduceWithComm).
"""

import sys
from collections.abc import Sequence

import torch

SMALLEST = sys.float_info.min**0.5
"""Squared norm below which a vector counts as zero: it is added as it is."""


def refusal(size: int) -> str | None:
    """Return why Adasum cannot run with this number of ranks, in one sentence, or None if it can."""
    if size > 0 and size & (size - 1) == 0:
        return None
    return (
        f"op=hvd.Adasum was called with {size} ranks; it combines ranks in pairs, so their number must be a power of two. Use "
        "1, 2, 4, 8 and so on, or op=hvd.Average."
    )


def combined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the combination of two tensors of one shape, in float64. `combined(a, b)` and `combined(b, a)` are equal."""
    a, b = a.double(), b.double()
    dot = float((a * b).sum())
    return _factor(dot, a) * a + _factor(dot, b) * b


def _factor(dot: float, vector: torch.Tensor) -> float:
    squared = float((vector * vector).sum())
    return 1.0 - dot / squared * 0.5 if squared >= SMALLEST else 1.0


def combine(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the combination of the tensors of all ranks, in rank order, in their type. Their number must be a power of two.

    Sums are in float64, in an order that depends on the ranks' numbers alone, so all ranks get the same bits.
    """
    level = [part.double() for part in parts]
    while len(level) > 1:
        level = [combined(low, high) for low, high in zip(level[::2], level[1::2], strict=True)]
    return level[0].to(parts[0].dtype)
