"""What a script passes as `regroup.session(strategy=...)`: how the work of a step is split over the ranks, in words.

Frozen descriptions, checked when they are made. Each says what it does with a step; what runs is in `regroup.parallel`, and
`job` makes one of the other. Imports no torch.
"""

from dataclasses import dataclass

from .errors import UsageError


@dataclass(frozen=True)
class DataParallel:
    """Each step applies the gradient of its whole batch, summed over the ranks. The default."""


@dataclass(frozen=True, kw_only=True)
class LocalSGD:
    """Each rank makes `inner_steps` steps of the optimizer on its own share; a commit averages the parameters (Stich 2019)."""

    inner_steps: int
    """Optimizer steps of each rank in one step of the session, at least 1."""
    max_norm: float | None = None
    """The norm of each inner step's gradient is clipped to it; None: no clipping."""

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True)
class DiLoCo:
    """As LocalSGD, but a commit takes the mean change of the parameters for a gradient, and makes a step of SGD with Nesterov
    momentum with it (Douillard et al. 2023). The defaults are that paper's."""

    inner_steps: int
    """Optimizer steps of each rank in one step of the session, at least 1."""
    max_norm: float | None = None
    """The norm of each inner step's gradient is clipped to it; None: no clipping."""
    outer_learning_rate: float = 0.7
    """Of the step that a commit makes. 1 without momentum would be LocalSGD."""
    outer_momentum: float = 0.9
    """Of the same step; above 0 and below 1."""

    def __post_init__(self) -> None:
        _check(self)
        if not _is_number(self.outer_learning_rate) or not self.outer_learning_rate > 0:
            raise UsageError(
                f"outer_learning_rate of DiLoCo is {self.outer_learning_rate!r}; it must be a number above 0."
            )
        if not _is_number(self.outer_momentum) or not 0 < self.outer_momentum < 1:
            raise UsageError(
                f"outer_momentum of DiLoCo is {self.outer_momentum!r}; it must be a number above 0 and below 1. "
                "Without momentum, use LocalSGD."
            )


def _check(description: LocalSGD | DiLoCo) -> None:
    """Raise UsageError for what no rank can do."""
    name, steps, norm = type(description).__name__, description.inner_steps, description.max_norm
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise UsageError(f"inner_steps of {name} is {steps!r}; it must be a whole number of at least 1.")
    if norm is not None and (not _is_number(norm) or not norm > 0):
        raise UsageError(f"max_norm of {name} is {norm!r}; it must be a number above 0, or None.")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
