"""The seam between a session and how the work of a step is split over its ranks.

A session is the same whatever the strategy: it deals samples, commits a step on all ranks or on none, and copies state to who
joins. What depends on the split is behind `Strategy`: gradients and how they are summed, running statistics, what is
compared, and which of the session's promises hold (`Guarantees`). One file for each strategy: `ddp`, `exact`, `local_steps`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from regroup.bits import float_of
from regroup.errors import UsageError
from regroup.generation.groups import Groups

from .host import Scalar, bits_of


@dataclass(frozen=True)
class Guarantees:
    """What holds under a strategy: for the documentation, and for whoever asks `job.guarantees`."""

    same_bits_at_any_size: bool
    """The committed state is bitwise that of one process, whatever the number of ranks and however often it changed."""
    survivor_has_all: bool
    """One survivor is enough to go on from the newest committed step."""
    lost_with_a_rank: str = ""
    """What only the rank itself has, in no state that is copied or saved, so that it is lost when the rank is. "": nothing."""
    whole_gradient: bool = True
    """A step applies the gradient of its whole batch: the optimizer's path does not depend on the number of ranks, but for
    rounding."""
    equal_state: bool = True
    """Every rank holds the same state, the optimizer's too: what a lost rank held is what each survivor holds."""
    samples_once: bool = True
    """Each sample of an epoch is used once, whatever fails. (Under a parameter server the last ones may not be used at all.)"""
    optimizer_steps: int = 1
    """Steps of the optimizer in one step of the session: a failure repeats at most so many."""


@dataclass
class Share:
    """This rank's part of one step, as far as it has come. Losses and weights are by virtual worker."""

    index: int
    """Number of the step, from 0."""
    pending: list[tuple[int, torch.Tensor, float]] = field(default_factory=list)
    """(virtual worker, loss, factor): losses whose product has not been read from the device, and is in no `loss_sums`."""
    unread: dict[int, torch.Tensor] = field(default_factory=dict)
    """Weights that are on the device; `weights` has 0 for them."""
    loss_sums: dict[int, float] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)
    sample_hash: int = 0
    """Sum of the samples' hashes modulo 2^64."""
    ended: bool = False
    """The data ended before it was whole."""
    loss: float = math.nan
    """Mean over the whole batch, once that is known."""

    def add(self, v: int, loss: torch.Tensor, factor: float, weight: "float | torch.Tensor") -> None:
        """Take the loss and the weight of a microbatch. What is on the device is read once it is needed."""
        self.pending.append((v, loss.detach(), factor))
        if isinstance(weight, torch.Tensor):
            self.unread[v] = weight.detach().clone()  # a script may count in one tensor, and set it back
            weight = 0.0
        self.weights[v] = weight

    def ask(self) -> list[Scalar]:
        """Return what is to be read from the device (`to_host`), for `tell`."""
        return [bits_of(one) for one in (*(loss for _, loss, _ in self.pending), *self.unread.values())]

    def tell(self, values: Sequence[int]) -> None:
        """Take what was read for `ask`. Raises UsageError for a weight that is no number of samples."""
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
    """What a strategy has each rank tell the others before a commit. All ranks see the words of all, in rank order."""

    parameters: int = 0
    """Hash of what has to be equal on all ranks: parameters and buffers, a part in each step. 0: not compared."""
    settings: int = 0
    """Hash of the optimizer's settings, such as learning rates. 0: not compared."""
    unused: int = 0
    """Hash of the set of parameters without a gradient; 0: each has one."""
    late: bool = False
    """Gradients came after their bucket was sent: they are still to be summed."""
    changed: bool = False
    """Forward changed buffers that were not averaged yet."""
    repeated: int = 0
    """Hash of what all ranks of a model group hold alike, a part in each step. 0: not compared."""
    norm_squared: float = 0.0
    """Of this rank's summed gradients, before they are divided by the weight; what a group holds several times counts once."""
    order: int = 0
    """Hash of the split modules that this rank has run in the step, in their order. 0: none."""
    own_norm_squared: float = -1.0
    """Of this rank's own gradients, before the sum over ranks. Below 0: not measured."""


