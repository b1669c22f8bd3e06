"""Local SGD and DiLoCo: each rank steps the optimizer by itself, and what is committed is a step over all ranks' changes.

One step of the session is a round. A rank cuts its share into inner batches and steps the script's optimizer after each. At the
commit the parameters are set back to those of the last commit, the *anchor*. A rank's change since then, times the weight of its
samples, is summed over the ranks as a gradient is, by `DataParallel`. An outer optimizer then steps the parameters. A round that is
not committed leaves parameters and inner optimizer as they were when it began. Why so: docs/design/adr/0030-local-steps.md.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch

from regroup.data import SamplePlan
from regroup.data.ids import share_of
from regroup.errors import UsageError
from regroup.generation.groups import Groups
from regroup.state.optimizers import Together, load_exactly, parts_of

from .ddp import DataParallel
from .strategy import Agree, Guarantees, Reduced, Share


class LocalSteps:
    """The strategy of regroup.strategies.LocalSGD and DiLoCo."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        plan: SamplePlan,
        *,
        inner_steps: int,
        max_norm: float | None,
        outer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        before_change: Callable[[], None],
    ) -> None:
        """`outer` makes the optimizer that a commit steps. `before_change` is called before a round changes anything of the state.

        Raises UsageError for a model without anything to train, and for steps of too few microbatches.
        """
        needed = inner_steps * plan.max_world_size
        if plan.num_virtual < needed:
            raise UsageError(
                f"inner_steps is {inner_steps}, and a step has {plan.num_virtual} microbatches (global_batch / microbatch) for up "
                f"to {plan.max_world_size} processes, each of which needs at least one for each inner step. Lower inner_steps, or "
                f"pass global_batch={needed * plan.microbatch} or more: it counts the samples of all inner steps together."
            )
        self.guarantees = Guarantees(
            same_bits_at_any_size=False,
            survivor_has_all=True,
            whole_gradient=False,
            equal_state=False,
            optimizer_steps=inner_steps,
        )
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.outer: Any = outer(trained) if trained else None
        # The settings of both are compared over ranks.
        self._sum = DataParallel(model, Together([*parts_of(optimizer), self.outer]), plan)
        self.equal = self._sum.equal
        self._gradients = self._sum.gradients
        self._optimizer, self._plan = optimizer, plan
        self._inner_steps, self._max_norm = inner_steps, max_norm
        self._before_change = before_change
        self._ends: frozenset[int] = frozenset()
        """Virtual workers of this rank whose microbatch is the last of an inner batch."""
        self._anchor: list[torch.Tensor] = []
        """The parameters' values when the round began."""
        self._kept: Any = None
        """The inner optimizer's state from then. None: nothing has been changed in this round."""
        self._used = bytes(len(self._gradients.parameters))
        """One byte for each parameter: 1 if it got a gradient in any inner step of this round, on this rank."""
        self._weight = 0.0
        """Weight of the inner batch that is not complete."""
        self._weights = 0.0
        """Weight of all microbatches of this rank's round."""

    def begin_generation(self, groups: Groups | None, *, replaced: bool = False) -> None:
        """Cut this rank's new share into inner batches."""
        self._sum.begin_generation(groups, replaced=replaced)
        rank, world_size = (groups.rank, groups.world_size) if groups is not None else (0, 1)
        self._ends = frozenset(inner_ends(self._plan.share(rank, world_size), self._inner_steps))

    def begin_step(self) -> None:
        """Begin a round."""
        self._sum.begin_step()
        self._kept, self._weight, self._weights = None, 0.0, 0.0
        self._used = bytes(len(self._gradients.parameters))

    def backward(self, loss: torch.Tensor, gradient: torch.Tensor, *, last: bool) -> None:  # noqa: ARG002
        """Add the gradients of one microbatch to those of the inner batch. Nothing is sent before the commit."""
        self._sum.backward(loss, gradient, last=False)

    def added(self, v: int, weight: float | torch.Tensor) -> None:
        """Make the inner step whose last microbatch this is. It needs the weight now."""
        weight = float(weight)
        self._weight += weight
        self._weights += weight
        if v not in self._ends:
            return
        if self._weight:  # a batch of padding only is no step, on this rank
            self._step(self._weight)
        self._gradients.begin()
        self._weight = 0.0

    def reduce(self, share: Share, agree: Agree) -> Reduced:
        """Sum the ranks' changes as gradients. The parameters are the anchor from here on."""
        self._gradients.begin()
        if self._kept is not None:
            at = {
                index: view for bucket in self._gradients.buckets for index, view in zip(bucket.indices, bucket.views)
            }
            with torch.no_grad():
                for index, (parameter, anchor) in enumerate(zip(self._gradients.parameters, self._anchor)):
                    if self._used[index]:
                        torch.sub(anchor, parameter, out=at[index]).mul_(self._weights)
                        self._gradients.mark_used(index)
            self._set_back()
        return self._sum.reduce(share, agree)

    def scale(self, weight: float) -> None:
        """Divide the sum of the changes by the round's weight."""
        self._sum.scale(weight)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Raise AssertionError: `Committer.commit` refuses max_norm before."""
        raise AssertionError(f"a commit without a gradient of the whole batch was to be clipped to {max_norm}")

    def undo(self) -> None:
        """Put parameters, buffers and the inner optimizer back to the last commit."""
        self._sum.undo()
        if self._kept is not None:
            self._set_back()
            # It may take these very tensors: they are nobody's copy from here on.
            kept, self._kept = self._kept, None
            load_exactly(self._optimizer, kept)

    def close(self) -> None:
        """Take the hooks off the model."""
        self._sum.close()

    def _step(self, weight: float) -> None:
        """Step the inner optimizer with the mean gradient of an inner batch."""
        gradients = self._gradients
        if self._kept is None:
            self._before_change()
            self._keep()
        gradients.check_kept(gradients.buckets)
        for bucket in gradients.buckets:
            gradients.collect(bucket)
        used = gradients.used
        gradients.scale(weight, used)
        if self._max_norm is not None:
            gradients.clip(self._max_norm)
        self._optimizer.step()
        self._used = bytes(map(max, self._used, used))

    def _keep(self) -> None:
        parameters = self._gradients.parameters
        if not self._anchor:
            self._anchor = [torch.empty_like(parameter) for parameter in parameters]
        with torch.no_grad():
            for anchor, parameter in zip(self._anchor, parameters):
                anchor.copy_(parameter)
        self._kept = copy.deepcopy(self._optimizer.state_dict())

    def _set_back(self) -> None:
        with torch.no_grad():
            for parameter, anchor in zip(self._gradients.parameters, self._anchor):
                parameter.copy_(anchor)


def inner_ends(share: range, inner_steps: int) -> list[int]:
    """Return the last virtual worker of each inner batch of a share. Pure.

    The batches are contiguous and differ by at most one microbatch. A share of fewer microbatches than `inner_steps` has
    a batch for each of them; that is so only in the one generation of a hand-over.
    """
    parts = (share_of(len(share), number, inner_steps) for number in range(inner_steps))
    return [share[part[-1]] for part in parts if part]
