"""The seam between a session and how the work of a step is split over its ranks.

A session is the same whatever the strategy. It deals samples, commits a step on all ranks or on none, and copies state to ranks
that join. `Strategy` has what depends on the split: gradients and their sums, running statistics, and which of the session's
promises hold (`Guarantees`). A strategy has one file: `ddp`, `exact` or `local_steps`. What has to be equal on all ranks is
compared beside it (`equal`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, SupportsFloat

import torch

from regroup.bits import float_of
from regroup.errors import UsageError
from regroup.generation.groups import Groups

from .equal import Equal
from .host import Scalar, bits_of

MAX_ROUNDS = 4
"""Largest number of times that a strategy may ask for rows in one step. Two are enough, so more would be a defect of ours."""


@dataclass(frozen=True)
class Guarantees:
    """The promises that hold under a strategy. A script reads them as `job.guarantees`."""

    same_bits_at_any_size: bool
    """The committed state is bitwise that of one process, whatever the number of ranks and however often it changed."""
    survivor_has_all: bool
    """One survivor is enough to go on from the newest committed step."""
    lost_with_a_rank: str = ""
    """A part of training that only the rank itself has, in no state that is copied or saved. It is lost with the rank. "": none."""
    whole_gradient: bool = True
    """A step applies the gradient of its whole batch: the optimizer's path does not depend on the number of ranks, but for
    rounding."""
    equal_state: bool = True
    """Every rank holds the same state, the optimizer's too, so each survivor holds the state of a lost rank."""
    samples_once: bool = True
    """Each sample of an epoch is used once, whatever fails. (Under a parameter server the last ones may not be used at all.)"""
    optimizer_steps: int = 1
    """Number of optimizer steps in one step of the session: a failure repeats at most so many."""


@dataclass
class Share:
    """This rank's part of one step, as far as it has come. Losses and weights have their virtual worker as key."""

    index: int
    """Number of the step, from 0."""
    pending: list[tuple[int, torch.Tensor, float]] = field(default_factory=list)
    """Losses that were not read from the device, as (virtual worker, loss, factor). They are in no `loss_sums`."""
    unread: dict[int, torch.Tensor] = field(default_factory=dict)
    """Weights that are on the device; `weights` has 0 for them."""
    loss_sums: dict[int, float] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)
    sample_hash: int = 0
    """Sum of the samples' hashes modulo 2^64."""
    ended: bool = False
    """The data ended before it was whole."""
    loss: SupportsFloat = math.nan
    """Mean over the whole batch, once the step is reduced. On a device it is read when it is asked for."""

    def add(self, v: int, loss: torch.Tensor, factor: float, weight: "float | torch.Tensor") -> None:
        """Take the loss and the weight of a microbatch. What is on the device is read once it is needed."""
        self.pending.append((v, loss.detach(), factor))
        if isinstance(weight, torch.Tensor):
            self.unread[v] = weight.detach().clone()  # a script may count in one tensor, and set it back
            weight = 0.0
        self.weights[v] = weight

    def take_losses(self, device: torch.device) -> torch.Tensor:
        """Return the sum of the losses on the device, a float64 scalar. From then on `ask` asks for weights only."""
        parts = [loss.double().reshape(()).to(device, non_blocking=True) * factor for _, loss, factor in self.pending]
        self.pending = []
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=device)

    def ask(self) -> list[Scalar]:
        """Return the losses in `pending` and the weights in `unread`, as bits (`bits_of`). `tell` takes them in this order."""
        return [bits_of(one) for one in (*(loss for _, loss, _ in self.pending), *self.unread.values())]

    def tell(self, values: Sequence[int]) -> None:
        """Take the values of the scalars of `ask`. Raises UsageError for a weight that is no number of samples."""
        numbers = list(map(float_of, values))
        for (v, _, factor), number in zip(self.pending, numbers):
            self.loss_sums[v] = number * factor
        for v, number in zip(self.unread, numbers[len(self.pending) :]):
            self.weights[v] = checked_weight(number)
        self.pending, self.unread = [], {}


def checked_weight(weight: Any) -> float:
    """Return the weight of a microbatch as a number. Waits for the device that it is on. Raises UsageError."""
    try:
        number = float(weight)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not 0 <= number < math.inf:
        said = weight if isinstance(weight, (int, float)) else f"a {type(weight).__name__}"
        raise UsageError(f"weight of step.backward() is {said}; it must be a number of samples, at least 0.")
    return number