NO_WORD = Word()


class Strategy(Protocol):
    """One session's strategy. Calls come in the order below, from the main thread; all ranks make the same ones.

    What communicates raises what `Groups.failed` says, and UsageError for what the strategy cannot do. `undo` may come at any
    point of a step before `apply`.
    """

    guarantees: Guarantees
    outer: Any
    """The optimizer that a commit steps in place of the script's; a part of the state, as `outer`. None: the script's."""

    def begin_generation(self, groups: Groups | None) -> None:
        """Other ranks than before, from here on. None: plain `python`."""
        ...

    def forget(self) -> None:
        """This rank's state has been replaced by a copy: what it kept for itself belongs to the old one. Comes before
        `begin_generation`."""
        ...

    def begin_step(self) -> None:
        """Gradients are zero."""
        ...

    def backward(self, v: int, loss: torch.Tensor, gradient: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of virtual worker `v`: of `loss`, a scalar, times `gradient`. `last`: of this rank's in this step."""
        ...

    def run_backward(
        self, run: Callable[[], Any], parameters: Sequence[torch.nn.Parameter] = (), *, last: bool = False
    ) -> None:
        """Call `run`, a piece of the backward pass of a pipeline's stage. parameters: those whose gradients have got more by
        it, where autograd did not add it. `last`: of this rank's in this step. Called in a model group only."""
        ...

    def skip(self, v: int) -> None:
        """Virtual worker `v` adds nothing: its weight is 0."""
        ...

    def added(self, v: int, weight: float | torch.Tensor) -> None:
        """`backward` or `skip` of virtual worker `v` is over. weight: its microbatch's, as `scale` takes it."""
        ...

    def launch(self, share: Share) -> None:
        """Start everything that has to be summed over ranks and has not been started by the last backward."""
        ...

    def parcel(self) -> torch.Tensor | None:
        """Return bytes in host memory that are gathered with the rows, instead of by a collective of their own: [bytes], of
        one length on all ranks. None: there are none."""
        ...

    def unpack(self, parcels: torch.Tensor) -> None:
        """Take the parcels of all ranks: [ranks, bytes], in rank order."""
        ...

    def wait(self) -> None:
        """Wait until it is summed."""
        ...

    def ask(self) -> list[Scalar]:
        """Return what `word` needs of the device. It is read together with the losses, so that the host waits once."""
        ...

    def word(self, values: Sequence[int]) -> Word:
        """Return what this rank tells the others. `values`: of the last `ask`."""
        ...

    def settle(self, words: Sequence[Word]) -> bool:
        """Do what the words of all ranks ask for; return True if something was exchanged: then new words are gathered."""
        ...

    def totals(self) -> tuple[float, float] | None:
        """Return the step's (loss sum, weight) over all ranks; None: they are the sums over the rows."""
        ...

    def norm_squared(self) -> Scalar | None:
        """Return the squared norm of the summed gradients, as its bits (`host.bits_of`), where `word` has that of this rank's own.
        None: not measured in this step, on any rank. Comes before `scale`."""
        ...

    def scale(self, weight: float) -> None:
        """Divide the summed gradients by the step's weight. Local, as is all that follows."""
        ...

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients' norm over all parameters to `max_norm`; return what it was, a scalar."""
        ...

    def take(self) -> Any:
        """The rows of the step do not come: give away all that was summed. It changes no more, and is for `put_back`. Called in a
        model group only."""
        ...

    def put_back(self, taken: Any, norm: float | None) -> None:
        """`scale` and `clip` come next, for the step that `taken` is of. `norm`: what its `clip` returned elsewhere, if it was
        clipped."""
        ...

    def undo(self) -> None:
        """The step is not committed: what forward changed is as before."""
        ...

    def close(self) -> None:
        """The session has ended: nothing of ours stays at the model."""
        ...
