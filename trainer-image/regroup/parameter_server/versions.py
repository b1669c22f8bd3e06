"""The next version of the parameters, applied to the state of the server or of its standby.

Both apply the same sum with the same optimizer and the same hooks, so they come to the same bits. A hash shows a difference.
Parameters and ledger change in one mark (rule LEDGER): an exception in between leaves the state without a name.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from regroup.errors import UsageError
from regroup.generation.membership import Membership
from regroup.parallel.fingerprint import Fingerprint
from regroup.parallel.host import to_host
from regroup.parallel.strategy import Share
from regroup.protocol.state import StatePair
from regroup.state.optimizers import learning_rates, parts_of
from regroup.state.training import CommitRecord, TrainingState
from regroup.transaction.hooks import refuse_collectives

from .ledger import CountedPlan, Entry
from .served_gradients import ServedGradients


class Calls(NamedTuple):
    """The arguments of a script's commit. Each version that is made during the commit runs its hooks once."""

    before: Sequence[Callable[[], Any]]
    after: Sequence[Callable[[], Any]]
    max_norm: float | None
    share: Share
    """Its loss is the loss of the version whose hooks run."""


class Applied(NamedTuple):
    """The origin of one version, for `step.applied` and for a replay."""

    generation: int
    entry: Entry


class Versions:
    """Applies the versions of one job, one after the other."""

    def __init__(
        self, membership: Membership, strategy: ServedGradients, state: TrainingState, plan: CountedPlan
    ) -> None:
        self._membership, self._strategy, self._state, self._plan = membership, strategy, state, plan
        self.prescale = 2.0 ** -round(math.log2(plan.step_samples))
        """Factor of each gradient while it is summed. It is a power of two, so no bit is lost."""
        self._fingerprint = Fingerprint(self._tensors)
        self.applied: list[Applied] = []
        """Versions of the script's block in progress, or of its last one."""
        self._watches = True

    def begin_generation(self) -> None:
        """Watch the next version for collectives of the script's own."""
        self._watches = True

    def apply(self, entry: Entry, sums: Sequence[torch.Tensor], used: bytes, calls: Calls) -> CommitRecord:
        """Make the next version of the state that is held. Raises UsageError for one without a weight."""
        if not entry.weight > 0:
            raise UsageError(f"Version {entry.version} has a total weight of {entry.weight:g}; it must be above 0.")
        state, generation = self._state, self._membership.generation
        norm: torch.Tensor | None = None
        calls.share.loss = entry.loss_sum / entry.weight
        state.begin_change()
        with refuse_collectives(self._membership.groups, watch=self._watches):
            gradients = self._strategy.put_sum(sums, used, entry.weight * self.prescale)
            if calls.max_norm is not None:
                norm = gradients.clip(calls.max_norm)
            for hook in calls.before:
                hook()
            rates = learning_rates(state.optimizer)
            for optimizer in parts_of(state.optimizer):
                optimizer.step()
            for hook in calls.after:
                hook()
            self._plan.ledger.count(entry, self._plan)
        pair = StatePair(generation, entry.version)
        record = CommitRecord(pair, calls.share.loss, entry.weight, norm, rates)
        state.committed(record, generation)
        self._watches = False
        self.applied.append(Applied(generation, entry))
        return record

    def hash(self) -> int:
        """Return a hash of a part of the parameters, another part for each version."""
        tensors, version = self._tensors, self._plan.ledger.version
        return self._fingerprint.hash(version, to_host(self._fingerprint.ask(tensors, version)))

    @property
    def _tensors(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self._state.model.parameters()]
