"""The gradients of one rank under a parameter server. The rank computes them, and the server sums those of several ranks.

The strategy is data parallel of one rank, so it communicates nothing: `served_committer` sends the gradients. A model whose forward
changes buffers is refused. Each rank would have buffers of its own, and a version comes from the ranks that were first.
"""

from collections.abc import Sequence
from typing import Any

import torch

from regroup.errors import UsageError
from regroup.generation.groups import Groups
from regroup.parallel.ddp import DataParallel
from regroup.parallel.gradients import Gradients
from regroup.parallel.strategy import Guarantees, Share

from .ledger import CountedPlan


class ServedGradients(DataParallel):
    """The `Strategy` of regroup.strategies.ParameterServer."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, plan: CountedPlan, *, is_whole: bool) -> None:
        """is_whole: a version is the gradient of a whole block, of no age. Raises UsageError for a model that nothing trains."""
        super().__init__(model, optimizer, plan)
        self._runs_ahead = False  # a push has the loss
        self.guarantees = Guarantees(
            same_bits_at_any_size=False, survivor_has_all=False, whole_gradient=is_whole, equal_state=False
        )

    def begin_generation(self, groups: Groups | None, *, replaced: bool = False) -> None:  # noqa: ARG002
        """Begin a generation without groups: the server sums the gradients."""
        super().begin_generation(None)

    def collect(self, share: Share) -> None:
        """Complete the gradients of this rank's deal. Raises UsageError if forward has changed a buffer."""
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
        """Overwrite the parameters with the tensors that `parameters` has returned on another rank."""
        with torch.no_grad():
            for bucket, flat in zip(self.gradients.buckets, flats):
                sizes = [parameter.numel() for parameter in bucket.parameters]
                for parameter, part in zip(bucket.parameters, torch.split(flat, sizes)):
                    parameter.copy_(part.view(parameter.shape))

    def put_sum(self, flats: Sequence[torch.Tensor], used: bytes, weight: float) -> Gradients:
        """Make the sums of a version, divided by its weight, the gradients. `used` says by parameter whether any share has one."""
        for bucket, flat in zip(self.gradients.buckets, flats):
            bucket.flat.copy_(flat)
            bucket.attach()
        self.gradients.scale(weight, used)
        return self.gradients
