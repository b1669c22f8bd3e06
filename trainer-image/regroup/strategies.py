"""Descriptions of how the work of a job is split over its ranks. A script passes one as `regroup.session(strategy=...)`.

Only descriptions: one frozen class for each strategy, checked when it is made. Pure, without torch, so that a configuration can
be read where torch is not installed. What does the work is in `regroup.parallel`, and `regroup.wiring.make_strategy` goes from one
to the other.
"""

from dataclasses import dataclass
from typing import Any

from .errors import UsageError

HOOKS = ("fp16", "bf16")
"""Formats that gradients may be rounded to for the sum over ranks."""
ALGORITHMS = ("library", "ring")
"""Algorithms that sum gradients over ranks."""


@dataclass(frozen=True)
class PowerSGD:
    """Sum a low-rank approximation of each gradient, and keep on each rank what it leaves out for the next step (Vogels et al.,
    PowerSGD, 2019)."""

    rank: int = 1
    """Rank of the approximation. 1 to 4 are usual; larger is more exact and slower."""
    start_step: int = 1000
    """Steps before this one sum gradients as they are: compressed gradients may lead the first steps astray."""
    min_compression: float = 2.0
    """A parameter is approximated only if that makes what is sent smaller by more than this factor."""

    def __post_init__(self) -> None:
        _check_whole("PowerSGD.rank", self.rank, 1)
        _check_whole("PowerSGD.start_step", self.start_step, 0)
        if not _is_number(self.min_compression) or not self.min_compression >= 1:
            raise UsageError(
                f"PowerSGD.min_compression is {self.min_compression!r}; it must be a number of at least 1."
            )


@dataclass(frozen=True)
class DataParallel:
    """Each rank has a whole copy of the model, and gradients are summed over ranks in each step. The default."""

    hook: str | PowerSGD | None = None
    """Compression of gradients for the sum: "fp16", "bf16", a PowerSGD, or None: as they are."""
    algorithm: str = "library"
    """Algorithm that sums them: "library", the all-reduce of gloo or NCCL; or "ring", the one written out in
    regroup/parallel/ring.py, to read and to compare with."""
    uneven: bool = False
    """Ranks that take longer for a microbatch get fewer of them. False: all get equally many."""

    def __post_init__(self) -> None:
        if not isinstance(self.uneven, bool):
            raise UsageError(f"DataParallel.uneven is {self.uneven!r}; it must be True or False.")
        if self.hook is not None and self.hook not in HOOKS and not isinstance(self.hook, PowerSGD):
            raise UsageError(
                f'DataParallel.hook is {self.hook!r}; it must be "fp16", "bf16", a regroup.strategies.PowerSGD, or None.'
            )
        if self.algorithm not in ALGORITHMS:
            raise UsageError(f'DataParallel.algorithm is {self.algorithm!r}; it must be "library" or "ring".')
        if self.algorithm == "ring" and self.hook is not None:
            raise UsageError(
                f'DataParallel.algorithm is "ring" and hook is {self.hook!r}: only gradients as they are go by the ring. '
                "Leave one of them out."
            )


@dataclass(frozen=True, kw_only=True)
class LocalSGD:
    """Each rank makes `inner_steps` steps of the optimizer on its own share; a commit averages the parameters (Stich 2019)."""

    inner_steps: int
    """Optimizer steps of each rank in one step of the session, at least 1."""
    max_norm: float | None = None
    """The norm of each inner step's gradient is clipped to it; None: no clipping."""

    def __post_init__(self) -> None:
        _check_rounds(self)


@dataclass(frozen=True, kw_only=True)
class DiLoCo:
    """LocalSGD in which a commit takes the mean change of the parameters for a gradient. It makes a step of SGD with Nesterov
    momentum with it (Douillard and others, 2023). The defaults are that paper's."""

    inner_steps: int
    """Optimizer steps of each rank in one step of the session, at least 1."""
    max_norm: float | None = None
    """The norm of each inner step's gradient is clipped to it; None: no clipping."""
    outer_learning_rate: float = 0.7
    """Learning rate of the step that a commit makes. 1 without momentum would be LocalSGD."""
    outer_momentum: float = 0.9
    """Momentum of the same step; above 0 and below 1."""

    def __post_init__(self) -> None:
        _check_rounds(self)
        if not _is_number(self.outer_learning_rate) or not self.outer_learning_rate > 0:
            raise UsageError(
                f"outer_learning_rate of DiLoCo is {self.outer_learning_rate!r}; it must be a number above 0."
            )
        if not _is_number(self.outer_momentum) or not 0 < self.outer_momentum < 1:
            raise UsageError(
                f"outer_momentum of DiLoCo is {self.outer_momentum!r}; it must be a number above 0 and below 1. "
                "Without momentum, use LocalSGD."
            )


@dataclass(frozen=True, kw_only=True)
class ParameterServer:
    """Ranks push gradients to one of them, the server, and pull parameters from it, each at its own pace (Ho et al. 2013). A
    commit of the session is a *version* of the server's parameters. A second rank, the standby, holds a copy of each."""

    staleness: int | None = 0
    """A gradient that was computed on version b is applied to version k only if k - b is at most this. Else it is refused and its
    microbatch is dealt again. 0: synchronous. None: no bound, asynchronous SGD."""
    shares_per_version: int | None = None
    """Microbatches whose gradients make a version. None: all of a global batch with staleness 0, else one. Fewer than there are
    workers, with staleness 0: the slowest ones are backup workers (Chen et al. 2016)."""
    computes: bool = True
    """Server and standby compute gradients as well, and make versions in between. False: they only serve, so that nobody waits for
    their microbatches; that takes two of the workers."""

    def __post_init__(self) -> None:
        if self.staleness is not None:
            _check_whole("ParameterServer.staleness", self.staleness, 0)
        if self.shares_per_version is not None:
            _check_whole("ParameterServer.shares_per_version", self.shares_per_version, 1)
        if not isinstance(self.computes, bool):
            raise UsageError(f"ParameterServer.computes is {self.computes!r}; it must be True or False.")


@dataclass(frozen=True)
class RateScaling:
    """Multiply learning rates when the batch follows the number of ranks, with a warm-up after each change."""

    base_batch: int
    """Samples in a step for which the optimizer's own rates are right: the factor is 1 there."""
    rule: str = "linear"
    """The factor is batch / base_batch ("linear"), or its square root ("sqrt")."""
    warmup_steps: int = 100
    """Steps in which the factor goes to its new value, in a straight line."""

    def __post_init__(self) -> None:
        _check_whole("RateScaling.base_batch", self.base_batch, 1)
        _check_whole("RateScaling.warmup_steps", self.warmup_steps, 0)
        if self.rule not in ("linear", "sqrt"):
            raise UsageError(f'RateScaling.rule is {self.rule!r}; it must be "linear" or "sqrt".')


Description = DataParallel | LocalSGD | DiLoCo | ParameterServer
"""The descriptions that `strategy` may be."""


def _check_rounds(description: LocalSGD | DiLoCo) -> None:
    """Raise UsageError for what no rank can do."""
    name, steps, norm = type(description).__name__, description.inner_steps, description.max_norm
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise UsageError(f"inner_steps of {name} is {steps!r}; it must be a whole number of at least 1.")
    if norm is not None and (not _is_number(norm) or not norm > 0):
        raise UsageError(f"max_norm of {name} is {norm!r}; it must be a number above 0, or None.")


def _check_whole(field: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{field} is {value!r}; it must be a whole number of at least {least}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