class Word(NamedTuple):
    """A strategy's part of a row. All ranks see the words of all ranks, in rank order."""

    unused: int = 0
    """Hash of the set of parameters without a gradient; 0: each has one."""
    late: bool = False
    """Gradients came after their bucket was sent: they are still to be summed."""
    changed: bool = False
    """Forward changed buffers that were not averaged yet."""
    norm_squared: float = 0.0
    """Squared norm of this rank's summed gradients before they are divided by the weight. Parts that a model group holds several
    times count once."""
    order: int = 0
    """Hash of the split modules that this rank has run in the step, in their order. 0: none."""
    own_norm_squared: float = -1.0
    """Squared norm of this rank's own gradients, before the sum over ranks. Below 0: not measured."""


NO_WORD = Word()


class Agreed(NamedTuple):
    """The content of all ranks' rows, once they were checked."""

    words: tuple[Word, ...]
    """The words of all ranks, in rank order."""
    loss_sum: float
    """The sum over the losses in the rows. It lacks those that a strategy has taken (`Share.take_losses`)."""
    weight: float
    """The weight of the whole step."""
    parcels: torch.Tensor | None = None
    """The parcels of all ranks, [ranks, bytes], where ranks sent one."""


class Agree(Protocol):
    """Sends this rank's row and returns the rows of all. The commit hands one to `Strategy.reduce`; all ranks call it as often."""

    def __call__(
        self,
        asked: Sequence[Sequence[Scalar]],
        word: Callable[..., Word],
        meanwhile: Callable[[], None] | None = None,
        parcel: torch.Tensor | None = None,
    ) -> Agreed:
        """Read the lists of scalars, send the word that `word(*lists)` makes of their values, and return what all ranks sent.

        `meanwhile` is called while the rows are on their way. The parcel, [bytes] in host memory and of one length on all ranks,
        travels with the row. Raises what `Groups.failed` says, and the errors of a step that must not be committed.
        """
        ...


class Reduced(NamedTuple):
    """The result of `Strategy.reduce`, equal on all ranks. The gradients themselves stay with the strategy."""

    loss: SupportsFloat
    """Mean over the whole batch, by weight."""
    weight: float
    norm_squared: Scalar | None = None
    """Squared norm of the summed gradients, as its bits (`host.bits_of`). None: it was not measured in this step, on any rank."""


def settled(agreed: Agreed, settle: Callable[[Sequence[Word]], bool], again: Callable[[], Agreed]) -> Agreed:
    """Return the last rows of a step. `settle` does what the words ask for, and returns True if it needs new rows: `again`."""
    for _ in range(MAX_ROUNDS):
        if not settle(agreed.words):
            return agreed
        agreed = again()
    raise AssertionError(f"the ranks' words never settle: {agreed.words}")


class Strategy(Protocol):
    """One session's strategy. Calls come in the order below, from the main thread; all ranks make the same ones.

    `reduce` communicates: it raises what `Groups.failed` says, and UsageError for what the strategy cannot do. `undo` may come at
    any point of a step before `scale`.
    """

    guarantees: Guarantees
    outer: Any
    """The optimizer that a commit steps in place of the script's; a part of the state, as `outer`. None: the script's."""
    equal: Equal
    """The checks of what has to be equal on all ranks."""

    def begin_generation(self, groups: Groups | None, *, replaced: bool = False) -> None:
        """Take the groups of a new generation; None: plain `python`.

        `replaced` says that this rank's state is a copy of another rank's: what the strategy kept for the old state is dropped.
        """
        ...

    def begin_step(self) -> None:
        """Zero the gradients."""
        ...

    def backward(self, loss: torch.Tensor, gradient: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of one microbatch: of `loss`, a scalar, times `gradient`. `last`: no other one of this rank follows."""
        ...

    def added(self, v: int, weight: float | torch.Tensor) -> None:
        """Note that the microbatch of virtual worker `v` is complete, with a backward or without one. `weight` is in the unit
        of `scale`."""
        ...

    def reduce(self, share: Share, agree: Agree) -> Reduced:
        """Sum everything over the ranks and agree on it. Returns on a rank only when all ranks have given their part."""
        ...

    def scale(self, weight: float) -> None:
        """Divide the summed gradients by the step's weight. This and all that follows is local."""
        ...

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients' norm over all parameters to `max_norm`. Returns the norm before, a scalar."""
        ...

    def undo(self) -> None:
        """Put back what forward and inner steps have changed: the step is not committed."""
        ...

    def close(self) -> None:
        """Take everything of ours off the model: the session has ended."""
        ...
