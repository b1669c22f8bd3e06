"""The standby of a parameter server: the rank that holds a second copy of the state."""

from collections.abc import Sequence

import torch

from regroup.bits import float_of
from regroup.generation.groups import Groups

from . import messages
from .ledger import Entry
from .links import COPIES, Link, numbers
from .served_gradients import ServedGradients
from .versions import Calls, Versions


class Standby:
    """Receives the sum of each version, applies it as the server does, and acknowledges it (rules COPY and LEAVE)."""

    def __init__(self, groups: Groups, strategy: ServedGradients, versions: Versions) -> None:
        self._link = Link(groups, COPIES)
        self._versions = versions
        self._head = torch.empty(messages.COPY, dtype=torch.int64)
        self._entry = torch.empty(0, dtype=torch.int64)
        self._used = torch.empty(len(strategy.gradients.parameters), dtype=torch.uint8)
        self._flats: Sequence[torch.Tensor] = strategy.empty()
        self._has_head = False
        self._link.expect([self._head])

    def end(self) -> None:
        """Wait for the server's word that no copy follows. A process that ends while gloo waits for a message aborts."""
        self._link.wait()

    def step(self, calls: Calls) -> bool:
        """Do what needs no wait; return whether anything was done. Raises what `Groups.failed` says."""
        if not self._link.take():
            return False
        length, weight, loss_sum = self._head.tolist()
        if not self._has_head:
            self._has_head = True
            self._entry = torch.empty(length, dtype=torch.int64)
            self._link.expect([self._entry, self._used, *self._flats])
            return True
        entry = Entry.from_numbers(self._entry.tolist(), float_of(weight), float_of(loss_sum))
        self._versions.apply(entry, self._flats, bytes(self._used.tolist()), calls)
        self._link.send([numbers(entry.version, self._versions.hash())])
        self._has_head = False
        self._link.expect([self._head])
        return True
