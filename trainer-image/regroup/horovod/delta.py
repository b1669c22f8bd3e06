"""The optimizer of `op=hvd.Adasum`: it combines what the optimizers of all ranks would change, and not their gradients.

Each rank steps with its own gradients. The change of each parameter is then combined over the ranks by `adasum`, and added to the
parameter as it was before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from regroup.horovod import classes
from regroup.horovod import operations as ops
from regroup.horovod.compression import Compressor


class _Delta(torch.optim.Optimizer):
    """The methods of the optimizer. Its class is made of these and the class of the user's optimizer."""

    _names: Mapping[int, str]
    _compression: type[Compressor]
    backward_passes_per_step: int

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes are accumulated before a step. Gradients are summed on this rank until then."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Do nothing: changes travel in `step`."""

    def skip_synchronize(self) -> None:
        """Raise AssertionError: a step always combines the changes of all ranks."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def step(self, closure: Any = None) -> Any:
        """Make a step, and wait for the combined changes of all ranks. Raises HorovodInternalError if a rank has ended."""
        parameters = [each for group in self.param_groups for each in group["params"] if each.requires_grad]
        before = [each.detach().clone() for each in parameters]
        loss = super(self.__class__, self).step(closure)
        with torch.no_grad():
            sent = [self._compression.compress(now - old) for now, old in zip(parameters, before)]
            handles = [
                ops.allreduce_async_(change, name=self._names[id(each)], op=ops.Adasum)
                for each, (change, _) in zip(parameters, sent)
            ]
            for each, old, handle, (_, context) in zip(parameters, before, handles, sent):
                each.copy_(old + self._compression.decompress(ops.synchronize(handle), context))
        return loss


def wrap(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], compression: type[Compressor], passes: int
) -> torch.optim.Optimizer:
    """Make the optimizer combine its changes with those of all ranks, and return it. `names` has a name for the id of each
    parameter."""
    classes.change(optimizer, _Delta)
    changed: Any = optimizer
    changed._names, changed._compression, changed.backward_passes_per_step = names, compression, passes
    return optimizer
