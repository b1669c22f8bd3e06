"""The loss of a step whose rows do not have it: a sum on the device, which the host reads when somebody asks for it.

Where the device works asynchronously, a row that had the loss would have to wait for backward. So each rank sums its losses on the
device, and the sums are gathered there, behind those of the gradients. The host adds them up in rank order, as it does with rows:
all ranks come to the same bits. Why so: docs/design/adr/0074-host-runs-ahead.md.
"""

from collections.abc import Sequence

import torch

from regroup.bits import float_of
from regroup.generation.groups import Groups, Pending

from .host import Reading, Scalar


class LateMean:
    """The mean loss of a step, as a number that is read with `float`. Reading it waits for its copy to the host only."""

    def __init__(self, sums: Sequence[Scalar], weight: float) -> None:
        """Take `sums`, the bits of each rank's sum of losses, and `weight`, that of the whole step."""
        self._reading, self._weight = Reading(sums), weight

    def __float__(self) -> float:
        return sum(map(float_of, self._reading.values())) / self._weight


class Losses:
    """The sums of losses of all ranks in one step, on the device."""

    def __init__(self, groups: Groups | None, own: torch.Tensor) -> None:
        """Start to gather `own`, this rank's sum: a float64 scalar. `groups` is None where no other rank is there.

        Raises what `Groups.failed` says.
        """
        own = own.reshape(1)
        self._all = own if groups is None else own.new_empty(groups.world_size)
        self.sent: list[Pending] = []
        """The gather. The strategy waits for it together with its own collectives."""
        if groups is not None:
            self.sent.append(groups.launch("_allgather_base", self._all, own))

    def mean(self, weight: float) -> LateMean:
        """Return the mean over the step's `weight`. The gather must have been waited for."""
        return LateMean(self._all.view(torch.int64).unbind(), weight)
