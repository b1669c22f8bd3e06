"""The gradients of one rank under a parameter server: computed here, summed at the server.

Data parallel of one rank, so nothing of it communicates; `regroup.transaction.served` sends what it gives. Buffers that forward
changes are refused: each rank would have its own, and a version is made by those that came first.
"""

from collections.abc import Sequence
from typing import Any

import torch

from regroup.errors import UsageError
from regroup.generation.groups import Groups

from .ddp import DataParallel
from .gradients import Gradients
from .ledger import CountedPlan
from .strategy import Guarantees, Share


class Served(DataParallel):
    """The strategy of regroup.strategies.ParameterServer on one rank."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, plan: CountedPlan, *, is_whole: bool) -> None:
        """is_whole: a version is the gradient of a whole block, of no age. Raises UsageError for a model that nothing trains."""
        super().__init__(model, optimizer, plan)
        self._runs_ahead = False  # a push has the loss
        self.guarantees = Guarantees(
            same_bits_at_any_size=False, survivor_has_all=False, whole_gradient=is_whole, equal_state=False
        )

    def begin_generation(self, groups: Groups | None, *, replaced: bool = False) -> None:  # noqa: ARG002
        """Sum with no other rank: the server sums."""
        super().begin_generation(None)

    def collect(self, share: Share) -> None:
        """The gradients of this rank's deal are complete. Raises UsageError where forward has changed a buffer."""
        self._launch(share)
        self._buffers.check_shapes()
        changed = self._buffers.changed() if share.weights else []
        if changed:
            raise UsageError(
                f"Forward changes buffer {changed[0]}, and strategy is ParameterServer: each rank would have its own. Use a layer "
                "without running statistics, such as LayerNorm, GroupNorm or BatchNorm(track_running_stats=False)."
            )

    def flats(self) -> list[torch.Tensor]:
        """Return copies of the summed gradients in host memory, one tensor for each bucket."""
        return [bucket.flat.detach().to("cpu", copy=True) for bucket in self.gradients.buckets]

    def parameters(self) -> list[torch.Tensor]:
        """Return copies of the parameters that are trained, in host memory, in the layout of `flats`."""
        return [
            torch.cat([parameter.detach().reshape(-1).cpu() for parameter in bucket.parameters])
            for bucket in self.gradients.buckets
        ]

    def empty(self) -> list[torch.Tensor]:
        """Return tensors without values in that layout."""
        return [torch.empty(bucket.flat.shape, dtype=bucket.flat.dtype) for bucket in self.gradients.buckets]

    def put_parameters(self, flats: Sequence[torch.Tensor]) -> None:
        """Overwrite the parameters with those of `parameters` elsewhere."""
        with torch.no_grad():
            for bucket, flat in zip(self.gradients.buckets, flats):
                sizes = [parameter.numel() for parameter in bucket.parameters]
                for parameter, part in zip(bucket.parameters, torch.split(flat, sizes)):
                    parameter.copy_(part.view(parameter.shape))

    def put_sum(self, flats: Sequence[torch.Tensor], used: bytes, weight: float) -> Gradients:
        """Take these sums of a version for the gradients, divided by its weight; used: by parameter, whether any share has one."""
        for bucket, flat in zip(self.gradients.buckets, flats):
            bucket.flat.copy_(flat)
            bucket.attach()
        self.gradients.scale(weight, used)
        return self.gradients
